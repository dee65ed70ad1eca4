"""Request: a state dict of Megatron's, taken apart; and put together again of what was loaded."""

from __future__ import annotations

import copy
from argparse import Namespace
from collections import UserString
from collections.abc import Iterable, Mapping, Sequence, Set
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from torch_ckpt.megatron.boxes import Box, Cell
from torch_ckpt.megatron.cat import ViewsForCat
from torch_ckpt.megatron.config import CheckpointingException
from torch_ckpt.megatron.kinds import Kind, kind_of

Path = tuple[Any, ...]


class _Absent:
    """In the place of what is not there."""


ABSENT = _Absent()


class _Places(dict[int, Any]):
    """The entries of a list of `length`, where some are missing, by their places.

    empty: containers that hold nothing, by their places: of no rank's common state but the first's.
    absent: where a load asks for what is not stored.
    """

    def __init__(
        self,
        entries: Iterable[tuple[int, Any]],
        length: int,
        empty: dict[int, Any],
        absent: Iterable[int] = (),
    ) -> None:
        super().__init__(entries)
        self.length = length
        self.empty = empty
        self.absent = frozenset(absent)


class _Built:
    """What a factory has built, `tree`, and what makes one value of it again."""

    def __init__(self, factory: Any, tree: Any) -> None:
        self.factory = factory
        self.tree = tree


class _Leaf:
    """A value that is put in its place as it is, whatever it is. own: of a
    LocalNonpersistentObject, which takes the place of what is stored."""

    def __init__(self, value: Any, own: bool = False) -> None:
        self.value = value
        self.own = own


class Request:
    """What a state dict of Megatron's says: of what is stored under keys, and of common values. It
    is not changed, but its factories build.

    names: the names that its outermost dict has.
    boxes, cells: its ShardedTensors and ShardedObjects, those of factories too.
    common: everything else, in the same containers. A list that has lost entries to the above is a
        dict by place.
    """

    def __init__(self, state_dict: dict[Any, Any]) -> None:
        """Raises CheckpointingException for leaves that make no sense, naming their keys."""
        if not isinstance(state_dict, dict):
            raise CheckpointingException(
                f"a sharded state dict is a dict, not a {type(state_dict).__name__}"
            )
        self.names = frozenset(state_dict)
        self.boxes: list[Box] = []
        self.cells: list[Cell] = []
        self._tree, common = self._visit(state_dict, ())
        _check_values(common)
        self.common: dict[Any, Any] = {} if common is ABSENT else dict(common)

    def _visit(self, value: Any, path: Path) -> tuple[Any, Any]:
        """`value` for what is not common state, and for what is; ABSENT where nothing is."""
        if isinstance(value, dict | list):
            return self._visit_container(value, path)
        match kind_of(value):
            case Kind.VALUE:
                return ABSENT, value
            case Kind.TENSOR:
                self.boxes.append(Box.of(value))
                return self.boxes[-1], ABSENT
            case Kind.OBJECT:
                self.cells.append(Cell.of(value))
                return self.cells[-1], ABSENT
            case Kind.NONPERSISTENT:
                return _Leaf(value.unwrap(), own=True), ABSENT
        built, common = self._visit(value.build(), path)
        if common is not ABSENT:
            raise CheckpointingException(
                f"its factory builds values that are no entries: {common!r:.100}", tensor=value.key
            )
        return _Built(value, built), ABSENT

    def _visit_container(self, value: Any, path: Path) -> tuple[Any, Any]:
        if not value:
            return ABSENT, value
        is_list = isinstance(value, list)
        found: dict[Any, Any] = {}
        common: dict[Any, Any] = {}
        same = True
        for key, entry in enumerate(value) if is_list else value.items():
            other, left = self._visit(entry, (*path, key))
            if other is not ABSENT:
                found[key] = other
            if left is not ABSENT:
                common[key] = left
            same &= left is entry
        # A container of nothing but values stays what it is, an OrderedDict too.
        rest: Any = value if same else (common or ABSENT)
        if is_list and not same and len(common) == len(value):
            rest = list(common.values())
        if not found:
            return ABSENT, rest
        if not is_list:
            return found, rest
        empty = {at: copy.copy(entry) for at, entry in enumerate(value) if _is_empty(entry)}
        return _Places(found.items(), len(value), empty), rest

    def leaves(self) -> list[Box | Cell]:
        """Boxes and cells."""
        return [*self.boxes, *self.cells]

    def answer(self, common: dict[Any, Any]) -> dict[Any, Any]:
        """The state dict that a load returns: what was asked for, loaded, within the stored
        `common` state, which is changed. Entries that are absent are left out. Raises
        CheckpointingException where the two do not fit each other."""
        loaded = self._loaded(self._tree)
        merged = common if loaded is ABSENT else _merged(common, loaded, ())
        whole: dict[Any, Any] = _closed(merged)
        return whole

    def _loaded(self, node: Any) -> Any:
        if isinstance(node, Box):
            return ABSENT if node.absent else _Leaf(node.data)
        if isinstance(node, Cell):
            return ABSENT if node.absent else _Leaf(node.value)
        if isinstance(node, _Built):
            return self._merged_of(node)
        if not isinstance(node, dict):
            return node
        entries = [(key, self._loaded(entry)) for key, entry in node.items()]
        there = [(key, value) for key, value in entries if value is not ABSENT]
        if not there:
            return ABSENT
        if not isinstance(node, _Places):
            return dict(there)
        absent = (key for key, value in entries if value is ABSENT)
        return _Places(there, node.length, node.empty, absent)

    def _merged_of(self, node: _Built) -> Any:
        parts = self._loaded(node.tree)
        absent = {leaf.absent for leaf in _leaves(node.tree)}
        if absent == {True}:
            return ABSENT
        if absent == {True, False}:
            raise CheckpointingException(
                "only some of the entries that its factory builds are stored",
                tensor=node.factory.key,
            )
        with torch.no_grad(), ViewsForCat() as views:
            merged = node.factory.merge_fn(_closed(parts))
        if views.parts_have_changed():
            raise CheckpointingException(
                "its merge_fn writes into parts that it has given to torch.cat, which gives the "
                "memory of loaded parts, not a copy: let it clone the parts first",
                tensor=node.factory.key,
            )
        return _Leaf(merged)


# Which look like containers, and hold no entries.
_TEXTS = (str, bytes, bytearray, memoryview, range, UserString)


def _check_values(value: Any, path: Path = (), within: tuple[int, ...] = (), of: str = "") -> None:
    """Raise CheckpointingException, which names the path, where common state holds a DTensor, of
    which each rank has a part, or an entry, which is looked for in dicts and lists alone. What
    contains itself is refused when it is written.

    of: the container around `value` that is a value as a whole; "" where there is none.
    """
    inside: Any = None
    if isinstance(value, Mapping):
        inside = value.items()
    elif isinstance(value, Sequence | Set) and not isinstance(value, _TEXTS):
        inside = enumerate(value)
    elif isinstance(value, Namespace | SimpleNamespace):
        inside = vars(value).items()
    if inside is not None:
        if not of and not isinstance(value, dict | list):
            of = type(value).__name__
        for key, entry in inside:
            if id(entry) not in within:
                _check_values(entry, (*path, key), (*within, id(entry)), of)
        return
    wrong = None
    if isinstance(value, DTensor):
        wrong = (
            "a DTensor has no key: give its to_local() in a ShardedTensor, which says key and box"
        )
    elif kind_of(value) is not Kind.VALUE:
        wrong = (
            f"a {type(value).__name__} in a {of}, which is a value: put it into a list or a dict"
        )
    if wrong is not None:
        raise CheckpointingException(f"{_said(path)}: {wrong}")


def _is_empty(value: Any) -> bool:
    return isinstance(value, dict | list) and not value


def _leaves(node: Any) -> Iterable[Box | Cell]:
    if isinstance(node, Box | Cell):
        yield node
    elif isinstance(node, _Built):
        yield from _leaves(node.tree)
    elif isinstance(node, dict):
        for entry in node.values():
            yield from _leaves(entry)


def _merged(common: Any, loaded: Any, path: Path) -> Any:
    """`common`, ABSENT where there is none, with what is in `loaded`. A list may be met by one of
    as many entries, or by a dict of its places."""
    if isinstance(loaded, _Leaf) and (loaded.own or common is ABSENT):
        return loaded
    if common is ABSENT:
        common = {}
    if isinstance(loaded, _Places):
        if isinstance(common, list) and len(common) != loaded.length:
            raise CheckpointingException(
                f"{_said(path)}: {loaded.length} entries are asked for in this list, and the "
                f"checkpoint has {len(common)} in it"
            )
        if isinstance(common, list):
            for place, entry in loaded.items():
                common[place] = _merged(common[place], entry, (*path, place))
            return common
        if isinstance(common, dict) and all(type(place) is int for place in common):
            united = _Places({**loaded.empty, **common}.items(), loaded.length, {})
            for place, entry in loaded.items():
                united[place] = _merged(common.get(place, ABSENT), entry, (*path, place))
            lost = {*range(loaded.length)} - united.keys() - loaded.absent
            if lost:  # those behind it would move up
                raise CheckpointingException(
                    f"{_said(path)}: {loaded.length} entries are asked for in this list, and the "
                    f"checkpoint has none at {min(lost)}"
                )
            return united
    elif isinstance(loaded, dict) and isinstance(common, dict):
        for key, entry in loaded.items():
            common[key] = _merged(common.get(key, ABSENT), entry, (*path, key))
        return common
    raise CheckpointingException(
        f"{_said(path)}: the checkpoint's common state has a {type(common).__name__} here, where "
        f"a {_kind(loaded)} is asked for"
    )


def _kind(loaded: Any) -> str:
    if isinstance(loaded, _Leaf):
        return f"{type(loaded.value).__name__} of an entry of its own"
    return "list" if isinstance(loaded, _Places) else type(loaded).__name__


def _closed(node: Any) -> Any:
    """The tree with lists for places, and values for leaves."""
    if isinstance(node, _Leaf):
        return node.value
    if isinstance(node, _Places):
        return [_closed(entry) for _, entry in sorted(node.items())]
    if isinstance(node, dict):
        for key, entry in node.items():
            node[key] = _closed(entry)
    elif isinstance(node, list):
        node[:] = [_closed(entry) for entry in node]
    return node


def _said(path: Path) -> str:
    return ".".join(map(str, path)) or "the state"
