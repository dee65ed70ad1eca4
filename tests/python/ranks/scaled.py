"""Bases of codes and scales into sharded models: boxes that cut blocks, and bytes of two codes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import scaled_bases
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks.run import Context, cases, raised
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import torch_ckpt
from torch_ckpt import QuantizedHuggingFaceStorageReader

CASES, case = cases()
KINDS = (
    "float8_e4m3fn float32 m.weight_scale_inv",
    "float8_e4m3fn bfloat16 rows (300,)",
    "float8_e5m2 float8_e8m0fnu mx",
    "float8_e4m3fn float32 one (1,)",
    "float8_e4m3fn float32 experts",
    "mxfp4",
    "fp4 in torch.int8",
)


def base_of(context: Context, kind: str, number: int) -> tuple[Path, str, torch.Tensor]:
    """The directory, which rank 0 writes; the name of the tensor; and its numbers."""
    stored, whole = scaled_bases.kinds(torch.Generator().manual_seed(4))[kind]
    path = context.folder / str(number)
    if context.rank == 0:
        scaled_bases.base(path, stored)
    dist.barrier()
    return path, next(iter(stored)).removesuffix("_blocks"), whole


def model_of(name: str, parameter: nn.Parameter) -> nn.Module:
    model = nn.Module()
    *modules, last = name.split(".")
    at = model
    for module in modules:
        at.add_module(module, nn.Module())
        at = getattr(at, module)
    at.register_parameter(last, parameter)
    return model


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@case
def into_any_sharding(context: Context) -> None:
    mesh = init_device_mesh("cpu", (context.world,))
    for number, kind in enumerate(KINDS):
        path, name, whole = base_of(context, kind, number)
        for dim in range(whole.dim()):
            # Uneven, so that ranks begin in the middle of blocks and of bytes.
            for dtype in (torch.bfloat16, torch.float32):
                zeros = torch.zeros(whole.shape, dtype=dtype)
                sharded = distribute_tensor(zeros, mesh, [Shard(dim)])
                model = model_of(name, nn.Parameter(sharded, requires_grad=False))
                torch_ckpt.load_model(model, path)
                wanted = distribute_tensor(whole.to(dtype), mesh, [Shard(dim)])
                assert torch.equal(local(sharded), local(wanted)), (kind, dim, dtype)


@case
def into_fsdp(context: Context) -> None:
    path, name, whole = base_of(context, KINDS[0], 0)
    model = model_of(name, nn.Parameter(torch.zeros(whole.shape, dtype=torch.bfloat16)))
    fully_shard(model, mesh=init_device_mesh("cpu", (context.world,)))
    torch_ckpt.load_model(model, path)
    (parameter,) = model.parameters()
    assert isinstance(parameter, DTensor)
    assert torch.equal(parameter.full_tensor(), whole.bfloat16())


@case
def by_the_reader(context: Context) -> None:
    mesh = init_device_mesh("cpu", (context.world,))
    path, name, whole = base_of(context, "mxfp4", 0)
    target = distribute_tensor(torch.zeros(whole.shape), mesh, [Shard(2)])
    reader = QuantizedHuggingFaceStorageReader(path)
    torch_ckpt.load({f"{name}_blocks": target}, storage_reader=reader)
    assert torch.equal(local(target), local(distribute_tensor(whole, mesh, [Shard(2)])))


@case
def what_is_refused_is_refused_on_all_ranks(context: Context) -> None:
    path = context.folder / "base"
    codes = torch.ones(8, 8).to(torch.float8_e4m3fn)
    if context.rank == 0:
        scaled_bases.base(path, {"m.weight": codes, "m.weight_scale": torch.ones(3)})
    dist.barrier()
    # A rank has something else of the model.
    name = "m.weight" if context.rank == context.world - 1 else "n.weight"
    model = model_of(name, nn.Parameter(torch.zeros(8, 8)))
    raised(lambda: torch_ckpt.load_model(model, path, strict=False), "m.weight", "(8, 8)", "(3)")


def experts(context: Context, scaled: bool) -> tuple[Path, dict[str, torch.Tensor]]:
    """One by one on disk, of two layers; and fused, turned groups of them."""
    generator = torch.Generator().manual_seed(6)
    stored: dict[str, torch.Tensor] = {}
    groups: dict[str, torch.Tensor] = {}
    for layer in range(2):
        fused = []
        for expert in range(3):
            parts = []
            for name in ("gate", "up"):
                values = torch.randn(140, 130, generator=generator)
                at = f"l.{layer}.e.{expert}.{name}"
                if scaled:
                    codes = values.to(torch.float8_e4m3fn)
                    grid = scaled_bases.scales((2, 2), torch.float32, generator)
                    stored |= {at: codes, f"{at}_scale_inv": grid}
                    values = scaled_bases.numbers(codes, grid, (128, 128))
                else:
                    stored[at] = values
                parts.append(values)
            fused.append(torch.cat(parts).T)
        groups[f"n.{layer}.gate_up"] = torch.stack(fused)
    path = context.folder / str(scaled)
    if context.rank == 0:
        scaled_bases.base(path, stored)
    dist.barrier()
    return path, groups


PAIRS = [
    ("l.{i}.e.{e}.gate", "n.{i}.gate_up[{e}, :, 0/2].T"),
    ("l.{i}.e.{e}.up", "n.{i}.gate_up[{e}, :, 1/2].T"),
]


def are_one_by_one(found: dict[str, torch.Tensor], fused: torch.Tensor) -> None:
    """Whether the experts of layer 0 are those of a group."""
    for expert in range(3):
        gate, up = fused[expert].T.chunk(2)
        assert torch.equal(found[f"l.0.e.{expert}.gate"], gate), expert
        assert torch.equal(found[f"l.0.e.{expert}.up"], up), expert


@case
def groups_of_experts(context: Context) -> None:
    mesh = init_device_mesh("cpu", (context.world,))
    for scaled in (False, True):
        path, groups = experts(context, scaled)
        for dim in range(3):
            model, wanted = nn.Module(), {}
            for name, whole in groups.items():
                zeros = torch.zeros(whole.shape, dtype=torch.bfloat16)
                sharded = distribute_tensor(zeros, mesh, [Shard(dim)])
                wanted[name] = distribute_tensor(whole.bfloat16(), mesh, [Shard(dim)])
                layer = model_of(name, nn.Parameter(sharded, requires_grad=False))
                if hasattr(model, "n"):
                    model.n.add_module("1", layer.n.get_submodule("1"))
                else:
                    model = layer
            torch_ckpt.load_model(model, path, tensor_mapping=PAIRS)
            for name, parameter in model.named_parameters():
                assert torch.equal(local(parameter), local(wanted[name])), (scaled, dim, name)


@case
def a_part_of_the_model_on_each_rank(context: Context) -> None:
    """As the stages of a pipeline: what one has not, another has."""
    path = context.folder / "base"
    stack = torch.randn(context.world, 4, 3, generator=torch.Generator().manual_seed(7))
    if context.rank == 0:
        scaled_bases.base(path, {"stack": stack})
    dist.barrier()
    own = f"m.{context.rank}.w"
    model = model_of(own, nn.Parameter(torch.zeros(4, 3)))
    torch_ckpt.load_model(model, path, tensor_mapping=[("stack[{l}]", "m.{l}.w")])
    assert torch.equal(next(model.parameters()).data, stack[context.rank])
    if context.world > 1:
        # None has the last one.
        some = model_of(f"m.{context.rank // 2}.w", nn.Parameter(torch.zeros(4, 3)))
        raised(
            lambda: torch_ckpt.load_model(some, path, tensor_mapping=[("stack[{l}]", "m.{l}.w")]),
            "stack",
            "in no tensor that is loaded",
        )


@case
def what_two_ranks_have_of_one_tensor(context: Context) -> None:
    """As many elements as there are, but some of them twice."""
    path = context.folder / "base"
    rows = 2 * context.world
    if context.rank == 0:
        scaled_bases.base(path, {"w": torch.ones(rows, 3)})
    dist.barrier()
    first = [0 if rank < 2 else 2 * rank for rank in range(context.world)]
    twice = [(f"w[{at} : {at} + 2]", f"m.{rank}.w") for rank, at in enumerate(first)]
    name, target = f"m.{context.rank}.w", torch.zeros(2, 3)
    model = model_of(name, nn.Parameter(target))
    if context.world > 1:
        raised(lambda: torch_ckpt.load_model(model, path, tensor_mapping=twice), "w", "twice")
        raised(lambda: torch_ckpt.load({name: target}, path, tensor_mapping=twice), "w", "twice")
        assert not target.any()
    # What a rank has not, another has.
    pairs = [(f"w[{{n}}/{context.world}]", "m.{n}.w")]
    torch_ckpt.load({name: target}, path, tensor_mapping=pairs)
    assert target.all()
    # And what none has is an error of all, as is a pair that means nothing.
    lonely = {"m.0.w": torch.zeros(2, 3)}
    if context.world > 1:
        raised(lambda: torch_ckpt.load(lonely, path, tensor_mapping=pairs), "w", "6 of")
    raised(
        lambda: torch_ckpt.load({name: target}, path, tensor_mapping=[*pairs, ("w", "never")]),
        "never",
        "no tensor",
    )


@case
def states_are_saved_as_they_are_stored(context: Context) -> None:
    mesh = init_device_mesh("cpu", (context.world,))
    _, groups = experts(context, False)
    whole = groups["n.0.gate_up"]
    for dim in range(3):
        path = context.folder / f"state-{dim}"
        state = {"n.0.gate_up": distribute_tensor(whole, mesh, [Shard(dim)]), "own": torch.ones(2)}
        # A pair may mean what another rank has.
        pairs = [*PAIRS, ("stage.{r}", "s.{r}")]
        state[f"s.{context.rank}"] = torch.full((2,), float(context.rank))
        torch_ckpt.save(state, path, tensor_mapping=pairs)
        found = torch_ckpt.load(path=path, no_dist=True)
        are_one_by_one(found, whole)
        assert all(found[f"stage.{r}"].eq(r).all() for r in range(context.world))
        for other in range(3):
            target = distribute_tensor(torch.zeros_like(whole), mesh, [Shard(other)])
            stage = torch.zeros(2)
            targets = {"n.0.gate_up": target, f"s.{context.rank}": stage}
            torch_ckpt.load(targets, path, tensor_mapping=pairs)
            assert torch.equal(target.full_tensor(), whole)
            assert stage.eq(context.rank).all()
    raised(
        lambda: torch_ckpt.save(
            state, context.folder / "never", tensor_mapping=[*pairs, ("never", "such")]
        ),
        "('never', 'such')",
        "no tensor",
    )
    assert not (context.folder / "never").exists()
    # Each rank has a part of one stored tensor.
    stacked = [("stack[{r}]", "s.{r}")]
    part = {f"s.{context.rank}": torch.full((2,), float(context.rank))}
    torch_ckpt.save(part, context.folder / "stack", tensor_mapping=stacked)
    torch_ckpt.async_save(part, context.folder / "later", tensor_mapping=stacked).result()
    for name in ("stack", "later"):
        found = torch_ckpt.load(path=context.folder / name, no_dist=True)["stack"]
        assert torch.equal(found, torch.arange(float(context.world))[:, None].expand(-1, 2))
    if context.world > 1:
        never = context.folder / "never"
        other = torch.ones(2 + context.rank)  # of another shape on each
        raised(lambda: torch_ckpt.save({"s.0": other}, never, tensor_mapping=stacked), "s.0")
        scaled = context.folder / "scaled"
        if context.rank == 0:
            codes = torch.ones(2 * context.world, 3).to(torch.float8_e4m3fn)
            halves = {"qkv": codes, "qkv_scale_inv": torch.full((1, 1), 0.5)}
            scaled_bases.base(scaled, halves)
        dist.barrier()
        own = {f"n.{context.rank}": torch.zeros(2, 3)}
        pieces = [(f"qkv[{{r}}/{context.world}]", "n.{r}")]
        torch_ckpt.load(own, scaled, tensor_mapping=pieces)
        assert own[f"n.{context.rank}"].eq(0.5).all()

        class Strip(torch_ckpt.SavePlanner):
            def set_up_planner(self, state_dict: Any, *args: Any, **options: Any) -> None:
                state = {name.removeprefix("module."): v for name, v in state_dict.items()}
                super().set_up_planner(state, *args, **options)

        stripped = Strip(tensor_mapping=[("Q", "q.T")])
        torch_ckpt.save({"module.q": torch.ones(2, 3)}, context.folder / "q", planner=stripped)
        (name,) = torch_ckpt.load(path=context.folder / "q", no_dist=True)
        assert name == "Q"
        planner = torch_ckpt.SavePlanner(tensor_mapping=stacked)
        writer = torch_ckpt.HuggingFaceStorageWriter(never, save_distributed=True)
        raised(lambda: dcp.save(part, storage_writer=writer, planner=planner), "stack")
        raised(
            lambda: torch_ckpt.save(
                7 if context.rank == 1 else part,  # type: ignore[arg-type]
                never,
                tensor_mapping=stacked,
            ),
            "rank 1: a state is a dict",
        )
        assert not never.exists()


@case
def groups_of_experts_are_saved_one_by_one(context: Context) -> None:
    mesh = init_device_mesh("cpu", (context.world,))
    _, groups = experts(context, False)
    whole = groups["n.0.gate_up"]
    for dim in range(3):
        path = context.folder / f"saved-{dim}"
        sharded = distribute_tensor(whole, mesh, [Shard(dim)])
        model = model_of("n.0.gate_up", nn.Parameter(sharded, requires_grad=False))
        torch_ckpt.save_model(model, path, tensor_mapping=PAIRS)
        found = torch_ckpt.load(path=path, no_dist=True)
        assert len(found) == 6
        are_one_by_one(found, whole)
    # And as the stages of a pipeline: each rank has a layer, all make one stack.
    own = model_of(f"m.{context.rank}.w", nn.Parameter(torch.full((2, 3), float(context.rank))))
    torch_ckpt.save_model(own, context.folder / "stack", tensor_mapping=[("s[{l}]", "m.{l}.w")])
    stack = torch_ckpt.load(path=context.folder / "stack", no_dist=True)["s"]
    assert stack.shape == (context.world, 2, 3)
    assert all(stack[rank].eq(rank).all() for rank in range(context.world))
