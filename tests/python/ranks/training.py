"""Training runs of several ranks: they go on to the bit on as many, and exactly on others."""

from __future__ import annotations

import functools
import random
import warnings
from typing import Any

import numpy
import torch
import torch.distributed as dist
from ranks.layouts import mesh_of, whole
from ranks.run import Context, cases, everywhere, raised
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from training_loop import Loader

import torch_ckpt
from torch_ckpt import Checkpointer

CASES, case = cases()

LAYOUTS = ("plain", "fsdp", "hsdp", "tp", "tp_fsdp")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.dropout(self.down(torch.relu(self.up(x))), 0.1, self.training)


@functools.cache
def named_mesh(world: int, *names: str) -> DeviceMesh:
    return init_device_mesh("cpu", (2, world // 2), mesh_dim_names=names)


def model_of(layout: str, world: int, width: int = 8) -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(*(Block(width) for _ in range(3)))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if layout == "fsdp":
        for block in model:
            fully_shard(block, mesh=mesh_of((world,)))
        fully_shard(model, mesh=mesh_of((world,)))
    elif layout == "hsdp":
        fully_shard(model, mesh=named_mesh(world, "replicas", "shards"))
    elif layout == "tp":
        for block in model:
            parallelize_module(block, mesh_of((world,)), plan)
    elif layout == "tp_fsdp":
        mesh = named_mesh(world, "dp", "tp")
        for block in model:
            parallelize_module(block, mesh["tp"], plan)
            fully_shard(block, mesh=mesh["dp"])
    return model


def layouts_of(world: int) -> list[str]:
    return [each for each in LAYOUTS if world % 2 == 0 or each not in ("hsdp", "tp_fsdp")]


def seeded(context: Context, seed: int) -> None:
    random.seed(seed + context.rank)
    numpy.random.seed(seed + context.rank)
    torch.manual_seed(seed + context.rank)


def train(model: nn.Module, optimizer: Any, loader: Loader, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        x = loader.next().float().reshape(1, 8) + torch.rand(2, 8) + float(numpy.random.rand())
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@case
def ddp_leaves_no_trace(context: Context) -> None:
    seeded(context, 3)
    model = DistributedDataParallel(model_of("plain", context.world))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    loader = Loader()
    run = context.folder / "run"
    with Checkpointer(run, model, optimizer, dataloader=loader) as checkpointer:
        train(model, optimizer, loader, 2)
        checkpointer.save(2)
        wanted = train(model, optimizer, loader, 2)
    names = set(torch_ckpt.open(run / "step-2/model"))
    assert names == set(model.module.state_dict())
    seeded(context, 4)
    model, loader = DistributedDataParallel(model_of("plain", context.world)), Loader()
    optimizer = torch.optim.AdamW(model.parameters(), 0.5)
    Checkpointer(run, model, optimizer, dataloader=loader).load()
    assert train(model, optimizer, loader, 2) == wanted


def value(name: str, parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What is saved under a name, in the placements of `parameter`."""
    content = whole(name, tuple(parameter.shape), dtype)
    if isinstance(parameter, DTensor):
        return distribute_tensor(content, parameter.device_mesh, parameter.placements)
    return content


MOMENTS = {"exp_avg": torch.float32, "exp_avg_sq": torch.bfloat16}


def fill(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            parameter.copy_(value(name, parameter, parameter.dtype))
        state = {key: value(f"{name}.{key}", parameter, of) for key, of in MOMENTS.items()}
        optimizer.state[parameter] = {
            "step": torch.tensor(7.0),
            "row": whole(f"{name}.row", (5,)),
            **state,
        }


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def check(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for name, parameter in model.named_parameters():
        wanted = value(name, parameter, parameter.dtype)
        assert torch.equal(local(parameter), local(wanted)), name
        state = optimizer.state[parameter]
        assert state.keys() == {"step", "row", *MOMENTS}, name
        for key, dtype in MOMENTS.items():
            wanted = value(f"{name}.{key}", parameter, dtype)
            assert state[key].dtype == dtype
            assert type(state[key]) is type(wanted)
            assert torch.equal(local(state[key]), local(wanted)), (name, key)
        assert state["step"] == 7.0 and torch.equal(state["row"], whole(f"{name}.row", (5,)))


@case
def any_layout_onto_any_other(context: Context) -> None:
    """Also those of launches with other numbers of ranks, which came before."""
    root = context.shared / "training"
    for layout in layouts_of(context.world):
        model = model_of(layout, context.world)
        optimizer = torch.optim.AdamW(model.parameters(), 0.25)
        fill(model, optimizer)
        with Checkpointer(root / f"{layout}-{context.world}", model, optimizer) as checkpointer:
            checkpointer.save(3)
    dist.barrier()
    for saved in sorted(path.name for path in root.iterdir()):
        for layout in layouts_of(context.world):
            model = model_of(layout, context.world)
            optimizer = torch.optim.AdamW(model.parameters(), 9.0)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                assert Checkpointer(root / saved, model, optimizer).load() == 3
            check(model, optimizer)
            assert optimizer.param_groups[0]["lr"] == 0.25
            other = saved.rpartition("-")[2] != str(context.world)
            said = [str(each.message) for each in caught if "random states" in str(each.message)]
            assert len(said) == (1 if other and context.rank == 0 else 0), said


@case
def streams_of_random_numbers_are_of_their_own(context: Context) -> None:
    model = model_of("plain", context.world)
    with Checkpointer(context.folder / "run", model) as checkpointer:
        seeded(context, 5)
        checkpointer.save(1)
        wanted = random.random(), float(numpy.random.rand()), torch.rand(1).item()
    seeded(context, 9)
    Checkpointer(context.folder / "run", model).load()
    assert wanted == (random.random(), float(numpy.random.rand()), torch.rand(1).item())
    assert len(set(everywhere(wanted))) == context.world
    # As if another number of ranks had saved.
    root = context.shared / "training"
    for saved in sorted(path.name for path in root.iterdir()):
        if saved.rpartition("-")[2] == str(context.world):
            continue
        model = model_of("plain", context.world)
        drawn = []
        for _ in range(2):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                Checkpointer(root / saved, model).load()
            drawn.append((random.random(), float(numpy.random.rand()), torch.rand(1).item()))
        assert drawn[0] == drawn[1]
        assert len(set(everywhere(drawn[0]))) == context.world


@case
def loaders_belong_to_data_ranks(context: Context) -> None:
    size = max(1, context.world // 2)
    data_rank = (context.rank % size, size)
    model, loader = model_of("plain", context.world), Loader()
    loader.position = 100 + data_rank[0]
    root = context.folder / "run"
    with Checkpointer(root, model, dataloader=loader, data_rank=data_rank) as checkpointer:
        checkpointer.save(1)
    loader.position = 0
    Checkpointer(root, model, dataloader=loader, data_rank=data_rank).load()
    assert loader.position == 100 + data_rank[0]
    if size == context.world:
        return
    # By fewer data ranks than have saved it.
    full = context.folder / "full"
    loader.position = 100 + context.rank
    with Checkpointer(full, model, dataloader=loader) as checkpointer:
        checkpointer.save(1)
    fewer = Checkpointer(full, model, dataloader=loader, data_rank=data_rank)
    raised(fewer.load, f"saved by {context.world} ranks", f"by {size}", "exclude")
    loader.position = 3
    fewer.load(exclude=["dataloader"])
    assert loader.position == 3
    checkpointer = Checkpointer(root, model, dataloader=loader)
    raised(checkpointer.load, f"saved by {size} ranks", f"by {context.world}", "reshard")
    checkpointer.load(
        reshard=lambda states, rank, of: {
            **states[0],
            "position": sum(state["position"] for state in states) * of + rank,
        }
    )
    total = sum(100 + rank for rank in range(size))
    assert loader.position == total * context.world + context.rank


@case
def stages_of_a_pipeline(context: Context) -> None:
    if context.world < 2:
        return
    root = context.folder / "run"

    def made(first: int, last: int, lr: float) -> tuple[list[nn.Module], torch.optim.Optimizer]:
        parts: list[nn.Module] = [
            nn.ModuleDict({f"layer_{at}": nn.Linear(3, 3)}) for at in range(first, last)
        ]
        parameters = [each for part in parts for each in part.parameters()]
        return parts, torch.optim.AdamW(parameters or [nn.Parameter(torch.ones(1))], lr)

    def names(parts: list[nn.Module]) -> list[tuple[str, nn.Parameter]]:
        return [each for part in parts for each in part.named_parameters()]

    # Each rank two stages, which are not next to each other; lr by the stage.
    parts, optimizer = made(2 * context.rank, 2 * context.rank + 2, 0.1 * (context.rank + 1))
    for name, parameter in names(parts):
        with torch.no_grad():
            parameter.copy_(whole(name, tuple(parameter.shape)))
        optimizer.state[parameter] = {"exp_avg": whole(f"{name}.m", tuple(parameter.shape))}
    with Checkpointer(root, parts, optimizer) as checkpointer:
        checkpointer.save(1)
    # Other ranks have them now.
    other = context.world - 1 - context.rank
    parts, optimizer = made(2 * other, 2 * other + 2, 9.0)
    Checkpointer(root, parts, optimizer).load()
    for name, parameter in names(parts):
        assert torch.equal(parameter, whole(name, tuple(parameter.shape)))
        moment = optimizer.state[parameter]["exp_avg"]
        assert torch.equal(moment, whole(f"{name}.m", tuple(parameter.shape)))
    assert optimizer.param_groups[0]["lr"] == 0.1 * (other + 1)
    # A stage that nobody has is an error of all.
    parts, optimizer = made(0, 2, 9.0)
    raised(lambda: Checkpointer(root, parts, optimizer).load(), "has what the model lacks")


def saved(checkpointer: Checkpointer, step: Any) -> None:
    checkpointer.save(step).result()


@case
def one_rank_fails(context: Context) -> None:
    last = context.world - 1

    class Mine:
        broken = False

        def state_dict(self) -> dict[str, Any]:
            if self.broken and context.rank == last:
                raise ValueError("out of order")
            return {"x": 1}

        def load_state_dict(self, state: Any) -> None:
            self.state_dict()

    mine, model = Mine(), model_of("plain", context.world)
    for background in (True, False):
        root = context.folder / str(background)
        checkpointer = Checkpointer(root, model, states={"mine": mine}, background=background)
        mine.broken = False
        checkpointer.save(1).result()
        mine.broken = True
        raised(functools.partial(saved, checkpointer, 2), "out of order")
        raised(checkpointer.load, "out of order")
        mine.broken = False
        assert checkpointer.load() == 1
        checkpointer.save(2).result()
        checkpointer.close()
        assert checkpointer.directory.steps() == [1, 2]


@case
def ranks_that_disagree(context: Context) -> None:
    if context.world < 2:
        return
    model = model_of("plain", context.world)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    raised(
        lambda: Checkpointer(context.folder / "run", model, optimizer if context.rank else None),
        "all ranks give the same",
    )
    checkpointer = Checkpointer(context.folder / "run", model, optimizer)
    raised(lambda: checkpointer.save(1 + context.rank).result(), "saves step 1", "step 2")
    raised(lambda: checkpointer.save("one" if context.rank else 1).result(), "a step is an integer")
    checkpointer.save(1).result()
    checkpointer.save(2).result()
    raised(lambda: checkpointer.load(exclude=["x"] if context.rank else []), "exclude")
    raised(lambda: checkpointer.load(1 + min(context.rank, 1)), "loads step 1", "step 2")
    raised(lambda: checkpointer.load(exclude=["rng"] if context.rank else []), "without")
    assert checkpointer.load() == 2


@case
def a_model_into_any_sharding(context: Context) -> None:
    hub = context.folder / "hub"
    source = model_of("plain", context.world)
    torch_ckpt.save_model(source, hub, dtype=torch.bfloat16)
    for layout in layouts_of(context.world):
        model = model_of(layout, context.world).to(torch.bfloat16)
        with torch.no_grad():
            for parameter in model.parameters():
                local(parameter).fill_(3.0)
        report = torch_ckpt.load_model(model, hub)
        assert (report.missing, report.unexpected) == ([], [])
        for (name, parameter), wanted in zip(
            model.named_parameters(), source.parameters(), strict=True
        ):
            content = wanted.detach().to(torch.bfloat16)
            if isinstance(parameter, DTensor):
                content = distribute_tensor(content, parameter.device_mesh, parameter.placements)
            assert torch.equal(local(parameter), local(content)), name
    more = nn.ModuleDict({"0": Block(8), "more": nn.Linear(2, 2)})
    raised(lambda: torch_ckpt.load_model(more, hub), "lacks what the model has", "more.weight")
    with torch.no_grad():
        more["more"].weight.fill_(5.0)
    report = torch_ckpt.load_model(more, hub, strict=False)
    assert report.missing == ["more.bias", "more.weight"]
    assert all(name.startswith(("1.", "2.")) for name in report.unexpected)
    assert more["more"].weight[0, 0] == 5.0
    report = torch_ckpt.load_model(more, hub, skip=["more.", "1.", "2."])
    assert (report.missing, report.unexpected) == ([], [])
    raised(
        lambda: torch_ckpt.load_model(nn.Linear(2, 2), hub, strict=False), "no name of the model"
    )
    wrong = nn.Sequential(Block(4))
    raised(lambda: torch_ckpt.load_model(wrong, hub, strict=False), "0.up.weight")


@case
def a_sharded_embedding_that_is_tied(context: Context) -> None:
    mesh = mesh_of((context.world,))

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            weight = distribute_tensor(whole("w", (8, 4)), mesh, [Shard(0)])
            self.embed = nn.Embedding(8, 4, _weight=torch.empty(8, 4))
            self.embed.weight = nn.Parameter(weight)
            self.head = nn.Linear(4, 8, bias=False)
            self.head.weight = self.embed.weight

    model = Tied()
    with Checkpointer(context.folder / "run", model) as checkpointer:
        checkpointer.save(1)
    opened = torch_ckpt.open(context.folder / "run/step-1/model")
    assert sorted(opened) == ["embed.weight", "head.weight"]
    with torch.no_grad():
        local(model.embed.weight).zero_()
    Checkpointer(context.folder / "run", model).load()
    wanted = distribute_tensor(whole("w", (8, 4)), mesh, [Shard(0)])
    assert torch.equal(local(model.head.weight), local(wanted))
