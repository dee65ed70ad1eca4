"""A tensor-parallel model that trains, dies, and goes on with another number of ranks: saved in the
background by the calls of Megatron Core's dist_checkpointing, on torch_ckpt. See README.md."""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import torch_ckpt
from torch_ckpt.megatron import dist_checkpointing
from torch_ckpt.megatron.dist_checkpointing import ShardedTensor
from torch_ckpt.megatron.dist_checkpointing.optimizer import (
    get_param_id_to_sharded_param_map,
    optim_state_to_sharding_state,
)
from torch_ckpt.megatron.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

WIDTH, HIDDEN, BATCH = 16, 64, 32
TRACKER = "latest_checkpointed_iteration.txt"


class Sum(torch.autograd.Function):
    """The sum over all ranks, each of which has a part of the hidden units."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor) -> torch.Tensor:
        whole = part.clone()
        dist.all_reduce(whole)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient


class Model(torch.nn.Module):
    """Two layers: this rank's part of the hidden units, and a bias that all ranks have."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(1)
        up = torch.randn(HIDDEN, WIDTH, generator=random) / 4
        down = torch.randn(WIDTH, HIDDEN, generator=random) / 8
        self.up = torch.nn.Parameter(up.chunk(world)[rank].clone())
        self.down = torch.nn.Parameter(down.chunk(world, 1)[rank].clone())
        self.bias = torch.nn.Parameter(torch.zeros(WIDTH))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(batch @ self.up.t())
        whole: torch.Tensor = Sum.apply(hidden @ self.down.t())
        return whole + self.bias


def state_of(model: Model, adam: torch.optim.Adam, step: int) -> dict[str, Any]:
    """What Megatron's programs describe: which part of which tensor this rank has."""
    rank, world = dist.get_rank(), dist.get_world_size()
    place = ShardedTensor.from_rank_offsets
    of_model = {
        "up": place("model.up", model.up, (0, rank, world)),
        "down": place("model.down", model.down, (1, rank, world)),
        "bias": place("model.bias", model.bias, replica_id=rank),
    }
    of_adam = adam.state_dict()
    numbers = get_param_id_to_sharded_param_map(of_model, model.parameters())
    optim_state_to_sharding_state(of_adam, numbers, exclude_keys=("step",))
    return {"model": of_model, "optimizer": of_adam, "iteration": step}


def load(model: Model, adam: torch.optim.Adam, path: Path) -> int:
    """The step at which the checkpoint was saved; tensors are read into their places."""
    for parameter in model.parameters():  # Adam makes its state at the first step
        zeros = torch.zeros_like(parameter)
        adam.state[parameter] = {
            "step": torch.tensor(0.0),
            "exp_avg": zeros.clone(),
            "exp_avg_sq": zeros,
        }
    loaded = dist_checkpointing.load(state_of(model, adam, 0), path)
    assert isinstance(loaded, dict)
    for state in adam.state.values():
        state["step"].fill_(loaded["iteration"])
    return int(loaded["iteration"])


def train(out: Path, steps: int, every: int, die_at: int | None) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    model = Model(rank, world)
    adam = torch.optim.Adam(model.parameters(), lr=0.01)
    target = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(2)) / 4
    tracker, queue, step = out / TRACKER, AsyncCallsQueue(), 0
    if tracker.exists():
        step = load(model, adam, out / f"iter_{int(tracker.read_text()):07}")
        if rank == 0:
            print(f"goes on at step {step} on {world} ranks", flush=True)
    while step < steps:
        if step == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        batch = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = torch.nn.functional.mse_loss(model(batch), batch @ target)
        adam.zero_grad()
        loss.backward()
        adam.step()
        step += 1
        queue.maybe_finalize_async_calls()
        if rank == 0 and (step == steps or step % every == 0):
            print(f"step {step}: loss {loss.item():.5f}", flush=True)
        if step % every == 0:
            save(queue, out, state_of(model, adam, step), step)
    queue.close()


def save(queue: AsyncCallsQueue, out: Path, state: dict[str, Any], step: int) -> None:
    """Stages now, and writes while training goes on; the tracker follows the commit."""
    request = dist_checkpointing.save(state, out / f"iter_{step:07}", async_sharded_save=True)
    assert request is not None

    def track() -> None:
        if dist.get_rank() == 0:
            (out / TRACKER).write_text(str(step))
        dist.barrier()

    request.add_finalize_fn(track)
    queue.schedule_async_request(request)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--die-at", type=int)
    parser.add_argument("--export", type=Path, help="write the model there when it is trained")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        options.out.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    train(options.out, options.steps, options.every, options.die_at)
    if options.export is not None and dist.get_rank() == 0:
        last = options.out / f"iter_{options.steps:07}"
        torch_ckpt.convert(last, options.export, "hf", include="model.*", objects=False)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
