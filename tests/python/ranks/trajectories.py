"""Training runs that go on to the bit: sharded, tensor-parallel, and stages of a pipeline."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from ranks.run import Context, cases
from ranks.training import Block, layouts_of, model_of, seeded, train
from torch import nn
from training_loop import Loader

from torch_ckpt import Checkpoint, Checkpointer

CASES, case = cases()


def goes_on(
    root: Path,
    begun: Callable[[int], Any],
    steps: Callable[[Any, int], list[float]],
    data_rank: tuple[int, int],
) -> None:
    """The losses after a save are those of a run of another seed that has loaded it.

    begun: of a seed, model, optimizers, schedulers and loader. steps: trains these, so often.
    """

    def checkpointer_of(run: Any) -> Checkpointer:
        model, optimizer, scheduler, loader = run
        return Checkpointer(
            root, model, optimizer, scheduler=scheduler, dataloader=loader, data_rank=data_rank
        )

    run = begun(3)
    with checkpointer_of(run) as checkpointer:
        steps(run, 3)
        checkpointer.save(3)
        wanted = steps(run, 3)
    run = begun(11)
    assert steps(run, 1)[0] not in wanted
    with checkpointer_of(run) as checkpointer:
        assert checkpointer.load() == 3
    assert steps(run, 3) == wanted


@case
def losses_go_on_to_the_bit(context: Context) -> None:
    for layout in layouts_of(context.world):
        if layout not in ("fsdp", "hsdp"):
            continue  # ranks of the others must draw alike
        root = context.folder / layout
        seeded(context, 3)
        model, loader = model_of(layout, context.world), Loader()
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        with Checkpointer(root, model, optimizer, dataloader=loader) as checkpointer:
            train(model, optimizer, loader, 2)
            checkpointer.save(2)
            wanted = train(model, optimizer, loader, 3)
        seeded(context, 11)
        model, loader = model_of(layout, context.world), Loader()
        optimizer = torch.optim.AdamW(model.parameters(), 0.5)
        train(model, optimizer, loader, 1)
        with Checkpointer(root, model, optimizer, dataloader=loader) as checkpointer:
            assert checkpointer.load() == 2
        assert train(model, optimizer, loader, 3) == wanted, layout
        Checkpoint(root / "step-2").verify()


@case
def losses_of_tensor_parallel_ranks_go_on_to_the_bit(context: Context) -> None:
    """With two optimizers and two schedulers, in bfloat16 and float32, and dropout."""
    for layout in layouts_of(context.world):
        if layout not in ("tp", "tp_fsdp"):
            continue
        # Tensor-parallel ranks draw alike, and share a loader.
        size = 2 if layout == "tp_fsdp" else 1
        data_rank = (context.rank * size // context.world, size)

        def begun(
            seed: int, layout: str = layout, data_rank: tuple[int, int] = data_rank
        ) -> tuple[nn.Module, list[Any], list[Any], Loader]:
            for draw in (random.seed, numpy.random.seed, torch.manual_seed):
                draw(seed + data_rank[0])
            model = model_of(layout, context.world)
            torch.manual_seed(seed + data_rank[0])
            model[1].to(torch.bfloat16)
            kinds = [("adam", torch.optim.AdamW, 0.01), ("sgd", torch.optim.SGD, 0.02)]
            optimizers = [
                kind(
                    [
                        p
                        for n, p in model.named_parameters()
                        if n.startswith("0.") == (name == "sgd")
                    ],
                    lr,
                )
                for name, kind, lr in kinds
            ]
            schedulers = [torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in optimizers]
            loader = Loader()
            loader.position = 50 * data_rank[0]
            return model, optimizers, schedulers, loader

        def steps(run: tuple[nn.Module, list[Any], list[Any], Loader], count: int) -> list[float]:
            model, optimizers, schedulers, loader = run
            losses = []
            for _ in range(count):
                x = loader.next().float().reshape(1, 8) + torch.rand(2, 8)
                y = x
                for place, block in enumerate(model):
                    y = block(y.to(torch.bfloat16 if place == 1 else torch.float32)).float()
                loss = y.square().mean() + random.random()
                loss.backward()
                for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
                    optimizer.step()
                    optimizer.zero_grad()
                    scheduler.step()
                losses.append(loss.item())
            return losses

        goes_on(context.folder / layout, begun, steps, data_rank)


@case
def losses_of_a_pipeline_go_on_to_the_bit(context: Context) -> None:
    """A stage on each rank: what it makes goes to the next one, and gradients come back."""
    rank, last = context.rank, context.world - 1

    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module(f"layer_{rank}", Block(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return next(self.children())(x)

    def begun(seed: int) -> tuple[nn.Module, Any, Any, Loader]:
        seeded(context, seed)
        stage = Stage()
        optimizer = torch.optim.AdamW(stage.parameters(), 0.01 * (rank + 1))
        return stage, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5), Loader()

    def steps(run: tuple[nn.Module, Any, Any, Loader], count: int) -> list[float]:
        stage, optimizer, scheduler, loader = run
        losses = []
        for _ in range(count):
            x = loader.next().float().reshape(1, 8) + torch.zeros(2, 8)
            if rank:
                dist.recv(x, rank - 1)
            x.requires_grad_()
            y = stage(x)
            if rank < last:
                dist.send(y.detach(), rank + 1)
                gradient = torch.empty_like(y)
                dist.recv(gradient, rank + 1)
                y.backward(gradient)
            else:
                y.square().mean().backward()
            if rank:
                dist.send(x.grad, rank - 1)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            losses.append(y.square().mean().item())
        return losses

    goes_on(context.folder, begun, steps, (0, 1))
