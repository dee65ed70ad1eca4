"""The leaves of a checkpoint as the commands list them; the small values of those that are no
tensors, as text, without torch."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable
from typing import Any

from torch_ckpt.cli.output import format_bytes, printable
from torch_ckpt.cli.text import natural
from torch_ckpt.errors import CheckpointError, CorruptError
from torch_ckpt.native import core
from torch_ckpt.native.opened import ListedFile, Listing, OpenedCheckpoint
from torch_ckpt.planning.reserved import STRUCTURE_FQN

_MOST_BYTES = 16 << 20  # of an objects file that is read to show values
_MOST_SHOWN = 60  # characters of a value


def leaves_of(
    listing: Listing, wanted: Callable[[str], bool] = lambda _: True
) -> list[dict[str, Any]]:
    """{"name", "dtype", "shape", "bytes", "alias_of", "unread"} of every leaf whose name is
    `wanted`, in natural order; of one that is no tensor the last five are None. "unread" says why
    a tensor is not read; such a one may have no shape."""
    aliases, types = listing.aliases, listing.types
    leaves = []
    for name, kind, at in listing.entries():
        if name != STRUCTURE_FQN and wanted(name):
            dtype, shape, size = types[at] if kind != core.OBJECT else (None, None, None)
            leaf = {"name": name, "dtype": dtype, "shape": shape, "bytes": size}
            leaves.append(
                {**leaf, "alias_of": aliases.get(name), "unread": listing.unread.get(name)}
            )
    return sorted(leaves, key=lambda leaf: natural(leaf["name"]))


def count_objects(listing: Listing) -> int:
    """How many leaves are no tensors."""
    objects = listing.objects()
    return len(objects) - (STRUCTURE_FQN in objects)


def with_values(
    opened: OpenedCheckpoint, listing: Listing, leaves: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The leaves with "value": the text of what is no tensor; None of tensors, and where it is not
    read."""
    wanted = {leaf["name"] for leaf in leaves if leaf["dtype"] is None}
    values = values_of(opened, listing, wanted)
    return [
        {**leaf, "value": value_text(values[leaf["name"]]) if leaf["name"] in values else None}
        for leaf in leaves
    ]


def cells_of(leaf: dict[str, Any]) -> tuple[str, str, str, str]:
    """What `columns` shows of a leaf of `with_values`: name, dtype, shape or value, size."""
    if leaf["dtype"] is None:
        return printable(leaf["name"]), "object", leaf["value"] or "", ""
    if leaf["unread"] is not None:
        shape = "" if leaf["shape"] is None else str(leaf["shape"])
        return printable(leaf["name"]), printable(leaf["dtype"]), shape, "not read"
    size = format_bytes(leaf["bytes"])
    if leaf["alias_of"] is not None:
        size = f"is {printable(leaf['alias_of'])}"
    return printable(leaf["name"]), leaf["dtype"], str(leaf["shape"]), size


def values_of(
    opened: OpenedCheckpoint, listing: Listing, wanted: Collection[str]
) -> dict[str, Any]:
    """The typed JSON (docs/format.md, section 7) of those of the leaves `wanted` that are no
    tensors; an exception for one that cannot be read. Those in very large files are left out."""
    archived = [name for name in listing.archived if name in wanted]
    found: dict[str, Any] = dict(zip(archived, opened.archived_objects(archived), strict=True))
    by_file: dict[ListedFile, list[str]] = {}
    for name, file in listing.object_files().items():
        if file is not None and name in wanted and name not in found:
            by_file.setdefault(file, []).append(name)
    for file, names in by_file.items():
        if file.bytes <= _MOST_BYTES:
            found.update(_of_file(opened, file.name, names))
    return found


def _of_file(opened: OpenedCheckpoint, file: str, names: list[str]) -> dict[str, Any]:
    """Of an objects file of ours, whose bytes the core compares with their digests."""
    request = {"op": "objects_file", "checkpoint": opened.id, "name": file}
    try:
        text = core.call(request)["text"]
        objects = json.loads(text)["objects"]
        return {name: objects[name] for name in names}
    except CheckpointError as error:
        return dict.fromkeys(names, error)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        wrong = CorruptError(f"not an objects file: {error!r:.200}", file=f"{opened.path}/{file}")
        return dict.fromkeys(names, wrong)


def value_text(value: Any) -> str:
    """A value of `values_of` as Python would show it, on one line, cut where it is long."""
    if isinstance(value, Exception):
        message = value.message if isinstance(value, CheckpointError) else str(value)
        return printable(f"({message})")
    try:
        text = _shown(value, _MOST_SHOWN)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError):
        return "(malformed)"  # `show`, `load` and `verify` say how
    text = printable(text)
    return text if len(text) <= _MOST_SHOWN else text[: _MOST_SHOWN - 3] + "..."


def _shown(value: Any, room: int) -> str:
    """At least the first `room` characters of it."""
    if isinstance(value, list):
        return f"[{_items((_shown(each, room) for each in value), room)}]"
    if not isinstance(value, dict):
        return repr(value[: room + 1]) if isinstance(value, str) else repr(value)
    if "$" not in value:
        pairs = (f"{key[:room]!r}: {_shown(member, room)}" for key, member in value.items())
        return f"{{{_items(pairs, room)}}}"
    return _tagged(value["$"], value, room)


def _items(texts: Iterable[str], room: int) -> str:
    said: list[str] = []
    for text in texts:
        said.append(text)
        room -= len(text) + 2
        if room < 0:
            break
    return ", ".join(said)


def _tagged(tag: str, value: dict[str, Any], room: int) -> str:
    inner: Any = value.get("v")
    if tag in ("tuple", "set", "frozenset", "deque", "range", "slice", "size"):
        items = _items((_shown(each, room) for each in inner or ()), room)
        if tag == "tuple":
            return f"({items},)" if len(inner or ()) == 1 else f"({items})"
        return f"{tag}({items})" if tag in ("range", "slice") else f"{tag}([{items}])"
    if tag == "record":
        pairs = (f"{name}={_shown(member, room)}" for name, member in inner or ())
        return f"{value['c'].rpartition(':')[2]}({_items(pairs, room)})"
    if tag in ("dict", "odict", "counter", "defaultdict"):
        pairs = (f"{_shown(key, room)}: {_shown(member, room)}" for key, member in inner or ())
        return f"{{{_items(pairs, room)}}}"
    if tag == "namedtuple":
        fields = zip(value["f"], inner or (), strict=True)
        pairs = (f"{name}={_shown(member, room)}" for name, member in fields)
        return f"{value['c'].rpartition(':')[2]}({_items(pairs, room)})"
    if tag == "namespace":
        pairs = (f"{name}={_shown(member, room)}" for name, member in inner or ())
        return f"Namespace({_items(pairs, room)})"
    if tag in ("tensor", "parameter", "ndarray"):
        return f"{tag} {value['t']}{value['s']}"
    if tag == "enum":
        name = value["c"].rpartition(":")[2]
        return f"{name}.{value['n']}" if "n" in value else f"{name}({_shown(inner, room)})"
    if tag == "int":
        return str(int(inner, 16)) if len(inner) <= room else "int"
    if tag == "float":
        return repr(float(inner)) if not math.isfinite(float(inner)) else "(malformed)"
    if tag == "complex":
        return repr(
            complex(*(float(part["v"] if isinstance(part, dict) else part) for part in inner))
        )
    if tag in ("dtype", "layout", "memory_format"):
        return f"torch.{inner}"
    if tag in ("device", "path", "uuid", "decimal"):
        return f"{tag} {inner}"
    if tag == "fraction":
        return f"{inner[0]}/{inner[1]}"
    return str(tag)  # bytes, dates, numpy scalars and pickles: by `show`
