"""CheckpointDirectory by several ranks: rank 0 alone looks, writes and deletes, and all agree."""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from ranks.failures import FailsOnRank1
from ranks.layouts import check, layouts, state
from ranks.run import Context, cases, raised

import torch_ckpt
from torch_ckpt import CheckpointDirectory, IncompleteError, InvalidArgumentError
from torch_ckpt.runs import directory as directory_module

CASES, case = cases()


def content(context: Context, step: int) -> dict[str, Any]:
    return {**state(layouts(context.world)), "n": torch.full((5,), step), "step": step}


def load(context: Context, directory: CheckpointDirectory, step: int | None = None) -> int:
    table = layouts(context.world)
    target = {**state(table, blank=True), "n": torch.zeros(5, dtype=torch.int64), "step": -1}
    found = directory.load(target, step)
    check({name: target[name] for name in table}, table)
    assert target["step"] == found and (target["n"] == found).all()
    return found


@contextlib.contextmanager
def seen_by_rank_0_alone(context: Context) -> Iterator[None]:
    """Every other rank sees another directory, and fails if it changes it, or looks for what is to
    come: its node may remember for a while that it is not there."""
    if context.rank == 0:
        yield
        return
    wrong = {
        "newest_first": mock.Mock(side_effect=lambda *args, **options: iter([999, 5])),
        **{
            name: mock.Mock(side_effect=AssertionError(f"{name} on rank {context.rank}"))
            for name in ("write_pointer", "make_directory", "child_name")
        },
    }
    deletes = mock.Mock(side_effect=AssertionError(f"deletes on rank {context.rank}"))
    with (
        mock.patch.multiple(directory_module, **wrong),
        mock.patch.multiple(directory_module.Deletions, begin=deletes, spare=deletes),
    ):
        yield


def children(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


@case
def all_see_what_rank_0_sees(context: Context) -> None:
    root = context.folder / "below" / "root"
    with seen_by_rank_0_alone(context):
        directory = CheckpointDirectory(root, keep_last=2)
        raised(lambda: load(context, directory), "holds no committed checkpoint")
        assert directory.load({}, missing_ok=True) is None
        for step in (1, 2, 3):
            directory.save(content(context, step), step)
            assert (root / "LATEST").read_text() == f"step-{step}\n"
            assert load(context, directory) == step
        directory.close()
        dist.barrier()
        assert load(context, directory, 2) == 2
    assert directory.steps() == [2, 3]
    assert directory.latest() == str(root / "step-3")
    assert children(root) == ["LATEST", "step-2", "step-3"]


@case
def saves_in_the_background(context: Context) -> None:
    """While a rank asks what is there, alone: that is no collective call."""
    root = context.folder / "root"
    group = dist.new_group(backend="gloo")
    with seen_by_rank_0_alone(context):
        directory = CheckpointDirectory(root, keep_last=2, process_group=group)
        heard: list[int] = []
        before = 0
        for step in range(1, 8):
            source = content(context, step)
            future = directory.async_save(source, step, on_commit=lambda n=step: heard.append(n))
            source["n"].fill_(-1)
            for _ in range(10 if context.rank == 0 else 0):
                latest = directory.latest()
                # Committed or not yet, but whole and never an older one.
                if latest is not None:
                    assert int(latest.rpartition("-")[2]) in (before, step)
            future.result()
            assert heard[-1] == step
            dist.barrier()
            assert load(context, directory) == step
            before = step
        directory.close()
    dist.barrier()
    assert children(root) == ["LATEST", "step-6", "step-7"]


@case
def a_failed_save_changes_nothing(context: Context) -> None:
    root = context.folder / "root"
    directory = CheckpointDirectory(root, keep_last=1)
    directory.save(content(context, 1), 1)
    raised(lambda: directory.save(content(context, 2), 2, planner=FailsOnRank1()), "rank 1")
    future = directory.async_save(content(context, 2), 2, planner=FailsOnRank1())
    raised(future.result, "rank 1")
    directory.close()
    dist.barrier()
    assert children(root) == ["LATEST", "step-1"]
    assert (root / "LATEST").read_text() == "step-1\n"
    directory.save(content(context, 2), 2)
    directory.close()
    dist.barrier()
    assert children(root) == ["LATEST", "step-2"]


@case
def what_fails_on_rank_0(context: Context) -> None:
    root = context.folder / "root"
    if context.rank == 0:
        (context.folder / "file").write_text("")
    dist.barrier()
    error = raised(lambda: CheckpointDirectory(context.folder / "file"), "is not a directory")
    assert isinstance(error, InvalidArgumentError)
    directory = CheckpointDirectory(root)
    full = OSError(errno.ENOSPC, "No space left on device")
    with mock.patch.object(directory_module, "write_pointer", mock.Mock(side_effect=full)):
        raised(lambda: directory.save(content(context, 1), 1), "No space left")
        # Committed all the same.
        assert load(context, directory) == 1
        future = directory.async_save(content(context, 2), 2)
        assert future.exception() is (full if context.rank == 0 else None)
    directory.save(content(context, 3), 3)
    assert (root / "LATEST").read_text() == "step-3\n"


@case
def parts_of_all_ranks(context: Context) -> None:
    root = context.folder / "root"
    with seen_by_rank_0_alone(context):
        directory = CheckpointDirectory(root, keep_last=1)
        for step in (1, 2):
            directory.save(content(context, step), step, use_collectives=False)
            assert load(context, directory) == step
        directory.close()
    dist.barrier()
    assert children(root) == ["LATEST", "step-2"]
    parts = sorted((root / "step-2").glob("torch_ckpt-*.json"))
    assert len(parts) == context.world
    dist.barrier()
    if context.rank == 0:
        parts[-1].unlink()
    dist.barrier()
    assert directory.latest() is None
    error = raised(lambda: load(context, directory), "holds no committed checkpoint")
    assert isinstance(error, IncompleteError)


@case
def a_group_of_some_ranks(context: Context) -> None:
    """Rank 0 of the group decides, which is not rank 0 of all."""
    groups = [dist.new_group([rank], backend="gloo") for rank in range(context.world)]
    root = context.folder / str(context.rank)
    with CheckpointDirectory(root, keep_last=1, process_group=groups[context.rank]) as directory:
        for step in range(1, 3 + context.rank):
            value = {"n": torch.full((5,), step), "step": step}
            directory.save(value, step)
            time.sleep(0.01 * context.rank)
        target = {"n": torch.zeros(5, dtype=torch.int64), "step": 0}
        assert directory.load(target) == target["step"] == 2 + context.rank
    assert children(root) == ["LATEST", f"step-{2 + context.rank}"]
    raised(
        lambda: CheckpointDirectory(context.folder).save({"n": 1}, 1, no_dist=True),
        "no_dist would make every rank save",
    )
    assert torch_ckpt.Checkpoint(root / f"step-{2 + context.rank}").describe().world_size == 1
