"""Saves of two layouts by several ranks: final files in model/, shards in state/."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from ranks.final import check_final
from ranks.layouts import check, layouts, several_boxes, state
from ranks.run import Context, cases, raised
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import torch_ckpt
from torch_ckpt import Checkpoint, HuggingFaceStorageWriter, SavePlanner
from torch_ckpt.dcp.write.layouts import Layout, Layouts

CASES, case = cases()

LAYOUTS = Layouts(
    Layout(True, "model", "hf"), Layout(False, "state"), frozenset({"optimizer", "rng", "version"})
)


def writer(path: Path, layouts: Layouts = LAYOUTS, extras: Any = None) -> HuggingFaceStorageWriter:
    """With `extras` beside the final files."""
    made = HuggingFaceStorageWriter(path, layout="final")
    made.layouts = replace(layouts, main=replace(layouts.main, extras=extras))
    return made


def files_below(path: Path) -> list[str]:
    return sorted(
        file.relative_to(path).as_posix() for file in path.rglob("*") if not file.is_dir()
    )


def both(world: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tables of the model's tensors and of the optimizer's, by their names in the checkpoint."""
    model = layouts(world) | several_boxes(world)
    return model, {f"optimizer.{name}": layout for name, layout in model.items()}


def loads(path: Path, table: dict[str, Any]) -> None:
    """What is at `path` has these tensors, in any layout."""
    blank = state(table, blank=True)
    torch_ckpt.load(blank, path)
    check(blank, table)


@case
def every_layout(context: Context) -> None:
    model, optimizer = both(context.world)
    path = context.folder / "c"
    saved = {**state(model | optimizer), "version": 3}
    torch_ckpt.save(saved, storage_writer=writer(path))
    loads(path, model | optimizer)
    check_final(path / "model", model)
    assert files_below(path / "model") == ["model.safetensors"]
    Checkpoint(path).verify()
    # Each part by itself, too.
    loads(path / "model", model)
    loads(path / "state", optimizer)


@case
def in_the_background(context: Context) -> None:
    model, optimizer = both(context.world)
    config = context.folder / "config.json"
    if context.rank == 0:
        config.write_text("{}")
    torch.distributed.barrier()
    for kind in AsyncCheckpointerType:
        path = context.folder / kind.value
        torch_ckpt.async_save(
            state(model | optimizer),
            storage_writer=writer(path, extras=str(config)),
            async_checkpointer_type=kind,
        ).result()
        check_final(path / "model", model)
        loads(path / "state", optimizer)
        assert files_below(path / "model") == ["config.json", "model.safetensors"]


@case
def a_plan_that_is_cached(context: Context) -> None:
    model, optimizer = both(context.world)
    planner = SavePlanner(enable_plan_caching=True)
    for step in range(3):
        path = context.folder / str(step)
        torch_ckpt.save(state(model | optimizer), storage_writer=writer(path), planner=planner)
        check_final(path / "model", model)
        loads(path / "state", optimizer)


@case
def an_error_of_one_rank_is_one_of_all(context: Context) -> None:
    model, optimizer = both(context.world)
    path = context.folder / "c"
    torch_ckpt.save(state(model | optimizer), storage_writer=writer(path))
    wrong = {**state(model), "version": object() if context.rank == 0 else 1}
    raised(lambda: torch_ckpt.save(wrong, storage_writer=writer(path)), "version")
    loads(path, model | optimizer)
    torch.distributed.barrier()
    # Nothing for final files but a header.
    torch_ckpt.save(state(optimizer), storage_writer=writer(path))
    loads(path / "state", optimizer)
