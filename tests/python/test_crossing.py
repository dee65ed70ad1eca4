"""Staged states that go to another process: the same memory, as one descriptor."""

from __future__ import annotations

import collections
import copy
import io
import os
import pickle
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing import reduction
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing
from torch.distributed.checkpoint.staging import StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from wrapped_tensor import Wrapped

import torch_ckpt
from torch_ckpt import PinnedMemoryStager
from torch_ckpt.native import core, operators
from torch_ckpt.staging import crossing
from torch_ckpt.staging.staged_state import StagedState

MIB = 1 << 20


def stage(state: dict[str, Any]) -> StagedState:
    staged = PinnedMemoryStager(StagingOptions(False, False, False, False)).stage(state)
    assert isinstance(staged, StagedState)
    return staged


def leased() -> int:
    bytes_: int = core.call({"op": "arena", "snapshots": True})["leased"]
    return bytes_


def trim() -> None:
    core.call({"op": "arena", "snapshots": True, "trim": True})


@pytest.fixture(autouse=True)
def expected(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(crossing, "_expected", True)
    yield
    trim()


@pytest.fixture
def sent_descriptors(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    sent: list[int] = []
    dup = reduction.DupFd

    def count(fd: int) -> Any:
        sent.append(fd)
        return dup(fd)

    monkeypatch.setattr(reduction, "DupFd", count)
    return sent


def serve(connection: Any) -> None:
    """The other process: answers (function, argument) with what the function returns."""
    for function, argument in iter(connection.recv, None):
        try:
            answer = function(argument)
        except Exception as error:
            answer = error
        del argument
        connection.send(answer)


class Other:
    """A process that was started with "spawn"."""

    def __init__(self) -> None:
        context = torch.multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def call(self, function: Callable[[Any], Any], argument: Any = None) -> Any:
        self.connection.send((function, argument))
        return self.connection.recv()


@pytest.fixture(scope="module")
def other() -> Iterator[Other]:
    made = Other()
    yield made
    made.connection.send(None)
    made.process.join(20)
    assert made.process.exitcode == 0


def mappings(process: int | str = "self") -> list[int]:
    """Sizes of the pieces of memory files of ours that a process has mapped."""
    found = []
    for line in Path(f"/proc/{process}/maps").read_text().splitlines():
        if "memfd:torch_ckpt" in line:
            begin, end = (int(number, 16) for number in line.split()[0].split("-"))
            found.append(end - begin)
    return found


THREAD, PROCESS = AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS
kept: list[StagedState] = []


def look(_: Any) -> tuple[int, list[int]]:
    """What is open and mapped once nothing is kept: nothing that somebody leases."""
    kept.clear()
    trim()
    return len(os.listdir("/proc/self/fd")), mappings()


def attributes_of(state: StagedState) -> list[dict[str, Any]]:
    return [vars(tensor) for tensor in state.values()]


def test_attributes_of_tensors_cross(other: Other) -> None:
    tagged, plain = torch.nn.Parameter(torch.ones(2)), torch.ones(2)
    tagged.axes = {"rows": [0, 1]}  # type: ignore[attr-defined]
    staged = stage({"tagged": tagged, "plain": plain})
    assert other.call(attributes_of, staged) == [{"axes": {"rows": [0, 1]}}, {}]


def keep(state: StagedState) -> tuple[int, list[int], list[int]]:
    kept[:] = [state]
    kept[0]["w"][1] = 77
    return len(os.listdir("/proc/self/fd")), mappings(), state["w"][:3].tolist()


def read(_: Any) -> list[int]:
    numbers: list[int] = kept[0]["w"][:3].tolist()
    return numbers


def test_the_memory_is_the_same(other: Other, sent_descriptors: list[int]) -> None:
    descriptors, none = other.call(look)
    staged = stage({"w": torch.arange(3 * MIB, dtype=torch.int32), "step": 5})
    assert other.call(keep, staged) == (descriptors, [*none, 12 * MIB], [0, 77, 2])
    assert len(sent_descriptors) == 1
    assert staged["w"][:3].tolist() == [0, 77, 2]
    staged["w"][2] = 88
    assert other.call(read) == [0, 77, 88]
    assert other.call(look) == (descriptors, none)


def forget(_: Any) -> list[int]:
    kept.clear()
    return mappings()


def test_it_stays_mapped_for_the_next_state(other: Other) -> None:
    # The first touch of the pages costs the process that saves as much as writing them.
    descriptors, none = other.call(look)
    for value in range(20):
        staged = stage({"w": torch.full((MIB,), value, dtype=torch.int32)})
        assert other.call(keep, staged) == (descriptors, [*none, 4 * MIB], [value, 77, value])
        assert other.call(forget) == [*none, 4 * MIB]
        staged.end()


def echo(state: StagedState) -> Any:
    """As a dict whose tensors are copies."""
    assert type(state) is StagedState
    assert state.staged_bytes > 0
    return copy.deepcopy(dict(state))


Point = collections.namedtuple("Point", "x y")


def test_states_arrive_as_they_are(other: Other, sent_descriptors: list[int]) -> None:
    model = collections.OrderedDict(w=torch.randn(3, 4), empty=torch.zeros(0, 3))
    model._metadata = {"": {"version": 1}}  # type: ignore[attr-defined]
    state = {
        "model": model,
        "steps": collections.defaultdict(list, {3: [torch.tensor(1), {"lr": 0.1}]}),
        "point": Point(torch.ones(2), (torch.zeros(0, 3), "x")),
        "leaves": [None, 2.5, b"bytes", torch.float32, torch.Size((2, 3))],
        "kinds": [torch.ones(3).to(kind) for kind in (torch.bool, torch.bfloat16, torch.int8)],
        "float4": torch.arange(8, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
        "complex": torch.randn(5, dtype=torch.complex128),
        "sparse": torch.eye(3).to_sparse(),
        "deep": torch.randn((1,) * 9),
    }
    staged = stage(state)
    # Whatever users put into it: parts of the region cross as well, and other tensors as ever.
    staged["part"] = staged["model"]["w"][1:, ::2]
    staged["conjugate"] = staged["complex"].conj().clone()
    arrived = other.call(echo, staged)
    assert list(arrived) == list(staged)
    assert type(arrived["model"]) is collections.OrderedDict
    assert arrived["model"]._metadata == model._metadata
    assert arrived["model"]["empty"].shape == (0, 3)
    assert torch.equal(arrived["model"]["w"], model["w"])
    assert torch.equal(arrived["part"], model["w"][1:, ::2])
    assert arrived["steps"].default_factory is list
    assert arrived["steps"][3] == [torch.tensor(1), {"lr": 0.1}]
    assert type(arrived["point"]) is Point
    assert arrived["point"].y[0].shape == (0, 3)
    assert arrived["leaves"] == state["leaves"]
    for name in ("complex", "deep", "conjugate"):
        assert torch.equal(arrived[name], staged[name]), name
    assert arrived["float4"].dtype == torch.float4_e2m1fn_x2
    assert arrived["float4"].view(torch.uint8).tolist() == list(range(8))
    assert [kind.dtype for kind in arrived["kinds"]] == [torch.bool, torch.bfloat16, torch.int8]
    assert all(kind.tolist() == [1, 1, 1] for kind in arrived["kinds"])
    assert torch.equal(arrived["sparse"].to_dense(), torch.eye(3))


class Scaled(Wrapped):
    """One that torch may detach."""

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], scale: float, size: Any, stride: Any
    ) -> Scaled:
        return Scaled(inner["inner"], scale)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is torch.ops.aten.detach.default, func
        return Scaled(args[0].inner, args[0].scale)


def change_inner(state: StagedState) -> tuple[str, float]:
    state["q"].inner[2] = 9
    return type(state["q"]).__name__, state["q"].scale


def test_the_memory_inside_of_a_wrapper_is_the_same(
    other: Other, sent_descriptors: list[int]
) -> None:
    staged = stage({"q": Scaled(torch.arange(4, dtype=torch.int8), 0.5)})
    assert other.call(change_inner, staged) == ("Scaled", 0.5)
    assert staged["q"].inner.tolist() == [0, 1, 9, 3]
    assert len(sent_descriptors) == 1


def tied(state: StagedState) -> list[bool]:
    state["a"].zero_()
    return [state["a"] is state["again"], state["a"] is state["b"], bool((state["b"] == 0).all())]


def test_tied_tensors_stay_tied(other: Other) -> None:
    tensor = torch.ones(5)
    staged = stage({"a": tensor, "b": tensor.view(5)})
    staged["again"] = staged["a"]
    assert other.call(tied, staged) == [True, False, True]


def total(state: StagedState) -> tuple[int, int]:
    return len(state), sum(int(tensor[0]) for tensor in state.values())


def test_many_tensors_are_one_descriptor(other: Other, sent_descriptors: list[int]) -> None:
    count = 19_000
    staged = stage({f"layer.{n}": torch.full((8,), n) for n in range(count)})
    assert other.call(total, staged) == (count, sum(range(count)))
    assert len(sent_descriptors) == 1


def test_the_first_is_copied_where_none_was_expected(
    other: Other, sent_descriptors: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, none = other.call(look)
    monkeypatch.setattr(crossing, "_expected", False)
    for copied in (True, False):
        staged = stage({"w": torch.arange(100, dtype=torch.int32)})
        assert (staged._region is not None and staged._region.fd is None) == copied
        _, mapped, found = other.call(keep, staged)
        assert found == [0, 77, 2]
        assert mapped == none + [2 * MIB] * (not copied)
        other.call(look)
    assert len(sent_descriptors) == 2


def test_a_region_that_crossed_serves_others_when_it_ends(other: Other) -> None:
    descriptors, none = other.call(look)
    for value in range(20):
        staged = stage({"w": torch.full((MIB,), value, dtype=torch.int32)})
        assert other.call(keep, staged) == (descriptors, [*none, 4 * MIB], [value, 77, value])
        assert leased() == 4 * MIB
        staged.end()
        assert leased() == 0
        other.call(look)
    assert core.call({"op": "arena", "snapshots": True})["mapped"] == 4 * MIB
    assert len(mappings()) == 1
    trim()
    assert mappings() == []


@pytest.mark.parametrize("who", ["a save", "the stager"])
def test_memory_that_was_prepared_is_of_the_kind_that_is_expected(
    who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crossing, "_expected", who == "a save")
    stager = PinnedMemoryStager(
        StagingOptions(False, False, False, False),
        prepare="3MiB",
        async_checkpointer_type=PROCESS if who == "the stager" else THREAD,
    )
    staged = stager.stage({"w": torch.ones(3 * MIB, dtype=torch.uint8)})
    assert isinstance(staged, StagedState)
    assert staged._region is not None and staged._region.fd is not None
    assert core.call({"op": "arena", "snapshots": True})["mapped"] == 4 * MIB
    assert mappings() == [4 * MIB]


def test_an_ended_state_and_one_without_tensors_cross_as_dicts(
    other: Other, sent_descriptors: list[int]
) -> None:
    ended = stage({"w": torch.ones(3), "step": 1})
    ended.end()
    assert other.call(dict, ended)["step"] == 1
    assert other.call(dict, stage({"step": 2})) == {"step": 2}
    assert sent_descriptors == []


def test_other_picklers_copy() -> None:
    staged = stage({"w": torch.arange(5), "inner": {"b": torch.tensor([1, 1])}})
    file = io.BytesIO()
    torch.save(staged, file)
    file.seek(0)
    copies = [
        pickle.loads(pickle.dumps(staged)),
        copy.deepcopy(staged),
        torch.load(file, weights_only=False),
    ]
    staged["w"].zero_()
    staged["inner"]["b"].zero_()
    for copied in copies:
        assert type(copied) is StagedState
        assert copied["w"].tolist() == [0, 1, 2, 3, 4]
        assert copied["inner"]["b"].tolist() == [1, 1]
        assert copied.staged_bytes == 0


def forward(state: StagedState) -> Any:
    return state


def test_what_was_received_can_be_sent_on(other: Other) -> None:
    staged = stage({"w": torch.arange(5)})
    assert other.call(forward, staged)["w"].tolist() == [0, 1, 2, 3, 4]


def test_only_regions_are_adopted() -> None:
    staged = stage({"w": torch.ones(3 * MIB)})
    assert staged._region is not None
    fd, offset = staged._region.fd, staged._region.offset
    assert fd is not None
    end = os.fstat(fd).st_size
    before = len(mappings())
    read_end, write_end = os.pipe()
    with tempfile.TemporaryFile() as file:
        file.truncate(4 * MIB)
        for number, begin, size in (
            (file.fileno(), 0, MIB),
            (read_end, 0, MIB),
            (1 << 30, 0, MIB),
            (1 << 40, 0, MIB),
            (-1, 0, MIB),
            (fd, -4096, MIB),
            (fd, end, 4096),
            (fd, end - 4096, 8192),
            (fd, offset, 1 << 62),
            (fd, offset, 0),
        ):
            with pytest.raises(torch_ckpt.InvalidArgumentError):
                operators.adopt(number, begin, size, 0)
    os.close(read_end)
    os.close(write_end)
    with pytest.raises(OSError, match="mmap"):
        operators.adopt(fd, 1, MIB, 0)
    assert len(mappings()) == before
    adopted = operators.adopt(fd, offset, 4096, 8)
    assert adopted.memory[:4].view(torch.float32).item() == 1
    assert adopted.fd is None
    assert len(mappings()) == before + 1
    del adopted
    trim()
    assert len(mappings()) == before


def test_a_place_beyond_the_region_is_an_error() -> None:
    staged = stage({"w": torch.ones(3)})
    make, (descriptor, offset, size, used, places, pickled) = crossing._reduce(staged)
    dtype, shape, strides, begin, attributes = places[0]
    wrong = [(dtype, (size,), strides, begin, attributes)]
    with pytest.raises(RuntimeError, match="storage"):
        make(descriptor, offset, size, used, wrong, pickled)
