"""A checkpoint that Megatron's programs load: ours, or a directory of Megatron's own."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from torch_ckpt.calls.api import load
from torch_ckpt.calls.stored import StoredTensor
from torch_ckpt.checkpoint.description import entry_paths
from torch_ckpt.checkpoint.megatron_form import (
    BACKEND,
    WITH_LEAVES,
    WITH_OBJECT,
    form_with_leaves,
)
from torch_ckpt.checkpoint.names import (
    MEGATRON_COMMON,
    MEGATRON_COMMON_FILE,
    MEGATRON_CONTENT,
    MEGATRON_LEAVES,
    MEGATRON_OBJECT,
)
from torch_ckpt.dcp.read.read_objects import ObjectReader
from torch_ckpt.dcp.read.reader import ReplacedError
from torch_ckpt.errors import ConflictError, CorruptError
from torch_ckpt.megatron.boxes import Numbers
from torch_ckpt.megatron.config import CheckpointingException, maybe_load_config
from torch_ckpt.native.core import STRUCTURE
from torch_ckpt.native.dtypes import PACKED, TORCH_DTYPES
from torch_ckpt.native.opened import OpenedCheckpoint, StoredType
from torch_ckpt.objects.types import DTYPES
from torch_ckpt.options import local_path
from torch_ckpt.planning.flatten import check_structure, rebuild

COMMON_KEY, CONTENT_KEY = (
    name.partition(MEGATRON_OBJECT)[0] for name in (MEGATRON_COMMON, MEGATRON_CONTENT)
)


class _Backend(NamedTuple):
    """format: what a CheckpointReader reads it as; None for ours. lists: whether objects are
    stored as lists of one."""

    format: str | None
    lists: bool


_BACKENDS = {
    (BACKEND, WITH_OBJECT): _Backend(None, True),
    (BACKEND, WITH_LEAVES): _Backend(None, True),  # lists where common_state.json says so
    ("torch_dist", 1): _Backend("dcp", True),  # without the leaves of its common state
    ("zarr", 1): _Backend("megatron", False),
}


class Stored:
    """One look at the checkpoint in a directory.

    format: what a CheckpointReader is to read it as; None for ours.
    save_id: of the save that is seen; "" for a directory of Megatron's.
    """

    def __init__(self, checkpoint_dir: str | os.PathLike[str]) -> None:
        """Raises CheckpointingException where there is no checkpoint that is read here, and what
        opening one raises."""
        self.path = local_path(checkpoint_dir)
        if not os.path.isdir(self.path):
            raise CheckpointingException("there is no such directory", file=self.path)
        config = maybe_load_config(self.path)
        if config is None:
            raise CheckpointingException(
                "is no distributed checkpoint: it has no metadata.json", file=self.path
            )
        backend = (config.sharded_backend, config.sharded_backend_version)
        if backend not in _BACKENDS:
            words = ", ".join(f"{name} {version}" for name, version in _BACKENDS)
            raise CheckpointingException(
                f"is of the backend {backend[0]}, version {backend[1]}; {words} are read",
                file=self.path,
            )
        self.format, self._lists = _BACKENDS[backend]
        self._leaves: frozenset[str] | None = None
        if backend == (BACKEND, WITH_LEAVES):
            self._leaves, bare = form_with_leaves(self.path)
            self._lists = not bare
        opened = OpenedCheckpoint(self.path, self.format)
        listing = opened.listing()
        self._look = (opened, listing)
        self.save_id = listing.save_id
        objects = listing.objects()
        self._stored_objects = frozenset(objects)
        if lost := (self._leaves or frozenset()).difference(listing.names):
            raise CorruptError(
                f"is of the common state by {MEGATRON_LEAVES}, and not in the checkpoint",
                file=self.path,
                tensor=min(lost),
            )
        # Of zarr the catalog has the leaves of the common state beside the tensors.
        leaves = self._leaves or listing.common
        common = {MEGATRON_COMMON, MEGATRON_CONTENT, STRUCTURE, *leaves}
        self._tensors = {key: each for key, each in listing.tensors().items() if key not in common}
        self._objects = [name for name in objects if name not in common]

    def tensors(self) -> dict[str, tuple[torch.dtype, Numbers]]:
        """Dtype and shape of each tensor by its key, also of one that is not read. Raises
        CorruptError for one that this torch cannot say."""
        found: dict[str, tuple[torch.dtype, Numbers]] = {}
        for key, stored in self._tensors.items():
            dtype = TORCH_DTYPES.get(stored.dtype) or DTYPES.get(stored.dtype)
            shape = _shape_of(stored)
            if dtype is None or shape is None:
                raise CorruptError(
                    f"is {stored.dtype} of {stored.shape}, which this torch cannot hold",
                    file=self.path,
                    tensor=key,
                )
            found[key] = (dtype, shape)
        return found

    def shapes(self) -> dict[str, Numbers | None]:
        """The shape of each tensor by its key."""
        return {key: _shape_of(each) for key, each in self._tensors.items()}

    def objects(self) -> list[str]:
        """The names of all objects: their unique keys."""
        return self._objects

    def name_of(self, unique_key: str) -> str:
        """Under which name the object of that unique key is stored: early releases of Megatron
        left out the last size of its grid."""
        early, _, last = unique_key.rpartition(".")
        is_early = (
            unique_key not in self._stored_objects
            and last.lstrip("-").isdigit()
            and early in self._stored_objects
            and early.rpartition("/")[2].count("_") == 2  # shard_<offset>_<sizes>
        )
        return early if is_early else unique_key

    def keys(self) -> set[str]:
        """Of tensors and objects."""
        return {*self._tensors, *(key_of(name) for name in self._objects)}

    def common_names(self) -> list[str]:
        """The names of what `common_of` is to be given."""
        return [
            name for name in (MEGATRON_COMMON, MEGATRON_CONTENT) if name in self._stored_objects
        ]

    def common_of(self, values: dict[str, Any]) -> dict[Any, Any]:
        """The common state, and what the checkpoint says of itself in it, of the values by name."""
        common: Any = {}
        if self._leaves is not None:
            common = self._of_leaves(self._leaves)
        elif MEGATRON_COMMON in values:
            common = self.object_of(values[MEGATRON_COMMON], MEGATRON_COMMON)
        elif self.format is not None:
            common = load(None, os.path.join(self.path, MEGATRON_COMMON_FILE), no_dist=True)
        if not isinstance(common, dict):
            raise CheckpointingException(
                f"its common state is a {type(common).__name__}, not a dict", file=self.path
            )
        if MEGATRON_CONTENT in values:
            common[CONTENT_KEY] = self.object_of(values[MEGATRON_CONTENT], MEGATRON_CONTENT)
        return common

    def _of_leaves(self, leaves: frozenset[str]) -> dict[Any, Any]:
        opened, listing = self._look
        tensors = listing.tensors()

        def value_of(name: str) -> Any:
            if name not in tensors:
                return self._read(name)
            stored, why = tensors[name], listing.unread.get(name)
            tensor = StoredTensor(
                opened, name, stored, tensors, verify=True, direct_io=True, unread=why
            )
            return tensor[...]

        with _or_replaced():
            values = {name: value_of(name) for name in listing.names if name in leaves}
            said = self._read(STRUCTURE) if STRUCTURE in self._stored_objects else None
        structure = None if said is None else check_structure(said)
        paths = dict(zip(listing.names, entry_paths(listing), strict=True))
        return rebuild(values, paths, structure)

    def _read(self, name: str) -> Any:
        """The object under that name, of the save that is seen."""
        opened, listing = self._look
        reader = ObjectReader(opened, listing, verify=True, allow_pickle=False)
        return reader.read_one(name)

    def common(self) -> dict[Any, Any]:
        """Reads it. Raises ReplacedError where it is no longer there."""
        with _or_replaced():
            values = {name: self._read(name) for name in self.common_names()}
        return self.common_of(values)

    def object_of(self, value: Any, name: str) -> Any:
        """The object that is stored as `value` under the unique key `name`."""
        if not self._lists:
            return value
        if not isinstance(value, list) or len(value) != 1:
            raise CheckpointingException(
                "is not stored as a list of one, as objects of Megatron are",
                file=self.path,
                tensor=name,
            )
        return value[0]


@contextlib.contextmanager
def _or_replaced() -> Iterator[None]:
    """What was read is no longer that of the save that was seen: a ReplacedError."""
    try:
        yield
    except ConflictError as error:
        raise ReplacedError(error.message, file=error.file, tensor=error.tensor) from error


def _shape_of(stored: StoredType) -> Numbers | None:
    """In elements as torch counts them, of which one may be several of the file's."""
    if stored.shape is None:
        return None
    sizes = [*stored.shape]
    if sizes:
        sizes[-1] //= PACKED.get(stored.dtype, 1)
    return tuple(sizes)


def key_of(name: str) -> str:
    """The key of the object of that unique key."""
    return name.rpartition(MEGATRON_OBJECT)[0] or name
