"""Objects in archives of torch.save whose classes are not on the list: read as data, or refused."""

from __future__ import annotations

import argparse
import base64
import dataclasses
import enum
import io
import os
import signal
import sqlite3
import struct
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import torch_ckpt
from torch_ckpt.dcp.read import read_objects
from torch_ckpt.objects import decode, decode_object, encode_object


class Color(enum.Enum):
    RED = "red"
    BLUE = 2


class Level(enum.IntEnum):
    LOW = 1


class Bits(enum.Flag):
    A = 1
    B = 2


class Tricky(enum.Flag):
    A = 1

    @classmethod
    def _missing_(cls, value: object) -> Any:
        raise AssertionError("a file's value has run this")


class Celsius:
    """Made of one number, as an enum's member is of its value."""

    def __init__(self, degrees: int = 0) -> None:
        self.degrees = degrees

    def __reduce__(self) -> Any:
        return Celsius, (self.degrees,)


class Record:
    def __init__(self) -> None:
        self.a = 1


def read(path: Path) -> Any:
    return torch_ckpt.open(path).objects


def test_what_is_data_is_read(tmp_path: Path) -> None:
    stream = io.BytesIO(b"abc\xff")
    stream.seek(2)
    values = {
        "enums": [Color.RED, Color.BLUE, Level.LOW],
        "flags": [Bits.A, Bits.A | Bits.B],
        "signals": (signal.SIGTERM, signal.SIGUSR1),
        "args": argparse.Namespace(color=Color.RED, exit_signal=signal.SIGINT, lr=0.5),
        "keys": {Color.BLUE: 1},
    }
    torch.save({**values, "stream": stream}, tmp_path / "a.pt")
    objects = read(tmp_path / "a.pt")
    for name, value in values.items():
        assert objects[name] == value, name
        assert type(objects[name]) is type(value)
    assert type(objects["signals"][0]) is signal.Signals
    found = objects["stream"]
    assert type(found) is io.BytesIO and found.tell() == 2 and found.getvalue() == b"abc\xff"


def test_what_is_not_is_refused_alone(tmp_path: Path) -> None:
    values = {
        "celsius": Celsius(5),
        "record": Record(),
        "tricky": [Tricky.A],
        "step": 7,
    }
    torch.save(values, tmp_path / "a.pt")
    objects = read(tmp_path / "a.pt")
    for name, says in (("celsius", "Celsius"), ("record", "Record")):
        with pytest.raises(torch_ckpt.UnsupportedError, match=f"{name}.*({says}).*not on the list"):
            objects[name]
    assert objects["step"] == 7 and objects["tricky"] == [Tricky.A]
    with pytest.raises(torch_ckpt.CheckpointError, match="Celsius"):
        torch_ckpt.load(path=tmp_path / "a.pt")
    loaded = torch_ckpt.load(path=tmp_path / "a.pt", include=["step", "tricky"])
    assert loaded == {"step": 7, "tricky": [Tricky.A]}


class Rewarmed:
    def __init__(self) -> None:
        self.a = 1

    def __setstate__(self, state: Any) -> None:
        raise AssertionError("a file's value has run this")


def test_classes_that_the_process_lists(tmp_path: Path) -> None:
    """As those that torch.load takes with weights_only."""
    torch.save({"record": Record(), "rewarmed": Rewarmed(), "moved": Record()}, tmp_path / "a.pt")
    for refused in (lambda: read(tmp_path / "a.pt")["record"], lambda: encode_object(Record())):
        with pytest.raises(torch_ckpt.UnsupportedError, match="Record"):
            refused()
    with torch.serialization.safe_globals([Record, Rewarmed]):
        objects = read(tmp_path / "a.pt")
        assert type(objects["record"]) is Record and vars(objects["record"]) == {"a": 1}
        said = encode_object(Record())
        with pytest.raises(torch_ckpt.UnsupportedError, match="rewarmed.*code of its own"):
            objects["rewarmed"]
        with pytest.raises(torch_ckpt.UnsupportedError, match="Rewarmed"):
            encode_object(Rewarmed())
        assert vars(decode_object(said)) == {"a": 1}
    with pytest.raises(torch_ckpt.UnsupportedError, match="not on the list.*add_safe_globals"):
        decode_object(said)
    # A class that has moved since.
    said["c"] = "of_old:Record"
    with torch.serialization.safe_globals([(Record, "of_old.Record")]):
        assert type(decode_object(said)) is Record


class Slotted:
    __slots__ = ("a",)


class Ending(Record):
    def __del__(self) -> None:
        runs.append("del")


class Reduced(Record):
    def __reduce__(self) -> Any:
        return Reduced, ()


class Mapping(dict[str, int]):
    pass


class Connection(sqlite3.Connection):
    pass


@dataclasses.dataclass(frozen=True)
class Key:
    a: int


def test_classes_whose_objects_are_more_than_their_attributes() -> None:
    for cls in (Slotted, Ending, Reduced, Mapping, Rewarmed, Connection, int, ValueError):
        said = {"$": "record", "c": f"{cls.__module__}:{cls.__qualname__}", "v": [["a", 1]]}
        with torch.serialization.safe_globals([cls]):
            with pytest.raises(torch_ckpt.UnsupportedError, match="code of its own"):
                decode_object(said)
    record = Record()
    vars(record)[1] = 2
    space = types.SimpleNamespace()
    vars(space)[1] = 2
    with torch.serialization.safe_globals([Record, Key]):
        for odd in (record, space):
            with pytest.raises(torch_ckpt.UnsupportedError, match="attribute 1"):
                encode_object(odd)
        assert decode_object(encode_object({Key(1): 2})) == {Key(1): 2}
        lacks = {"$": "record", "c": f"{__name__}:Key", "v": []}
        with pytest.raises(torch_ckpt.CorruptError):
            decode_object({"$": "dict", "v": [[lacks, 1]]})
        # For who reads pickles, whatever he lists.
        assert encode_object(Record(), allow_pickle=True)["$"] == "pickle"


def test_random_number_generators(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(7)
    torch.rand(3, generator=generator)
    torch.save({"generator": generator, "step": 1}, tmp_path / "a.pt")
    expected = torch.rand(5, generator=generator.clone_state())
    for found in (read(tmp_path / "a.pt")["generator"], decode_object(encode_object(generator))):
        assert type(found) is torch.Generator and found.device == torch.device("cpu")
        assert torch.equal(torch.rand(5, generator=found), expected)
    said = encode_object(generator)
    state = bytearray(base64.b64decode(said["b"]))

    def of_numbers(left: int, place: int, seeded: int = 1) -> dict[str, str]:
        """Of which torch reads the numbers behind its own."""
        struct.pack_into("<iiQ", state, 8, left, seeded, place)
        return {"b": base64.b64encode(state).decode()}

    for draws in range(0, 1300, 13):
        after = torch.Generator().manual_seed(draws)
        torch.randint(9, (draws,), generator=after)
        assert torch.equal(decode_object(encode_object(after)).get_state(), after.get_state())
    odd = [of_numbers(*each) for each in ((600, 624), (0, 625), (625, 0), (-5, 630), (1, 0, 0))]
    for wrong in (*odd, {"b": ""}, {"b": said["b"][:400]}, {"d": 1}, {"d": "nowhere"}):
        with pytest.raises(torch_ckpt.CorruptError, match="malformed"):
            decode_object({**said, **wrong})
    if not torch.cuda.is_available():
        with pytest.raises(torch_ckpt.UnsupportedError, match="generator of cuda:1"):
            decode_object({**said, "d": "cuda:1"})


class Tokens:
    """What nothing reads as data: its pickle calls a function."""

    def __init__(self, words: list[str]) -> None:
        self.words = words

    def __reduce__(self) -> Any:
        return tokens_of, (" ".join(self.words),)


def tokens_of(text: str) -> Tokens:
    runs.append(text)
    return Tokens(text.split())


runs: list[str] = []


@pytest.mark.parametrize("kind", ["file", "directory", "stock"])
def test_pickles_are_run_where_that_is_allowed(tmp_path: Path, kind: str) -> None:
    """Of the leaves that need it alone."""
    state = {
        "w": torch.arange(6.0),
        "tokens": Tokens(["a", "b"]),
        "nested": {"deep": [1, Tokens(["c"])], "step": 7},
    }
    path = tmp_path / "c"
    if kind == "stock":
        dcp.save(state, checkpoint_id=path, no_dist=True)
    else:
        path.mkdir(exist_ok=True)
        path = path / "pytorch_model.bin"
        torch.save(state, path)
        path = path if kind == "file" else path.parent

    def target() -> dict[str, Any]:
        return {
            "w": torch.zeros(6),
            "tokens": None,
            "nested": {"deep": [0, None], "step": 0},
        }

    runs.clear()
    with pytest.raises(torch_ckpt.UnsupportedError, match="tokens"):
        torch_ckpt.load(target(), path)
    assert not runs
    loaded = target()
    reader = torch_ckpt.CheckpointReader(path, allow_pickle=True)
    torch_ckpt.load({"w": loaded["w"], "nested": {"step": 0}}, storage_reader=reader)
    assert not runs  # none of these needs it
    torch_ckpt.load(loaded, storage_reader=reader)
    assert torch.equal(loaded["w"], state["w"])
    assert loaded["tokens"].words == ["a", "b"] and loaded["nested"]["deep"][1].words == ["c"]
    assert loaded["nested"]["deep"][0] == 1 and loaded["nested"]["step"] == 7
    assert sorted(set(runs)) == ["a b", "c"] and len(runs) == 2


@pytest.mark.parametrize("same_time", [False, True])
def test_a_file_that_is_replaced_while_its_pickle_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same_time: bool
) -> None:
    path = tmp_path / "a.pt"
    torch.save({"tokens": Tokens(["a"])}, path)
    run = read_objects.run_pickle

    def replaced(*place: Any) -> Any:
        torch.save({"tokens": Tokens(["b"])}, tmp_path / "b.pt")
        if same_time:  # as within a tick of the clock
            os.utime(tmp_path / "b.pt", ns=(0, path.stat().st_mtime_ns))
        (tmp_path / "b.pt").replace(path)
        return run(*place)

    monkeypatch.setattr(read_objects, "run_pickle", replaced)
    target = {"tokens": None}
    reader = torch_ckpt.CheckpointReader(path, allow_pickle=True)
    with pytest.raises(torch_ckpt.ConflictError):
        torch_ckpt.load(target, storage_reader=reader)
    assert target == {"tokens": None}


def test_no_code_of_an_enum_is_run() -> None:
    for value in (7, "x", 1.5):
        said = {"$": "enum", "c": f"{__name__}:Tricky", "v": value}
        with pytest.raises(torch_ckpt.UnsupportedError, match="has no member"):
            decode_object(said)
    for value in (1, 3):
        assert decode_object({"$": "enum", "c": f"{__name__}:Bits", "v": value}) == Bits(value)
    with pytest.raises(torch_ckpt.UnsupportedError, match="has no member 'A'|has no member"):
        decode_object({"$": "enum", "c": f"{__name__}:Bits", "v": "A"})
    with pytest.raises(torch_ckpt.UnsupportedError, match="import its module first"):
        decode_object({"$": "enum", "c": "not_imported:Color", "v": 1})
    with pytest.raises(torch_ckpt.UnsupportedError, match="not on the list"):
        decode_object({"$": "record", "c": f"{__name__}:Record", "v": [["a", 1]]})
    with pytest.raises(torch_ckpt.CorruptError):
        decode_object({"$": "enum", "c": f"{__name__}:Bits"})


@pytest.fixture
def megatron(monkeypatch: pytest.MonkeyPatch) -> dict[str, types.ModuleType]:
    """Modules of Megatron's names, with an enum and a record; whether they are imported is for the
    test to say."""
    enums = types.ModuleType("megatron.core.enums")
    optimizer = types.ModuleType("megatron.core.optimizer.optimizer_config")

    class ModelType(enum.Enum):
        encoder_or_decoder = 1

    @dataclasses.dataclass
    class OptimizerConfig:
        lr: float = 0.1

    for module, cls in ((enums, ModelType), (optimizer, OptimizerConfig)):
        cls.__module__, cls.__qualname__ = module.__name__, cls.__name__
        setattr(module, cls.__name__, cls)
    monkeypatch.setattr(decode, "_warned_classes", set())
    monkeypatch.setattr(torch.serialization, "get_safe_globals", list)  # Megatron's own, once it is
    return {module.__name__: module for module in (enums, optimizer)}


def test_classes_of_megatron(
    tmp_path: Path, megatron: dict[str, types.ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, config = (
        megatron["megatron.core.enums"].ModelType,
        megatron["megatron.core.optimizer.optimizer_config"].OptimizerConfig,
    )
    values = [kind.encoder_or_decoder, config(0.3)]
    with monkeypatch.context() as imported:
        for name, module in megatron.items():
            imported.setitem(sys.modules, name, module)
        torch.save({"both": values}, tmp_path / "a.pt")
        said = encode_object(values)
        for found in (read(tmp_path / "a.pt")["both"], decode_object(said)):
            assert found == values and found[0] is kind.encoder_or_decoder
            assert type(found[1]) is config
    for name in megatron:
        monkeypatch.delitem(sys.modules, name, raising=False)
    for look in (lambda: read(tmp_path / "a.pt")["both"], lambda: decode_object(said)):
        monkeypatch.setattr(decode, "_warned_classes", set())
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            assert look() == [1, types.SimpleNamespace(lr=0.3)]
            assert look() == [1, types.SimpleNamespace(lr=0.3)]
        texts = [str(each.message) for each in told]
        assert len(texts) == 2, texts  # each class once
        assert "megatron.core.enums:ModelType is not imported" in texts[0]
        assert "OptimizerConfig" in texts[1]


@pytest.mark.parametrize("to", ["torch_ckpt", "hf", "dcp", "megatron", "torch"])
def test_conversions(tmp_path: Path, to: Any) -> None:
    values = {"w": torch.ones(2), "color": [Color.RED], "signal": signal.SIGTERM}
    torch.save(values, tmp_path / "a.pt")
    torch_ckpt.convert(tmp_path / "a.pt", tmp_path / "out", to)
    loaded = torch_ckpt.load(path=tmp_path / "out")
    assert loaded["color"] == [Color.RED] and loaded["signal"] is signal.SIGTERM
    torch.save({**values, "celsius": Celsius(5)}, tmp_path / "b.pt")
    with pytest.raises(torch_ckpt.UnsupportedError, match="celsius.*Celsius.*--no-objects"):
        torch_ckpt.convert(tmp_path / "b.pt", tmp_path / "none", to)
    assert not (tmp_path / "none").exists()
