"""What a staged state is: equal to what was staged, type for type, and out of reach of changes."""

from __future__ import annotations

import collections
import copy
import dataclasses
import itertools
import pickle
import threading
from typing import Any

import pytest
import torch
from async_writers import BLOCKING
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from wrapped_tensor import Wrapped

import torch_ckpt
from torch_ckpt import PinnedMemoryStager
from torch_ckpt.staging.staged_state import StagedState


def stage(state: dict[str, Any]) -> dict[str, Any]:
    staged = PinnedMemoryStager(BLOCKING).stage(state)
    assert isinstance(staged, dict)
    return staged


Point = collections.namedtuple("Point", "x y")


@dataclasses.dataclass
class Options:
    names: list[str]


def test_containers_and_leaves_keep_their_types() -> None:
    model = collections.OrderedDict(w=torch.nn.Parameter(torch.randn(3, 4)))
    model._metadata = {"": {"version": 1}}  # type: ignore[attr-defined]
    state = {
        "model": model,
        "steps": collections.defaultdict(list, {3: [torch.tensor(1), {"lr": 0.1}]}),
        "point": Point(torch.ones(2), (torch.zeros(0, 3), "x")),
        "leaves": [None, True, 5, 2.5, 1j, "text", b"bytes", torch.float32, torch.Size((2, 3))],
        "options": Options(["a"]),
        "bits": torch.tensor([True, False]),
        "transposed": torch.arange(6).view(2, 3).t(),
        "conjugated": torch.randn(3, dtype=torch.complex64).conj(),
        "sparse": torch.eye(3).to_sparse(),
        "deep": torch.randn((1,) * 9),
    }
    staged = stage(state)
    assert type(staged) is StagedState
    assert list(staged) == list(state)
    assert type(staged["model"]) is collections.OrderedDict
    assert staged["model"]._metadata == model._metadata
    assert torch.equal(staged["model"]["w"], model["w"])
    assert not staged["model"]["w"].requires_grad
    assert type(staged["steps"]) is collections.defaultdict
    assert staged["steps"].default_factory is list
    assert staged["steps"][3] == [torch.tensor(1), {"lr": 0.1}]
    assert type(staged["point"]) is Point
    assert staged["point"].x.tolist() == [1, 1]
    assert staged["point"].y[0].shape == (0, 3)
    assert staged["point"].y[1] == "x"
    assert staged["leaves"] == state["leaves"]
    assert staged["options"] == Options(["a"])
    assert staged["options"].names is not state["options"].names  # type: ignore[attr-defined]
    assert staged["transposed"].is_contiguous()
    for name in ("bits", "transposed", "conjugated", "deep"):
        assert torch.equal(staged[name], state[name]), name  # type: ignore[arg-type]
    assert torch.equal(staged["sparse"].to_dense(), torch.eye(3))


def test_changes_after_staging_do_not_reach_it() -> None:
    state: dict[str, Any] = {"w": torch.zeros(1000), "groups": [{"lr": 1.0, "ids": [1, 2]}]}
    staged = stage(state)
    state["w"].fill_(7)
    state["groups"][0]["lr"] = 2.0
    state["groups"][0]["ids"].append(3)
    assert staged["w"].sum() == 0
    assert staged["groups"] == [{"lr": 1.0, "ids": [1, 2]}]


DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.complex128, torch.bool]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 6), max_size=4))
    dtype = draw(st.sampled_from(DTYPES))
    seed = draw(st.integers(0, 99))
    made = torch.randint(0, 2 if dtype is torch.bool else 99, shape, generator=_seeded(seed))
    tensor = made.to(dtype)
    if draw(st.booleans()) and tensor.dim() > 1:
        tensor = tensor.transpose(0, -1)
    if draw(st.booleans()) and tensor.dim() > 0:
        tensor = tensor[1:]
    if draw(st.booleans()):
        tensor = tensor.unsqueeze(0).expand(3, *tensor.shape)
    return tensor


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


states = st.recursive(
    tensors() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=4)
        | st.tuples(inner, inner)
    ),
    max_leaves=12,
)


def assert_same(a: Any, b: Any) -> None:
    if isinstance(a, torch.Tensor):
        assert type(b) is torch.Tensor
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert type(a) is type(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert a == b


@given(st.dictionaries(st.text(max_size=3), states, max_size=6))
def test_any_state_is_staged_as_it_is(state: dict[str, Any]) -> None:
    before = copy.deepcopy(state)
    staged = stage(state)
    assert_same(before, staged)
    assert_same(before, state)
    del staged


def test_leaves_that_cannot_be_staged_are_named() -> None:
    with pytest.raises(torch_ckpt.UnsupportedError, match="meta") as error:
        stage({"a": {"b": [torch.empty(3, device="meta")]}})
    assert error.value.tensor == "a.b.0"
    with pytest.raises(torch_ckpt.UnsupportedError, match="lock") as refused:
        stage({"a": threading.Lock()})
    assert refused.value.tensor == "a"
    with pytest.raises(torch_ckpt.InvalidArgumentError):
        PinnedMemoryStager(timeout=float("nan"))


def test_wrappers_are_staged_by_what_is_inside() -> None:
    source = torch.arange(6, dtype=torch.int8)
    staged = stage({"q": Wrapped(source, 0.5)})["q"]
    source.zero_()
    assert type(staged) is Wrapped
    assert staged.scale == 0.5
    assert staged.inner.tolist() == [0, 1, 2, 3, 4, 5]


def test_dtensors_keep_their_layout(group: None) -> None:
    mesh = init_device_mesh("cpu", (1,))
    whole = torch.arange(12.0).view(4, 3)
    tensor = distribute_tensor(whole.clone(), mesh, [Shard(0)])
    staged = stage({"w": tensor})["w"]
    tensor._local_tensor.zero_()
    assert type(staged) is DTensor
    assert staged.placements == (Shard(0),)
    assert staged.device_mesh is mesh
    assert torch.equal(staged.full_tensor(), whole)


def test_views_of_other_element_sizes() -> None:
    """A container stands where the largest elements of its parts are aligned."""
    for names in itertools.permutations("abc"):
        buffer = torch.arange(16, dtype=torch.uint8)
        parts = (torch.ones(3, dtype=torch.uint8), buffer, buffer.view(torch.float32))
        state = dict(zip(names, parts, strict=True))
        wanted = {name: part.clone() for name, part in state.items()}
        staged = stage(state)
        buffer.zero_()
        for name, part in wanted.items():
            assert torch.equal(staged[name].view(torch.uint8), part.view(torch.uint8)), names


def test_dtensors_can_be_pickled_wherever_they_lie(group: None) -> None:
    """torch reads the memory that a DTensor does not have if its local tensor has an offset."""
    mesh = init_device_mesh("cpu", (1,))
    state = {
        f"w{n}": distribute_tensor(torch.full((3, 5), float(n)), mesh, [Shard(n % 2)])
        for n in range(4)
    }
    staged = stage(state)
    offsets = {value.to_local().storage_offset() for value in staged.values()}
    assert len(offsets) == 4, "they are to lie one after another"
    for copied in (pickle.loads(pickle.dumps(staged)), copy.deepcopy(staged), staged):
        for name, value in state.items():
            assert copied[name].placements == value.placements
            assert torch.equal(copied[name].full_tensor(), value.full_tensor())
