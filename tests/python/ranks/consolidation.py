"""Consolidation by all ranks together."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from ranks.layouts import check, layouts, state, whole
from ranks.run import Context, cases, everywhere, raised
from safetensors.torch import load_file
from sample_states import stock_rows

import torch_ckpt
from torch_ckpt.native import core

CASES, case = cases()


def written_bytes() -> int:
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("wchar"):
            return int(line.split()[1])
    raise AssertionError("no wchar")


@case
def consolidation_on_every_rank(context: Context) -> None:
    """One output file of one large tensor is still written by all ranks, about equally."""
    shards, out = context.folder / "in", context.folder / "out"
    content = whole("big", (4096, 1024 * context.world))
    if context.rank == 0:
        stock_rows(shards, content, 4, name="big")
    dist.barrier()
    before = written_bytes()
    torch_ckpt.consolidate_safetensors_files_on_every_rank(shards, out, {"big": 1})
    done = everywhere(written_bytes() - before)
    share = content.numel() * 4 / context.world
    assert all(0.9 * share < part < 1.1 * share for part in done), done
    assert torch.equal(load_file(out / "model-00001-of-00001.safetensors")["big"], content)


@case
def consolidation_with_another_mapping_on_every_rank(context: Context) -> None:
    """As one made of a set is. The first rank's holds, and bad ones are an error on all."""
    shards, out = context.folder / "in", context.folder / "out"
    content = {name: torch.full((1 << 20,), float(i)) for i, name in enumerate("abc")}
    torch_ckpt.save(content, checkpoint_id=shards)
    mapping = {"a": 1, "b": 2, "c": 2} if context.rank == 0 else {"b": 1, "a": 2, "c": 2}
    torch_ckpt.consolidate_safetensors_files_on_every_rank(shards, out, mapping)
    for number, names in ((1, "a"), (2, "bc")):
        found = load_file(out / f"model-{number:05}-of-00002.safetensors")
        assert set(found) == set(names)
        assert all(torch.equal(found[name], content[name]) for name in names)
    # So do its names.
    torch_ckpt.consolidate_safetensors_files_on_every_rank(
        shards,
        context.folder / "named",
        None,
        key_mapping=lambda name: f"{name}{context.rank}",
    )
    (named,) = (context.folder / "named").glob("*.safetensors")
    assert set(load_file(named)) == {"a0", "b0", "c0"}
    raised(
        lambda: torch_ckpt.consolidate_safetensors_files_on_every_rank(
            shards, context.folder / "bad", None, dtype="nothing" if context.rank == 1 else "bf16"
        ),
        "rank 1",
        "dtype='nothing'",
    )
    bad = {**mapping, "c": 0} if context.rank == 1 else mapping
    raised(
        lambda: torch_ckpt.consolidate_safetensors_files_on_every_rank(
            shards, context.folder / "bad", bad
        ),
        "rank 1",
        "'c': has index 0",
    )
    assert sorted(os.listdir(context.folder)) == ["in", "named", "out"]


@case
def consolidation_that_fails_on_one_rank(context: Context) -> None:
    shards, out = context.folder / "in", context.folder / "out"
    if context.rank == 0:
        stock_rows(shards, whole("w", (64, 64)), 4)
    dist.barrier()
    source = shards if context.rank != 1 else context.folder / "elsewhere"
    raised(
        lambda: torch_ckpt.consolidate_safetensors_files_on_every_rank(source, out, None),
        "rank 1",
        "elsewhere",
    )
    dist.barrier()
    assert sorted(os.listdir(context.folder)) == ["in"], os.listdir(context.folder)
    raised(
        lambda: torch_ckpt.consolidate_safetensors_files_on_every_rank(
            shards, out, {"w": 1, "x": 1}
        ),
        "'x'",
    )
    dist.barrier()
    torch_ckpt.consolidate_safetensors_files_on_every_rank(shards, out, None)
    assert sorted(os.listdir(context.folder)) == ["in", "out"]


@case
def extras_that_there_are_not(context: Context) -> None:
    """It is said before the work is done."""
    shards, out = context.folder / "in", context.folder / "out"
    torch_ckpt.save({"w": torch.ones(1000)}, checkpoint_id=shards)
    asked = []
    call = core.call

    def watched(request: dict[str, Any]) -> Any:
        asked.append(request["op"])
        return call(request)

    with mock.patch.object(core, "call", watched):
        raised(
            lambda: torch_ckpt.consolidate_safetensors_files_on_every_rank(
                shards, out, None, extras=context.folder / "nothing"
            ),
            "rank 0",
            "no such file",
        )
    assert "merge_share" not in asked
    dist.barrier()
    assert not out.exists()


@case
def every_layout_in_other_dtypes(context: Context) -> None:
    table = layouts(context.world)
    shards, out = context.folder / "in", context.folder / "out"
    torch_ckpt.save(state(table), checkpoint_id=shards)
    torch_ckpt.consolidate_safetensors_files_on_every_rank(
        shards, out, None, dtype="bf16", keep_fp32=["rows"], max_shard_size="2KB", naming="hf"
    )
    tensors: dict[str, torch.Tensor] = {}
    for file in out.glob("*.safetensors"):
        tensors.update(load_file(file))
    assert len(list(out.glob("model-*"))) > 2
    for name, layout in table.items():
        expected = whole(name, layout.shape)
        if "rows" not in name:
            expected = expected.bfloat16()
        assert tensors[name].dtype == expected.dtype
        assert torch.equal(tensors[name], expected), name
    target = {name: value.float() for name, value in state(table, blank=True).items()}
    torch_ckpt.load(target, checkpoint_id=shards)
    check(target, table)
    torch_ckpt.Checkpoint(out).verify()


@case
def progress_is_that_of_all_ranks(context: Context) -> None:
    shards, out = context.folder / "in", context.folder / "out"
    torch_ckpt.save({"w": torch.ones(1 << 21)}, checkpoint_id=shards)
    calls: list[tuple[int, int]] = []
    torch_ckpt.consolidate_safetensors_files_on_every_rank(
        shards, out, None, progress=lambda done, total: calls.append((done, total))
    )
    if context.rank == 0:
        size = (out / "model-00001-of-00001.safetensors").stat().st_size
        assert calls[-1] == (size, size)
    else:
        assert calls == []

    class Needy(Exception):
        """Cannot be pickled, and could not be made again."""

        def __init__(self, text: str, rank: int) -> None:
            super().__init__(f"{text} by {rank}")

    for kind in (lambda text, rank: ValueError(f"{text} by {rank}"), Needy):

        def failing(*_: int, kind: Any = kind) -> None:
            raise kind("cannot be shown", context.rank)

        raised(
            lambda failing=failing: torch_ckpt.consolidate_safetensors_files_on_every_rank(
                shards, context.folder / "unwatched", None, progress=failing
            ),
            "cannot be shown by 0",
        )
    dist.barrier()
    assert sorted(os.listdir(context.folder)) == ["in", "out"]


@case
def beside_training(context: Context) -> None:
    """Two at a time, while the trainer uses the same process group."""
    contents = [torch.full((1 << 20,), float(number)) for number in range(2)]
    for number, content in enumerate(contents):
        torch_ckpt.save({"w": content}, checkpoint_id=context.folder / f"in{number}")
    futures = [
        torch_ckpt.consolidate_safetensors_files_on_every_rank(
            context.folder / f"in{number}", context.folder / f"out{number}", None, background=True
        )
        for number in range(2)
    ]
    for step in range(50):
        total = torch.tensor([step])
        dist.all_reduce(total)
        assert total.item() == step * context.world
    for number, future in enumerate(futures):
        assert future is not None
        assert future.result(timeout=20) is None
        file = context.folder / f"out{number}" / "model-00001-of-00001.safetensors"
        assert torch.equal(load_file(file)["w"], contents[number])
    failing = torch_ckpt.consolidate_safetensors_files_on_every_rank(
        context.folder / "nowhere", context.folder / "out", None, background=True
    )
    assert failing is not None
    assert isinstance(failing.exception(timeout=20), torch_ckpt.IncompleteError)


@case
def cancelled_by_one_rank(context: Context) -> None:
    shards, out = context.folder / "in", context.folder / "out"
    content = torch.arange(1 << 18)
    torch_ckpt.save({"w": content}, checkpoint_id=shards)
    call = core.call
    cancelled = threading.Event()

    def waiting(request: dict[str, Any]) -> Any:
        if request["op"] == "merge_share":
            assert cancelled.wait(60)
        answer = call(request)
        if request["op"] == "job_cancel":  # of this rank's share
            cancelled.set()
        return answer

    core.call = waiting
    try:
        future = torch_ckpt.consolidate_safetensors_files_on_every_rank(
            shards, out, None, background=True
        )
        assert future is not None
        if context.rank == context.world - 1:
            assert future.cancel()
        error = future.exception(timeout=60)
    finally:
        core.call = call
    assert isinstance(error, torch_ckpt.CancelledError), error
    assert f"rank {context.world - 1}" in str(error)
    assert not future.cancel()
    dist.barrier()
    assert os.listdir(context.folder) == ["in"]
    torch_ckpt.consolidate_safetensors_files_on_every_rank(shards, out, None)
    assert torch.equal(load_file(out / "model-00001-of-00001.safetensors")["w"], content)
