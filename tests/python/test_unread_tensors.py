"""Tensors that are not read, in files of torch.save and of stock DCP: they are listed as tensors,
and never left out unasked; nothing else suffers."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import torch_ckpt
from torch_ckpt.checkpoint.checkpoint import Checkpoint
from torch_ckpt.cli import cli as main

pytestmark = pytest.mark.filterwarnings("ignore")


class Coded(torch.Tensor):
    """A wrapper subclass that is stored as codes of a quarter of its bytes, as torchao's are."""

    codes: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes: torch.Tensor) -> None:
        self.codes = codes

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return cls(args[0].codes)
        plain = torch.utils._pytree.tree_map(
            lambda x: x.codes / 2 if isinstance(x, cls) else x, args
        )
        return func(*plain, **(kwargs or {}))


def quantized() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(3, 2), 0.1, 0, torch.quint8)


# What is saved, and what is said of it.
KINDS: dict[str, tuple[Any, str, list[int], str]] = {
    "sparse": (lambda: torch.eye(3).to_sparse(), "F32", [3, 3], "sparse"),
    "csr": (lambda: torch.eye(3).to_sparse_csr(), "F32", [3, 3], "sparse"),
    "quantized": (quantized, "quint8", [3, 2], "quantized"),
    "complex128": (lambda: torch.ones(4, dtype=torch.complex128), "complex128", [4], "Complex"),
    "conj": (lambda: torch.ones(4, dtype=torch.complex64).conj(), "C64", [4], "conjugates"),
    "meta": (lambda: torch.empty(5, device="meta"), "F32", [5], "meta"),
    "subclass": (lambda: Coded(torch.ones(2, 4, dtype=torch.int8)), "F32", [2, 4], "Coded"),
    "parameter": (
        lambda: torch.nn.Parameter(torch.ones(4, dtype=torch.complex128)),
        "complex128",
        [4],
        "Complex",
    ),
}


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(main, list(arguments))
    return done.exit_code, done.output


def check_the_rest(path: Path, name: str, dtype: str, shape: list[int], reason: str) -> None:
    """`path` has the tensor `name` that is not read, and x = ones(2)."""
    opened = torch_ckpt.open(path)
    assert set(opened) == {name, "x"}
    assert opened["x"].read().tolist() == [1, 1]
    assert list(opened[name].shape) == shape
    for use in (lambda: opened[name].read(), lambda: opened[name].statistics()):
        with pytest.raises(torch_ckpt.UnsupportedError, match=rf"'{name}'.*{reason}"):
            use()
    info = {tensor.name: tensor for tensor in Checkpoint(path).describe().tensors}
    assert (info[name].dtype, list(info[name].shape)) == (dtype, shape)
    assert reason in str(info[name].unread) and info["x"].unread is None
    assert Checkpoint(path).verify().files == 1
    target = {"x": torch.zeros(2)}
    torch_ckpt.load(target, path)
    assert target["x"].tolist() == [1, 1]
    for load in (
        lambda: torch_ckpt.load({"x": torch.zeros(2), name: torch.zeros(shape)}, path),
        lambda: torch_ckpt.load(path=path),
    ):
        with pytest.raises(torch_ckpt.UnsupportedError, match=rf"'{name}'.*{reason}"):
            load()
    assert torch_ckpt.load(path=path, exclude=name)["x"].tolist() == [1, 1]
    status, output = run("ls", str(path))
    assert status == 0 and dtype in output and "not read" in output
    status, output = run("inspect", str(path), "--tree")
    assert status == 0 and f"cannot be read: {name}" in output
    status, output = run("diff", str(path), str(path))
    assert status == 4 and f"{name}" in output and "cannot be compared" in output


def check_conversions(path: Path, name: str, reason: str, out: Path) -> None:
    for objects in (True, False):
        for to in ("hf", "torch_ckpt", "dcp", "torch"):
            with pytest.raises(torch_ckpt.UnsupportedError) as caught:
                torch_ckpt.convert(path, out, to, objects=objects)
            said = str(caught.value)
            assert f"'{name}'" in said and reason in said and "exclude=" in said
            assert "objects=False" not in said
            assert not out.exists()
    status, output = run("convert", str(path), str(out), "--to", "hf", "--no-objects")
    assert status != 0 and name in output and "--exclude" in output
    torch_ckpt.convert(path, out, "hf", objects=False, exclude=name)
    assert set(torch_ckpt.open(out)) == {"x"}


@pytest.mark.parametrize("kind", list(KINDS))
def test_in_a_file_of_torch_save(kind: str, tmp_path: Path) -> None:
    make, dtype, shape, reason = KINDS[kind]
    torch.save({"w": make(), "x": torch.ones(2)}, tmp_path / "s.pt")
    check_the_rest(tmp_path / "s.pt", "w", dtype, shape, reason)
    check_conversions(tmp_path / "s.pt", "w", reason, tmp_path / "out")


def nested() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def with_attribute(tensor: torch.Tensor) -> torch.Tensor:
    tensor.tag = 1  # type: ignore[attr-defined]
    return tensor


WRAPPERS: dict[str, Any] = {
    "parameter": lambda tensor: torch.nn.Parameter(tensor, requires_grad=False),
    "buffer": torch.nn.Buffer,
    "attribute": with_attribute,
    "parameter_with_attribute": lambda tensor: with_attribute(
        torch.nn.Parameter(tensor, requires_grad=False)
    ),
}


@pytest.mark.parametrize("wrapper", list(WRAPPERS))
@pytest.mark.parametrize("kind", [*KINDS, "nested"])
def test_wrapped_in_a_file_of_torch_save(kind: str, wrapper: str, tmp_path: Path) -> None:
    """What stands around a tensor that is not read makes no damage of it."""
    make, dtype, shape, reason = KINDS.get(kind, (nested, "F32", [], "nested"))
    path = tmp_path / "s.pt"
    torch.save({"w": WRAPPERS[wrapper](make()), "l": [make()], "x": torch.ones(2)}, path)
    info = {tensor.name: tensor for tensor in Checkpoint(path).describe().tensors}
    assert (info["w"].dtype, list(info["w"].shape)) == (dtype, shape)
    assert reason in str(info["w"].unread) and info["x"].unread is None
    target = {"x": torch.zeros(2)}
    torch_ckpt.load(target, path)
    assert target["x"].tolist() == [1, 1]
    with pytest.raises(torch_ckpt.UnsupportedError, match=rf"'w'.*{reason}"):
        torch_ckpt.open(path)["w"].read()
    assert torch_ckpt.load(path=path, exclude=["w", "l.*"])["x"].tolist() == [1, 1]


def test_in_lists_of_a_file_of_torch_save(tmp_path: Path) -> None:
    state = {"l": [torch.eye(3).to_sparse(), torch.eye(2).to_sparse()], "x": torch.ones(2)}
    torch.save(state, tmp_path / "s.pt")
    assert set(torch_ckpt.open(tmp_path / "s.pt")) == {"l.0", "l.1", "x"}
    with pytest.raises(torch_ckpt.UnsupportedError, match="'l.0'"):
        torch_ckpt.convert(tmp_path / "s.pt", tmp_path / "out", "hf", objects=False)
    torch_ckpt.convert(tmp_path / "s.pt", tmp_path / "out", "hf", exclude="l.*")
    assert set(torch_ckpt.open(tmp_path / "out")) == {"x"}


class Holder:
    """An object that holds what it is told."""

    def __init__(self, held: Any) -> None:
        self.held = held


HIDDEN: dict[str, tuple[Any, str]] = {
    "tuple": (lambda: (1, torch.eye(3).to_sparse()), "sparse"),
    "deep": (lambda: {(1, 2): [({3: torch.ones(2, dtype=torch.complex128)},)]}, "Complex"),
    "object": (lambda: Holder([torch.ones(2)]), "Holder"),
}


@pytest.mark.parametrize("kind", list(HIDDEN))
def test_a_tensor_inside_of_what_is_none_is_not_dropped(kind: str, tmp_path: Path) -> None:
    make, reason = HIDDEN[kind]
    torch.save({"t": make(), "x": torch.ones(2), "o": Holder(3)}, tmp_path / "s.pt")
    with pytest.raises(torch_ckpt.UnsupportedError, match=rf"s\.pt: tensor 't': .*{reason}"):
        torch_ckpt.convert(tmp_path / "s.pt", tmp_path / "out", "hf", objects=False)
    with pytest.raises(torch_ckpt.UnsupportedError, match=rf"'t': .*{reason}.*exclude='t'"):
        torch_ckpt.convert(tmp_path / "s.pt", tmp_path / "out", "hf", exclude="o")
    torch_ckpt.convert(tmp_path / "s.pt", tmp_path / "out", "hf", objects=False, exclude="t")
    target = {"x": torch.zeros(2)}
    torch_ckpt.load(target, tmp_path / "s.pt")
    assert target["x"].tolist() == [1, 1] and set(torch_ckpt.open(tmp_path / "out")) == {"x"}


@pytest.mark.parametrize("source", ["torch", "ours"])
def test_a_tensor_that_is_read_in_a_tuple_is_not_dropped(source: str, tmp_path: Path) -> None:
    state = {"t": (1, {"a": torch.ones(3)}), "x": torch.ones(2), "n": {1, 2}}
    if source == "ours":
        torch_ckpt.save(state, tmp_path / "s")
    else:
        torch.save(state, tmp_path / "s")
    torch_ckpt.convert(tmp_path / "s", tmp_path / "all", "hf")
    assert torch_ckpt.load(path=tmp_path / "all")["t"][1]["a"].tolist() == [1, 1, 1]
    with pytest.raises(torch_ckpt.UnsupportedError, match="'t': .*drop; exclude='t'"):
        torch_ckpt.convert(tmp_path / "s", tmp_path / "out", "hf", objects=False)
    torch_ckpt.convert(tmp_path / "s", tmp_path / "out", "hf", objects=False, exclude="t")
    assert set(torch_ckpt.open(tmp_path / "out")) == {"x"}


def test_a_type_that_is_not_read_is_said_once(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2, dtype=torch.complex128)}, tmp_path / "s.pt")
    with pytest.raises(torch_ckpt.UnsupportedError) as caught:
        torch_ckpt.open(tmp_path / "s.pt")["w"].read()
    assert str(caught.value).count("not read") == 1
    with pytest.raises(torch_ckpt.UnsupportedError, match=r"s\.pt: tensor 'w'"):
        torch_ckpt.convert(tmp_path / "s.pt", tmp_path / "out", "hf")


def test_a_nested_tensor_says_no_shape(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    torch.save({"w": nested, "x": torch.ones(2)}, tmp_path / "s.pt")
    info = {tensor.name: tensor for tensor in Checkpoint(tmp_path / "s.pt").describe().tensors}
    assert (info["w"].dtype, info["w"].shape) == ("F32", ()) and "nested" in str(info["w"].unread)
    assert run("inspect", "--tensors", str(tmp_path / "s.pt"))[0] == 0


def test_in_the_weights_of_the_hub(tmp_path: Path) -> None:
    torch.save({"w": torch.eye(3).to_sparse(), "x": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    check_the_rest(tmp_path, "w", "F32", [3, 3], "sparse")


def stock_save(state: Any, path: Path) -> None:
    dcp.save(state, storage_writer=dcp.FileSystemWriter(str(path)))


DCP_KINDS = {
    "complex128": (
        lambda: torch.ones(4, dtype=torch.complex128),
        "complex128",
        [4],
        "complex128",
    ),
    # Its archive is smaller than its elements would be.
    "large": (
        lambda: Coded(torch.ones(64, 256, dtype=torch.int8)),
        "F32",
        [64, 256],
        "something else",
    ),
    "small": (lambda: Coded(torch.ones(2, 4, dtype=torch.int8)), "F32", [2, 4], "no plain tensor"),
}


@pytest.mark.parametrize("kind", list(DCP_KINDS))
def test_in_distcp_files(kind: str, tmp_path: Path) -> None:
    make, dtype, shape, reason = DCP_KINDS[kind]
    path = tmp_path / "c"
    stock_save({"w": make(), "x": torch.ones(2)}, path)
    opened = torch_ckpt.open(path)
    assert set(opened) == {"w", "x"} and opened["x"].read().tolist() == [1, 1]
    with pytest.raises(torch_ckpt.UnsupportedError, match=rf"'w'.*{reason}"):
        opened["w"].read()
    info = {tensor.name: tensor for tensor in Checkpoint(path).describe().tensors}
    assert (info["w"].dtype, list(info["w"].shape)) == (dtype, shape)
    assert reason in str(info["w"].unread)
    assert Checkpoint(path).verify().files >= 1
    target = {"x": torch.zeros(2)}
    torch_ckpt.load(target, path)
    assert target["x"].tolist() == [1, 1]
    with pytest.raises(torch_ckpt.UnsupportedError, match="'w'"):
        torch_ckpt.load({"w": torch.zeros(shape)}, path)
    assert run("ls", str(path))[0] == run("inspect", str(path), "--tensors")[0] == 0
    check_conversions(path, "w", reason, tmp_path / "out")


def test_what_a_stock_planner_packed_is_read_inert(tmp_path: Path) -> None:
    class PacksItself(DefaultSavePlanner):
        def resolve_data(self, item: Any) -> Any:
            data = super().resolve_data(item)
            if item.index.fqn == "note":
                data = io.BytesIO()
                torch.save({"a": [1, 2.5], "b": "x", "t": torch.arange(3)}, data)
            return data

    state = {"w": torch.ones(3), "note": "any"}
    torch_ckpt.save(state, tmp_path / "c", planner=PacksItself())
    target: dict[str, Any] = {"w": torch.zeros(3), "note": None}
    torch_ckpt.load(target, tmp_path / "c")
    assert target["note"]["a"] == [1, 2.5] and target["note"]["t"].tolist() == [0, 1, 2]
    found = torch_ckpt.open(tmp_path / "c").objects["note"]
    assert found["b"] == "x" and found["t"].tolist() == [0, 1, 2]


class Runs:
    def __reduce__(self) -> Any:
        return (print, ("run",))


def test_a_packed_pickle_that_would_run_code_is_refused(tmp_path: Path, capfd: Any) -> None:
    class PacksItself(DefaultSavePlanner):
        def resolve_data(self, item: Any) -> Any:
            data = super().resolve_data(item)
            if item.index.fqn == "note":
                data = io.BytesIO()
                torch.save({"a": Runs()}, data)
            return data

    torch_ckpt.save({"w": torch.ones(3), "note": "x"}, tmp_path / "c", planner=PacksItself())
    with pytest.raises(torch_ckpt.UnsupportedError, match=r"'note'.*print"):
        torch_ckpt.load({"w": torch.zeros(3), "note": None}, tmp_path / "c")
    assert "run" not in capfd.readouterr().out
