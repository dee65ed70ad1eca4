"""How a checkpoint of Megatron's programs says that it is one, in a directory of ours.

metadata.json, which comes with the commit as an extra, says the backend "torch_ckpt" and a version.
Version 1 is what `dist_checkpointing.save` writes: objects are lists of one, and so is all of the
common state (names.py). Version 2 is what a conversion of Megatron's own directories writes: the
common state stands leaf by leaf beside all else, as `load` gives it, and common_state.json, another
extra, says which leaves are of it, and whether objects are what they are or lists of one.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch_ckpt.checkpoint.names import (
    MEGATRON_COMMON,
    MEGATRON_CONFIG,
    MEGATRON_CONTENT,
    MEGATRON_LEAVES,
    METADATA,
)
from torch_ckpt.errors import CorruptError, InvalidArgumentError, UnsupportedError
from torch_ckpt.native.opened import OpenedCheckpoint

BACKEND = "torch_ckpt"
WITH_OBJECT, WITH_LEAVES = 1, 2  # versions: how the common state stands


class MegatronForm(NamedTuple):
    """leaves: the names of those of the common state; None where it is one object. bare: whether
    objects are what they are, and no lists of one."""

    leaves: frozenset[str] | None = None
    bare: bool = False

    def of(self, names: Iterable[str], new_names: Mapping[str, str]) -> MegatronForm:
        """The same of what has these names, and some of it new ones."""
        if self.leaves is None:
            return self
        for name in new_names.values():
            if name in (MEGATRON_COMMON, MEGATRON_CONTENT):
                raise InvalidArgumentError("is what the common state is stored under", tensor=name)
        kept = self.leaves.intersection(names)
        return self._replace(leaves=frozenset(new_names.get(name, name) for name in kept))


def form_of(opened: OpenedCheckpoint) -> MegatronForm | None:
    """None where it is no checkpoint of Megatron's, nor one of ours that says so. Raises
    UnsupportedError for a version of which nothing is known here, CorruptError, OSError."""
    listing = opened.listing()
    if listing.format == "megatron":
        # Of Megatron's zarr, objects have files of their own.
        is_zarr = not os.path.exists(os.path.join(opened.path, METADATA))
        return MegatronForm(frozenset(listing.common), is_zarr)
    extras = {file.name for file in opened.files() if file.role == "extra"}
    if listing.format != "torch_ckpt" or MEGATRON_CONFIG not in extras:
        return None
    place = Path(opened.path, MEGATRON_CONFIG)
    try:
        said = json.loads(place.read_bytes())
    except (FileNotFoundError, ValueError, RecursionError) as error:
        raise CorruptError(
            f"does not say whose checkpoint it is: {error}", file=str(place)
        ) from error
    if not isinstance(said, dict) or said.get("sharded_backend") != BACKEND:
        if MEGATRON_LEAVES in extras:
            raise CorruptError(
                f"does not say {BACKEND}, as {MEGATRON_LEAVES} does", file=str(place)
            )
        return None  # somebody's own
    version = said.get("sharded_backend_version", WITH_OBJECT)
    if version not in (WITH_OBJECT, WITH_LEAVES):
        raise UnsupportedError(
            f"says the backend {BACKEND} of version {version!r}; {WITH_OBJECT} and {WITH_LEAVES} "
            "are read",
            file=str(place),
        )
    return MegatronForm() if version == WITH_OBJECT else form_with_leaves(opened.path)


def form_with_leaves(path: str) -> MegatronForm:
    """What common_state.json says in a directory of version 2. Raises CorruptError."""
    place = Path(path, MEGATRON_LEAVES)
    try:
        said: Any = json.loads(place.read_bytes())
        leaves, bare = said["leaves"], said["bare_objects"]
        if type(leaves) is not list or any(type(name) is not str for name in leaves):
            raise ValueError("leaves are a list of names")
        if type(bare) is not bool:
            raise ValueError("bare_objects is true or false")
    except (FileNotFoundError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise CorruptError(
            f"does not say which leaves are of the common state: {error}", file=str(place)
        ) from error
    return MegatronForm(frozenset(leaves), bare)


@contextlib.contextmanager
def form_files(form: MegatronForm) -> Iterator[list[str]]:
    """The paths of the extras that say `form`, which are there until the end of the block."""
    version = WITH_OBJECT if form.leaves is None else WITH_LEAVES
    said: dict[str, Any] = {
        MEGATRON_CONFIG: {"sharded_backend": BACKEND, "sharded_backend_version": version}
    }
    if form.leaves is not None:
        said[MEGATRON_LEAVES] = {"leaves": sorted(form.leaves), "bare_objects": form.bare}
    with tempfile.TemporaryDirectory(prefix="torch_ckpt-extras-") as made:
        for name, value in said.items():
            Path(made, name).write_text(json.dumps(value), encoding="utf-8")
        yield [os.path.join(made, name) for name in said]
