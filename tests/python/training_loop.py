"""A small training run with all that a checkpoint has to keep: dropout, a loader that shuffles,
a schedule, an average of the weights, tied tensors."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import nn

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.05),
    "momentum": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.01),
    "fused": lambda p: torch.optim.AdamW(p, 0.01, fused=True),
    "tensor lr": lambda p: torch.optim.AdamW(p, torch.tensor(0.01), foreach=False),
    "NAdam": lambda p: torch.optim.NAdam(p, 0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, 0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.01, centered=True, momentum=0.5),
    "ASGD": lambda p: torch.optim.ASGD(p, 0.01, t0=2),
    "Rprop": lambda p: torch.optim.Rprop(p, 0.01),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adafactor": lambda p: torch.optim.Adafactor(p, 0.01),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = nn.functional.dropout(torch.relu(layer(hidden)), 0.2, self.training)
        return self.head(self.norm(hidden))


class Loader:
    """Batches in an order that python's random numbers say; its position is its state."""

    def __init__(self) -> None:
        self.position = 0
        self.order: list[int] = []

    def next(self) -> torch.Tensor:
        if not self.order:
            self.order = random.sample(range(6), 6)
        self.position += 1
        first = self.order.pop()
        return (torch.arange(8) + first) % 6

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "order": list(self.order)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position, self.order = state["position"], list(state["order"])


class Average:
    """An exponential average of the weights, as `states` of a run."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.values = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.count = 0

    def update(self) -> None:
        self.count += 1
        for name, parameter in self.model.named_parameters():
            self.values[name].lerp_(parameter.detach(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values, self.count = dict(state["values"]), state["count"]


def run_of(
    optimizer_of: Callable[[Any], torch.optim.Optimizer],
    seed: int = 5,
    model: nn.Module | None = None,
) -> dict[str, Any]:
    """The arguments of a Checkpointer for a new run."""
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    model = Net() if model is None else model
    optimizer = optimizer_of(model.parameters())
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
        "dataloader": Loader(),
        "states": {"ema": Average(model)},
    }


def losses_of(run: dict[str, Any], first: int, last: int) -> list[float]:
    """Train from step `first` to `last`; the losses, exact."""
    losses = []
    for _ in range(first, last + 1):
        tokens = run["dataloader"].next()
        noise = torch.from_numpy(numpy.random.rand(8, 1)).float()
        target = (tokens + 1) % 6
        run["optimizer"].zero_grad()
        loss = nn.functional.cross_entropy(run["model"](tokens) + 0.1 * noise, target)
        loss.backward()
        run["optimizer"].step()
        run["scheduler"].step()
        run["states"]["ema"].update()
        average = sum(float(value.sum()) for value in run["states"]["ema"].values.values())
        losses.append(loss.item() + average)
    return losses
