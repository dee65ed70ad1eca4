"""Leaves that are no tensors: from the objects files to the planner."""

from __future__ import annotations

import io
import json
import tempfile
from collections import deque
from collections.abc import Mapping, Set
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

from torch_ckpt.dcp.plan.load_planner import LoadPlanner as OurLoadPlanner
from torch_ckpt.dcp.plan.stock_planner import has_method_of
from torch_ckpt.errors import CheckpointError, CorruptError, IncompleteError, UnsupportedError
from torch_ckpt.native import core, operators
from torch_ckpt.native.jobs import Job
from torch_ckpt.native.opened import Listing, OpenedCheckpoint
from torch_ckpt.objects import ObjectError, ObjectFile, decode_object
from torch_ckpt.objects.archive import run_pickle
from torch_ckpt.objects.stand_ins import StandIns
from torch_ckpt.planning.reserved import RAW_LEAVES

_ARCHIVE = b"PK\x03\x04"  # how files of torch.save begin


def not_read(path: str, name: str, why: str) -> UnsupportedError:
    """The error of who asks for a tensor that is in the checkpoint at `path`, and not read."""
    return UnsupportedError(f"{why}, and is not read", file=path, tensor=name)


def holds_tensor(value: Any) -> bool:
    """Whether a value that was read from typed JSON is a tensor, or holds one."""
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, torch.Tensor):
            return True
        if isinstance(each, Mapping):
            left += [*each.keys(), *each.values()]
        elif isinstance(each, list | tuple | Set | deque):
            left += each
    return False


class ObjectReader:
    """Reads the object items of one plan; each objects file once."""

    def __init__(
        self,
        opened: OpenedCheckpoint,
        listing: Listing,
        *,
        verify: bool,
        allow_pickle: bool,
        stand_ins: StandIns | None = None,
    ) -> None:
        """`listing` is what `opened` says of itself. stand_ins: what makes objects that are only
        written on; None for those that are used."""
        self.opened = opened
        self.path = opened.path
        self.listing = listing
        self.verify = verify
        self.allow_pickle = allow_pickle
        self.stand_ins = stand_ins
        self._holders: dict[str, str | None] | None = None  # fqn to objects file
        self._last: tuple[str, ObjectFile, bytes] | None = None  # of the file read last, its side
        self._last_archive: tuple[tuple[Any, ...], Any] | None = None  # what its pickle has made

    def read(self, items: list[ReadItem], planner: LoadPlanner) -> None:
        """Give every item's object to the planner."""
        wanted: dict[str | None, list[ReadItem]] = {}
        for item in items:
            wanted.setdefault(self._file_of(item.storage_index.fqn), []).append(item)
        archived = wanted.pop(None, [])
        values = self._archived([item.storage_index.fqn for item in archived])
        for item, value in zip(archived, values, strict=True):
            _give(planner, item, value)
        for name, of_file in wanted.items():
            assert name is not None
            objects, raw = self._load(name, [item.storage_index.fqn for item in of_file])
            for item in of_file:
                fqn = item.storage_index.fqn
                if fqn in raw:
                    self._give_packed(planner, item, objects[fqn])
                else:
                    _give(planner, item, objects[fqn])

    def read_one(self, fqn: str) -> Any:
        """The object of one leaf."""
        name = self._file_of(fqn)
        if name is None:
            return self._archived([fqn])[0]
        objects, raw = self._load(name, [fqn])
        return self._unpacked(fqn, objects[fqn]) if fqn in raw else objects[fqn]

    def _archived(self, fqns: list[str]) -> list[Any]:
        values = []
        for fqn, value in zip(fqns, self.opened.archived_objects(fqns), strict=True):
            try:
                if isinstance(value, Exception):
                    raise value
                values.append(self._decoded(value, fqn))
            except UnsupportedError:
                if not self.allow_pickle:
                    raise
                values.append(self._unpickled(fqn))
        return values

    def _unpickled(self, fqn: str) -> Any:
        """A leaf that only its own pickle can make, which is run."""
        archive = self.opened.archive_of(fqn)
        place = archive[:3]
        if self._last_archive is None or self._last_archive[0] != place:
            self._last_archive = (place, run_pickle(*place))
            # Another file may stand there by now: looked at again, that is a ConflictError.
            self.opened.archived_objects([fqn])
        value = self._last_archive[1]
        try:
            if archive.path is not None and isinstance(value, list) and len(value) == 1:
                value = value[0]  # Megatron's objects are in lists of one
            for key in archive.path or ():
                value = value[key]
        except (LookupError, TypeError) as error:
            raise UnsupportedError(
                f"its pickle has made a state dict that has no such leaf: {error!r}",
                file=archive.file,
                tensor=fqn,
            ) from error
        return value

    def _decoded(self, value: Any, fqn: str) -> Any:
        """The object that a file of others holds as `fqn`; what is wrong names that as the core
        does."""
        try:
            return decode_object(value, fqn, stand_ins=self.stand_ins)
        except ObjectError as error:
            error.message = error.message.removeprefix(f"{fqn}: ")
            error.tensor, error.file = fqn, self.path
            raise

    def _file_of(self, fqn: str) -> str | None:
        """The objects file that holds it; None for an archive in a foreign file."""
        listing = self.listing
        if self._holders is None:
            archived = set(listing.archived)
            self._holders = {
                name: None if file is None or name in archived else file.name
                for name, file in listing.object_files().items()
            }
        if fqn in listing.unread:
            raise not_read(self.path, fqn, listing.unread[fqn])
        if fqn not in self._holders:
            raise IncompleteError("is not in the checkpoint", file=self.path, tensor=fqn)
        return self._holders[fqn]

    def _bytes(self, name: str, size: int) -> bytes:
        if not size:
            return b""
        # Not a tensor's own memory: to bytes() a storage is a sequence, read one by one.
        held = bytearray(size)
        target = torch.frombuffer(held, dtype=torch.uint8)
        plan = {
            "checkpoint": self.opened.id,
            "verify": self.verify,
            "names": [name],
            "files": {"0": name},
        }
        with Job() as job:
            operators.read([target], plan, job)
        return bytes(held)

    def _load(self, name: str, fqns: list[str]) -> tuple[dict[str, Any], set[str]]:
        """The objects of one file, and the names of those that a user's planner has packed."""
        if self._last is None or self._last[0] != name:
            self._last = (name, *self._read_file(name))
        _, file, side = self._last
        stored = file.fqns()
        names = [*fqns, RAW_LEAVES] if RAW_LEAVES in stored else fqns
        for fqn in names:
            if fqn not in stored:
                raise CorruptError("is not in its objects file", file=file.name, tensor=fqn)
        objects = file.load(
            names, side=side, allow_pickle=self.allow_pickle, stand_ins=self.stand_ins
        )
        raw = objects.get(RAW_LEAVES, [])
        if type(raw) is not list or not all(type(fqn) is str for fqn in raw):
            raise CorruptError(f"{RAW_LEAVES} is no list of names", file=file.name)
        return objects, set(raw)

    def _read_file(self, name: str) -> tuple[ObjectFile, bytes]:
        """An objects file, and the bytes of its side file."""
        sizes = {file.name: file.bytes for file in self.listing.files}
        file = ObjectFile(self._bytes(name, sizes[name]), name=f"{self.path}/{name}")
        side_name = name.removesuffix(".json") + ".bin"
        if file.side_bytes and side_name not in sizes:
            raise CorruptError("its side file is not in the checkpoint", file=file.name)
        return file, self._bytes(side_name, sizes[side_name]) if file.side_bytes else b""

    def _give_packed(self, planner: LoadPlanner, item: ReadItem, value: Any) -> None:
        """Bytes that a planner of the user's has made, to the planner that can read them."""
        fqn = item.storage_index.fqn
        if type(value) is not bytes:
            raise CorruptError("is said to be packed and is no bytes", file=self.path, tensor=fqn)
        unpickles = has_method_of(planner, "load_bytes", DefaultLoadPlanner, OurLoadPlanner)
        if unpickles and not self.allow_pickle and value.startswith(_ARCHIVE):
            _give(planner, item, self._unpacked(fqn, value))
            return
        if unpickles and not self.allow_pickle:
            raise UnsupportedError(
                "was packed by a planner of its own when it was saved. Load it with the planner "
                f"that belongs to that one: {type(planner).__name__} would unpickle it, which "
                "only allow_pickle=True permits",
                tensor=fqn,
            )
        planner.load_bytes(item, io.BytesIO(value))

    def _unpacked(self, fqn: str, value: Any) -> Any:
        """What a planner has packed by torch.save, as those of `.distcp` files are read: nothing of
        its pickle is run. Other bytes are what they are."""
        if type(value) is not bytes or not value.startswith(_ARCHIVE):
            return value
        with tempfile.NamedTemporaryFile(prefix="torch_ckpt-") as file:
            file.write(value)
            file.flush()
            try:
                text = core.call({"op": "read_archive", "path": file.name})["text"]
            except CheckpointError as error:
                error.tensor, error.file = fqn, self.path
                raise
        return self._decoded(json.loads(text), fqn)


def _give(planner: LoadPlanner, item: ReadItem, value: Any) -> None:
    load_object = getattr(planner, "load_object", None)
    if load_object is not None:
        load_object(item, value)
        return
    # Stock planners take a pickle and no object. This one is made here and now, of an object that
    # was decoded from typed JSON: nothing that came from disk is unpickled.
    data = io.BytesIO()
    torch.save(value, data)
    data.seek(0)
    planner.load_bytes(item, data)
