"""torch_ckpt.open: a checkpoint of any format as a mapping of its tensors."""

from __future__ import annotations

import pickle
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from foreign_samples import DTYPES, Payload, same
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import torch_ckpt
from torch_ckpt.native import operators

STATE = {
    "w": torch.arange(60.0).view(3, 4, 5),
    "t": torch.arange(20).view(4, 5).t(),
    "half": torch.randn(7).bfloat16(),
    "scalar": torch.tensor(3.0),
    "empty": torch.empty(0, 3),
    "fp4": torch.arange(8, dtype=torch.uint8).view(torch.float4_e2m1fn_x2).view(2, 4),
}
LEAVES = {"step": 7, "betas": (0.9, 0.99), "name": "größe"}


def ours(path: Path) -> Path:
    torch_ckpt.save({**STATE, **LEAVES}, path)
    return path


def final(path: Path) -> Path:
    torch_ckpt.save({**STATE, **LEAVES}, path, layout="final")
    return path


def stock(path: Path) -> Path:
    dcp.save({**STATE, **LEAVES}, storage_writer=dcp.FileSystemWriter(path))
    return path


def torch_file(path: Path) -> Path:
    torch.save({**STATE, **LEAVES}, path)
    return path


def bare(path: Path) -> Path:
    path.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in STATE.items()}, path / "a.safetensors")
    return path


FORMATS = {
    "torch_ckpt": (ours, "torch_ckpt"),
    "final": (final, "hf"),
    "dcp": (stock, "dcp"),
    "torch": (torch_file, "torch"),
    "hf": (bare, "hf"),
}


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_is_a_mapping(tmp_path: Path, kind: str) -> None:
    make, word = FORMATS[kind]
    checkpoint = torch_ckpt.open(make(tmp_path / "c"))
    assert checkpoint.format == word
    assert sorted(checkpoint) == sorted(STATE) and len(checkpoint) == len(STATE)
    assert "w" in checkpoint and "step" not in checkpoint and "nothing" not in checkpoint
    for name, tensor in STATE.items():
        stored = checkpoint[name]
        assert (stored.shape, stored.dtype, stored.name) == (tensor.shape, tensor.dtype, name)
        assert stored.nbytes == tensor.nbytes
        assert same(stored[...], tensor)
    assert same(checkpoint["fp4"][1, 1:3], STATE["fp4"][1, 1:3])
    with pytest.raises(KeyError):
        checkpoint["nothing"]
    assert dict(checkpoint.objects) == ({} if kind == "hf" else LEAVES)
    with pytest.raises(KeyError):
        checkpoint.objects["w"]


@pytest.mark.parametrize("kind", FORMATS)
def test_stock_load_reads_every_format(tmp_path: Path, kind: str) -> None:
    path = FORMATS[kind][0](tmp_path / "c")
    target = {name: torch.zeros_like(STATE[name]) for name in ("w", "t")}
    dcp.load(target, storage_reader=torch_ckpt.CheckpointReader(path))
    assert same(target, {name: STATE[name] for name in target})


@st.composite
def tensors_and_indices(draw: st.DrawFn) -> tuple[torch.Tensor, Any]:
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    count = torch.Size(shape).numel()
    dtype = draw(st.sampled_from(DTYPES))
    bounds = st.none() | st.integers(-7, 7)
    slices = st.builds(slice, bounds, bounds, st.none() | st.integers(1, 3))
    parts: list[Any] = [
        draw(slices | st.integers(-size, size - 1) if size else slices) for size in shape
    ]
    parts = parts[: draw(st.integers(0, len(parts)))]
    if len(parts) < len(shape) and draw(st.booleans()):
        parts.append(...)
    whole = parts[0] if len(parts) == 1 and draw(st.booleans()) else tuple(parts)
    return torch.arange(count).remainder(2).to(dtype).view(shape), whole


@settings(max_examples=150)
@given(case=tensors_and_indices())
def test_an_index_is_torchs_own(tmp_path_factory: Any, case: tuple[torch.Tensor, Any]) -> None:
    tensor, index = case
    path = tmp_path_factory.mktemp("open") / "a.pt"
    torch.save({"x": tensor}, path)
    stored = torch_ckpt.open(path)["x"]
    wanted = tensor[index]
    assert same(stored[index], wanted)
    reverse = list(range(wanted.dim()))[::-1]
    out = torch.empty(wanted.shape[::-1], dtype=wanted.dtype).permute(reverse)
    assert stored.read(index, out=out) is out
    assert same(out, wanted)


def test_a_slice_reads_its_own_bytes_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"w": torch.arange(1 << 22).view(4096, 1024)}, tmp_path / "a.safetensors")
    told: list[dict[str, int]] = []
    read = operators.read

    def spy(*arguments: Any) -> dict[str, int]:
        told.append(read(*arguments))
        return told[-1]

    monkeypatch.setattr(operators, "read", spy)
    stored = torch_ckpt.open(tmp_path)["w"]
    assert torch.equal(stored[3:5, 7], torch.tensor([3 * 1024 + 7, 4 * 1024 + 7]))
    assert [each["bytes_needed"] for each in told] == [16]
    assert told[0]["bytes_read"] < 32 << 10


@pytest.mark.parametrize(
    ("index", "error"),
    [
        (5, IndexError),
        ((0, 0, 0, 0), IndexError),
        ((..., ...), IndexError),
        (slice(None, None, -1), ValueError),
        (None, TypeError),
        (True, TypeError),
        ([0], TypeError),
        (torch.tensor(1), TypeError),
    ],
)
def test_what_is_no_index(tmp_path: Path, index: Any, error: type[Exception]) -> None:
    stored = torch_ckpt.open(torch_file(tmp_path / "a.pt"))["w"]
    with pytest.raises(error):
        stored[index]


def test_into_tensors_of_other_dtypes_and_shapes(tmp_path: Path) -> None:
    stored = torch_ckpt.open(ours(tmp_path / "c"))["w"]
    out = torch.zeros(3, 5, dtype=torch.float64)
    stored.read((slice(None), 1), out=out)
    assert torch.equal(out, STATE["w"][:, 1].double())
    stored.read((slice(None), 1, slice(None, None, 2)), out=out[:, :3])
    assert torch.equal(out[:, :3], STATE["w"][:, 1, ::2].double())
    with pytest.raises(torch_ckpt.InvalidArgumentError, match="'w'.*out has shape"):
        stored.read(out=out)
    with pytest.raises(torch_ckpt.InvalidArgumentError, match="'w'"):
        stored.read(out=torch.zeros(3, 4, 5, dtype=torch.float8_e8m0fnu))  # 0 is no value of it


@pytest.mark.parametrize("kind", FORMATS)
def test_mapped_tensors(tmp_path: Path, kind: str) -> None:
    path = FORMATS[kind][0](tmp_path / "c")
    checkpoint = torch_ckpt.open(path)
    for name, tensor in STATE.items():
        try:
            mapped = checkpoint[name].mmap()
        except torch_ckpt.UnsupportedError as error:
            assert "cannot be mapped" in str(error) and name in str(error)
            assert kind == "dcp"  # a header of stock's may move what follows
            continue
        assert same(mapped, tensor)
        if mapped.numel() and mapped.dtype.is_floating_point and mapped.dtype.itemsize > 1:
            mapped.zero_()  # in this process alone
            assert same(checkpoint[name][...], tensor)


def test_a_file_that_was_replaced_is_not_mapped(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({"a": torch.zeros(1000), "b": torch.arange(1000.0)}, path)
    stored = torch_ckpt.open(path)["a"]
    torch.save({"b": torch.arange(1000.0), "a": torch.zeros(1000)}, path)  # of the same size
    with pytest.raises(torch_ckpt.ConflictError):
        stored.mmap()
    stored = torch_ckpt.open(path)["a"]
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(torch_ckpt.CheckpointError):
        stored.mmap()


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (torch.tensor([1e30, 1.0]), torch.float16),
        (torch.tensor([1j, 1.0]), torch.float32),
        (torch.tensor([300, 1]), torch.int8),
    ],
)
def test_steps_change_nothing_about_casts(
    tmp_path: Path, value: torch.Tensor, dtype: torch.dtype
) -> None:
    torch.save({"w": value}, tmp_path / "a.pt")
    stored = torch_ckpt.open(tmp_path / "a.pt")["w"]
    for index in (slice(None), slice(None, None, 2)):
        with pytest.raises(torch_ckpt.CheckpointError, match="'w'"):
            stored.read(index, out=torch.zeros_like(value[index], dtype=dtype))


def test_the_dtype_of_out_is_the_callers_and_warned_of_nowhere(tmp_path: Path) -> None:
    torch.save({"w": torch.rand(4)}, tmp_path / "a.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch_ckpt.open(tmp_path / "a.pt")["w"].read(out=torch.zeros(4, dtype=torch.bfloat16))


def test_codes_beside_a_scale_are_cast_with_it(tmp_path: Path) -> None:
    what = {"w": torch.ones(3).to(torch.float8_e4m3fn), "w_scale_inv": torch.full((1,), 2.0)}
    torch.save(what, tmp_path / "a.pt")
    out = torch.zeros(3)
    torch_ckpt.open(tmp_path / "a.pt")["w"].read(out=out)
    assert out.eq(2).all()


def test_iteration_is_over_the_first_dimension(tmp_path: Path) -> None:
    checkpoint = torch_ckpt.open(ours(tmp_path / "c"))
    assert same(list(checkpoint["w"]), list(STATE["w"]))
    with pytest.raises(TypeError):
        iter(checkpoint["scalar"])


def test_threads_see_one_look(tmp_path: Path) -> None:
    checkpoint = torch_ckpt.Checkpoint(ours(tmp_path / "c"))
    with ThreadPoolExecutor(8) as pool:
        looks = set(pool.map(lambda _: checkpoint._looked(), range(32)))
    assert len(looks) == 1


def test_a_tensor_in_pieces_is_not_mapped(tmp_path: Path) -> None:
    data = STATE["w"].contiguous()
    for half in range(2):
        info = f'{{"w": {{"saved_offsets": [{2 * half}, 0, 0]}}}}'
        part = data[2 * half : 2 * half + 2].contiguous()
        save_file(
            {"w": part},
            tmp_path / f"shard-0000{half + 1}-model-00001-of-00001.safetensors",
            metadata={"DCP_SHARDING_INFO": info},
        )
    checkpoint = torch_ckpt.open(tmp_path)
    assert checkpoint.topology.world_size == 2
    assert same(checkpoint["w"][1:3], STATE["w"][1:3])
    with pytest.raises(torch_ckpt.UnsupportedError, match="2 pieces"):
        checkpoint["w"].mmap()


def test_who_wrote_it(tmp_path: Path) -> None:
    topology = torch_ckpt.open(ours(tmp_path / "a")).topology
    assert topology.world_size == 1
    assert set(topology.ranks.values()) == {0}
    topology = torch_ckpt.open(stock(tmp_path / "b")).topology
    assert (topology.world_size, dict(topology.ranks)) == (1, {"__0_0.distcp": 0})
    topology = torch_ckpt.open(torch_file(tmp_path / "c.pt")).topology
    assert (topology.world_size, topology.ranks) == (None, {})


def test_the_format_can_be_said(tmp_path: Path) -> None:
    path = stock(tmp_path / "c")
    save_file({"other": torch.ones(1)}, path / "model.safetensors")
    torch.save({"third": torch.ones(1)}, path / "pytorch_model.bin")
    with pytest.raises(torch_ckpt.ConflictError, match="say which format"):
        torch_ckpt.open(path)
    assert set(torch_ckpt.open(path, format="dcp")) == set(STATE)
    assert list(torch_ckpt.open(path, format="hf")) == ["other"]
    assert list(torch_ckpt.open(path, format="torch")) == ["third"]
    with pytest.raises(torch_ckpt.IncompleteError, match=r"no torch_ckpt\.json"):
        torch_ckpt.open(path, format="torch_ckpt")
    with pytest.raises(
        torch_ckpt.InvalidArgumentError, match="torch_ckpt, hf, megatron, dcp, torch"
    ):
        torch_ckpt.open(path, format="zip")
    target = {"other": torch.zeros(1)}
    reader = torch_ckpt.CheckpointReader(path, format="hf")
    torch_ckpt.load(target, storage_reader=reader)
    assert target["other"] == 1
    # Of ours the files can be read by their headers too.
    path = ours(tmp_path / "ours")
    assert set(torch_ckpt.open(path, format="hf")) == set(STATE)
    assert set(torch_ckpt.Checkpoint(path, format="hf").dtypes()) == set(STATE)
    with pytest.raises(torch_ckpt.IncompleteError, match="no checkpoint of the format dcp"):
        torch_ckpt.open(path, format="dcp")
    # Whole files of ours keep their digests and leaves.
    whole = torch_ckpt.open(final(tmp_path / "whole"))
    again = torch_ckpt.open(whole.path, format=whole.format)
    assert dict(again.objects) == LEAVES
    torch_ckpt.Checkpoint(whole.path, format="hf").verify()


@pytest.mark.parametrize("word", ["torch_ckpt", "hf", "dcp"])
def test_a_file_is_of_its_own_format(tmp_path: Path, word: str) -> None:
    path = torch_file(tmp_path / "a.pt")
    assert torch_ckpt.open(path, format="torch").format == "torch"
    with pytest.raises(torch_ckpt.IncompleteError, match=rf"a\.pt.*format {word}"):
        torch_ckpt.open(path, format=word)


def test_a_checkpoint_that_is_replaced_is_an_error_and_not_a_mixture(tmp_path: Path) -> None:
    path = ours(tmp_path / "c")
    checkpoint = torch_ckpt.open(path)
    first = checkpoint["w"]
    torch_ckpt.save({"w": torch.zeros(3, 4, 5), **LEAVES}, path)
    with pytest.raises(torch_ckpt.ConflictError):
        first[...]
    assert torch_ckpt.open(path)["w"][...].sum() == 0


def test_a_leaf_of_some_class_is_named_and_not_made(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    torch.save({"w": torch.ones(1), "evil": Payload(marker), "step": 1}, tmp_path / "a.pt")
    checkpoint = torch_ckpt.open(tmp_path / "a.pt")
    assert checkpoint.objects["step"] == 1
    with pytest.raises(torch_ckpt.UnsupportedError, match=r"'evil'.*posix\.system"):
        checkpoint.objects["evil"]
    assert not marker.exists()


def test_it_is_an_object_of_its_own(tmp_path: Path) -> None:
    path = ours(tmp_path / "c")
    checkpoint, other = torch_ckpt.open(path), torch_ckpt.open(path)
    assert checkpoint == checkpoint and checkpoint != other and len({checkpoint, other}) == 2
    assert bool(torch_ckpt.Checkpoint(tmp_path / "nothing"))
    again = pickle.loads(pickle.dumps(checkpoint))
    assert same(again["w"][0], STATE["w"][0])
    with pytest.raises(torch_ckpt.IncompleteError):
        torch_ckpt.open(tmp_path / "nothing")


def test_names_need_no_torch(tmp_path: Path) -> None:
    path = torch_file(tmp_path / "a.pt")
    program = (
        "import sys, torch_ckpt\n"
        f"c = torch_ckpt.open({str(path)!r})\n"
        "assert 'w' in c and c.format == 'torch' and c.topology.world_size is None\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
