"""Trees of dicts and lists: taken apart, compared, put together. Tuples are leaves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, TypeVar

import torch

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
R = TypeVar("R")
Tree = Any  # of dicts and lists
Path = tuple[Any, ...]


def extract_matching_values(
    x: Tree, predicate: Callable[[Any], bool], return_lists_as_dicts: bool = False
) -> tuple[Tree, Tree]:
    """The leaves of a dict or list for which `predicate` holds, and the rest, as trees like `x`.

    Lists close up, unless `return_lists_as_dicts`: then they are dicts by position. Containers
    that become empty vanish; those that are empty in `x` go to the rest. Raises ValueError for
    what is neither a dict nor a list.
    """
    if isinstance(x, dict):
        return _split(x, x.items(), predicate, return_lists_as_dicts)
    if isinstance(x, list):
        found, rest = _split(x, enumerate(x), predicate, return_lists_as_dicts)
        if return_lists_as_dicts:
            return found, rest
        return list(found.values()), list(rest.values())
    raise ValueError(f"a dict or a list is due, not a {type(x).__name__}")


def _split(
    x: Tree,
    items: Iterable[tuple[Any, Any]],
    predicate: Callable[[Any], bool],
    lists_as_dicts: bool,
) -> tuple[dict[Any, Any], dict[Any, Any]]:
    found: dict[Any, Any] = {}
    rest: dict[Any, Any] = {}
    for key, value in items:
        if isinstance(value, dict | list) and not value:
            rest[key] = value if isinstance(x, list) or not lists_as_dicts else {}
        elif isinstance(value, dict | list):
            inner, others = extract_matching_values(value, predicate, lists_as_dicts)
            if inner:
                found[key] = inner
            if others:
                rest[key] = others
        elif predicate(value):
            found[key] = value
        else:
            rest[key] = value
    return found, rest


def diff(
    x1: Any, x2: Any, prefix: Path = ()
) -> tuple[list[Path], list[Path], list[tuple[Path, type, type]]]:
    """Paths that only `x1` has, that only `x2` has, and those at which they differ, with both
    types. Lists and tuples go by position, tensors and arrays by shape, dtype and values, sharded
    ones and objects by their data."""
    only_left: list[Path] = []
    only_right: list[Path] = []
    differing: list[tuple[Path, type, type]] = []
    if isinstance(x1, dict) and isinstance(x2, dict):
        only_left = [(*prefix, key) for key in x1 if key not in x2]
        only_right = [(*prefix, key) for key in x2 if key not in x1]
        common = [(key, x1[key], x2[key]) for key in x1 if key in x2]
    elif isinstance(x1, list | tuple) and type(x1) is type(x2):
        only_left = [(*prefix, i) for i in range(len(x2), len(x1))]
        only_right = [(*prefix, i) for i in range(len(x1), len(x2))]
        common = [(i, a, b) for i, (a, b) in enumerate(zip(x1, x2, strict=False))]
    elif type(x1) is type(x2) and hasattr(x1, "replica_id"):
        common = [(type(x1), x1.data, x2.data)]
    else:
        if not _equal(x1, x2):
            differing.append((prefix, type(x1), type(x2)))
        return only_left, only_right, differing
    for key, a, b in common:
        left, right, other = diff(a, b, (*prefix, key))
        only_left += left
        only_right += right
        differing += other
    return only_left, only_right, differing


def _equal(a: Any, b: Any) -> bool:
    try:
        if isinstance(a, torch.Tensor) or type(a).__name__ == "ndarray":
            return a.shape == b.shape and a.dtype == b.dtype and bool((a == b).all())
        return bool(a == b)
    except (AttributeError, TypeError, ValueError, RuntimeError):  # of what says neither yes nor no
        return False


def nested_values(x: Tree) -> Iterator[Any]:
    """The leaves of `x`."""
    if isinstance(x, dict | list):
        for value in list(x.values()) if isinstance(x, dict) else x:
            yield from nested_values(value)
    else:
        yield x


def dict_list_map_inplace(f: Callable[[Any], Any], x: Tree) -> Tree:
    """Put `f` of each leaf in its place. Returns `x`, or `f(x)` of a leaf."""
    if isinstance(x, dict):
        for key, value in x.items():
            x[key] = dict_list_map_inplace(f, value)
    elif isinstance(x, list):
        x[:] = [dict_list_map_inplace(f, value) for value in x]
    else:
        return f(x)
    return x


def dict_list_map_outplace(f: Callable[[Any], Any], x: Tree) -> Tree:
    """A tree like `x` with `f` of each leaf in its place."""
    if isinstance(x, dict):
        return {key: dict_list_map_outplace(f, value) for key, value in x.items()}
    if isinstance(x, list):
        return [dict_list_map_outplace(f, value) for value in x]
    return f(x)


def merge(x1: Tree, x2: Tree, key: Path = ()) -> Tree:
    """Add the leaves of `x2` to `x1`, which is changed and returned.

    A list may be met by one of as many entries. Raises ValueError that names the path of lists of
    other lengths, and of a leaf that both have.
    """
    if isinstance(x1, dict) and isinstance(x2, dict):
        for name, value in x2.items():
            x1[name] = merge(x1[name], value, (*key, name)) if name in x1 else value
        return x1
    if isinstance(x1, list) and isinstance(x2, list):
        if len(x1) != len(x2):
            raise ValueError(f"{_said(key)}: lists of {len(x1)} and {len(x2)} entries")
        x1[:] = [merge(a, b, (*key, i)) for i, (a, b) in enumerate(zip(x1, x2, strict=True))]
        return x1
    raise ValueError(
        f"{_said(key)}: a {type(x1).__name__} and a {type(x2).__name__} cannot be put together"
    )


def _said(path: Path) -> str:
    return ".".join(map(str, path)) or "the whole"


def map_reduce(
    xs: Iterable[Any],
    key_fn: Callable[[Any], K] = lambda x: x,
    value_fn: Callable[[Any], V] = lambda x: x,
    reduce_fn: Callable[[list[V]], R] = lambda x: x,  # type: ignore[assignment, return-value]
) -> dict[K, R]:
    """`reduce_fn` of the values of those of `xs` that have one key, by key."""
    groups: defaultdict[K, list[V]] = defaultdict(list)
    for x in xs:
        groups[key_fn(x)].append(value_fn(x))
    return {key: reduce_fn(values) for key, values in groups.items()}
