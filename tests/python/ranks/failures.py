"""What one rank fails at is raised on all of them, and leaves nothing."""

from __future__ import annotations

import errno
import gc
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from async_writers import OddWriter
from odd_tensors import Coded, codes
from ranks.layouts import check, layouts, state
from ranks.run import Context, cases, raised
from ranks.saving import PLAIN, plain
from sample_states import assert_same, listing, load
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict

import torch_ckpt
from torch_ckpt import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch_ckpt.native.sessions import SaveSession

CASES, case = cases()


class FailsOnRank1(dcp.DefaultSavePlanner):
    def resolve_data(self, write_item: Any) -> Any:
        if dist.get_rank() == 1:
            raise OSError(5, "Input/output error of the test", "device")
        return super().resolve_data(write_item)


@case
def a_rank_that_fails(context: Context) -> None:
    """The error is raised on every rank and names the rank; the old checkpoint stays, nothing else
    does, and the next save works."""
    path = context.folder / "c"
    table = layouts(context.world)
    torch_ckpt.save({**state(table), "step": 1}, checkpoint_id=path)
    before = listing(context.folder)
    writer = HuggingFaceStorageWriter(path, save_distributed=True)
    changed = {name: value * 2 for name, value in state(table).items()}
    error = raised(
        lambda: torch_ckpt.save({**changed, "step": 2}, checkpoint_id=path, planner=FailsOnRank1()),
        "rank 1",
        "of the test",
    )
    assert isinstance(error, OSError) and error.errno == 5, repr(error)
    dist.barrier()
    assert listing(context.folder) == before, listing(context.folder)
    error = raised(
        lambda: dcp.save({**changed, "step": 2}, storage_writer=writer, planner=FailsOnRank1()),
        "rank 1",
    )
    assert list(error.failures) == [1], error.failures
    target: dict[str, Any] = {**state(table, blank=True), "step": 0}
    torch_ckpt.load(target, checkpoint_id=path)
    check(target, table)
    assert target["step"] == 1
    dist.barrier()
    dcp.save({**changed, "step": 3}, storage_writer=writer)
    target = {**state(table, blank=True), "step": 0}
    torch_ckpt.load(target, checkpoint_id=path)
    assert target["step"] == 3
    assert torch.equal(target["rows"].to_local(), changed["rows"].to_local())
    dist.barrier()
    assert not [name for name in listing(context.folder) if "stage" in name]


@case
def a_tensor_that_is_made_of_others_is_refused_everywhere(context: Context) -> None:
    """Before anything is written; and so are targets of one rank that share memory."""
    table = layouts(context.world)
    last = context.rank == context.world - 1
    odd = {**state(table), "odd": Coded(codes()) if last else torch.ones(8)}
    path = context.folder / "odd"
    for layout in ("sharded", "final"):
        writer = HuggingFaceStorageWriter(path, layout=layout)
        planner = torch_ckpt.SavePlanner()
        for call in (
            lambda layout=layout: torch_ckpt.save(odd, path, layout=layout),
            lambda layout=layout: torch_ckpt.async_save(odd, path, layout=layout).result(),
            lambda writer=writer, planner=planner: dcp.save(
                odd, storage_writer=writer, planner=planner
            ),
        ):
            error = raised(call, "tensor 'odd': is of class odd_tensors.Coded")
            assert getattr(error, "rank", context.world - 1) == context.world - 1
        dist.barrier()
        assert not path.exists()
    path = context.folder / "plain"
    torch_ckpt.save({"a": torch.ones(8), "b": torch.ones(8)}, path)
    room = torch.zeros(12)
    target = {"a": room[:8], "b": room[4:] if last else torch.zeros(8)}
    raised(lambda: torch_ckpt.load(target, path), f"rank {context.world - 1}: tensor 'b'", "'a'")


@case
def errors_of_a_load_reach_every_rank(context: Context) -> None:
    path = context.folder / "c"
    table = layouts(context.world)
    torch_ckpt.save(state(table), checkpoint_id=path)
    if context.rank == 0:
        next(path.glob("shard-00002*")).unlink()
    dist.barrier()
    for call in (
        lambda: torch_ckpt.load(state(table, blank=True), checkpoint_id=path),
        lambda: load(state(table), HuggingFaceStorageReader(path), no_dist=False),
    ):
        raised(call, "shard-00002")


@case
def an_error_of_load_state_dict_reaches_every_rank(context: Context) -> None:
    """Also what those do that are given theirs before it: none when one rank could not read."""
    given = []

    class Counter:
        def state_dict(self) -> dict[str, Any]:
            return {"w": torch.zeros(2)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            given.append(state["w"].tolist())
            if context.rank == 1:
                raise RuntimeError("size mismatch")

    path = context.folder / "c"
    torch_ckpt.save({"a": {"w": torch.ones(2)}}, path)
    error = raised(lambda: torch_ckpt.load({"a": Counter()}, path), "size mismatch")
    assert isinstance(error, RuntimeError if context.rank == 1 else torch_ckpt.CheckpointError)
    assert given == [[1, 1]]
    # On one rank alone: the others take part.
    target = {"a": Counter() if context.rank == 0 else {"w": torch.zeros(2)}}
    torch_ckpt.load(target, path)
    assert given == [[1, 1], [1, 1]] if context.rank == 0 else [[1, 1]]


@case
def an_error_of_metadata_is_itself_on_every_rank(context: Context) -> None:
    """DCP passes on its text only, and on the other ranks nothing has failed."""
    path, missing, file = (context.folder / name / "c" for name in ("good", "missing", "file"))
    table = layouts(context.world)
    torch_ckpt.save(state(table), checkpoint_id=path)
    if context.rank == 0:
        file.parent.mkdir()
        file.write_text("no directory")
    dist.barrier()
    last = context.world - 1

    def load(elsewhere: Path) -> Exception:
        reader = HuggingFaceStorageReader(elsewhere if context.rank == last else path)
        try:
            torch_ckpt.load(state(table, blank=True), storage_reader=reader)
        except Exception as error:
            return error
        raise AssertionError("this load should have failed")

    error = load(missing)
    assert isinstance(error, torch_ckpt.IncompleteError), repr(error)
    assert (error.rank, error.file) == (last, str(missing)), repr(error)
    error = load(file)
    assert isinstance(error, torch_ckpt.CorruptError), repr(error)
    assert (error.rank, error.file) == (last, str(file)), repr(error)
    error = load(file / "c")
    assert type(error) is NotADirectoryError, repr(error)
    assert (error.errno, error.filename) == (errno.ENOTDIR, str(file / "c")), repr(error)
    assert f"rank {last}:" in str(error)
    # And the ranks still agree on what comes next.
    torch_ckpt.load(state(table, blank=True), checkpoint_id=path)


@case
def ranks_whose_planners_work_otherwise_are_told(context: Context) -> None:
    """One rank's planner wants whole plans, the others' do not: nobody waits, and all hear it."""
    path, last = context.folder / "c", context.rank == context.world - 1
    torch_ckpt.save(plain(), checkpoint_id=path)
    planner = dcp.DefaultLoadPlanner() if last else None
    if context.world > 1:
        raised(
            lambda: torch_ckpt.load(plain(), checkpoint_id=path, planner=planner),
            "ranks make different calls",
            ", whole'",
        )
    torch_ckpt.load(plain(), checkpoint_id=path)
    torch_ckpt.load(plain(), checkpoint_id=path, planner=dcp.DefaultLoadPlanner())


class FailingWriter(HuggingFaceStorageWriter):
    """Fails where `fails` says, on every rank that comes there."""

    fails = ""

    def write_data(self, *arguments: Any) -> Any:
        if self.fails == "write" and not self.is_coordinator:
            raise ValueError("no write")
        return super().write_data(*arguments)

    def finish(self, *arguments: Any, **keywords: Any) -> None:
        if self.fails == "finish":
            raise ValueError("no finish")
        super().finish(*arguments, **keywords)


@case
def a_failed_save_of_another_coordinator_leaves_nothing(context: Context) -> None:
    """Its error is kept, and with it the frames in which the writer is; the collector is off."""
    path = context.folder / "c"
    errors = []
    gc.collect()
    gc.disable()
    try:
        for fails in ("finish", "write", "mapping"):
            mapping = {name: 1 for name in (*PLAIN, "missing")} if fails == "mapping" else None
            writer = FailingWriter(path, mapping)
            writer.fails = fails
            try:
                _save_state_dict(plain(), writer, coordinator_rank=1)
            except BaseException as error:
                errors.append(error)
            else:
                raise AssertionError("it was saved")
            del writer
            dcp.save(plain(), storage_writer=HuggingFaceStorageWriter(path))
            assert_same(torch_ckpt.load(path=path), plain())
            dist.barrier()
    finally:
        gc.enable()
    assert os.listdir(context.folder) == ["c"]


@case
def paths_that_are_not_the_same_place(context: Context) -> None:
    """As where a path is a disk of each node's own."""
    own = context.folder / f"node{context.rank}"
    own.mkdir()
    mine = {f"w{context.rank}": torch.ones(2)}
    of_all = {"w": torch.ones(2)}  # which rank 0 writes alone
    for source in (mine, of_all):
        for layout in ("sharded", "final"):
            error = raised(
                lambda: torch_ckpt.save(source, own / "c", layout=layout),  # noqa: B023
                "same file system",
            )
            assert isinstance(error, torch_ckpt.CheckpointError) and error.rank
            assert f"node{error.rank}{os.sep}c" in str(error)
            dist.barrier()
            assert os.listdir(own) == []
    # Where it finds another save, that of a machine that has stopped.
    if context.rank == 1:
        held = SaveSession(str(own / "c"), overwrite=True)
    dist.barrier()
    place = context.folder / f"node{int(context.rank == 1)}" / "c"
    raised(lambda: torch_ckpt.save(of_all, place), "rank 1", "same file system")
    if context.rank == 1:
        held.end()


@case
def a_writer_of_one_rank_has_no_path(context: Context) -> None:
    writer = OddWriter(context.folder / "c")
    writer.place = writer.path
    if context.rank == 1:
        writer.path = 5
    torch_ckpt.save(plain(), storage_writer=writer)
    assert_same(torch_ckpt.load(path=context.folder / "c"), plain())
