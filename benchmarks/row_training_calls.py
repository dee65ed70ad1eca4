"""Rows: what a Checkpointer takes beside moving bytes: many parameters, and many steps."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks import files, rivals, states
from benchmarks.contender import Contender, Context, Figure, Row, row
from benchmarks.program import Timing

PARAMETERS = 10_000
STEPS = 1_000


def many(count: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model of so many small parameters, and an AdamW that has taken a step."""
    model = nn.Module()
    for number in range(count // 100):
        block = nn.ParameterList(nn.Parameter(torch.randn(8)) for _ in range(100))
        model.add_module(f"block{number}", block)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


@row("train_names")
def train_names(context: Context) -> Row:
    """Tensors so small that bytes cost nothing."""
    model, optimizer = many(max(100, states.scaled(PARAMETERS, context.scale)))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    flat: dict[str, torch.Tensor] = dict(model.state_dict())
    for parameter, values in optimizer.state.items():
        for key, value in values.items():
            flat[f"optimizer.state.{names[id(parameter)]}.{key}"] = value
    directory = context.directory / "run"
    kept: list[Any] = []

    def as_step() -> None:
        if not kept:
            kept.append(rivals.ours("Checkpointer")(directory, model, optimizer, background=False))
        kept[0].save(1)

    def add(name: str, run: Callable[[], None]) -> Contender:
        return Contender(
            name=name,
            role="ours",
            before=lambda: directory.mkdir(exist_ok=True),
            run=run,
            after=lambda: files.remove(directory),
            skip=rivals.why_not_ours("Checkpointer"),
        )

    return Row(
        title="A step of a model of many small parameters and AdamW, on one rank, and its tensors",
        bytes=sum(tensor.nbytes for tensor in flat.values()),
        tensors=len(flat),
        contenders=[
            add("ours, Checkpointer", as_step),
            add("ours, bare save", lambda: rivals.ours("save")(flat, directory / "bare") and None),
        ],
        limit="",
        per_tensor=True,
        close=kept.clear,
    )


@row("train_find", memory=("as-is",))
def train_find(context: Context) -> Row:
    """A start that finds nothing, and one that finds the newest of many steps."""
    root = context.directory / "steps"
    steps = max(3, states.scaled(STEPS, context.scale))
    _make_steps(root, steps)

    def load(of: Path) -> Timing:
        checkpointer = rivals.ours("Checkpointer")(of, nn.Linear(4, 4))
        cpu, start = time.process_time(), time.perf_counter()
        found = checkpointer.load()
        seconds = time.perf_counter() - start
        used = time.process_time() - cpu
        checkpointer.close()
        if found != (0 if of != root else steps):
            raise ValueError(f"step {found} was loaded")
        return Timing(seconds, used, 160, figures={"milliseconds": seconds * 1e3})

    def add(name: str, of: Path) -> Contender:
        return Contender(
            name=name,
            role="ours",
            run=lambda: load(of),
            after=lambda: None if of == root else files.remove(of),
            skip=rivals.why_not_ours("Checkpointer"),
        )

    return Row(
        title="Checkpointer.load of a small model",
        bytes=160,
        tensors=2,
        contenders=[
            add("ours, no step yet", context.directory / "none"),
            add(f"ours, the newest of {steps:,}", root),
        ],
        limit="",
        figures=(Figure("milliseconds", "load ms", worst=True),),
        close=lambda: files.remove(root),
    )


def _make_steps(root: Path, count: int) -> None:
    """Copies of one: their names say which step each is, its metadata the same."""
    if rivals.why_not_ours("Checkpointer"):
        root.mkdir()
        return
    with rivals.ours("Checkpointer")(root, nn.Linear(4, 4), background=False) as checkpointer:
        checkpointer.save(count)
    for number in range(1, count):
        shutil.copytree(root / f"step-{count}", root / f"step-{number}")
