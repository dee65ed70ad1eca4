"""Models and optimizers of torch's parallelisms, through torch.distributed.checkpoint.state_dict."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks.run import Context, cases
from safetensors.torch import load_file
from sample_states import bits
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import torch_ckpt
from torch_ckpt import HuggingFaceStorageReader, HuggingFaceStorageWriter

CASES, case = cases()

Built = tuple[nn.Module, torch.optim.Optimizer]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.second = nn.Linear(16, 7)  # uneven over 2 and 4 ranks
        self.register_buffer("counted", torch.tensor(0))

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(data)))


def net(seed: int) -> Net:
    torch.manual_seed(seed)
    made = Net()
    made.counted.fill_(seed)
    return made


def trained(model: nn.Module) -> Built:
    """One step, so that the optimizer has a state."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    model(torch.ones(3, 6)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def plain(seed: int) -> Built:
    return trained(net(seed))


def fsdp2(seed: int) -> Built:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))  # where there is a GPU too
    model = net(seed)
    fully_shard(model.first, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return trained(model)


def hsdp(seed: int) -> Built:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("r", "s"))
    model = net(seed)
    fully_shard(model, mesh=mesh)
    return trained(model)


def tensor_parallel(seed: int) -> Built:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
    return trained(parallelize_module(net(seed), mesh, plan))


def fsdp2_tp(seed: int) -> Built:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("d", "t"))
    plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
    model = parallelize_module(net(seed), mesh["t"], plan)
    fully_shard(model, mesh=mesh["d"])
    return trained(model)


def leaves(value: Any, path: str = "") -> dict[str, Any]:
    """All leaves; DTensors and ShardedTensors as their local parts."""
    if isinstance(value, dict):
        return {
            k: v for key, entry in value.items() for k, v in leaves(entry, f"{path}/{key}").items()
        }
    if isinstance(value, (list, tuple)):
        return leaves(dict(enumerate(value)), path)
    if isinstance(value, DTensor):
        return {path: bits(value.to_local())}
    if hasattr(value, "local_shards"):
        return {f"{path}[{n}]": bits(shard.tensor) for n, shard in enumerate(value.local_shards())}
    if isinstance(value, torch.Tensor):
        return {path: bits(value)}
    return {path: value}


def same(got: Any, wanted: Any) -> None:
    got, wanted = leaves(got), leaves(wanted)
    wrong = [path for path in {**got, **wanted} if got.get(path, "?") != wanted.get(path, "!")]
    assert not wrong, wrong


def state_of(built: Built, options: StateDictOptions) -> dict[str, Any]:
    model, optimizer = get_state_dict(*built, options=options)
    return {"model": model, "optim": optimizer}


def round_trip(
    context: Context,
    build: Callable[[int], Built],
    options: StateDictOptions | None = None,
    **writer: Any,
) -> None:
    """Save one training, load it into another one; by the stock planner and by ours."""
    options = options or StateDictOptions()
    for number, kinds in enumerate(
        ((None, None), (torch_ckpt.SavePlanner, torch_ckpt.LoadPlanner))
    ):
        path = context.folder / str(number)
        saved = build(1)
        dcp.save(
            state_of(saved, options),
            storage_writer=HuggingFaceStorageWriter(path, **{"save_distributed": True, **writer}),
            planner=kinds[0] and kinds[0](),
        )
        loaded = build(2)
        target = state_of(loaded, options)
        planner = kinds[1] and kinds[1]()
        dcp.load(target, storage_reader=HuggingFaceStorageReader(path), planner=planner)
        set_state_dict(
            *loaded,
            model_state_dict=target["model"],
            optim_state_dict=target["optim"],
            options=options,
        )
        same(state_of(loaded, StateDictOptions()), state_of(saved, StateDictOptions()))


@case
def full(context: Context) -> None:
    round_trip(context, fsdp2, StateDictOptions(full_state_dict=True), save_distributed=False)


@case
def full_cpu_offload_of_rank_0(context: Context) -> None:
    """Only rank 0 has the state; a load gives it to rank 0, which broadcasts."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    saved = fsdp2(1)
    source = state_of(saved, options)
    assert bool(source["model"]) == (context.rank == 0)
    path = context.folder / "c"
    dcp.save(source, storage_writer=HuggingFaceStorageWriter(path))
    loaded = fsdp2(2)
    target = state_of(loaded, options)
    dcp.load(target, storage_reader=HuggingFaceStorageReader(path))
    # One at a time: set_state_dict takes an empty one for "nothing to do" and leaves rank 0 alone.
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(loaded[0], target["model"], options=options)
    set_optimizer_state_dict(*loaded, target["optim"], options=options)
    same(state_of(loaded, StateDictOptions()), state_of(saved, StateDictOptions()))


@case
def cpu_offload(context: Context) -> None:
    round_trip(context, fsdp2, StateDictOptions(cpu_offload=True))


@case
def flattened_optimizer(context: Context) -> None:
    round_trip(context, fsdp2, StateDictOptions(flatten_optimizer_state_dict=True))


@case
def data_parallel_by_hand(context: Context) -> None:
    round_trip(context, plain)


@case
def fully_sharded_2(context: Context) -> None:
    round_trip(context, fsdp2)


@case
def hybrid_sharded(context: Context) -> None:
    round_trip(context, hsdp)


@case
def tensor_parallel_model(context: Context) -> None:
    round_trip(context, tensor_parallel)


@case
def fully_sharded_2_with_tensor_parallel(context: Context) -> None:
    round_trip(context, fsdp2_tp)


@case
def fully_sharded_1(context: Context) -> None:
    """FSDP1's sharded state dict: ShardedTensors, or DTensors with a mesh."""

    def model_of(seed: int, mesh: Any) -> nn.Module:
        return FullyShardedDataParallel(net(seed), device_mesh=mesh, device_id=torch.device("cpu"))

    meshes = {"ShardedTensor": None, "DTensor": init_device_mesh("cpu", (context.world,))}
    for name, mesh in meshes.items():
        saved, loaded = model_of(1, mesh), model_of(2, mesh)
        for model in (saved, loaded):
            FullyShardedDataParallel.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
        for number, kinds in enumerate(
            ((None, None), (torch_ckpt.SavePlanner, torch_ckpt.LoadPlanner))
        ):
            path = context.folder / f"{name}-{number}"
            source = saved.state_dict()
            writer = HuggingFaceStorageWriter(
                path, save_distributed=True, enable_consolidation=True
            )
            planner = kinds[0] and kinds[0]()
            dcp.save({"model": source}, storage_writer=writer, planner=planner)
            target = {"model": loaded.state_dict()}
            planner = kinds[1] and kinds[1]()
            dcp.load(target, storage_reader=HuggingFaceStorageReader(path), planner=planner)
            same(target["model"], source)
            loaded.load_state_dict(target["model"])
            same(loaded.state_dict(), source)
            if context.rank == 0:
                found = load_file(next(path.glob("model-*")))
                wanted = {f"model.{key}": value.shape for key, value in net(1).state_dict().items()}
                assert {key: value.shape for key, value in found.items()} == wanted
            dist.barrier()


class Part:
    """A Stateful with tensors, numbers and a nested state."""

    def __init__(self, value: int) -> None:
        self.value = value
        self.tensor = torch.full((3,), float(value))

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "tensor": self.tensor, "more": {"list": [self.value, None]}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]
        self.tensor = state["tensor"]
        assert state["more"] == {"list": [self.value, None]}


@case
def stateful(context: Context) -> None:
    for kinds in ((dcp.save, dcp.load), (torch_ckpt.save, torch_ckpt.load)):
        path = context.folder / kinds[0].__module__
        writer = HuggingFaceStorageWriter(path, save_distributed=True)
        kinds[0]({"part": Part(5), "step": 1}, storage_writer=writer)
        target = {"part": Part(9), "step": 0}
        kinds[1](target, storage_reader=HuggingFaceStorageReader(path))
        assert target["part"].value == 5 and target["step"] == 1
        assert torch.equal(target["part"].tensor, torch.full((3,), 5.0))


@case
def pipeline_stages(context: Context) -> None:
    """Other keys on every rank; each loads its own, and a rank loads another's."""
    torch.manual_seed(context.rank)
    stage = nn.Linear(3, 2)
    source = {f"stage{context.rank}": stage.state_dict()}
    path = context.folder / "c"
    writer = HuggingFaceStorageWriter(path, save_distributed=True, enable_consolidation=True)
    dcp.save(source, storage_writer=writer)
    other = (context.rank + 1) % context.world
    torch.manual_seed(other)
    wanted = nn.Linear(3, 2).state_dict()
    for folder in (path, path / "sharded"):
        target = {f"stage{other}": nn.Linear(3, 2).state_dict()}
        dcp.load(target, storage_reader=HuggingFaceStorageReader(folder))
        same(target[f"stage{other}"], wanted)


@case
def state_dict_from_keys(context: Context) -> None:
    """The nested state comes back nested, without a target, only the keys that were asked for."""
    source = state_of(fsdp2(1), StateDictOptions())
    path = context.folder / "c"
    writer = HuggingFaceStorageWriter(path, save_distributed=True)
    dcp.save({**source, "step": 4}, storage_writer=writer)
    reader = HuggingFaceStorageReader(path)
    got = _load_state_dict_from_keys({"model"}, storage_reader=reader)
    assert list(got) == ["model"]
    wanted = {
        key: value.full_tensor() if isinstance(value, DTensor) else value
        for key, value in source["model"].items()
    }
    same(got["model"], wanted)
    everything = _load_state_dict_from_keys(storage_reader=HuggingFaceStorageReader(path))
    assert set(everything) == {"model", "optim", "step"} and everything["step"] == 4
    same(everything["model"], wanted)


@case
def quantized_reader_of_stock(context: Context) -> None:
    """QuantizedHuggingFaceStorageReader on files of ours."""
    values = (torch.arange(256 * 256) % 100 + 1.0).reshape(256, 256).to(torch.float8_e4m3fn)
    scales = torch.tensor([[1.0, 2.0], [4.0, 8.0]])
    source = {"a.weight": values, "a.weight_scale_inv": scales, "b": torch.ones(5)}
    path = context.folder / "c"
    dcp.save(source if context.rank == 0 else {}, storage_writer=HuggingFaceStorageWriter(path))
    assert (
        "a.weight_scale_inv"
        in json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    )
    wanted = values.float() * scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    target = {"a.weight": torch.zeros(256, 256), "b": torch.zeros(5)}
    dcp.load(target, storage_reader=dcp.QuantizedHuggingFaceStorageReader(str(path)))
    assert torch.equal(target["a.weight"], wanted)
    assert torch.equal(target["b"], torch.ones(5))


@case
def frozen_and_shared_parameters(context: Context) -> None:
    """Parameters that need no gradient and tied ones, loaded in place."""
    model = net(1)
    model.first.weight.requires_grad_(False)
    model.tied = model.second
    path = context.folder / "c"
    saved = copy.deepcopy(get_model_state_dict(model))
    dcp.save(saved, storage_writer=HuggingFaceStorageWriter(path))
    target = net(2)
    target.tied = target.second
    state = get_model_state_dict(target)
    dcp.load(state, storage_reader=HuggingFaceStorageReader(path))
    same(get_model_state_dict(target), saved)
