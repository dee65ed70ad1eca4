"""Tensors that have no memory of their own, no shape, or elements in another form: saved, staged
and filled right, or refused by name."""

from __future__ import annotations

import re
import warnings
from collections import ChainMap, UserDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from odd_tensors import ODD, Coded, Deaf, Grumpy, codes
from safetensors.torch import save_file
from sample_states import FAILED
from sample_states import SAVES_OF_OURS as SAVES
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

import torch_ckpt
from torch_ckpt import CheckpointReader, HuggingFaceStorageWriter, PinnedMemoryStager
from torch_ckpt.errors import InvalidArgumentError, UnsupportedError
from torch_ckpt.native.tensors import memory_of
from torch_ckpt.native.torch_private import dtensor_of
from torch_ckpt.objects import ObjectError

VALUES = torch.arange(8) / 2


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    torch_ckpt.save({"w": VALUES}, tmp_path / "plain")
    return tmp_path / "plain"


def leaves(value: Any) -> dict[str, dict[str, Any]]:
    """States in which `value` is `w`, or in it."""
    return {"w": {"w": value}, "in.0.w": {"in": [{"w": value}]}}


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("kind", ODD)
def test_it_is_not_saved(tmp_path: Path, kind: str, save: str) -> None:
    for name, state in leaves(ODD[kind]()).items():
        message = rf"(?s)tensor '{re.escape(name)}': is .*{re.escape(kind)}"
        with pytest.raises(FAILED, match=message) as caught:
            SAVES[save](state, tmp_path / "c")
        if save != "dcp":
            assert isinstance(caught.value, UnsupportedError)
            assert caught.value.rank == 0
        assert not (tmp_path / "c").exists()


# What stock's planner fails at before it calls anything of ours (docs/guarantees.md).
AT_STOCKS_PLANNER = {
    "an UninitializedParameter",
    "an UninitializedBuffer",
    "a nested tensor",
    "nested tensor",
    "MaskedTensor",
    "_mkldnn",
}


@pytest.mark.parametrize("kind", ODD)
def test_stocks_planner_saves_none_of_them(tmp_path: Path, kind: str) -> None:
    writer = HuggingFaceStorageWriter(tmp_path / "c", layout="sharded")
    with pytest.raises(FAILED) as caught:
        dcp.save({"w": ODD[kind]()}, storage_writer=writer, no_dist=True)
    error = caught.value
    assert isinstance(error, CheckpointException)
    (inner,) = (failure[0] for failure in error.failures.values())
    assert isinstance(inner, UnsupportedError) == (kind not in AT_STOCKS_PLANNER)
    if isinstance(inner, UnsupportedError):
        assert inner.tensor == "w" and kind in str(inner)
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("kind", sorted(ODD.keys() - {"complex128"}))
def test_it_is_no_part_of_an_object(tmp_path: Path, kind: str) -> None:
    with pytest.raises(ObjectError, match=r"w\.0: (a )?tensors? "):
        torch_ckpt.save({"w": (ODD[kind](),)}, tmp_path / "c")


@pytest.mark.parametrize("kind", ODD)
def test_its_stage_is_a_copy_or_refused_by_name(kind: str) -> None:
    try:
        staged = PinnedMemoryStager().stage({"w": ODD[kind]()})
    except UnsupportedError as error:
        assert error.tensor == "w" and kind in error.message
    else:
        assert isinstance(staged, dict) and type(staged["w"]) is type(ODD[kind]())
        assert kind in ("sparse_coo", "_mkldnn", "qint8", "complex128", "a nested tensor")


@pytest.mark.parametrize("reader", ["load", "dcp", "read"])
@pytest.mark.parametrize("kind", ODD)
def test_it_is_filled_by_its_own_copy_or_refused(plain: Path, kind: str, reader: str) -> None:
    target = ODD[kind]()
    # A target on the meta device gets memory.
    filled = {"qint8", "odd_tensors.Coded", "MaskedTensor", "complex128"}
    if reader != "read":
        filled |= {"on the meta device"}

    def load() -> torch.Tensor:
        state = {"w": target}
        if reader == "read":
            return torch_ckpt.open(plain)["w"].read(out=target)
        if reader == "load":
            torch_ckpt.load(state, plain)
        else:
            planner = torch_ckpt.LoadPlanner()
            dcp.load(state, storage_reader=CheckpointReader(plain), planner=planner, no_dist=True)
        return state["w"]

    if kind not in filled:
        with pytest.raises(FAILED, match=rf"(?s)tensor 'w': its target is .*{re.escape(kind)}"):
            load()
        return
    made = load()
    got = made.dequantize() if kind == "qint8" else made
    if kind == "odd_tensors.Coded":
        got = made.codes / 2  # type: ignore[attr-defined]
    if kind == "MaskedTensor":
        got = made.get_data()  # type: ignore[attr-defined]
    assert torch.equal(got.to(torch.float32), VALUES)


@pytest.mark.parametrize("kind", [Deaf, Grumpy])
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_copy_that_does_nothing_is_an_error(
    plain: Path, kind: type[Coded], wrapped: bool
) -> None:
    target: torch.Tensor = kind(torch.ones(8, dtype=torch.int8))
    if wrapped:
        target = torch.nn.Parameter(target)
    message = (
        r"tensor 'w': its target, of class odd_tensors\.(Deaf|Grumpy), does not take a plain tensor"
    )
    with pytest.raises(UnsupportedError, match=message):
        torch_ckpt.load({"w": target}, plain)
    with pytest.raises(UnsupportedError, match=message):
        torch_ckpt.open(plain)["w"].read(out=target)


def test_a_target_that_has_the_values_already(plain: Path) -> None:
    target = Coded(codes())
    for _ in range(2):
        torch_ckpt.load({"w": target}, plain)
        assert torch.equal(target.codes, codes())
    torch_ckpt.open(plain)["w"].read(slice(0, 8, 2), out=Coded(codes(4)))


def test_codes_with_scales_beside_pass_through_a_copy_as_numbers(tmp_path: Path) -> None:
    halves = VALUES.to(torch.float8_e4m3fn).float()
    stored = {"w": VALUES.to(torch.float8_e4m3fn), "w_scale_inv": torch.full((1,), 2.0)}
    save_file(stored, tmp_path / "model.safetensors")
    target = Coded(codes())
    torch_ckpt.load({"w": target}, tmp_path)
    wanted = Coded(codes())
    wanted.copy_(2 * halves)
    assert torch.equal(target.codes, wanted.codes)


@pytest.mark.usefixtures("group")
def test_what_is_inside_of_a_dtensor(tmp_path: Path, plain: Path) -> None:
    mesh = init_device_mesh("cpu", (1,))
    wrapped = dtensor_of(Coded(codes()), DTensor.from_local(torch.zeros(8), mesh, [Replicate()]))
    with pytest.raises(UnsupportedError, match="tensor 'w': is of class odd_tensors.Coded"):
        torch_ckpt.save({"w": wrapped}, tmp_path / "c")
    local = wrapped._local_tensor
    assert isinstance(local, Coded)
    local.codes.zero_()
    torch_ckpt.load({"w": wrapped}, plain)
    assert torch.equal(local.codes, codes())


@pytest.mark.parametrize("op", ["save", "read", "stage"])
@pytest.mark.parametrize("kind", sorted(ODD.keys() - {"complex128"}))
def test_operators_have_no_kernel_for_it(tmp_path: Path, plain: Path, kind: str, op: str) -> None:
    report = torch.zeros(4, dtype=torch.int64)
    value = [ODD[kind]()]
    with pytest.raises((NotImplementedError, TypeError, ValueError, AssertionError), match=op):
        if op == "stage":
            offsets, region = torch.zeros(1, dtype=torch.int64), torch.zeros(4096).byte()
            stage = torch.ops.dcp_ext.stage
            stage(value, torch_ckpt.plan(names=["w"]), offsets, report, region)
        else:
            path = plain if op == "read" else tmp_path / "c"
            getattr(torch.ops.dcp_ext, op)(value, torch_ckpt.plan(path, ["w"]), report)
    assert report[0] == 0 and not (tmp_path / "c").exists()


def test_operators_take_what_has_memory(tmp_path: Path) -> None:
    report = torch_ckpt.native.operators.new_report()
    names = [name for name in TURNED if name != "named"]  # whose class refuses to be asked
    values = [TURNED[name] for name in names]
    wanted = [
        value.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg() for value in values
    ]
    torch.ops.dcp_ext.save(values, torch_ckpt.plan(tmp_path / "c", names), report)
    found = torch_ckpt.load(path=tmp_path / "c")
    assert all(torch.equal(found[n], value) for n, value in zip(names, wanted, strict=True))
    offsets, region = torch.zeros(len(names), dtype=torch.int64), torch.zeros(4096).byte()
    torch.ops.dcp_ext.stage(values, torch_ckpt.plan(names=names), offsets, report, region)
    for value, at in zip(wanted, offsets.tolist(), strict=True):
        staged = region[at : at + value.nbytes].view(value.dtype)
        assert torch.equal(staged, value.flatten())
    into = [torch.zeros_like(value) for value in wanted]
    plan = torch_ckpt.plan(tmp_path / "c", names)
    torch.ops.dcp_ext.read(into, plan, report)
    assert all(torch.equal(into[i], value) for i, value in enumerate(wanted))
    for odd in (into[0].conj(), torch.zeros(8, dtype=torch.complex64).conj().imag):
        with pytest.raises(
            RuntimeError, match="Please materialize .* before calling dcp_ext::read"
        ):
            torch.ops.dcp_ext.read([odd, *into[1:]], plan, report)


class Gathered(Coded):
    """As the weights of float8 training: a plain weight inside, which FSDP2 casts."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        raise AssertionError

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: None, size: Any, stride: Any) -> Gathered:
        return Gathered(inner["codes"])


@pytest.mark.parametrize("save", SAVES)
def test_the_weight_inside_of_one_that_fsdp_gathers(tmp_path: Path, save: str) -> None:
    weight = Gathered(torch.randn(5))
    SAVES[save]({"w": torch.nn.Parameter(weight)}, tmp_path / "c")
    target = Gathered(torch.zeros(5))
    torch_ckpt.load({"w": target}, tmp_path / "c")
    assert torch.equal(target.codes, weight.codes)
    SAVES[save]({"w": Gathered(codes())}, tmp_path / "d")  # of another dtype than the weight's
    assert list(torch_ckpt.open(tmp_path / "d")) == ["w.codes"]
    target = Gathered(codes().zero_())
    torch_ckpt.load({"w": target}, tmp_path / "d")
    assert torch.equal(target.codes, codes())


class Named(torch.Tensor):
    """Only more behaviour."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "dcp_ext" in str(func):
            raise AssertionError("our operators are none of its business")
        return super().__torch_function__(func, types, args, kwargs or {})


TURNED = {
    "conjugated": torch.complex(VALUES, VALUES).conj(),
    "negated": torch.complex(VALUES, VALUES).conj().imag,
    "both": torch.complex(VALUES, -VALUES).conj()[::2],
    "named": VALUES.as_subclass(Named),  # type: ignore[arg-type]
    "parameter": torch.nn.Parameter(VALUES.clone()),
    "leaf": VALUES.clone().requires_grad_() * 1,
}


@pytest.mark.parametrize("save", SAVES)
def test_what_has_memory_is_saved_and_filled(tmp_path: Path, save: str) -> None:
    SAVES[save](TURNED, tmp_path / "c")
    wanted = {
        name: value.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg()
        for name, value in TURNED.items()
    }
    for name, value in torch_ckpt.load(path=tmp_path / "c").items():
        assert torch.equal(value, wanted[name]), name
    target = {
        "conjugated": torch.zeros(8, dtype=torch.complex64).conj(),
        "negated": torch.zeros(8, dtype=torch.complex64).conj().imag,
        "both": torch.zeros(8, dtype=torch.complex64).conj()[::2],
        "named": torch.zeros(8).as_subclass(Named),  # type: ignore[arg-type]
        "parameter": torch.nn.Parameter(torch.zeros(8)),
        "leaf": torch.zeros(8),
    }
    torch_ckpt.load(dict(target), tmp_path / "c")
    for name, value in target.items():
        assert torch.equal(value.as_subclass(torch.Tensor), wanted[name]), name
        value.detach().zero_()
        with torch.no_grad():
            torch_ckpt.open(tmp_path / "c")[name].read(out=value)
        assert torch.equal(value.as_subclass(torch.Tensor), wanted[name]), name


def test_what_memory_is() -> None:
    base = torch.ones(4)
    for value in (base, torch.nn.Parameter(base), base.as_subclass(Named), base[::2]):  # type: ignore[arg-type]
        memory = memory_of(value)
        assert memory is not None and type(memory) in (torch.Tensor, torch.nn.Parameter)
        assert memory.data_ptr() == base.data_ptr()
    assert memory_of(Coded(codes())) is None


# --- modes and default devices ---------------------------------------------------


def test_under_inference_mode(tmp_path: Path) -> None:
    committed: list[int] = []
    with torch.inference_mode():
        made = {"w": torch.ones(5), "c": torch.zeros(5, dtype=torch.complex128)}
        torch_ckpt.async_save(
            {"w": made["w"]}, tmp_path / "c", on_commit=lambda: committed.append(1)
        ).result()
        inside = {"w": torch.zeros(5), "c": torch.zeros(2)}
        torch_ckpt.load({"w": inside["w"]}, tmp_path / "c")
        torch_ckpt.open(tmp_path / "c")["w"].read(slice(0, 4, 2), out=inside["c"])
    assert committed == [1]
    assert torch.equal(inside["w"], torch.ones(5)) and torch.equal(inside["c"], torch.ones(2))
    # Tensors of that mode are filled outside of it, as in place so with a cast.
    torch_ckpt.load({"w": made["c"]}, tmp_path / "c")
    assert torch.equal(made["c"].real, torch.ones(5).double())


def test_a_load_under_a_default_device(plain: Path) -> None:
    with torch.device("meta"):
        state = torch_ckpt.load(path=plain)
    assert torch.equal(state["w"], VALUES)


def test_meta_targets_of_one_process(plain: Path) -> None:
    state = {"w": torch.empty(8, device="meta")}
    torch_ckpt.load(state, plain)
    assert torch.equal(state["w"], VALUES)


# --- mappings ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", [UserDict, ChainMap])
def test_every_mapping_is_staged_that_is_saved(tmp_path: Path, kind: type[Any]) -> None:
    weight = torch.ones(2, requires_grad=True) * torch.arange(2.0)  # no leaf: deepcopy refuses it
    state = kind({"w": weight, "sub": kind({"b": torch.ones(4)})})
    for path, given in (("a", {"model": state}), ("b", state)):
        future = torch_ckpt.async_save(given, tmp_path / path)
        future.result()
        assert future.stats.staged_bytes == 24
        torch_ckpt.save(given, tmp_path / "now")
        found = torch_ckpt.load(path=tmp_path / path)
        found = found.get("model", found)
        assert torch.equal(found["w"], weight) and torch.equal(found["sub"]["b"], torch.ones(4))
    with pytest.raises(InvalidArgumentError, match="w"):
        torch_ckpt.load({"w": torch.zeros(3)}, tmp_path / "b")


# --- one memory under two names ---------------------------------------------


def _plain(value: torch.Tensor) -> list[float]:
    return list((value.dequantize() if value.is_quantized else value + 0).tolist())


def _same_object(make: Callable[[torch.Tensor], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    one = make(codes())
    return one, one


def _one_inner(make: Callable[[torch.Tensor], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    inner = codes()
    return make(inner), make(inner)


def _quantized(inner: torch.Tensor) -> torch.Tensor:
    return torch.quantize_per_tensor(inner.float(), 0.5, 0, torch.qint8)


def _quantized_views() -> tuple[torch.Tensor, torch.Tensor]:
    one = _quantized(codes())
    return one, one.view(2, 4).view(8)


class Hidden(Coded):
    """It shows nothing of what it is made of."""

    def __init__(self, codes: torch.Tensor) -> None:
        self.inside = [codes]

    @property
    def codes(self) -> torch.Tensor:  # type: ignore[override]
        return self.inside[0]


def _coded(inner: torch.Tensor) -> torch.Tensor:
    return Coded(inner)


TWINS: dict[str, Callable[[], tuple[torch.Tensor, torch.Tensor]]] = {
    "object": lambda: _same_object(_coded),
    "hidden": lambda: _same_object(Hidden),
    "inner": lambda: _one_inner(_coded),
    "quantized": lambda: _same_object(_quantized),
    "quantized_views": _quantized_views,
}


@pytest.mark.filterwarnings("ignore:.*quantize:UserWarning")
@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize("kind", TWINS)
def test_the_last_name_of_a_tensor_with_its_own_copy_is_loaded(
    tmp_path: Path, kind: str, equal: bool
) -> None:
    stored = {"a": torch.full((8,), 1.5), "b": torch.full((8,), 1.5 if equal else 3.0)}
    torch_ckpt.save(stored, tmp_path / "c")
    a, b = TWINS[kind]()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch_ckpt.load({"a": a, "b": b}, tmp_path / "c")
    assert _plain(a) == _plain(b) == stored["b"].tolist()
    said = [str(each.message) for each in caught if "one memory" in str(each.message)]
    assert len(said) == (0 if equal else 1)
    assert equal or "'a' has the values of 'b'" in said[0]


@pytest.mark.parametrize("first", ["codes", "made"])
def test_a_tensor_and_what_it_is_made_of_are_loaded_in_order(tmp_path: Path, first: str) -> None:
    inner = codes()
    made = Coded(inner)
    names = {"made": "b" if first == "codes" else "a", "codes": "a" if first == "codes" else "b"}
    stored = {
        names["made"]: torch.full((8,), 1.5),
        names["codes"]: torch.full((8,), 7, dtype=torch.int8),
    }
    torch_ckpt.save(stored, tmp_path / "c")
    state = dict(sorted({names["made"]: made, names["codes"]: inner}.items()))
    with pytest.warns(UserWarning, match="'a' has the values of 'b': they are one memory"):
        torch_ckpt.load(state, tmp_path / "c")
    assert inner.tolist() == ([3] * 8 if first == "codes" else [7] * 8)


def test_a_part_of_what_it_is_made_of_is_an_error_before_anything_is_read(tmp_path: Path) -> None:
    inner = codes(16)
    stored = {"a": torch.zeros(8), "b": torch.zeros(8, dtype=torch.int8)}
    torch_ckpt.save(stored, tmp_path / "c")
    with pytest.raises(InvalidArgumentError, match="'b': its target shares a part of its mem.*'a'"):
        torch_ckpt.load({"a": Coded(inner[:8]), "b": inner[4:12]}, tmp_path / "c")
    assert inner.tolist() == list(range(16))


def test_a_table_that_tensors_share_and_no_load_changes_is_no_tie(tmp_path: Path) -> None:
    table = torch.arange(4.0)
    a, b = Coded(codes()), Coded(codes())
    a.table = b.table = table  # type: ignore[attr-defined]
    torch_ckpt.save({"a": torch.ones(8), "b": torch.zeros(8)}, tmp_path / "c")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch_ckpt.load({"a": a, "b": b}, tmp_path / "c")
    assert _plain(a) == [1.0] * 8 and _plain(b) == [0.0] * 8


@pytest.mark.parametrize("index", [slice(0, 8, 2), slice(0, 4)])
def test_an_expanded_out_is_named(tmp_path: Path, index: slice) -> None:
    torch_ckpt.save({"a": torch.arange(8.0)}, tmp_path / "c")
    with pytest.raises(InvalidArgumentError, match="tensor 'a': the target is expanded"):
        torch_ckpt.open(tmp_path / "c")["a"].read(index, out=torch.zeros(1).expand(4))
