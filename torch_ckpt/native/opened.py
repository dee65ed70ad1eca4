"""A checkpoint that was looked at once, and what it holds."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from torch_ckpt.errors import CheckpointError, IncompleteError, error_from
from torch_ckpt.native import core
from torch_ckpt.native.jobs import finalizer
from torch_ckpt.options import local_path

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


Format = Literal["torch_ckpt", "hf", "dcp", "megatron", "torch"]
Source = Literal["manifest", "index", "headers", "dcp", "megatron", "torch"]


class ListedFile(NamedTuple):
    """role: "data", "objects", "catalog", "index" or "extra"."""

    name: str
    role: str
    bytes: int


class StoredType(NamedTuple):
    """What tensors have in common. Of one that is not read, `dtype` may be a name of torch's and
    `shape` None."""

    dtype: str
    shape: list[int] | None
    bytes: int


class Archive(NamedTuple):
    """An archive of torch.save, `bytes` of a file from `begin` on. path: the keys of a leaf in the
    state dict that it holds; None for all that it holds."""

    file: str
    begin: int
    bytes: int
    path: tuple[Any, ...] | None


@dataclass(frozen=True)
class Listing:
    """What a checkpoint holds, in columns: of all entries in one order, or only of its objects.

    source: "manifest", or what else the checkpoint was read by; format: a word of `convert`.
    save_id: "" where there is none; world_size: None where nothing says it.
    metadata: what was said of it when it was saved: names, and JSON texts.
    hulls: tensors whose global shape no file says; beside: files that are no part of it; notes:
        what is wrong and no error.
    tensor_count: of all tensors, tied ones too; dtypes: {"tensors", "bytes"} by dtype, where a
        tied one is none.
    names, paths: of each entry; None where a name is the path, else JSON.
    kinds: a character for each: core.OBJECT for those that are no tensors, core.ALIAS for tied
        ones, core.UNREAD for tensors that are not read, of which `unread` says why, by name.
    types: each once; type_of: the place in it, for each entry.
    aliases: the tensor that a tied one is stored as, by name.
    holders: for each object the place of its file in `files`; None for an archived one, unless all
        is listed.
    archived: the names of objects that are archives in files of a foreign format.
    scaled: the names of tensors whose stored elements are codes that scales make numbers of, see
        `OpenedCheckpoint.dequantized`. Their dtype is F32, in which these are made.
    common: the names of what belongs to the common state of a checkpoint of Megatron's.
    files: all files, or those of objects only; placements: for each tensor its boxes, or nothing.
        Those of an alias are None: they are its tensor's.
    """

    source: Source
    format: Format
    save_id: str
    world_size: int | None
    metadata: list[tuple[str, str]]
    hulls: list[str]
    beside: list[str]
    notes: list[str]
    files: list[ListedFile]
    tensor_count: int
    dtypes: dict[str, dict[str, int]]
    names: list[str]
    kinds: str
    types: list[StoredType]
    type_of: list[int]
    paths: list[str | None]
    aliases: dict[str, str]
    holders: list[int | None]
    archived: list[str]
    common: list[str]
    scaled: list[str]
    unread: dict[str, str]
    placements: list[list[dict[str, Any]] | None]

    def entries(self) -> Iterator[tuple[str, str, int]]:
        """Name, kind and the place of the type, of each entry."""
        return zip(self.names, self.kinds, self.type_of, strict=True)

    def tensors(self) -> dict[str, StoredType]:
        """Every tensor's type, by its name."""
        types = self.types
        return {name: types[at] for name, kind, at in self.entries() if kind != core.OBJECT}

    def boxes(self) -> dict[str, list[dict[str, Any]]]:
        """Where each tensor that is read has its boxes, of a listing of the whole, by its name."""
        held = iter(self.placements)
        kinds = (core.OBJECT, core.UNREAD)
        found = {name: next(held) for name, kind, _ in self.entries() if kind not in kinds}
        return {name: found[self.aliases.get(name, name)] or [] for name in found}

    def object_files(self) -> dict[str, ListedFile | None]:
        """The file of each object, by its name, as `holders` says."""
        held = (None if at is None else self.files[at] for at in self.holders)
        return dict(zip(self.objects(), held, strict=True))

    def objects(self) -> list[str]:
        """The names of the entries that are no tensors."""
        return [name for name, kind, _ in self.entries() if kind == core.OBJECT]


def listing_of(
    place: dict[str, Any], *, whole: bool = False, tensors: bool = True, check_files: bool = False
) -> Listing:
    """What the checkpoint holds that `place` names, by its "path" or by its number.

    whole: with all files, and where each tensor is; tensors: not only what is no tensor;
    check_files: sizes and ids of all files are compared first. Raises what opening one does.
    """
    request = {"op": "describe", "whole": whole, "tensors": tensors, "check_files": check_files}
    answer: dict[str, Any] = core.call({**request, **place})
    answer["names"] = core.listed_names(answer["names"])
    answer["files"] = [ListedFile(**file) for file in answer["files"]]
    answer["types"] = [StoredType(*each) for each in answer["types"]]
    return Listing(**answer)


class OpenedCheckpoint:
    """A checkpoint directory, looked at once: what it holds stays what it was then, and a file
    that has been replaced since is an error.

    Its files are opened when they are first read. `close`, or garbage, ends it; jobs that use it
    go on. Raises what the core's "open" raises (csrc/engine/open/checkpoint.h).
    """

    path: str
    id: int
    notes: list[str]  # what is wrong and no error, of which users tell: `hulls.warn_of_notes`
    close: Callable[[], Any]

    def __init__(self, path: str, format: str | None = None) -> None:
        self.path = local_path(path)
        request = {"op": "open", "path": self.path}
        if format is not None:
            request["format"] = format
        try:
            answer = core.call(request)
        except IncompleteError:
            if os.path.lexists(self.path) or not _HUB_ID.fullmatch(path):
                raise
            raise IncompleteError(
                "there is no such file or directory; for a model on the Hugging Face Hub, load "
                f"from huggingface_hub.snapshot_download({path!r})",
                file=self.path,
            ) from None
        self._take(answer["checkpoint"], answer["notes"])

    def _take(self, number: int, notes: list[str]) -> None:
        self.id, self.notes = number, notes
        self.close = finalizer(self, _close_checkpoint, self.id)

    def __reduce__(self) -> Any:
        raise TypeError("an opened checkpoint cannot be pickled")

    def without(self, names: list[str]) -> OpenedCheckpoint:
        """The same look without these leaves, as if they were not there."""
        request = {"op": "without", "checkpoint": self.id, "names": core.names_text(names)}
        left = object.__new__(OpenedCheckpoint)
        left.path = self.path
        left._take(core.call(request)["checkpoint"], self.notes)
        return left

    def dequantized(
        self,
        *,
        blocks: tuple[int, int] | None = None,
        only: Collection[str] | None = None,
        keeps_scales: bool = False,
        keeps_names: bool = False,
    ) -> Dequantized:
        """The same look with a tensor of numbers in place of each pair of codes and scales.

        blocks: rows and columns of float8 codes that have a scale in common; None: 128 and 128.
        only: the names of codes that become numbers; None: all that have scales.
        keeps_scales: scales stay as tensors. keeps_names: `x_blocks` is not called `x`.

        Raises UnsupportedError, naming both, for scales of `only` that do not fit.
        """
        request: dict[str, Any] = {
            "op": "dequantize",
            "checkpoint": self.id,
            "keeps_scales": keeps_scales,
            "keeps_names": keeps_names,
        }
        if blocks is not None:
            request["blocks"] = blocks
        if only is not None:
            request["only"] = sorted(only)
        answer = core.call(request)
        made = object.__new__(OpenedCheckpoint)
        made.path = self.path
        made._take(answer["checkpoint"], self.notes)
        pairs = [ScaledPair(*each) for each in answer["pairs"]]
        misfits = [Misfit(*each) for each in answer["misfits"]]
        return Dequantized(made, pairs, answer["unscaled"], answer["orphans"], misfits)

    def mapped(
        self,
        pairs: Sequence[tuple[str, str]],
        natives: Mapping[str, Sequence[int]],
        numbers: Mapping[str, int],
    ) -> Mapped:
        """The same look with the tensors of a model, `natives` by name and shape, in place of the
        stored ones that `pairs` say they are made of; all others stay.

        numbers: by the names that views have for them. Raises InvalidArgumentError, naming pair and
        tensor, for what is no mapping: csrc/engine/open/derived.h.
        """
        request = {
            "op": "map",
            "checkpoint": self.id,
            "pairs": list(pairs),
            "names": core.names_text(list(natives)),
            "shapes": list(natives.values()),
            "numbers": dict(numbers),
        }
        return self._mapped(core.call(request))

    def mapped_onto_new(
        self, pairs: Sequence[tuple[str, str]], numbers: Mapping[str, int]
    ) -> Mapped:
        """The same look with the tensors that `pairs` make of its own, in the smallest shapes that
        have all elements; all others stay. Its own have the names of the one side: the first one,
        but where they are of the second alone. Raises as `mapped` does."""
        request = {"op": "map_onto_new", "checkpoint": self.id, "pairs": list(pairs)}
        return self._mapped(core.call({**request, "numbers": dict(numbers)}))

    def _mapped(self, answer: dict[str, Any]) -> Mapped:
        made = object.__new__(OpenedCheckpoint)
        made.path = self.path
        made._take(answer["checkpoint"], self.notes)
        partly = [PartlyUsed(*each) for each in answer["partly"]]
        return Mapped(made, partly, frozenset(answer["unmatched"]))

    @contextlib.contextmanager
    def files_open(self, direct_io: bool) -> Iterator[None]:
        """Within it each file is opened once, however many jobs with that `direct_io` read it."""
        request = {"op": "hold_files", "checkpoint": self.id, "direct_io": direct_io}
        files = core.call(request)["files"]
        try:
            yield
        finally:
            core.call({"op": "release_files", "files": files})

    def listing(
        self, *, whole: bool = False, tensors: bool = True, check_files: bool = False
    ) -> Listing:
        """What it holds: see `listing_of`."""
        place = {"checkpoint": self.id}
        return listing_of(place, whole=whole, tensors=tensors, check_files=check_files)

    def files(self) -> list[ListedFile]:
        """All its files."""
        answer = core.call({"op": "files", "checkpoint": self.id})
        names, roles = (core.listed_names(answer[column]) for column in ("names", "roles"))
        return list(map(ListedFile, names, roles, answer["bytes"]))

    def archived_objects(self, names: list[str]) -> list[Any]:
        """Objects that `listing` calls archived, each as the parsed JSON of an objects file
        (docs/format.md, section 7), or as the error that names it. Nothing of a pickle is run."""
        answer = core.call({"op": "read_objects", "checkpoint": self.id, "names": names})
        return [
            error_from(each["error"]) if "error" in each else json.loads(each["text"])
            for each in answer["objects"]
        ]

    def archive_of(self, name: str) -> Archive:
        """Where the archive is that holds the object `name`, of which `listing` says that it is
        archived. Raises IncompleteError for another one."""
        found = core.call({"op": "archive_of", "checkpoint": self.id, "name": name})
        path = tuple(json.loads(found["path"])) if found["path"] else (name,)
        return Archive(
            os.path.join(self.path, found["file"]) if os.path.isdir(self.path) else self.path,
            found["begin"],
            found["bytes"],
            path if found["leaf"] else None,
        )

    def dtypes(self) -> dict[str, str]:
        """The dtype of every tensor by its name, as safetensors calls it ("BF16")."""
        return {name: stored.dtype for name, stored in self.listing().tensors().items()}


class ScaledPair(NamedTuple):
    """Names: of a tensor of numbers, and of the codes and scales that it is stored as."""

    name: str
    codes: str
    scales: str


class Misfit(NamedTuple):
    """Names of codes, and of scales that belong to them and do not fit, and why."""

    codes: str
    scales: str
    reason: str


class Dequantized(NamedTuple):
    """unscaled: the names of codes that have no scales; orphans: of scales that have no codes;
    misfits: codes that stay what they are."""

    opened: OpenedCheckpoint
    pairs: list[ScaledPair]
    unscaled: list[str]
    orphans: list[str]
    misfits: list[Misfit]


class PartlyUsed(NamedTuple):
    """`elements` of the `of` ones of a stored tensor are in a native one; some are in none."""

    stored: str
    native: str
    elements: int
    of: int


class Mapped(NamedTuple):
    """unmatched: the positions of pairs that mean no tensor."""

    opened: OpenedCheckpoint
    partly: list[PartlyUsed]
    unmatched: frozenset[int]


def _close_checkpoint(checkpoint: int) -> None:
    """For finalizers: nothing is left to tell an error to."""
    with contextlib.suppress(CheckpointError):
        core.call({"op": "close", "checkpoint": checkpoint})
