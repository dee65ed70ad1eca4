"""dcp.save(use_collectives=False): every rank commits a part of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks.layouts import check, layouts, several_boxes, state, whole
from ranks.run import Context, cases, everywhere, raised
from safetensors.torch import load_file
from sample_states import listing

import torch_ckpt
from torch_ckpt import (
    ConflictError,
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
    IncompleteError,
    InvalidArgumentError,
    LocalBoxes,
    consolidate_safetensors_files,
)

CASES, case = cases()


def content(context: Context, *, blank: bool = False) -> dict[str, Any]:
    """Sharded and replicated DTensors, a plain tensor that every rank holds, a step counter."""
    model = state(layouts(context.world), blank=blank)
    plain = whole("plain", (6, 2))
    return {
        "model": model,
        "plain": torch.zeros_like(plain) if blank else plain,
        "step": 0 if blank else 7,
    }


def check_content(context: Context, loaded: dict[str, Any]) -> None:
    check(loaded["model"], layouts(context.world))
    assert torch.equal(loaded["plain"], whole("plain", (6, 2)))
    assert loaded["step"] == 7


def save(context: Context, path: Path, **options: Any) -> None:
    writer = HuggingFaceStorageWriter(path, save_distributed=True, **options)
    dcp.save(content(context), storage_writer=writer, use_collectives=False)


@case
def saved_and_loaded(context: Context) -> None:
    """By the stock planner; `shared` is loaded by one process afterwards."""
    path = context.shared / "no-collectives"
    save(context, path)
    names = listing(path)
    assert len([name for name in names if name.startswith("torch_ckpt-")]) == 2 * context.world
    assert not [name for name in names if "stage" in name], names
    loaded = content(context, blank=True)
    dcp.load(loaded, storage_reader=HuggingFaceStorageReader(path))
    check_content(context, loaded)


@case
def our_planner(context: Context) -> None:
    """torch_ckpt.save, with parts of several boxes."""
    table = several_boxes(context.world)
    path = context.folder / "c"
    torch_ckpt.save(state(table), checkpoint_id=path, use_collectives=False)
    loaded = state(table, blank=True)
    torch_ckpt.load(loaded, checkpoint_id=path)
    check(loaded, table)


@case
def a_box_that_ranks_have_beside_others(context: Context) -> None:
    """All have the first row; beside it each has rows of its own, next to it or not."""
    rows = 2 * context.world + 1
    content = torch.arange(rows * 3.0).view(rows, 3)

    def boxes(source: torch.Tensor) -> LocalBoxes:
        own = range(1 + 2 * context.rank, 3 + 2 * context.rank)
        return LocalBoxes((rows, 3), [((i, 0), source[i : i + 1].clone()) for i in (0, *own)])

    path = context.folder / "c"
    torch_ckpt.save({"w": boxes(content)}, path, use_collectives=False)
    target = {"w": boxes(torch.zeros_like(content))}
    torch_ckpt.load(target, path)
    for (at, got), (_, wanted) in zip(target["w"].boxes, boxes(content).boxes, strict=True):
        assert torch.equal(got, wanted), at
    assert torch.equal(torch_ckpt.load(None, path)["w"], content)


@case
def consolidated(context: Context) -> None:
    path, output = context.folder / "shards", context.folder / "output"
    save(context, path)
    if context.rank == 0:
        consolidate_safetensors_files(path, output, None)
        tensors = load_file(output / "model-00001-of-00001.safetensors")
        for name, layout in layouts(context.world).items():
            assert torch.equal(tensors[f"model.{name}"], whole(name, layout.shape)), name
    dist.barrier()
    loaded = content(context, blank=True)
    dcp.load(loaded, storage_reader=HuggingFaceStorageReader(output))
    check_content(context, loaded)


@case
def stock_reads_what_no_two_ranks_hold(context: Context) -> None:
    path = context.folder / "c"
    table = {"rows": layouts(context.world)["rows"]}
    writer = HuggingFaceStorageWriter(path, save_distributed=True)
    dcp.save(state(table), storage_writer=writer, use_collectives=False)
    loaded = state(table, blank=True)
    dcp.load(loaded, storage_reader=dcp.HuggingFaceStorageReader(str(path)))
    check(loaded, table)


@case
def a_second_save_is_refused(context: Context) -> None:
    path = context.folder / "c"
    save(context, path)
    before = listing(path)
    error = raised(lambda: save(context, path), str(path), "without a checkpoint")
    assert isinstance(error, ConflictError)
    dist.barrier()
    assert listing(path) == before
    loaded = content(context, blank=True)
    dcp.load(loaded, storage_reader=HuggingFaceStorageReader(path))
    check_content(context, loaded)
    # One with collectives may replace it.
    dcp.save(content(context), storage_writer=HuggingFaceStorageWriter(path, save_distributed=True))
    assert "torch_ckpt.json" in listing(path)
    assert not [name for name in listing(path) if name.startswith("torch_ckpt-")]


@case
def a_checkpoint_is_not_saved_over(context: Context) -> None:
    path = context.folder / "c"
    dcp.save(content(context), storage_writer=HuggingFaceStorageWriter(path, save_distributed=True))
    error = raised(lambda: save(context, path), "torch_ckpt.json")
    assert isinstance(error, ConflictError)


@case
def an_error_on_one_rank_leaves_no_checkpoint(context: Context) -> None:
    """Nor anything of that rank; the missing part is named."""
    path = context.folder / "c"
    values = content(context)
    last = context.world - 1
    if context.rank == last:
        values["step"] = lambda: None  # typed JSON cannot say it
    writer = HuggingFaceStorageWriter(path, save_distributed=True)
    planner = dcp.DefaultSavePlanner()
    failure = None
    try:
        # The calls of dcp.save but for its barrier, in which the others would wait.
        planner.set_up_planner(values, None, context.rank == 0)
        writer.set_up_storage_writer(context.rank == 0, rank=context.rank, use_collectives=False)
        plan = writer.prepare_local_plan(planner.create_local_plan())
        plans, metadata = planner.create_global_plan([plan])
        plan = planner.finish_plan(writer.prepare_global_plan(plans)[0])
        results = writer.write_data(plan, planner).wait()
        writer.finish(metadata=metadata, results=[results])
    except Exception as error:
        failure = error
    failures = everywhere(None if failure is None else str(failure))
    assert failures[:last] == [None] * last and failures[last], failures
    own = f"{context.rank + 1:05}"
    left = [name for name in listing(path) if own in name.split("-of-")[0]]
    assert bool(left) == (failure is None), left
    error = raised(lambda: HuggingFaceStorageReader(path).read_metadata(), f"rank {last} of")
    assert isinstance(error, IncompleteError)


@case
def paths_that_are_not_the_same_place(context: Context) -> None:
    """No rank hears of another while it saves, but before they commit they have looked."""
    own = context.folder / f"node{context.rank}"
    own.mkdir()
    error = raised(
        lambda: torch_ckpt.save(content(context), own / "c", use_collectives=False),
        "rank 1",
        "same file system",
        str(context.folder / "node1" / "c"),
    )
    assert isinstance(error, IncompleteError) and error.rank == 1
    dist.barrier()
    assert not listing(own / "c")


@case
def one_rank_that_cannot_write_leaves_no_part(context: Context) -> None:
    values = content(context)
    if context.rank == context.world - 1:
        values["step"] = lambda: None
    path = context.folder / "c"
    raised(lambda: torch_ckpt.save(values, path, use_collectives=False), "step")
    dist.barrier()
    assert not listing(path)
    torch_ckpt.save(content(context), path, use_collectives=False)
    loaded = content(context, blank=True)
    torch_ckpt.load(loaded, path)
    check_content(context, loaded)
    assert not [name for name in listing(path) if "save_id" in name]


@case
def another_group(context: Context) -> None:
    """The last rank alone, through a group in which it is rank 0."""
    last = context.world - 1
    group = dist.new_group([last])
    path = context.folder / "c"
    value = {"w": whole("w", (3, 3))}
    if context.rank == last:
        torch_ckpt.save(value, checkpoint_id=path, process_group=group, use_collectives=False)
        loaded = {"w": torch.zeros(3, 3)}
        torch_ckpt.load(loaded, checkpoint_id=path, no_dist=True)
        assert torch.equal(loaded["w"], value["w"])
        refused = None
        try:
            # Bare DCP does not say how many ranks save.
            dcp.save(
                value,
                storage_writer=HuggingFaceStorageWriter(path / "bare", save_distributed=True),
                process_group=group,
                use_collectives=False,
            )
        except InvalidArgumentError as error:
            refused = str(error)
        assert refused is not None and "world_size" in refused, refused
        dcp.save(
            value,
            storage_writer=HuggingFaceStorageWriter(
                path / "said", save_distributed=True, world_size=1
            ),
            process_group=group,
            use_collectives=False,
        )
        torch_ckpt.load(loaded, checkpoint_id=path / "said", no_dist=True)


@case
def a_writer_that_was_of_another_group(context: Context) -> None:
    writer = HuggingFaceStorageWriter(context.folder / f"own{context.rank}", save_distributed=True)
    value = {f"own{context.rank}": whole("w", (3, 3))}
    torch_ckpt.save(value, storage_writer=writer, no_dist=True)
    path = context.folder / "all"
    torch_ckpt.save(value, storage_writer=writer, checkpoint_id=path, use_collectives=False)
    names = {entry.name for entry in torch_ckpt.Checkpoint(path).describe().tensors}
    assert names == {f"own{rank}" for rank in range(context.world)}, names


@case
def what_needs_all_ranks_is_refused(context: Context) -> None:
    for options, text in (
        ({}, "save_distributed=True"),
        ({"save_distributed": True, "enable_consolidation": True}, "consolidate_safetensors"),
    ):
        path = context.folder / "c"
        writer = HuggingFaceStorageWriter(path, **options)
        error = raised(
            lambda writer=writer: dcp.save(  # type: ignore[misc]
                content(context), storage_writer=writer, use_collectives=False
            ),
            text,
        )
        assert isinstance(error, InvalidArgumentError)
        assert not path.exists()
