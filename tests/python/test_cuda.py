"""CUDA tensors: saved piece by piece without a copy of the state, loaded through pinned memory.

Most need a GPU. What does not, the copies themselves, is tested over a driver made for tests in
tests/cpp: runtime_cuda_driver_test.cc, runtime_cuda_copy_test.cc and engine_cuda_test.cc.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import torch_ckpt
import torch_ckpt.native.operators
from torch_ckpt.dcp.write import write_files
from torch_ckpt.staging.sources import in_memory_order
from torch_ckpt.staging.staged_state import StateCopy

State = dict[str, torch.Tensor]
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
WRITERS = {"final": {}, "sharded": {"save_distributed": True}}


def save(state: State, path: Path, **options: object) -> None:
    to = torch_ckpt.HuggingFaceStorageWriter(str(path), **options)  # type: ignore[arg-type]
    dcp.save(state, storage_writer=to, no_dist=True)


def load(state: State, path: Path) -> None:
    dcp.load(state, storage_reader=torch_ckpt.HuggingFaceStorageReader(str(path)), no_dist=True)


def assert_same(found: State, expected: State) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name].cpu(), tensor.cpu()), name


def mixed_state(device: str) -> State:
    """Contiguous and not, views, tied, empty, of several dtypes, one on the CPU."""
    base = torch.randn(64, 96, device=device)
    return {
        "contiguous": base,
        "tied": base,
        "transposed": base.t(),
        "columns": base[:, 10:50],
        "rows": base[7:21],
        "every_third": base.view(-1)[::3],
        "expanded": base[:1].expand(5, 96),
        "half": torch.randn(1000, 33, device=device).bfloat16(),
        "large": torch.randint(-9, 9, (3 << 20,), dtype=torch.int64, device=device),
        "odd": torch.arange(7, dtype=torch.uint8, device=device),
        "flags": torch.tensor([True, False, True], device=device),
        "conjugated": torch.randn(20, 4, dtype=torch.complex64, device=device).conj(),
        "scalar": torch.tensor(2.5, device=device),
        "empty": torch.empty(0, 4, device=device),
        "on_host": torch.randn(11),
    }


def test_the_kernel_of_the_cuda_key_is_that_of_the_cpu(tmp_path: Path) -> None:
    x, report = torch.arange(12.0).reshape(3, 4), torch_ckpt.native.operators.new_report()
    file = {"name": "model.safetensors", "role": "data", "names": ["x"], "dtypes": ["F32"]}
    plan = {"staging": str(tmp_path), "files": [{**file, "first_source": 0}]}
    blob = torch_ckpt.native.operators.plan_tensor(plan)
    torch.ops.dcp_ext.write.default._op_dk(torch._C.DispatchKey.CUDA, [x], blob, report)
    (written,) = tmp_path.iterdir()
    assert report[0] == 1 and torch.equal(load_file(written)["x"], x)
    blob = torch_ckpt.plan(tmp_path / "c", ["x"])
    torch.ops.dcp_ext.save.default._op_dk(torch._C.DispatchKey.CUDA, [x], blob, report)
    assert report[0] == 1 and torch.equal(load_file(tmp_path / "c/model.safetensors")["x"], x)


@needs_cuda
def test_operators_wait_for_kernels(tmp_path: Path) -> None:
    """Whatever stream they are on: nobody told the operator."""
    x = torch.zeros(1 << 20, device="cuda")
    plan, report = torch_ckpt.plan(tmp_path / "c", ["x"]), torch_ckpt.native.operators.new_report()
    region = torch.zeros(x.nbytes, dtype=torch.uint8, pin_memory=True)
    offsets = torch.zeros(1, dtype=torch.int64)
    torch.cuda.synchronize()

    def later() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(200_000_000)
            x.add_(1)

    later()
    torch.ops.dcp_ext.save([x], plan, report)
    assert (load_file(tmp_path / "c/model.safetensors")["x"] == 1).all()
    later()
    torch.ops.dcp_ext.stage([x], torch_ckpt.plan(names=["x"]), offsets, report, region)
    assert (region.view(torch.float32) == 2).all()
    x.copy_(torch.arange(1 << 20, device="cuda"))
    turned = x.view(1024, 1024).t()[:, 3:]
    torch.ops.dcp_ext.save([turned], plan, report)
    assert torch.equal(load_file(tmp_path / "c/model.safetensors")["x"], turned.cpu())


@needs_cuda
def test_strides_take_no_memory_of_the_device(tmp_path: Path) -> None:
    experts = torch.randn(64, 768, 1024, device="cuda").bfloat16()
    pairs = [("e.{e}.gate", "up[{e}, :, 0/2].T"), ("e.{e}.up", "up[{e}, :, 1/2].T")]
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch_ckpt.save({"up": experts}, tmp_path / "c", layout="final", tensor_mapping=pairs)
    assert torch.cuda.max_memory_allocated() - before < 64 << 20
    found = torch_ckpt.load(None, tmp_path / "c")
    assert torch.equal(found["e.5.up"], experts[5, :, 512:].T.cpu())
    turned = {"x": experts.mT[:, 7:]}
    torch_ckpt.async_save(turned, tmp_path / "d").result()
    assert torch.cuda.max_memory_allocated() - before < 64 << 20
    assert torch.equal(torch_ckpt.load(None, tmp_path / "d")["x"], turned["x"].cpu())


def test_dimensions_in_the_order_of_memory() -> None:
    whole = torch.arange(2 * 3 * 5 * 7).reshape(2, 3, 5, 7)
    for order in itertools.permutations(range(4)):
        for tensor in (whole.permute(order), whole.permute(order)[:, 1:]):
            found, back = in_memory_order(tensor)
            assert list(found.stride()) == sorted(found.stride(), reverse=True)
            assert (back is None) == (order == (0, 1, 2, 3))
            again = found if back is None else found.permute(back)
            assert again.stride() == tensor.stride() and torch.equal(again, tensor)


def test_a_staged_tensor_that_was_turned_goes_with_its_state() -> None:
    copy = StateCopy({"x": torch.arange(6.0).reshape(3, 2).clone()})
    copy._orders[0] = [1, 0]
    staged = [tensor.clone() for tensor in copy.tensors]
    storage = staged[0].untyped_storage()
    state = copy.with_tensors(staged, None)
    turned = state["x"]
    assert torch.equal(turned, torch.arange(6.0).reshape(3, 2).t())
    assert turned.untyped_storage().data_ptr() == storage.data_ptr()
    state.end()
    assert turned.numel() == 0 and turned._base is None


def test_a_bucket_of_copies_is_written_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {f"t{i}": torch.randn(5, 6) for i in range(6)}
    mapping = {name: i % 3 + 1 for i, name in enumerate(state)}
    calls: list[int] = []

    def as_copies(*args: Any) -> write_files.TensorColumns:
        columns = collect(*args)
        columns.gathered = "t0" not in columns.fqns  # as if only that one were contiguous
        return columns

    def counted(sources: list[torch.Tensor], *args: Any) -> Any:
        calls.append(len(sources))
        return write(sources, *args)

    write, collect = torch_ckpt.native.operators.write, write_files.collect_tensors
    monkeypatch.setattr(write_files, "collect_tensors", as_copies)
    monkeypatch.setattr(torch_ckpt.native.operators, "write", counted)
    save(state, tmp_path / "saved", fqn_to_index_mapping=mapping)
    assert calls == [4, 2]
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    load(into, tmp_path / "saved")
    assert_same(into, state)


@needs_cuda
@pytest.mark.parametrize("options", WRITERS.values(), ids=WRITERS)
def test_round_trip(tmp_path: Path, options: dict[str, bool]) -> None:
    state = mixed_state("cuda")
    save(state, tmp_path / "saved", **options)
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    into["expanded"] = torch.zeros(5, 96, device="cuda")
    load(into, tmp_path / "saved")
    assert_same(into, state)
    on_host = {name: torch.zeros(t.shape, dtype=t.dtype) for name, t in state.items()}
    load(on_host, tmp_path / "saved")
    assert_same(on_host, state)


@needs_cuda
def test_gathered_buckets_and_the_mapping(tmp_path: Path) -> None:
    state = {f"t{i}": torch.randn(50, 60, device="cuda").t() for i in range(6)}
    mapping = {name: i % 3 + 1 for i, name in enumerate(state)}
    save({**state, "step": torch.tensor(3)}, tmp_path / "saved",
         fqn_to_index_mapping={**mapping, "step": 1})  # fmt: skip
    found: State = {}
    for path in (tmp_path / "saved").glob("*.safetensors"):
        found.update(load_file(path))
    assert_same(found, {**state, "step": torch.tensor(3)})


@needs_cuda
def test_strided_and_cast_targets_on_the_device(tmp_path: Path) -> None:
    state = {"x": torch.randn(300, 200, device="cuda"), "n": torch.arange(9, device="cuda")}
    save(state, tmp_path / "saved")
    into = {
        "x": torch.zeros(200, 600, dtype=torch.float64, device="cuda").t()[::2],
        "n": torch.zeros(9, dtype=torch.int64, device="cuda"),
    }
    load(into, tmp_path / "saved")
    assert torch.equal(into["x"], state["x"].double()) and torch.equal(into["n"], state["n"])
    narrow = {"x": torch.zeros(300, 200, dtype=torch.bfloat16, device="cuda")}
    with pytest.warns(UserWarning, match="lose precision"):
        load(narrow, tmp_path / "saved")
    assert torch.equal(narrow["x"], state["x"].bfloat16())


@needs_cuda
def test_kernels_in_flight_are_waited_for(tmp_path: Path) -> None:
    x = torch.zeros(2048, 2048, device="cuda")
    for step in range(200):  # queued, not done, when save is called
        x = (x @ x).clamp(-1, 1) + step
    save({"x": x}, tmp_path / "saved")
    into = {"x": torch.zeros_like(x)}
    load(into, tmp_path / "saved")
    assert torch.equal(into["x"], x)


@needs_cuda
def test_dense_tensors_take_no_device_memory(tmp_path: Path) -> None:
    state = {f"t{i}": torch.randn(1 << 20, device="cuda") for i in range(8)}
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    save(state, tmp_path / "saved")
    assert torch.cuda.max_memory_allocated() == before


@needs_cuda
def test_stock_reads_it(tmp_path: Path) -> None:
    state = {"x": torch.randn(30, 40, device="cuda"), "y": torch.randn(9, device="cuda").half()}
    save(state, tmp_path / "saved", save_distributed=True)
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    reader = dcp.HuggingFaceStorageReader(str(tmp_path / "saved"))
    dcp.load(into, storage_reader=reader, no_dist=True)
    assert_same(into, state)


@needs_cuda
def test_async_save(tmp_path: Path) -> None:
    state = mixed_state("cuda")
    to = torch_ckpt.HuggingFaceStorageWriter(str(tmp_path / "saved"))
    expected = {name: tensor.clone() for name, tensor in state.items()}
    future = dcp.async_save(state, storage_writer=to, no_dist=True)
    future.result()
    into = {name: torch.zeros(t.shape, dtype=t.dtype, device=t.device) for name, t in state.items()}
    load(into, tmp_path / "saved")
    assert_same(into, expected)


MEMORY = """
import json, sys
import torch
import torch.distributed.checkpoint as dcp
import torch_ckpt


def peak(work):
    # 5 sets the peak of resident memory to what is resident now.
    open("/proc/self/clear_refs", "w").write("5")
    def field(name):
        text = open("/proc/self/status").read()
        return int(text.split(name + ":")[1].split()[0]) << 10
    before = field("VmRSS")
    work()
    return field("VmHWM") - before


def save(state, path):
    writer = torch_ckpt.HuggingFaceStorageWriter(path)
    dcp.save(state, storage_writer=writer, no_dist=True)


def load(state, path):
    reader = torch_ckpt.HuggingFaceStorageReader(path)
    dcp.load(state, storage_reader=reader, no_dist=True)


folder = sys.argv[1]
small = {"x": torch.randn(1000, device="cuda")}
save(small, folder + "/warm")  # code, threads and the CUDA context
load(small, folder + "/warm")
state = {f"t{i}": torch.randn(64 << 20, device="cuda") for i in range(4)}
state["one"] = torch.randn(1, 192 << 20, device="cuda")
kept = {name: tensor.sum() for name, tensor in state.items()}
result = {"save": peak(lambda: save(state, folder + "/big"))}
for tensor in state.values():
    tensor.zero_()
result["load"] = peak(lambda: load(state, folder + "/big"))
result["equal"] = all(bool(tensor.sum() == kept[name]) for name, tensor in state.items())
print(json.dumps(result))
"""


@needs_cuda
def test_host_memory_is_bounded(tmp_path: Path) -> None:
    # 1.75 GiB of state, 0.75 GiB of it in one tensor.
    package = str(Path(torch_ckpt.__file__).parents[1])
    path = os.pathsep.join([package, os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", MEMORY, str(tmp_path)],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["equal"]
    assert result["save"] < 128 << 20  # a piece of the arena for each of two workers, and slack
    assert result["load"] < 512 << 20  # two waves, the reader's own memory, and slack


@needs_cuda
def test_fsdp2_on_one_device(tmp_path: Path) -> None:
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Linear(30, 20)).cuda()
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(8, 40, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return model, optimizer

    torch.cuda.set_device(0)
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    try:
        model, optimizer = make()
        weights, moments = get_state_dict(model, optimizer)
        torch_ckpt.save({"model": weights, "optim": moments}, checkpoint_id=tmp_path / "saved")
        other, other_optimizer = make()
        found, found_moments = get_state_dict(other, other_optimizer)
        into = {"model": found, "optim": found_moments}
        torch_ckpt.load(into, checkpoint_id=tmp_path / "saved")
        set_state_dict(
            other,
            other_optimizer,
            model_state_dict=into["model"],
            optim_state_dict=into["optim"],
        )
        for old, new in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(old.to_local(), new.to_local())  # type: ignore[operator]
            for name, value in optimizer.state[old].items():
                loaded = other_optimizer.state[new][name]
                full = [
                    t.full_tensor() if hasattr(t, "full_tensor") else t for t in (value, loaded)
                ]
                assert torch.equal(full[0].cpu(), full[1].cpu()), name
    finally:
        dist.destroy_process_group()
