"""Optimizers and schedulers under a Checkpointer: by name, in their own dtype, of any class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from training_loop import OPTIMIZERS, losses_of, run_of

from torch_ckpt import (
    Checkpointer,
    InvalidArgumentError,
)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_run_goes_on_to_the_bit(tmp_path: Path, kind: str) -> None:
    whole = losses_of(run_of(OPTIMIZERS[kind]), 1, 8)
    run = run_of(OPTIMIZERS[kind])
    with Checkpointer(tmp_path, **run) as checkpointer:
        assert checkpointer.load() == 0
        first = losses_of(run, 1, 4)
        checkpointer.save(4)
        losses_of(run, 5, 6)  # what is saved is the state at the call
    other = run_of(OPTIMIZERS[kind], seed=17)
    losses_of(other, 1, 2)  # it has a state already, which is another one
    with Checkpointer(tmp_path, **other) as checkpointer:
        assert checkpointer.load() == 4
    assert first + losses_of(other, 5, 8) == whole


def test_moments_keep_their_own_dtype(tmp_path: Path) -> None:
    for dtype, moments in ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)):
        root = tmp_path / str(dtype)

        def made(dtype: torch.dtype = dtype) -> tuple[nn.Module, torch.optim.Optimizer]:
            model = nn.Linear(3, 3).to(dtype)
            return model, torch.optim.AdamW(model.parameters())

        model, optimizer = made()
        for parameter in model.parameters():
            optimizer.state[parameter] = {
                "step": torch.tensor(3.0),
                "exp_avg": torch.randn(parameter.shape).to(moments),
                "exp_avg_sq": torch.rand(parameter.shape).to(moments),
                "note": ("mine", 1),
            }
        with Checkpointer(root, model, optimizer, background=False) as checkpointer:
            checkpointer.save(1)
        loaded, fresh = made()
        with Checkpointer(root, loaded, fresh) as checkpointer:
            checkpointer.load()
        for old, new in zip(model.parameters(), loaded.parameters(), strict=True):
            a, b = optimizer.state[old], fresh.state[new]
            assert a.keys() == b.keys() and b["note"] == ("mine", 1)
            for key in ("step", "exp_avg", "exp_avg_sq"):
                assert a[key].dtype == b[key].dtype and torch.equal(a[key], b[key])


def test_hyperparameters_go_by_name(tmp_path: Path) -> None:
    def made(split: bool, lr: float = 0.5) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        first, second = (list(part.parameters()) for part in model)
        groups = (
            [{"params": first, "lr": 0.1}, {"params": second, "lr": lr, "mine": 7}]
            if split
            else [{"params": [*second, *first]}]
        )
        return model, torch.optim.SGD(groups, lr=9.0)

    for step, lr in ((1, 0.5), (2, 0.1)):
        model, optimizer = made(True, lr)
        if step == 2:
            del optimizer.param_groups[1]["mine"]
        with Checkpointer(tmp_path, model, optimizer) as checkpointer:
            checkpointer.save(step)
    model, optimizer = made(True)
    optimizer.param_groups.reverse()  # another order
    Checkpointer(tmp_path, model, optimizer).load(1)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.1]
    assert optimizer.param_groups[0]["mine"] == 7
    # Into one group only where both were saved alike.
    model, optimizer = made(False)
    with pytest.raises(InvalidArgumentError, match="saved with different"):
        Checkpointer(tmp_path, model, optimizer).load(1)
    Checkpointer(tmp_path, model, optimizer).load(2)
    assert optimizer.param_groups[0]["lr"] == 0.1
    # Two optimizers that share out what one had.
    model, _ = made(True)
    two = [torch.optim.SGD(part.parameters(), lr=3.0) for part in model]
    Checkpointer(tmp_path, model, two).load(1)
    assert [each.param_groups[0]["lr"] for each in two] == [0.1, 0.5]


def test_an_optimizer_with_lists_in_its_state(tmp_path: Path) -> None:
    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(2)
        model = nn.Linear(3, 1)
        return model, torch.optim.LBFGS(model.parameters(), max_iter=3)

    def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
        x = torch.arange(12.0).reshape(4, 3) / 10

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(x).square() + model(x).cos()).mean()
            loss.backward()
            return loss

        return [optimizer.step(closure).item() for _ in range(steps)]

    model, optimizer = made()
    whole = trained(model, optimizer, 5)
    model, optimizer = made()
    trained(model, optimizer, 2)
    with Checkpointer(tmp_path, model, optimizer) as checkpointer:
        checkpointer.save(2)
    model, optimizer = made()
    Checkpointer(tmp_path, model, optimizer).load()
    assert trained(model, optimizer, 3) == whole[2:]


def test_state_in_mappings_and_of_other_shapes(tmp_path: Path) -> None:
    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(3, 2)
        return model, torch.optim.SGD(model.named_parameters(), 0.1)  # with their names

    model, optimizer = made()
    held = {
        "left": {"factors": [torch.randn(3, 3), torch.randn(2, 2)], "done": True},
        "row": torch.randn(7),
        "like": torch.randn(2, 3, dtype=torch.float64),
        "step": 4,
    }
    optimizer.state[model.weight] = held
    with Checkpointer(tmp_path, model, optimizer) as checkpointer:
        checkpointer.save(1)
    other, fresh = made()
    Checkpointer(tmp_path, other, fresh).load()
    found = fresh.state[other.weight]
    assert found.keys() == held.keys() and found["step"] == 4
    assert found["left"]["done"] is True
    for a, b in zip(held["left"]["factors"], found["left"]["factors"], strict=True):
        assert torch.equal(a, b)
    assert torch.equal(found["row"], held["row"])
    assert torch.equal(found["like"], held["like"]) and found["like"].dtype == torch.float64
    assert other.bias not in fresh.state


def test_hyperparameters_of_one_group_are_not_shared(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), torch.tensor(0.5), foreach=False)
    with Checkpointer(tmp_path, model, optimizer) as checkpointer:
        checkpointer.save(1)
    two = [torch.optim.SGD(part.parameters(), lr=3.0) for part in model]
    Checkpointer(tmp_path, model, two).load()
    first, second = (each.param_groups[0]["lr"] for each in two)
    assert first == second == 0.5 and first is not second


def test_several_schedulers(tmp_path: Path) -> None:
    def made() -> tuple[nn.Module, list[Any], list[Any]]:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        optimizers = [torch.optim.SGD(part.parameters(), 1.0) for part in model]
        schedulers = [
            torch.optim.lr_scheduler.ExponentialLR(each, rate)
            for each, rate in zip(optimizers, (0.5, 0.25), strict=True)
        ]
        return model, optimizers, schedulers

    model, optimizers, schedulers = made()
    for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
        optimizer.step()
        scheduler.step()
    with Checkpointer(tmp_path, model, optimizers, scheduler=schedulers) as checkpointer:
        checkpointer.save(1)
    model, optimizers, schedulers = made()
    Checkpointer(tmp_path, model, optimizers, scheduler=schedulers).load()
    assert [each.get_last_lr() for each in schedulers] == [[0.5], [0.25]]
    assert [each.param_groups[0]["lr"] for each in optimizers] == [0.5, 0.25]
    with pytest.raises(InvalidArgumentError, match="has 2 schedulers, and here are 1"):
        Checkpointer(tmp_path, model, optimizers, scheduler=schedulers[0]).load()
