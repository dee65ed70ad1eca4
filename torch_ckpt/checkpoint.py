"""A checkpoint directory as an object: what is in it, is it whole, repair it, remove it.

Nothing here needs torch.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from torch_ckpt import _core
from torch_ckpt.errors import CheckpointError, ConflictError, IncompleteError
from torch_ckpt.jobs import Job, OpenedCheckpoint, SaveSession
from torch_ckpt.options import local_path
from torch_ckpt.progress import Progress, told

T = TypeVar("T")

_MANIFEST = "torch_ckpt.json"
_JOURNAL = ".torch_ckpt-stage/commit.json"


@dataclass(frozen=True, slots=True)
class FileInfo:
    """A file of a checkpoint. `role` is "data", "objects", "catalog", "index" or "extra"."""

    name: str
    role: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one box of a tensor is stored: its bytes, row-major, from byte `offset` of `file` on.

    `offsets` and `sizes` say which box of the global tensor, in elements.
    """

    file: str
    offset: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A stored tensor: safetensors dtype name, global shape in elements, bytes of the whole.

    `path` is where it stands in the nested state dict; (name,) where that is not known. `alias_of`
    is the tensor that has the same bytes in the same place, stored once (tied tensors).
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    path: tuple[str | int, ...]
    placements: tuple[Placement, ...]
    alias_of: str | None = None


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """A stored leaf that is no tensor, and the objects file that holds it."""

    name: str
    file: str
    path: tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Description:
    """What a checkpoint holds.

    source: "manifest" for a directory that torch_ckpt wrote; "dcp" for one of stock DCP
        (.metadata beside .distcp files); "torch" for files of torch.save; "index" (its index.json)
        or "headers" (all .safetensors files) for any other.
    save_id, world_size: of the save; None without a manifest.
    beside: data files that are no part of such a directory's checkpoint, and are not read.
    """

    path: str
    source: Literal["manifest", "index", "headers", "dcp", "torch"]
    save_id: str | None
    world_size: int | None
    files: tuple[FileInfo, ...]
    tensors: tuple[TensorInfo, ...]
    objects: tuple[ObjectInfo, ...]
    beside: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Files and bytes whose digests were compared and found right."""

    files: int
    bytes: int


@dataclass(frozen=True, slots=True)
class RemoveReport:
    """Names that were removed from the directory, and names that are still in it.

    directory_removed: whether the directory itself was left empty and so is gone too.
    """

    removed: tuple[str, ...]
    left: tuple[str, ...]
    directory_removed: bool


def look_again(look: Callable[[], T], replaced: type[CheckpointError]) -> T:
    """What `look` returns; after an error `replaced` it looks again, up to four times, a second
    apart: a network file system may show a node that late what another one has committed."""
    for _ in range(4):
        try:
            return look()
        except replaced:
            time.sleep(1.0)
    return look()


class Checkpoint:
    """The checkpoint in directory `path`.

    Holds no descriptor and no native handle: every method looks at the directory anew. Methods may
    be called from any thread. All raise CheckpointError kinds or OSError that name the file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = local_path(path)

    def __repr__(self) -> str:
        return f"Checkpoint({self.path!r})"

    def is_committed(self) -> bool:
        """Whether a save of torch_ckpt is there whole: its manifest, or the journal of a commit
        that was interrupted, and every file that it names; without collectives, all ranks' parts.

        False where there is no such directory, and for checkpoints of others, which have no mark
        of a commit. True for one that is damaged, so that nobody passes it over in silence: who
        loads it hears what is wrong. As a rule only the manifest is read, and no file opened.
        Raises OSError.
        """
        if not os.path.isdir(self.path):
            return False
        try:
            # The journal first: it goes only when the manifest is in its place.
            if not self._holds(_JOURNAL) and self._agrees_with_manifest():
                return True
            # A journal, parts, or files that are missing or changed: as readers see it.
            source: str = self._described(whole=False)["source"]
        except IncompleteError:
            return False
        except CheckpointError:
            return self._holds(_MANIFEST) or self._holds(_JOURNAL)
        return source == "manifest"

    def _described(self, *, whole: bool) -> dict[str, Any]:
        return _core.describe({"path": self.path, "check_files": True}, whole=whole)

    def _holds(self, name: str) -> bool:
        return os.path.exists(os.path.join(self.path, name))

    def _agrees_with_manifest(self) -> bool:
        """Whether the manifest is there and so are its files, of the right sizes. Raises
        IncompleteError where there is none, of parts neither."""
        try:
            answer = _core.call({"op": "manifest", "path": self.path})
            return answer["manifests"] == [_MANIFEST] and all(
                os.stat(os.path.join(self.path, file["name"])).st_size == file["bytes"]
                for file in answer["files"]
            )
        except OSError as error:
            # ESTALE: another node has replaced it under our hands.
            if error.errno not in (errno.ENOENT, errno.ESTALE):
                raise
            return False

    def describe(self) -> Description:
        """What the checkpoint holds. Reads no tensor data and writes nothing.

        With a manifest the size of every file and the id of every data file are compared; without
        one every header is parsed. Every tensor is proved to be whole. Raises IncompleteError
        when there is no checkpoint or a part of it is missing, CorruptError, ConflictError for
        overlapping shards or while it is being replaced, OSError.
        """
        answer = self._described(whole=True)
        tensors, objects = _entries(answer)
        files = tuple(FileInfo(**file) for file in answer["files"])
        return Description(
            path=self.path,
            source=answer["source"],
            save_id=answer["save_id"] or None,
            world_size=answer["world_size"],
            files=files,
            tensors=tensors,
            objects=objects,
            beside=tuple(answer["beside"]),
        )

    def dtypes(self) -> dict[str, str]:
        """The dtype of every tensor by its name, as safetensors calls it ("BF16"): a part of what
        `describe` says, in a fraction of the time, since no file of tensors is looked at where
        there is a manifest. Raises what that does."""
        return OpenedCheckpoint(self.path).dtypes()

    def verify(
        self, workers: int = 2, progress: Progress | None = None, *, direct_io: bool = True
    ) -> VerifyReport:
        """Compare every byte of every file with its digest; of a checkpoint of stock DCP, every
        entry of its archives with its CRC-32. Begins again, a few times, when a save replaces the
        checkpoint meanwhile.

        workers: threads. progress: called with bytes done and bytes in all, about ten times a
        second, on another thread. direct_io: False reads through the page cache. Raises
        CorruptError that names the file and the bytes; UnsupportedError for a directory that has
        neither, as plain safetensors; and what `describe` raises.
        """

        def once() -> VerifyReport:
            with Job() as job:
                request = {
                    "op": "verify",
                    "path": self.path,
                    "workers": workers,
                    "direct_io": direct_io,
                    "job": job.id,
                }
                with told(job, progress):
                    answer = job.run(lambda: _core.call(request))
            return VerifyReport(answer["files"], answer["bytes"])

        return look_again(once, ConflictError)

    def recover(self) -> bool:
        """Finish a commit that was interrupted, and remove what dead saves have left.

        Every save does this first; between saves it only tidies up, since readers understand an
        interrupted commit as it stands. True when there was something to do. Raises ConflictError
        while a save is in progress.
        """
        return bool(_core.call({"op": "recover", "path": self.path})["recovered"])

    def remove(self) -> RemoveReport:
        """Delete the checkpoint: the files that its manifest names, then the manifest.

        Whatever else is in the directory stays and is reported, and the directory with it. After
        a kill half way the checkpoint is incomplete, which every reader says, and can be removed
        again, as any damaged one whose manifest is whole. No link is followed: a name that is a
        link is unlinked itself, and `path` must not be one.

        Raises IncompleteError for a directory without a manifest (nothing says which files belong
        to a checkpoint there), ConflictError while a save into it is in progress.
        """
        answer = _core.call({"op": "remove", "path": self.path})
        return RemoveReport(
            tuple(answer["removed"]), tuple(answer["left"]), answer["directory_removed"]
        )


def _path(name: str, text: str | None) -> tuple[str | int, ...]:
    return (name,) if text is None else tuple(json.loads(text))


def _entries(answer: dict[str, Any]) -> tuple[tuple[TensorInfo, ...], tuple[ObjectInfo, ...]]:
    files = [file["name"] for file in answer["files"]]
    columns = ("names", "kinds", "type_of", "paths")
    holders, of_tensors = iter(answer["holders"]), iter(answer["placements"])
    tensors, objects = [], []
    for name, kind, at, path in zip(*(answer[column] for column in columns), strict=True):
        if kind == _core.OBJECT:
            objects.append(ObjectInfo(name, files[next(holders)], _path(name, path)))
            continue
        placements = tuple(
            Placement(
                files[part["file"]], part["offset"], tuple(part["offsets"]), tuple(part["sizes"])
            )
            for part in next(of_tensors)
        )
        dtype, shape, size = answer["types"][at]
        alias_of = answer["aliases"].get(name)
        tensors.append(
            TensorInfo(name, dtype, tuple(shape), size, _path(name, path), placements, alias_of)
        )
    return tuple(tensors), tuple(objects)


@contextlib.contextmanager
def locked(path: str) -> Iterator[None]:
    """Hold the lock that saves into `path` take."""
    session = SaveSession(path, overwrite=True)
    try:
        yield
    finally:
        session.end()
