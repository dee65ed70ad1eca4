"""safetensors files for the tests of the header parser: whole ones, and damaged on purpose.

A header is a tree of lists, `Pairs` for objects (so that a key can stand twice), text, None, bools,
integers, and `Raw` for tokens that Python's json would not write.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

# Bits of an element, and the fewest elements that make whole bytes.
BITS = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}
UNITS = {4: 2, 6: 4}
Draw = Callable[[st.SearchStrategy[Any]], Any]


class Pairs(list[tuple[Any, Any]]):
    """An object of JSON: keys and values in their order."""


class Raw(str):
    """Text that goes into the header as it is."""


@dataclass
class Draft:
    """A file that is still to be written."""

    root: Any
    data: bytes
    before: bytes = b""
    behind: bytes = b""
    length_off_by: int = 0
    gap: str = ""  # between tokens
    escapes: str = "few"

    def header(self) -> bytes:
        text = _text(self.root, self.gap, self.escapes)
        return self.before + text.encode("utf-8", "surrogatepass") + self.behind

    def file(self) -> bytes:
        header = self.header()
        length = (len(header) + self.length_off_by) % (1 << 64)
        return length.to_bytes(8, "little") + header + self.data


def _text(node: Any, gap: str, escapes: str) -> str:
    if isinstance(node, Raw):
        return node
    if isinstance(node, str):
        if escapes != "all":
            return json.dumps(node, ensure_ascii=escapes == "ascii")
        units = node.encode("utf-16-be", "surrogatepass").hex()
        return '"' + "".join(f"\\u{units[i : i + 4]}" for i in range(0, len(units), 4)) + '"'
    if isinstance(node, Pairs):
        items = [
            f"{_text(key, gap, escapes)}{gap}:{gap}{_text(value, gap, escapes)}"
            for key, value in node
        ]
        return "{" + gap + f"{gap},{gap}".join(items) + gap + "}"
    if isinstance(node, list):
        items = [_text(item, gap, escapes) for item in node]
        return "[" + gap + f"{gap},{gap}".join(items) + gap + "]"
    return json.dumps(node)


# --- whole files ------------------------------------------------------------

NAMES = st.one_of(
    st.text(max_size=5),
    st.sampled_from(
        ["", "layer.0.weight", "metadata", "dtype", '"\\/', "\x7f\n", "é", "\U0001f600"]
    ),
).filter(lambda name: "\0" not in name and name != "__metadata__")


def _sharding_info(entries: list[tuple[str, Pairs]]) -> tuple[str, str]:
    """What makes shards of tensors, here at offset 0: a value that a reader of ours must decode."""
    said = {name: {"saved_offsets": [0] * len(dict(entry)["shape"])} for name, entry in entries}
    return "DCP_SHARDING_INFO", json.dumps(said)


def whole_draft(draw: Draw, sharded: bool = False) -> Draft:
    names = draw(st.lists(NAMES, max_size=4, unique=True))
    entries, begin = [], 0
    for name in names:
        dtype = draw(st.sampled_from(sorted(BITS)))
        shape = draw(st.lists(st.integers(0, 4), max_size=4))
        unit = UNITS.get(BITS[dtype], 1)
        if unit > 1:
            shape.append(unit * draw(st.integers(0, 2)))
        end = begin + math.prod(shape) * BITS[dtype] // 8
        fields = [("dtype", dtype), ("shape", shape), ("data_offsets", [begin, end])]
        entries.append((name, Pairs(draw(st.permutations(fields)))))
        begin = end
    items = draw(st.permutations(entries))
    metadata = draw(
        st.one_of(st.just("absent"), st.none(), st.dictionaries(st.sampled_from("abc"), NAMES))
    )
    if sharded:
        metadata = Pairs([("format", "pt"), _sharding_info(entries)])
    elif isinstance(metadata, dict):
        metadata = Pairs(metadata.items())
    if metadata != "absent":
        items.insert(draw(st.integers(0, len(items))), ("__metadata__", metadata))
    return Draft(
        Pairs(items),
        bytes(i * 7 % 256 for i in range(begin)),
        behind=b" " * draw(st.integers(0, 9)),
        gap=draw(st.sampled_from(["", "", " ", "\n\t", "\r"])),
        escapes=draw(st.sampled_from(["few", "ascii", "all"])),
    )


# --- damage -----------------------------------------------------------------

NUMBERS = st.one_of(
    st.integers(-2, 12),
    st.sampled_from([2**32, 2**48 - 1, 2**48, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, 2**64]),
    st.sampled_from(["-0", "0.0", "1.0", "4.0", "1e0", "01", "+1", "1e999", "0x1", "NaN"]).map(Raw),
)
JUNK = st.one_of(
    NUMBERS,
    st.sampled_from(["", "F32", "I128", "f32", "\0", "\ud800"]),
    st.sampled_from([None, True, [], Pairs(), [[0]], Pairs([("F32", None)]), Pairs([("F32", [])])]),
    st.sampled_from(["", "{", "'a'", "/**/1", "[1,]", "\ufeff", '"\\x41"', "[" * 200]).map(Raw),
).map(copy.deepcopy)  # the next damage may change it
KEYS = st.sampled_from(
    ["__metadata__", "dtype", "shape", "data_offsets", "Dtype", "x", "", "\0", "a\0", "\ud800"]
)


def _containers(node: Any) -> Iterator[Any]:
    if isinstance(node, list):
        yield node
        for item in node:
            yield from _containers(item[1] if isinstance(node, Pairs) else item)


def _place(draw: Draw, draft: Draft) -> tuple[Any, int] | None:
    """A list or an object that is not empty, and one place in it."""
    found = [node for node in _containers(draft.root) if node]
    if not found:
        return None
    node = draw(st.sampled_from(found))
    return node, draw(st.integers(0, len(node) - 1))


def _set(node: Any, i: int, value: Any) -> None:
    node[i] = (node[i][0], value) if isinstance(node, Pairs) else value


def _get(node: Any, i: int) -> Any:
    return node[i][1] if isinstance(node, Pairs) else node[i]


def _entries(draft: Draft) -> list[Pairs]:
    return [
        value for key, value in draft.root if isinstance(value, Pairs) and key != "__metadata__"
    ]


def _entry(draw: Draw, draft: Draft) -> Pairs | None:
    found = _entries(draft)
    return draw(st.sampled_from(found)) if found else None


def _field(entry: Pairs, name: str) -> Any:
    return next((value for key, value in entry if key == name), None)


def put_junk(draw: Draw, draft: Draft) -> None:
    if place := _place(draw, draft):
        _set(*place, draw(JUNK))


def change_a_number(draw: Draw, draft: Draft) -> None:
    entry = _entry(draw, draft)
    numbers = entry and _field(entry, draw(st.sampled_from(["shape", "data_offsets"])))
    if isinstance(numbers, list) and numbers and not isinstance(numbers, Pairs):
        i = draw(st.integers(0, len(numbers) - 1))
        step = draw(st.sampled_from([-8, -4, -1, 1, 4, 8, None]))
        keep = step is not None and isinstance(numbers[i], int)
        numbers[i] = numbers[i] + step if keep else draw(NUMBERS)


def leave_out(draw: Draw, draft: Draft) -> None:
    if place := _place(draw, draft):
        del place[0][place[1]]


def say_twice(draw: Draw, draft: Draft) -> None:
    if place := _place(draw, draft):
        node, i = place
        node.insert(draw(st.integers(0, len(node))), copy.deepcopy(node[i]))


def rename(draw: Draw, draft: Draft) -> None:
    place = _place(draw, draft)
    if place and isinstance(place[0], Pairs):
        node, i = place
        node[i] = (draw(KEYS), node[i][1])


def add_a_key(draw: Draw, draft: Draft) -> None:
    objects = [node for node in _containers(draft.root) if isinstance(node, Pairs)]
    if objects:
        node = draw(st.sampled_from(objects))
        node.insert(draw(st.integers(0, len(node))), (draw(KEYS), draw(JUNK)))


def exchange(draw: Draw, draft: Draft) -> None:
    a, b = _place(draw, draft), _place(draw, draft)
    if a and b:
        first, second = copy.deepcopy(_get(*a)), copy.deepcopy(_get(*b))
        _set(*a, second)
        _set(*b, first)


def other_form(draw: Draw, draft: Draft) -> None:
    """An entry in a form that the crate takes and we do not."""
    places = [i for i, (_, value) in enumerate(draft.root) if value in _entries(draft)]
    if not places:
        return
    i = draw(st.sampled_from(places))
    name, entry = draft.root[i]
    form = draw(st.sampled_from(["array", "dtype", "key", "name", "twin"]))
    if form == "array":
        values = [_field(entry, key) for key in ("dtype", "shape", "data_offsets")]
        draft.root[i] = (name, values + draw(st.sampled_from([[], [], [0]])))
    elif form == "dtype":
        variants = st.sampled_from([None, Pairs(), [], 1]).map(copy.deepcopy)
        entry[:] = [(k, Pairs([(v, draw(variants))]) if k == "dtype" else v) for k, v in entry]
    elif form == "key":
        entry.insert(draw(st.integers(0, len(entry))), ("x", draw(JUNK)))
    elif form == "name":
        draft.root[i] = (name + "\0", entry)
    else:
        twin = copy.deepcopy(draw(st.sampled_from(_entries(draft))))
        draft.root.insert(draw(st.integers(0, i)), (name, twin))


def other_dtype(draw: Draw, draft: Draft) -> None:
    if (entry := _entry(draw, draft)) is not None:
        for i, (key, _) in enumerate(entry):
            if key == "dtype":
                entry[i] = (key, draw(st.sampled_from([*sorted(BITS), "F128", "", "F32 "])))


def more_dimensions(draw: Draw, draft: Draft) -> None:
    """Of size 1, so that the bytes stay right, up to too many of them; or a huge one."""
    entry = _entry(draw, draft)
    shape = entry and _field(entry, "shape")
    if isinstance(shape, list) and not isinstance(shape, Pairs):
        at = draw(st.integers(0, len(shape)))
        size = draw(st.sampled_from([1, 1, 1, 0, 2**31, 2**48 - 1, 2**48, 2**64 - 1]))
        shape[at:at] = [size] * draw(st.integers(1, 6))


def an_empty_tensor(draw: Draw, draft: Draft) -> None:
    """At any place of the data: only those where tensors meet are right."""
    at = draw(st.integers(0, len(draft.data) + 1))
    huge = draw(st.sampled_from([1, 3, 2**32, 2**48 - 1, 2**48, 2**64 - 1]))
    shape = draw(st.permutations([0, huge, draw(st.sampled_from([1, 2, 2**31, 2**32]))]))
    fields = [("dtype", draw(st.sampled_from(sorted(BITS)))), ("shape", shape)]
    entry = Pairs([*fields, ("data_offsets", [at, at])])
    draft.root.insert(draw(st.integers(0, len(draft.root))), (draw(NAMES), entry))


def same_place(draw: Draw, draft: Draft) -> None:
    """The offsets of one tensor for another too."""
    entries = _entries(draft)
    if len(entries) > 1:
        a, b = draw(st.sampled_from(entries)), draw(st.sampled_from(entries))
        b[:] = [(k, copy.deepcopy(_field(a, k)) if k != "dtype" else v) for k, v in b]


def data_of_another_size(draw: Draw, draft: Draft) -> None:
    if draw(st.booleans()):
        draft.data += bytes(draw(st.sampled_from([1, 4, 8])))
    else:
        draft.data = draft.data[: draw(st.integers(0, len(draft.data)))]


def around_the_object(draw: Draw, draft: Draft) -> None:
    some = st.sampled_from([b"", b" ", b"\n", b"\t", b"\r", b"\0", b"x", b"\xef\xbb\xbf", b"{}"])
    draft.before += draw(some)
    draft.behind += draw(some) + b" " * draw(st.integers(0, 2))


def another_length(draw: Draw, draft: Draft) -> None:
    header = len(draft.header())
    off_by = [-header, 1 - header, -8, -1, 1, 8, 100_000_000 - header, 100_000_001 - header]
    draft.length_off_by = draw(st.sampled_from([*off_by, 2**63, 2**64 - 8 - header, -header - 1]))


DAMAGE = (
    put_junk,
    change_a_number,
    leave_out,
    say_twice,
    rename,
    add_a_key,
    exchange,
    other_form,
    other_dtype,
    more_dimensions,
    an_empty_tensor,
    same_place,
    data_of_another_size,
    around_the_object,
    another_length,
)


def _bad_bytes(draw: Draw, file: bytes) -> bytes:
    """Cut it, or change or insert a byte, mostly of the header."""
    at = min(draw(st.integers(0, 300)), len(file))
    kind = draw(st.sampled_from(["none", "none", "none", "cut", "change", "insert"]))
    if kind == "none":
        return file
    if kind == "cut":
        return file[:at]
    byte = draw(st.one_of(st.sampled_from(b' \t\n{}[]":,0-9.e\\\0\x80\xff'), st.integers(0, 255)))
    return file[:at] + bytes([byte]) + file[at + (kind == "change") :]


@st.composite
def whole_files(draw: Draw) -> bytes:
    return whole_draft(draw, sharded=draw(st.booleans())).file()


@st.composite
def damaged_files(draw: Draw) -> bytes:
    draft = whole_draft(draw)
    for damage in draw(st.lists(st.sampled_from(DAMAGE), min_size=1, max_size=2)):
        if isinstance(draft.root, Pairs):
            damage(draw, draft)
    return _bad_bytes(draw, draft.file())
