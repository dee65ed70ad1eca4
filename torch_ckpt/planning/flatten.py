"""A nested state dict as {fqn: leaf}, and the description of what the fqns alone do not say.

The fqns are those of torch's `flatten_state_dict`, so that stock planners read what ours wrote:
mappings are always opened, lists only where they hold tensors or mappings, tuples never. What that
loses (types of keys, empty containers, types of mappings, order) is kept in a *structure*:

    {"version": 1,
     "containers": [[path, type, keys], ...],   # path: list of str (mapping) and int (list)
     "per_rank": [path, ...],
     "tensors": {fqn: words, ...}}              # see wrappers.py; only where there are any

with one entry per container that the fqns do not describe, and no structure at all where they
describe every one, as in a plain nested dict of tensors. docs/format.md has the grammar.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from torch_ckpt.errors import CorruptError, InvalidArgumentError
from torch_ckpt.native.tensors import PLAIN_TENSORS
from torch_ckpt.native.torch_private import ShardedTensor, local_tensor
from torch_ckpt.objects.types import FACTORIES
from torch_ckpt.planning.per_rank import PerRank, is_rank_part, rank_part
from torch_ckpt.planning.reserved import RESERVED, STRUCTURE_FQN
from torch_ckpt.planning.wrappers import Words, agreed_words, inner_tensors, is_made_of_others

Path = tuple[Any, ...]
Structure = dict[str, Any]

_LEAVES = frozenset(
    {torch.Tensor, torch.nn.Parameter, DTensor, int, float, str, bool, type(None), bytes}
)
_FACTORY_NAMES = {factory: name for name, factory in FACTORIES.items()}


class Flat:
    """A flattened state dict.

    values: {fqn: leaf}; for a PerRank leaf its value, under this rank's fqn.
    paths: {fqn: path}, the `planner_data` that stock planners know.
    slots: {fqn: (container, key)}, where a leaf is to be replaced; only when asked for.
    empty: the paths of empty mappings.
    words: {fqn: words} of tensors that are made of others, whose inner tensors stand in `values`.
    structured: whether the fqns leave something unsaid.
    has_sharded_tensor, has_meta: whether a leaf is one.
    """

    __slots__ = (
        "values",
        "paths",
        "slots",
        "empty",
        "words",
        "structured",
        "has_sharded_tensor",
        "has_meta",
        "_part",
        "_per_rank_leaves",
        "_whole",
    )

    def __init__(
        self,
        state_dict: Mapping[Any, Any],
        rank: int,
        world_size: int,
        slots: bool = False,
        whole: Container[str] = (),
    ) -> None:
        """Flatten `state_dict`. Tensors that are made of others are opened, but for those of which
        the fqn is in `whole`. Raises InvalidArgumentError where two leaves have one fqn,
        UnsupportedError for what `inner_tensors` cannot open."""
        self.values: dict[str, Any] = {}
        self.paths: dict[str, Path] = {}
        self.slots: dict[str, tuple[Any, Any]] | None = {} if slots else None
        self.empty: set[Path] = set() if state_dict else {()}
        self.words: dict[str, Words] = {}
        self._whole = whole
        self.structured = type(state_dict) not in _PLAIN_MAPPINGS
        self.has_sharded_tensor = False
        self.has_meta = False
        self._part = rank_part(rank, world_size)
        self._per_rank_leaves: set[str] = set()
        try:
            self._visit(state_dict, state_dict.items(), "", ())
        except RecursionError:
            raise too_deep(state_dict) from None
        if slots:  # of a load, which takes whatever names a checkpoint has
            return
        for name in RESERVED & self.values.keys():
            raise InvalidArgumentError(f"{name}: this name is reserved for torch_ckpt")
        for fqn in self.values if self._per_rank_leaves else ():
            leaf, _, part = fqn.rpartition(".")
            if leaf in self._per_rank_leaves and part != self._part and is_rank_part(part):
                raise InvalidArgumentError(
                    f"{fqn}: this name belongs to {leaf}, which is a PerRank"
                )

    def _visit(
        self, container: Any, items: Iterable[tuple[Any, Any]], prefix: str, path: Path
    ) -> None:
        values, paths, slots = self.values, self.paths, self.slots
        in_list = isinstance(container, list)
        for key, value in items:
            if type(key) is str:
                name, fqn = key, prefix + key
            else:
                name = key if in_list else str(key)
                fqn = f"{prefix}{key}"
                if not in_list:
                    self.structured = True
            kind = type(value)
            if kind not in _LEAVES:
                if isinstance(value, Mapping):
                    if not value or kind not in _PLAIN_MAPPINGS:
                        self.structured = True
                    if not value:
                        self.empty.add((*path, name))
                    self._visit(value, value.items(), f"{fqn}.", (*path, name))
                    continue
                if isinstance(value, list):
                    if _opens(value):
                        self._visit(value, enumerate(value), f"{fqn}.", (*path, name))
                        continue
                elif kind is PerRank:
                    self.structured = True
                    self._per_rank(fqn, value, (*path, name))
                    continue
                elif isinstance(value, ShardedTensor):
                    self.has_sharded_tensor = True
                elif isinstance(value, torch.Tensor) and self._opened(fqn, value, (*path, name)):
                    continue
            elif kind is DTensor and type(local_tensor(value)) not in PLAIN_TENSORS:
                if self._opened(fqn, value, (*path, name)):
                    continue
            if fqn in values:
                self._collision(fqn, (*path, name), key, container)
            values[fqn] = value
            paths[fqn] = (*path, name)
            if slots is not None:
                slots[fqn] = (container, key)
                # A ShardedTensor of several local shards has no is_meta, nor an __init_tensor__.
                if isinstance(value, torch.Tensor) and not isinstance(value, ShardedTensor):
                    self.has_meta |= value.is_meta

    def _opened(self, fqn: str, value: torch.Tensor, path: Path) -> bool:
        """Whether `value` is made of others, which are leaves now."""
        if fqn in self._whole or not is_made_of_others(value):
            return False
        inner, words = inner_tensors(value, fqn, compared=self.slots is None)
        if words is not None:
            self.words[fqn] = words
        if fqn in self.values:
            self._collision(fqn, path, path[-1])
        # No slots are to be had there: whatever is put into a tensor is a copy.
        self._visit(MappingProxyType(inner), inner.items(), f"{fqn}.", path)
        return True

    def _per_rank(self, fqn: str, leaf: PerRank, path: Path) -> None:
        if isinstance(leaf.value, (DTensor, ShardedTensor, PerRank)):
            raise InvalidArgumentError(
                f"{fqn}: a {type(leaf.value).__name__} cannot be a per-rank value"
            )
        own = f"{fqn}.{self._part}"
        if own in self.values or fqn in self.values:
            self._collision(own if own in self.values else fqn, path, path[-1])
        self._per_rank_leaves.add(fqn)
        self.values[own] = leaf.value
        self.paths[own] = (*path, self._part)
        if self.slots is not None:
            self.slots[own] = (leaf, "value")

    def _collision(self, fqn: str, path: Path, key: Any, container: Any = ()) -> None:
        first = self.paths[fqn]
        if first == path and container:  # of keys that are no str it has the texts
            first = (*path[:-1], next(other for other in container if str(other) == path[-1]))
        raise InvalidArgumentError(
            f"{fqn}: two leaves of the state dict have this name: the one at "
            f"{_show(first)} and the one at {_show((*path[:-1], key))}; rename one"
        )


# Types whose own entries need no word in the structure.
_PLAIN_MAPPINGS = frozenset({dict})


def _opens(value: list[Any]) -> bool:
    """Whether stock's flattening, and so ours, goes into this list."""
    for entry in value:
        if isinstance(entry, (torch.Tensor, Mapping, PerRank)):
            return True
        if isinstance(entry, list) and _opens(entry):
            return True
    return False


def too_deep(state_dict: Mapping[Any, Any]) -> InvalidArgumentError:
    """The error for a state dict that ends in a RecursionError: where it contains itself, if it
    does."""
    around = {id(state_dict)}
    path: list[Any] = []
    inside: list[tuple[Any, Iterator[Any]]] = [(state_dict, iter(state_dict.items()))]
    while inside:
        container, entries = inside[-1]
        for key, value in entries:
            if isinstance(value, Mapping | list | tuple):
                if id(value) in around:
                    return InvalidArgumentError(
                        f"{_show((*path, key))} is what it lies in: the state dict contains itself"
                    )
                around.add(id(value))
                path.append(key)
                items = value.items() if isinstance(value, Mapping) else enumerate(value)
                inside.append((value, iter(items)))
                break
        else:
            around.discard(id(container))
            inside.pop()
            del path[-1:]
    return InvalidArgumentError("the state dict is nested too deeply")


def _show(path: Path) -> str:
    return "state_dict" + "".join(f"[{part!r}]" for part in path)


def _mapping_type(value: Mapping[Any, Any]) -> str:
    """The word for a mapping's type; types that are not listed come back as a dict."""
    kind = type(value)
    if kind is OrderedDict:
        return "odict"
    if kind is Counter:
        return "counter"
    if isinstance(value, defaultdict):
        try:
            factory = _FACTORY_NAMES.get(value.default_factory)
        except TypeError:  # an unhashable callable
            factory = None
        return "dict" if factory is None else f"defaultdict:{factory}"
    return "dict"


# What a structure says of a state dict whose containers the names say.
NO_STRUCTURE: Structure = {"version": 1, "containers": [], "per_rank": []}


def describe_structure(state_dict: Mapping[Any, Any]) -> Structure:
    """The structure of `state_dict`. Keys of other types than `_KEY_TYPES` are given as str."""
    containers: list[list[Any]] = []
    per_rank: list[list[Any]] = []

    def visit(container: Any, path: list[Any]) -> bool:
        """Describe `container` and what is in it; whether its parent must list its keys."""
        items: Iterable[tuple[Any, Any]]
        if isinstance(container, list):
            kind, items = "list", enumerate(container)
            listed = False
        else:
            kind, items = _mapping_type(container), container.items()
            listed = kind != "dict" or not container
        at = len(containers)
        special = False
        for key, value in items:
            part = key if type(key) is str or kind == "list" else str(key)
            if type(key) is not str and kind != "list":
                listed = True
            if type(value) in _LEAVES:
                continue
            if type(value) is PerRank:
                per_rank.append([*path, part])
                listed = True
            elif isinstance(value, Mapping) or (isinstance(value, list) and _opens(value)):
                special |= visit(value, [*path, part])
        if listed or special:
            keys: int | list[Any] = len(container)
            if kind != "list":
                keys = [_safe_key(key) for key in container]
            if type(keys) is list and len({str(key) for key in keys}) != len(keys):
                raise InvalidArgumentError(
                    f"{'.'.join(map(str, path))}: two keys of this mapping have the same text; "
                    f"rename one: {keys!r:.200}"
                )
            containers.insert(at, [path, kind, keys])
        return not container

    visit(state_dict, [])
    return {**NO_STRUCTURE, "containers": containers, "per_rank": per_rank}


# Key types that come back as they are, beside tuples of them. Of Enum members and named tuples only
# the text does: a reader that lacks the class could not read the structure, and so nothing at all.
_KEY_TYPES = frozenset(
    {str, int, float, complex, bool, type(None), bytes, torch.Size, torch.dtype, torch.device}
)


def _safe_key(key: Any) -> Any:
    kind: type = type(key)
    if kind in _KEY_TYPES:
        return key
    if kind is tuple and all(_safe_key(part) is part for part in key):
        return key
    return str(key)


def check_structure(value: Any) -> Structure:
    """`value`, which was read from a checkpoint, as a structure. Raises CorruptError."""
    try:
        if set(value) - {"tensors"} != {"version", "containers", "per_rank"}:
            raise ValueError("its members")
        if value["version"] != 1:
            raise ValueError("its version")
        for fqn, words in value.get("tensors", {}).items():
            if any(type(text) is not str for text in (fqn, words["class"], *words["inner"])):
                raise ValueError("the words of a tensor")
        for path, kind, keys in value["containers"]:
            _check_path(path)
            if type(kind) is not str or type(keys) is not (int if kind == "list" else list):
                raise ValueError("a container")
        for path in value["per_rank"]:
            _check_path(path)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CorruptError(f"{STRUCTURE_FQN}: malformed: {error}") from error
    checked: Structure = value
    return checked


def _check_path(path: Any) -> None:
    if type(path) is not list or any(type(part) not in (str, int) for part in path):
        raise ValueError("a path")


def merge_structures(structures: Iterable[Structure | None]) -> Structure | None:
    """One structure for ranks that hold different parts of a state dict.

    `structures` has one per rank. Where two ranks differ on a container's type the lower rank's
    holds; keys are united. Raises InvalidArgumentError where they differ on what a tensor is.
    """
    merged: Structure | None = None
    by_path: dict[Path, list[Any]] = {}
    tensors: dict[str, Words] = {}
    said_by: dict[str, int] = {}
    for rank, structure in enumerate(structures):
        if structure is None:
            continue
        if merged is None:
            merged = {**NO_STRUCTURE, "containers": [], "per_rank": []}
        for path, kind, keys in structure["containers"]:
            entry = by_path.get(tuple(path))
            if entry is None:
                entry = [path, kind, keys]
                by_path[tuple(path)] = entry
                merged["containers"].append(entry)
            elif keys == entry[2]:
                continue
            elif type(keys) is list and type(entry[2]) is list:
                texts = {str(key) for key in entry[2]}
                entry[2] = entry[2] + [key for key in keys if str(key) not in texts]
            elif type(keys) is int and type(entry[2]) is int:
                entry[2] = max(keys, entry[2])
        for path in structure["per_rank"]:
            if path not in merged["per_rank"]:
                merged["per_rank"].append(path)
        for fqn, words in structure.get("tensors", {}).items():
            known = tensors.setdefault(fqn, words)
            try:
                tensors[fqn] = agreed_words(known, words)
            except ValueError:
                raise InvalidArgumentError(
                    f"ranks {said_by[fqn]} and {rank} disagree: {known!s:.500} and {words!s:.500}",
                    tensor=fqn,
                ) from None
            said_by.setdefault(fqn, rank)
    if merged is not None and tensors:
        merged["tensors"] = {
            fqn: {what: said for what, said in words.items() if what != "shared"}
            for fqn, words in tensors.items()
        }
    return merged


def empty_containers(structure: Structure | None) -> dict[Path, str]:
    """Of the empty containers that `structure` has, the kinds by path, for `new_container`."""
    containers = structure["containers"] if structure is not None else ()
    return {tuple(path): kind for path, kind, keys in containers if not keys}


def new_container(kind: str) -> Any:
    if kind == "list":
        return []
    if kind == "odict":
        return OrderedDict()
    if kind == "counter":
        return Counter()
    if kind.startswith("defaultdict:"):
        return defaultdict(FACTORIES.get(kind.partition(":")[2]))
    return {}


_GONE = object()  # in the place of a container
_MAX_DEPTH = 2000  # Python calls itself half as often, and so does what flattens


def rebuild(
    values: Mapping[str, Any], paths: Mapping[str, Path], structure: Structure | None
) -> dict[Any, Any]:
    """Nest `values` ({fqn: leaf}) again along `paths`, with the types and keys of `structure`. A
    container goes with the last of what was in it; one that was empty stays.

    Raises CorruptError where paths and structure, which come from a checkpoint, contradict each
    other, InvalidArgumentError where one is longer than any that can be saved.
    """
    children: dict[Path, dict[Any, None]] = {(): {}}
    leaves: dict[Path, Any] = {}
    kinds: dict[Path, str] = {}
    keys_at: dict[Path, dict[str, Any]] = {}
    counted: set[Path] = set()  # lists that had items
    for at, kind, keys in structure["containers"] if structure is not None else ():
        path = tuple(at)
        if len(path) > _MAX_DEPTH:
            raise InvalidArgumentError("the checkpoint is nested too deeply to be rebuilt")
        kinds[path] = kind
        named = {str(key): key for key in keys} if type(keys) is list else {}
        if type(keys) is int and keys:
            counted.add(path)
        keys_at[path] = named
        children.setdefault(path, {}).update(dict.fromkeys(named))
        for parent, part in _ancestors(path):
            children.setdefault(parent, {}).setdefault(part)
    for fqn, value in values.items():
        path = tuple(paths.get(fqn, (fqn,)))
        if len(path) > _MAX_DEPTH:
            raise InvalidArgumentError("the checkpoint is nested too deeply to be rebuilt")
        if path in leaves:
            raise CorruptError("its path is that of another leaf", tensor=fqn)
        leaves[path] = value
        for parent, part in _ancestors(path):
            children.setdefault(parent, {}).setdefault(part)
    for path in leaves.keys() & children.keys():
        raise CorruptError(f"there is a leaf at {path}, and others below it")

    made: dict[Path, Any] = {}

    def make(path: Path) -> Any:
        names = children[path]
        kind = kinds.get(path)
        numbered = all(type(name) is int for name in names)
        if kind == "list" or (kind is None and names and numbered):
            if not path or not numbered:
                raise CorruptError(f"what is at {path} can be no list")
            given = [child_at((*path, name)) for name in sorted(names)]
            found = [value for value in given if value is not _GONE]
            return _GONE if not found and (names or path in counted) else found
        container = new_container(kind or "dict")
        named = keys_at.get(path, {})
        for name in names:
            child = (*path, name)
            if child in children or child in leaves:
                value = child_at(child)
                if value is not _GONE:
                    container[named.get(name, name)] = value
        return _GONE if path and names and not container else container

    def child_at(path: Path) -> Any:
        return made.pop(path) if path in children else leaves[path]

    for path in sorted(children, key=len, reverse=True):  # the innermost first
        made[path] = make(path)
    nested: dict[Any, Any] = made[()]
    return nested


def _ancestors(path: Path) -> Iterator[tuple[Path, Any]]:
    for depth in range(len(path)):
        yield path[:depth], path[depth]
