"""Our header parser against the reference reader, the safetensors crate, on the same files.

We accept what the crate accepts, except where a rule of STRICTER holds of the file; nothing that it
refuses is accepted. What both accept is the same tensors with the same bytes.
"""

from __future__ import annotations

import collections
import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import safetensors
from header_files import BITS, Draft, Pairs, Raw, damaged_files, whole_files
from hypothesis import HealthCheck, given, settings

from torch_ckpt import Checkpoint, CorruptError, IncompleteError, UnsupportedError

FULL = os.environ.get("TORCH_CKPT_FULL", "") not in ("", "0")
Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]


# --- the two readers --------------------------------------------------------


def crate_reads(path: Path) -> Tensors | None:
    """What the crate makes of the file, None when it refuses."""
    try:
        found = safetensors.deserialize(path.read_bytes())
    except safetensors.SafetensorError:
        return None
    tensors = {name: (of["dtype"], tuple(of["shape"]), bytes(of["data"])) for name, of in found}
    # The other door, which maps the file, must tell the same.
    with safetensors.safe_open(path, "np") as opened:
        assert set(opened.keys()) == set(tensors)
    return tensors


def we_read(path: Path) -> Tensors | CorruptError | IncompleteError | UnsupportedError:
    """What we make of it, or our refusal."""
    try:
        described = Checkpoint(path.parent).describe()
    except (CorruptError, IncompleteError, UnsupportedError) as error:
        assert str(path) in str(error)
        return error
    content = path.read_bytes()
    tensors = {}
    for tensor in described.tensors:
        (box,) = tensor.placements
        assert box.sizes == tensor.shape and not any(box.offsets)
        data = content[box.offset : box.offset + tensor.bytes]
        tensors[tensor.name] = (tensor.dtype, tensor.shape, data)
    return tensors


# --- where we are stricter --------------------------------------------------


@dataclass
class Header:
    """A header that the crate accepts, with all that it leaves out."""

    text: str
    root: Pairs
    entries: list[Any]  # as they stand there
    tensors: list[tuple[str, list[int]]]  # their dtypes and shapes
    keys: list[list[str]]  # of every object

    @staticmethod
    def of(file: bytes) -> Header:
        text = file[8 : 8 + int.from_bytes(file[:8], "little")].decode()
        keys: list[list[str]] = []

        def pairs(items: list[tuple[str, Any]]) -> Pairs:
            keys.append([key for key, _ in items])
            return Pairs(items)

        root = json.loads(text, object_pairs_hook=pairs)
        entries = [value for key, value in root if key != "__metadata__"]
        tensors = []
        for entry in entries:
            fields = dict(entry) if isinstance(entry, Pairs) else {}
            dtype = fields["dtype"] if fields else entry[0]
            shape = fields["shape"] if fields else entry[1]
            tensors.append((dtype if isinstance(dtype, str) else dtype[0][0], shape))
        return Header(text, root, entries, tensors, keys)


def overflows(dtype: str, shape: list[int]) -> bool:
    elements = math.prod(size for size in shape if size)
    return elements >= 2**63 or elements * BITS[dtype] >= 2**64


FIELDS = {"dtype", "shape", "data_offsets"}


@dataclass(frozen=True)
class Rule:
    """A reason of ours to refuse: a rule of docs/format.md, and what our message says."""

    rule: str
    message: str
    holds: Callable[[Header], bool]


STRICTER = {
    "white space before": Rule("2.4", "not start with '{'", lambda h: h.text[0] != "{"),
    "line ends behind": Rule("2.4", "not end with '}'", lambda h: h.text.rstrip(" ")[-1] != "}"),
    "entry as an array": Rule(
        "2.6", "unexpected array", lambda h: any(not isinstance(e, Pairs) for e in h.entries)
    ),
    "dtype as an object": Rule(
        "2.6",
        "unexpected object",
        lambda h: any(
            isinstance(e, Pairs) and not isinstance(dict(e)["dtype"], str) for e in h.entries
        ),
    ),
    "huge dimension": Rule(
        "2.8",
        "larger than 2^48 - 1",
        lambda h: any(size >= 2**48 for _, shape in h.tensors for size in shape),
    ),
    "overflow beside a zero": Rule(
        "2.9", "overflows", lambda h: any(overflows(*tensor) for tensor in h.tensors)
    ),
    "twin names": Rule(
        "2.13", "stands twice", lambda h: any(len(set(keys)) < len(keys) for keys in h.keys)
    ),
    "NUL in a name": Rule(
        "strict JSON", "holds a NUL", lambda h: any("\0" in key for keys in h.keys for key in keys)
    ),
    "nine dimensions": Rule(
        "limits", "more than 8 dimensions", lambda h: any(len(shape) > 8 for _, shape in h.tensors)
    ),
    "long name": Rule(
        "limits",
        "more than this build reads",
        lambda h: any(len(key.encode()) > 65535 for keys in h.keys for key in keys),
    ),
}


def compare(path: Path, file: bytes) -> str:
    """Fails on any difference that is not on the list; else says what came out."""
    path.write_bytes(file)
    theirs, ours = crate_reads(path), we_read(path)
    if theirs is None:
        assert isinstance(ours, Exception), "we accept what the crate refuses"
        return "refused"
    header = Header.of(file)
    rules = [rule for rule in STRICTER.values() if rule.holds(header)]
    if not isinstance(ours, Exception):
        assert not rules, "a rule of ours is not enforced"
        assert ours == theirs
        return "accepted"
    assert any(rule.message in str(ours) for rule in rules), ours
    return "stricter"


# --- tests ------------------------------------------------------------------


def tensor(shape: Any, size: int = 0, dtype: Any = "F32", *more: Any) -> Pairs:
    return Pairs([("dtype", dtype), ("shape", shape), ("data_offsets", [0, size]), *more])


ONE = tensor([1], 4)
NAMED = {
    "white space before": Draft(Pairs(), b"", before=b"\n"),
    "line ends behind": Draft(Pairs(), b"", behind=b" \r\n\t"),
    "entry as an array": Draft(Pairs([("t", ["F32", [1], [0, 4]])]), bytes(4)),
    "dtype as an object": Draft(Pairs([("t", tensor([1], 4, Pairs([("F32", None)])))]), bytes(4)),
    "huge dimension": Draft(Pairs([("t", tensor([0, 2**48]))]), b""),
    "overflow beside a zero": Draft(Pairs([("t", tensor([0, 2**40, 2**23]))]), b""),
    "twin names": Draft(Pairs([("t", ONE), ("t", ONE)]), bytes(4)),
    "NUL in a name": Draft(Pairs([("a\0b", ONE)]), bytes(4)),
    "nine dimensions": Draft(Pairs([("t", tensor([1] * 9, 4))]), bytes(4)),
    "long name": Draft(Pairs([("n" * 65536, ONE)]), bytes(4)),
}


@pytest.mark.parametrize("name", STRICTER)
def test_each_stricter_rule_is_one(tmp_path: Path, name: str) -> None:
    """The crate takes the file, and of our rules this one alone refuses it."""
    file = NAMED[name].file()
    assert [n for n, rule in STRICTER.items() if rule.holds(Header.of(file))] == [name]
    assert compare(tmp_path / "model.safetensors", file) == "stricter"


@pytest.mark.parametrize("number", ["-0", "1.0", "1e0", "01", "-1", "18446744073709551616"])
def test_numbers_that_are_no_sizes(tmp_path: Path, number: str) -> None:
    file = Draft(Pairs([("t", tensor([0, Raw(number)]))]), b"").file()
    assert compare(tmp_path / "model.safetensors", file) == "refused"


def compare_many(folder: Path, files: Any, examples: int) -> collections.Counter[str]:
    """How many files had which outcome. In a full run 50 times as many, and others each time."""
    outcomes: collections.Counter[str] = collections.Counter()

    @settings(
        max_examples=examples * (50 if FULL else 1),
        database=None,
        derandomize=not FULL,
        suppress_health_check=list(HealthCheck),
    )
    @given(files)
    def one(file: bytes) -> None:
        outcomes[compare(folder / "model.safetensors", file)] += 1

    one()
    said = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
    print(f"tried: {sum(outcomes.values())} headers against the safetensors crate: {said}")
    return outcomes


def test_whole_files(tmp_path: Path) -> None:
    outcomes = compare_many(tmp_path, whole_files(), 300)
    assert outcomes.keys() == {"accepted"}


def test_damaged_files(tmp_path: Path) -> None:
    outcomes = compare_many(tmp_path, damaged_files(), 1500)
    # A generator that reaches only one of them would prove little.
    assert min(outcomes[kind] for kind in ("accepted", "stricter", "refused")) > 10, outcomes
