"""What is saved from and loaded into a device is what is saved from and loaded into host memory.

Each test runs on both; those of the CUDA device skip where there is none.
"""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from odd_tensors import ODD, Coded, codes
from sample_states import FAILED
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

import torch_ckpt
from torch_ckpt import HuggingFaceStorageReader, HuggingFaceStorageWriter, PinnedMemoryStager

State = dict[str, Any]
NO_DEVICE = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
BLOCKING = StagingOptions(
    use_pinned_memory=False,
    use_shared_memory=False,
    use_async_staging=False,
    use_non_blocking_copy=False,
)
SAVES: dict[str, Callable[[State, Path], Any]] = {
    "sharded": torch_ckpt.save,
    "final": lambda state, path: torch_ckpt.save(state, path, layout="final"),
    "async": lambda state, path: torch_ckpt.async_save(state, path).result(),
    "async final": lambda state, path: torch_ckpt.async_save(state, path, layout="final").result(),
    "stock's planner": lambda state, path: dcp.save(
        state, storage_writer=HuggingFaceStorageWriter(path, layout="sharded"), no_dist=True
    ),
}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=NO_DEVICE)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def loaded(state: State, path: Path) -> list[str]:
    """What a load warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch_ckpt.load(dict(state), path)
    return [str(each.message) for each in caught]


def pieces_of_one_storage(device: str, count: int) -> dict[str, torch.Tensor]:
    """Neighbours, gaps, odd starts, strides, repeats, in one allocation and of all widths."""
    base = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8).to(device)
    generator = torch.Generator().manual_seed(count)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    state, at = {}, 0
    for i in range(count):
        size = number(1, 700)
        at = (at + number(0, 2) * number(1, 70)) % ((1 << 20) - 1000)
        state[f"t{i}"] = base[at : at + size]
        at += size
        if i % 50 == 0:
            start = at - at % 8
            wide = base[start : start + 64].view(torch.float64)
            state[f"wide{i}"] = wide.nan_to_num_(7.0)
            state[f"steps{i}"] = base[at : at + 99 : 3]
            state[f"turned{i}"] = base[at : at + 96].view(8, 12).t()
            state[f"repeats{i}"] = base[at : at + 5].expand(4, 5)
            state[f"unfolded{i}"] = base[at : at + 40].unfold(0, 8, 2)
    return state


@pytest.mark.parametrize("save", SAVES)
def test_thousands_of_pieces_of_one_allocation(tmp_path: Path, device: str, save: str) -> None:
    state = pieces_of_one_storage(device, 3000)
    wanted = {name: value.cpu().clone() for name, value in state.items()}
    SAVES[save](state, tmp_path / "c")
    found = torch_ckpt.load(path=tmp_path / "c")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    into = {name: torch.zeros_like(value, device=device) for name, value in wanted.items()}
    assert loaded(into, tmp_path / "c") == []
    assert all(torch.equal(into[name].cpu(), value) for name, value in wanted.items())


@pytest.mark.parametrize("own", [True, False], ids=["async_save", "the stager"])
def test_what_training_does_next_is_not_in_the_save(tmp_path: Path, device: str, own: bool) -> None:
    """The tensors change as soon as they may, by kernels that are queued while the file is made."""
    state = {f"t{i}": torch.zeros(1 << 18, device=device) for i in range(24)}
    stager = None if own else PinnedMemoryStager(BLOCKING)
    pending = []
    for step in range(6):
        for value in state.values():
            value.fill_(step)
        handle = torch_ckpt.async_save(state, tmp_path / f"{step}", async_stager=stager)
        pending.append(handle)
        for value in state.values():
            value.mul_(3).add_(100)
    for step, handle in enumerate(pending):
        handle.result()
        found = torch_ckpt.load(path=tmp_path / f"{step}")
        assert all(bool((value == step).all()) for value in found.values()), step
    if stager is not None:
        stager.close()


@pytest.mark.parametrize("kind", ["pinned", "shared"])
def test_stocks_stagers_feed_our_writer(tmp_path: Path, device: str, kind: str, group: Any) -> None:
    gpu = device == "cuda"
    options = StagingOptions(
        use_pinned_memory=gpu and kind == "pinned",
        use_shared_memory=kind == "shared",
        use_async_staging=gpu,
        use_non_blocking_copy=gpu,
    )
    x = torch.zeros(300, 500, device=device)
    for step in range(3):
        stager = DefaultStager(options)  # torch 2.11 ends it with the save
        writer = HuggingFaceStorageWriter(tmp_path / f"{step}", save_distributed=True)
        handle = dcp.async_save({"x": x.fill_(step)}, storage_writer=writer, async_stager=stager)
        if hasattr(handle, "staging_completion"):
            handle.staging_completion.result()
        x.fill_(-1)
        getattr(handle, "upload_completion", handle).result()
        assert bool((torch_ckpt.load(path=tmp_path / f"{step}")["x"] == step).all())
        stager.close()


def test_one_memory_by_two_names(tmp_path: Path, device: str) -> None:
    one, other = torch.randn(40, 50), torch.randn(40, 50)
    torch_ckpt.save({"a": one.to(device), "b": one.to(device)}, tmp_path / "same")
    torch_ckpt.save({"a": one.to(device), "b": other.to(device)}, tmp_path / "differ")
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for target in (
            torch.zeros(40, 50, dtype=dtype, device=device),
            torch.zeros(50, 80, dtype=dtype, device=device).t()[::2],
        ):
            tied = {"a": target, "b": target}
            assert [text for text in loaded(tied, tmp_path / "same") if "one memory" in text] == []
            assert torch.equal(target.cpu(), one.to(dtype))
            (said,) = (t for t in loaded(tied, tmp_path / "differ") if "one memory" in t)
            assert "'a' has the values of 'b'" in said
            assert torch.equal(target.cpu(), other.to(dtype))


def test_a_part_in_common_is_an_error(tmp_path: Path, device: str) -> None:
    torch_ckpt.save({"a": torch.ones(4, 8), "b": torch.ones(4, 8)}, tmp_path / "c")
    base = torch.zeros(8, 8, device=device)
    with pytest.raises(torch_ckpt.InvalidArgumentError, match="shares a part of its memory"):
        torch_ckpt.load({"a": base[:4], "b": base[1:5]}, tmp_path / "c")
    assert not bool(base.any())


NOT_ON_DEVICES = {
    *("_mkldnn", "qint8"),  # torch has none on CUDA devices
    *("an UninitializedParameter", "an UninitializedBuffer", "on the meta device"),
    *("a fake tensor", "odd_tensors.Coded"),  # no device of theirs is CUDA, or another test
}


@pytest.mark.parametrize("save", [name for name in SAVES if name != "stock's planner"])
@pytest.mark.parametrize("kind", sorted(ODD.keys() - NOT_ON_DEVICES))
def test_what_is_not_plain_is_refused_by_name(
    tmp_path: Path, device: str, kind: str, save: str
) -> None:
    value = ODD[kind]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        value = value.to(device)
    with pytest.raises(FAILED, match=r"(?s)tensor 'w': is .*" + kind):
        SAVES[save]({"w": value, "x": torch.ones(3, device=device)}, tmp_path / "c")
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("save", SAVES)
def test_conjugated_and_negated_views(tmp_path: Path, device: str, save: str) -> None:
    base = torch.randn(30, 20, dtype=torch.complex64, device=device)
    state = {"conj": base.conj(), "neg": base.conj().imag, "both": base.conj()[::2].t()}
    SAVES[save](state, tmp_path / "c")
    found = torch_ckpt.load(path=tmp_path / "c")
    for name, value in state.items():
        assert torch.equal(found[name], value.cpu().resolve_conj().resolve_neg()), name


def test_a_wrapper_is_filled_by_its_own_copy(tmp_path: Path, device: str) -> None:
    torch_ckpt.save({"w": torch.arange(8, device=device) / 2}, tmp_path / "c")
    target = Coded(codes().zero_().to(device))
    torch_ckpt.load({"w": target}, tmp_path / "c")
    assert target.codes.tolist() == list(range(8))
    with pytest.raises(torch_ckpt.UnsupportedError, match="tensor 'w'"):
        torch_ckpt.save({"w": target}, tmp_path / "no")
    assert not (tmp_path / "no").exists()


def test_modules_with_tied_weights_and_inference_mode(tmp_path: Path, device: str) -> None:
    def make() -> torch.nn.Module:
        model = torch.nn.Sequential(torch.nn.Embedding(70, 33), torch.nn.Linear(33, 70))
        model[1].weight = model[0].weight
        return model.to(device)

    model, other = make(), make()
    with torch.inference_mode():
        torch_ckpt.save(model.state_dict(), tmp_path / "c")
    assert loaded(other.state_dict(), tmp_path / "c") == []
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name


MAKERS = """
import sys
import torch, torch_ckpt
device, path = sys.argv[1:]
base = torch.randn(1 << 20, device=device)
state = {f"t{i}": torch.randn(100 + i, device=device) for i in range(3000)}
state |= {f"large{i}": torch.randn(3 << 20, device=device) for i in range(4)}
state |= {f"part{i}": base[i * 777 : i * 777 + 700] for i in range(1000)}
wanted = {name: value.cpu().clone() for name, value in state.items()}
torch_ckpt.save(state, path + "/saved")
torch_ckpt.async_save(state, path + "/async").result()
torch_ckpt.save(state, path + "/final", layout="final")
for name in ("saved", "async", "final"):
    into = {name: torch.zeros_like(value) for name, value in state.items()}
    torch_ckpt.load(into, path + "/" + name)
    assert all(torch.equal(into[n].cpu(), wanted[n]) for n in wanted), name
"""


@pytest.mark.parametrize("allocator", ["", "expandable_segments:True", "backend:cudaMallocAsync"])
def test_allocators(tmp_path: Path, device: str, allocator: str) -> None:
    """The memory of a tensor may be mapped piece by piece, or come from a pool of the driver."""
    package = str(Path(torch_ckpt.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", MAKERS, device, str(tmp_path)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([package, os.environ.get("PYTHONPATH", "")]),
            "PYTORCH_CUDA_ALLOC_CONF": allocator,
        },
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("backend", ["gloo", pytest.param("nccl", marks=NO_DEVICE)])
def test_groups_of_one_backend(tmp_path: Path, device: str, backend: str) -> None:
    """Trainers often have NCCL alone, which moves nothing of the host."""
    if backend == "nccl":
        torch.cuda.set_device(0)
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        state = {"x": torch.randn(50, 60, device=device), "step": 3}
        torch_ckpt.save(state, tmp_path / "saved")
        torch_ckpt.save(state, tmp_path / "final", layout="final")
        torch_ckpt.async_save(state, tmp_path / "async").result()
        for name in ("saved", "final", "async"):
            into = {"x": torch.zeros(50, 60, device=device), "step": 0}
            torch_ckpt.load(into, tmp_path / name)
            assert torch.equal(into["x"], state["x"]), name
            assert into["step"] == 3
        stock = tmp_path / "stock"
        dcp.save(state, storage_writer=HuggingFaceStorageWriter(stock, save_distributed=True))
        into = {"x": torch.zeros(50, 60, device=device), "step": 0}
        dcp.load(into, storage_reader=HuggingFaceStorageReader(str(stock)))
        assert torch.equal(into["x"], state["x"]) and into["step"] == 3
    finally:
        dist.destroy_process_group()


PROCESS = """
import sys
import torch, torch.distributed as dist, torch_ckpt
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

def main():
    device, path = sys.argv[1:]
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    x = torch.zeros(3 << 20, device=device)
    for step in range(3):
        x.fill_(step)
        done = torch_ckpt.async_save(
            {"x": x, "y": x[5:9]}, f"{path}/{step}",
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )
        x.fill_(-1)
        getattr(done, "upload_completion", done).result()
        found = torch_ckpt.load(path=f"{path}/{step}")
        assert bool((found["x"] == step).all()) and bool((found["y"] == step).all()), step
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
"""


def test_another_process_saves(tmp_path: Path, device: str) -> None:
    (tmp_path / "script.py").write_text(PROCESS)
    package = str(Path(torch_ckpt.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", tmp_path / "script.py", device, str(tmp_path)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([package, os.environ.get("PYTHONPATH", "")]),
            "MASTER_ADDR": "127.0.0.1",
        },
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@NO_DEVICE
def test_a_save_while_a_graph_is_captured_is_an_error(tmp_path: Path) -> None:
    """What a graph will compute is not there yet."""
    x, y = torch.zeros(1 << 16, device="cuda"), torch.zeros(1 << 16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with pytest.raises(Exception, match=r"(?i)captur|CUDA"):  # torch's or ours, but an error
        with torch.cuda.graph(graph):
            y.copy_(x)
            torch_ckpt.save({"y": y}, tmp_path / "c")
    assert not (tmp_path / "c").exists()
