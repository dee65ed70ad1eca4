"""A checkpoint directory as an object: what is in it, is it whole, repair it, remove it.

Nothing here needs torch.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch_ckpt.checkpoint.description import (
    Description,
    FileInfo,
    Topology,
    entries_of,
    topology_of,
)
from torch_ckpt.checkpoint.hulls import warn_of_notes
from torch_ckpt.checkpoint.metadata import decoded
from torch_ckpt.checkpoint.names import JOURNAL, MANIFEST, ONLY_OURS, SHARD
from torch_ckpt.errors import CheckpointError, ConflictError, IncompleteError
from torch_ckpt.native import core
from torch_ckpt.native.jobs import Job
from torch_ckpt.native.opened import OpenedCheckpoint, listing_of
from torch_ckpt.native.progress import Progress, told
from torch_ckpt.native.sessions import SaveSession, warn_of
from torch_ckpt.options import local_path

if TYPE_CHECKING:
    from torch_ckpt.calls.stored import StoredObjects, StoredTensor

T = TypeVar("T")


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


class Checkpoint(Mapping[str, "StoredTensor"]):
    """The checkpoint at `path`: a directory, or a file of safetensors or torch.save.

    A mapping of its tensors: `checkpoint["name"][2:5, :]` reads that slice and no more. As a
    mapping, and for `format`, `topology` and `objects`, it is what it was at the first look;
    where a save has replaced it since, reading raises ConflictError. The methods look anew each
    time. All may be called from any thread, and raise CheckpointError kinds or OSError that name
    the file. No descriptor is held.

    path: where it is.
    format: what it is read as, a word of `format` below; None to find out by the names there.
    verify: compare what is read of tensors with its digests, where there are any.
    direct_io: False reads through the page cache.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        format: str | None = None,
        verify: bool = True,
        direct_io: bool = True,
    ) -> None:
        self.path = local_path(path)
        self._format = format
        self._verify = verify
        self._direct_io = direct_io
        self._look: _Look | None = None
        self._looking = threading.Lock()

    def __repr__(self) -> str:
        return f"Checkpoint({self.path!r})"

    __hash__ = object.__hash__
    __eq__ = object.__eq__

    def __bool__(self) -> bool:
        return True

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_look": None, "_looking": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _looking=threading.Lock())

    @property
    def _place(self) -> dict[str, Any]:
        """What requests of the core say of it."""
        return (
            {"path": self.path}
            if self._format is None
            else {
                "path": self.path,
                "format": self._format,
            }
        )

    def _looked(self) -> _Look:
        with self._looking:
            if self._look is None:
                opened = OpenedCheckpoint(self.path, self._format)
                warn_of_notes(self.path, opened.notes)
                self._look = _Look(opened)
            return self._look

    def __iter__(self) -> Iterator[str]:
        return iter(self._looked().tensors)

    def __len__(self) -> int:
        return len(self._looked().tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._looked().tensors

    def __getitem__(self, name: str) -> StoredTensor:
        """The tensor `name`, of which nothing is read yet. Raises KeyError."""
        look = self._looked()
        tensor: StoredTensor = _stored().StoredTensor(
            look.opened,
            name,
            look.tensors[name],
            look.tensors,
            verify=self._verify,
            direct_io=self._direct_io,
            unread=look.listing.unread.get(name),
        )
        return tensor

    @property
    def objects(self) -> StoredObjects:
        """The leaves that are no tensors, as a mapping: see StoredObjects."""
        look = self._looked()
        if look.objects is None:
            look.objects = _stored().StoredObjects(look.opened, look.listing, self._verify)
        return look.objects

    @property
    def format(self) -> str:
        """What the checkpoint is, in the words of `convert`: "torch_ckpt" for shards of ours, "hf"
        for safetensors of others and for whole tensors, "dcp" for .distcp files of stock DCP,
        "megatron" for those of Megatron Core, "torch" for files of torch.save."""
        return self._looked().listing.format

    @property
    def metadata(self) -> dict[str, Any]:
        """What `save` was given as such; a CheckpointDirectory says `step` and `metrics`."""
        return decoded(self._looked().listing.metadata)

    @property
    def topology(self) -> Topology:
        """Which ranks wrote it."""
        look = self._looked()
        names = [file.name for file in look.opened.files()]
        return topology_of(look.listing.world_size, names)

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
            if not self._holds(JOURNAL) and self._agrees_with_manifest():
                return True
            # A journal, parts, or files that are missing or changed: as readers see it.
            source = listing_of(self._place, tensors=False, check_files=True).source
        except IncompleteError:
            return False
        except CheckpointError:
            return self._holds(MANIFEST) or self._holds(JOURNAL)
        return source == "manifest"

    def _holds(self, name: str) -> bool:
        return os.path.exists(os.path.join(self.path, name))

    def _agrees_with_manifest(self) -> bool:
        """Whether the manifest is there and so are its files, of the right sizes. Raises
        IncompleteError where there is none, of parts neither."""
        try:
            answer = core.call({"op": "manifest", "path": self.path})
            return answer["manifests"] == [MANIFEST] and all(
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
        listing = listing_of(self._place, whole=True, check_files=True)
        tensors, objects = entries_of(listing)
        files = tuple(FileInfo(*file) for file in listing.files)
        return Description(
            path=self.path,
            format=listing.format,
            source=listing.source,
            save_id=listing.save_id or None,
            world_size=listing.world_size,
            files=files,
            tensors=tensors,
            objects=objects,
            beside=tuple(listing.beside),
            notes=tuple(listing.notes),
            metadata=decoded(listing.metadata),
        )

    def dtypes(self) -> dict[str, str]:
        """The dtype of every tensor by its name, as safetensors calls it ("BF16"): a part of what
        `describe` says, in a fraction of the time, since no file of tensors is looked at where
        there is a manifest. Raises what that does."""
        return OpenedCheckpoint(self.path, self._format).dtypes()

    def verify(
        self,
        workers: int = 2,
        progress: Progress | None = None,
        *,
        direct_io: bool = True,
        share: tuple[int, int] = (0, 1),
    ) -> VerifyReport:
        """Compare every byte of every file with its digest; of files of stock DCP and torch.save,
        every entry of their archives with its CRC-32. What has neither is an error. Begins again, a
        few times, when a save replaces the checkpoint meanwhile.

        workers: threads. progress: called with bytes done and bytes in all, about ten times a
        second, on another thread. direct_io: False reads through the page cache. share: (which, of
        how many) shares of the bytes, for ranks that verify together. Raises InvalidArgumentError
        for a share that there is not; CorruptError that names the file and the bytes;
        UnsupportedError where there is nothing to compare some of it with, as of plain safetensors
        and zarr; and what `describe` raises.
        """

        # What is wrong with a directory is raised by the first look, which takes its time where a
        # save may be replacing it: only what is replaced while it is read is looked at again.
        first = [OpenedCheckpoint(self.path, self._format)]

        def once() -> VerifyReport:
            opened = first.pop() if first else OpenedCheckpoint(self.path, self._format)
            with Job() as job:
                request = {
                    "op": "verify",
                    "checkpoint": opened.id,
                    "workers": workers,
                    "direct_io": direct_io,
                    "job": job.id,
                    "share": share[0],
                    "shares": share[1],
                }
                with told(job, progress):
                    answer = job.run(lambda: core.call(request))
            return VerifyReport(answer["files"], answer["bytes"])

        return look_again(once, ConflictError)

    def recover(self) -> bool:
        """Finish a commit that was interrupted, and remove what dead saves have left.

        Every save does this first; between saves it only tidies up, since readers understand an
        interrupted commit as it stands. True when there was something to do. Raises ConflictError
        while a save is in progress.
        """
        return bool(core.call({"op": "recover", "path": self.path})["recovered"])

    def remove(self) -> RemoveReport:
        """Delete the checkpoint: the files that its manifest names, then the manifest.

        Whatever else is in the directory stays and is reported, and the directory with it. After
        a kill half way the checkpoint is incomplete, which every reader says; the next `remove`,
        `recover` or save goes on. A damaged one can be removed too; where it is the manifest that
        is damaged, the files go that are called as only those of our saves are. No link is
        followed: a name that is a link is unlinked itself, and `path` must not be one.

        Raises IncompleteError for a directory without a manifest (nothing says which files belong
        to a checkpoint there), ConflictError while a save into it is in progress.
        """
        answer = core.call({"op": "remove", "path": self.path})
        warn_of(answer)
        return RemoveReport(
            tuple(answer["removed"]), tuple(answer["left"]), answer["directory_removed"]
        )


def _stored() -> Any:
    """The module that reads values, which needs torch."""
    import torch_ckpt.calls.stored

    return torch_ckpt.calls.stored


class _Look:
    """One look at a checkpoint. objects: made when they are asked for."""

    def __init__(self, opened: OpenedCheckpoint) -> None:
        self.opened = opened
        self.objects: StoredObjects | None = None
        self.listing = opened.listing()
        self.tensors = self.listing.tensors()


def open(
    path: str | os.PathLike[str],
    *,
    format: str | None = None,
    verify: bool = True,
    direct_io: bool = True,
) -> Checkpoint:
    """The checkpoint at `path`, looked at now; arguments are those of Checkpoint.

        checkpoint = torch_ckpt.open("run/step-1000")
        rows = checkpoint["layer.weight"][:2]  # reads two rows
        step = checkpoint.objects["step"]

    Raises IncompleteError where there is none, and what `Checkpoint.describe` raises.
    """
    checkpoint = Checkpoint(path, format=format, verify=verify, direct_io=direct_io)
    checkpoint._looked()
    return checkpoint


def was_committed(path: str) -> bool:
    """Whether a save of torch_ckpt was committed at `path` and not removed since, whatever became
    of its files: as Checkpoint.is_committed, but true as well where one of them is missing, the
    manifest not excepted. Raises OSError."""
    try:
        # The journal first, as there. That of a removal names no file.
        return bool(json.loads(Path(path, JOURNAL).read_bytes())["manifest"]["files"])
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        pass  # none, or in a place that only its owner may look into
    except (ValueError, KeyError, TypeError):
        return True  # damaged
    checkpoint = Checkpoint(path)
    if checkpoint._holds(MANIFEST):
        return True
    if not os.path.isdir(path):
        return False
    try:
        source = listing_of(checkpoint._place, tensors=False).source
    except IncompleteError as error:
        # A commit brings such a file into its place with the journal beside it, and a removal takes
        # it away so. Alone it has lost its manifest, or, of a rank's part, is what is lost. (A
        # shard that is not there may be one of others, which their index names.)
        named = error.file or ""
        part = os.path.basename(named)
        return ONLY_OURS.fullmatch(part) is not None and (
            os.path.exists(named) or not part.startswith(SHARD)
        )
    except CheckpointError:
        return False
    return source == "manifest"


@contextlib.contextmanager
def locked(path: str) -> Iterator[None]:
    """Hold the lock that saves into `path` take."""
    session = SaveSession(path, overwrite="all")
    try:
        yield
    finally:
        session.end()
