"""Saves by several ranks: modes, groups, cached plans, failures, consolidation by all ranks."""

from __future__ import annotations

import errno
import gc
import json
import logging
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from async_writers import OddWriter
from odd_tensors import Coded, codes
from ranks.layouts import Layout, check, dtensor, layouts, state, whole
from ranks.run import Context, cases, everywhere, raised
from safetensors.torch import load_file
from sample_states import assert_same, blank, listing, load, load_ours, load_stock
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import torch_ckpt
from torch_ckpt import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch_ckpt.jobs import SaveSession

CASES, case = cases()

PLAIN = {"a": (5, 3), "b": (17,), "c": (2, 2, 2), "d": (), "e": (64, 64)}


def plain() -> dict[str, torch.Tensor]:
    return {name: whole(name, shape) for name, shape in PLAIN.items()}


def final_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of the final files, none of them twice, just as the index says."""
    found: dict[str, torch.Tensor] = {}
    weight_map = {}
    for file in sorted(folder.glob("model-*.safetensors")):
        tensors = load_file(file)
        assert not set(tensors) & set(found)
        found.update(tensors)
        weight_map.update(dict.fromkeys(tensors, file.name))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == weight_map
    sizes = [tensor.numel() * tensor.itemsize for tensor in found.values()]
    assert index["metadata"]["total_size"] == sum(sizes)
    return found


@case
def full_state_dict_of_rank_0(context: Context) -> None:
    source = {**plain(), "step": 3} if context.rank == 0 else {}
    for number, options in enumerate(
        [
            {},
            {"fqn_to_index_mapping": {"a": 1, "b": 2, "c": 1, "d": 2, "e": 3}, "thread_count": 3},
            {"save_distributed": True},
            {"save_distributed": True, "enable_consolidation": True},
        ]
    ):
        path = context.folder / str(number)
        dcp.save(source, storage_writer=HuggingFaceStorageWriter(path, **options))
        if context.rank == 0:
            assert_same(load_ours(path, source), source)
            assert_same(load_stock(path, plain()), plain())
            if number != 2:
                assert_same(final_tensors(path), plain())
                files = len(list(path.glob("model-*.safetensors")))
                assert files == (3 if number == 1 else 1)
        dist.barrier()
        target = blank({**plain(), "step": 3})
        dcp.load(target, storage_reader=HuggingFaceStorageReader(path))
        assert_same(target, {**plain(), "step": 3})


@case
def plain_tensors_on_all_ranks_make_whole_final_files(context: Context) -> None:
    for number, mapping in enumerate([None, {"a": 1, "b": 2, "c": 1, "d": 2, "e": 2}]):
        for kind in (dcp.DefaultSavePlanner, torch_ckpt.SavePlanner):
            path = context.folder / f"{number}-{kind.__module__}"
            mesh = DeviceMesh("cpu", list(range(context.world)))
            source = plain()
            source["b"] = DTensor.from_local(source["b"], mesh, [Replicate()])
            dcp.save(source, storage_writer=HuggingFaceStorageWriter(path, mapping), planner=kind())
            if context.rank == 0:
                count = 2 if mapping else 1
                assert listing(path) == [
                    *(f"model-{n + 1:05}-of-{count:05}.safetensors" for n in range(count)),
                    "model.safetensors.index.json",
                    "torch_ckpt.catalog",
                    "torch_ckpt.json",
                ]
                assert_same(final_tensors(path), plain())
                assert_same(load_stock(path, plain()), plain())
            dist.barrier()
            target = blank(plain())
            dcp.load(target, storage_reader=HuggingFaceStorageReader(path))
            assert_same(target, plain())


@case
def shards_make_whole_final_files(context: Context) -> None:
    """As stock's writer is made by default; it writes a shard alone into a final file."""
    table = {"w": Layout((2 * context.world, 3), (context.world,), (Shard(0),))}
    path = context.folder / "c"
    dcp.save(state(table), storage_writer=HuggingFaceStorageWriter(path))
    assert_same(final_tensors(path), {"w": whole("w", table["w"].shape)})


@case
def every_rank_its_own_names(context: Context) -> None:
    """Pipeline stages: other keys on every rank."""
    mine = {f"stage{context.rank}": {"w": whole(f"s{context.rank}", (4, 3)), "n": context.rank}}
    all_of = {f"stage{r}": {"w": whole(f"s{r}", (4, 3)), "n": r} for r in range(context.world)}
    for number, options in enumerate([{}, {"save_distributed": True}]):
        path = context.folder / str(number)
        dcp.save(mine, storage_writer=HuggingFaceStorageWriter(path, **options))
        target = blank(mine)
        dcp.load(target, storage_reader=HuggingFaceStorageReader(path))
        assert_same(target, mine)
        target = blank(all_of)
        torch_ckpt.load(target, checkpoint_id=path)
        assert_same(target, all_of)


@case
def cached_plans(context: Context) -> None:
    """A rank whose plan is cached writes by the plan of an earlier save, into the new directory."""
    for kind in (dcp.DefaultSavePlanner, torch_ckpt.SavePlanner):
        table = layouts(context.world)
        writer = HuggingFaceStorageWriter(context.folder / "unused", save_distributed=True)
        name = kind.__module__.replace(".", "-")
        for number in range(5):
            source: dict[str, Any] = dict(state(table))
            source["plain"] = torch.full((3,), float(number))
            source["step"] = number
            if number >= 3 and context.rank == 1:
                source["late"] = torch.full((2,), float(number))  # only this rank's plan changes
            path = context.folder / f"{name}-{number}"
            planner = kind(enable_plan_caching=True)
            dcp.save(source, storage_writer=writer, planner=planner, checkpoint_id=path)
            target: dict[str, Any] = dict(state(table, blank=True))
            target.update(plain=torch.zeros(3), step=-1)
            if number >= 3:
                target["late"] = torch.zeros(2)
            dcp.load(target, storage_reader=HuggingFaceStorageReader(path))
            check(target, table)
            assert target["step"] == number
            assert torch.equal(target["plain"], torch.full((3,), float(number)))
            if number >= 3:
                assert torch.equal(target["late"], torch.full((2,), float(number)))


@case
def cached_plans_of_other_groups(context: Context) -> None:
    """What all ranks share is whole in every save, whoever saves."""
    source = {name: whole(name, (5,)) for name in ("a", "b", "c")} | {"step": 3}
    alone = [dist.new_group([rank]) for rank in range(context.world)][context.rank]
    pairs = [dist.new_group([0, rank]) for rank in range(1, context.world)]

    def saved(name: str, **options: Any) -> None:
        planner = torch_ckpt.SavePlanner(enable_plan_caching=True)
        path = context.folder / name
        torch_ckpt.save(source, checkpoint_id=path, planner=planner, **options)
        target = blank(source)
        torch_ckpt.load(target, checkpoint_id=path, no_dist=True)
        assert_same(target, source)

    for number in range(2):
        saved(f"all{number}")
        saved(f"alone{number}-{context.rank}", process_group=alone)
        for other, pair in enumerate(pairs, start=1):
            if context.rank in (0, other):
                saved(f"pair{number}-{other}", process_group=pair)
        saved(f"no_dist{number}-{context.rank}", no_dist=True)
        dist.barrier()


@case
def groups_without_global_rank_0(context: Context) -> None:
    ranks = list(range(1, context.world))
    group = dist.new_group(ranks)
    path = context.folder / "c"
    if context.rank in ranks:
        source = {f"w{context.rank}": whole(f"w{context.rank}", (3,)), "all": whole("all", (9,))}
        for number in range(2):
            source["step"] = number
            writer = HuggingFaceStorageWriter(
                path, save_distributed=True, enable_consolidation=True
            )
            dcp.save(source, storage_writer=writer, process_group=group)
        target = blank(source)
        dcp.load(target, storage_reader=HuggingFaceStorageReader(path), process_group=group)
        assert_same(target, source)
        torch_ckpt.consolidate_safetensors_files_on_every_rank(
            path / "sharded", context.folder / "out", None, process_group=group
        )
    dist.barrier()
    if context.rank == 0:
        assert set(load_file(next((context.folder / "out").glob("model-*.safetensors")))) == {
            "all",
            *(f"w{rank}" for rank in ranks),
        }


@case
def sub_mesh(context: Context) -> None:
    """A DTensor on some of the ranks; the others take part without items."""
    ranks = [rank for rank in range(context.world) if rank % 2]
    mesh = DeviceMesh("cpu", ranks)
    content = whole("sub", (6, 2))

    def make(source: torch.Tensor) -> DTensor:
        if context.rank in ranks:
            local = source.chunk(len(ranks))[ranks.index(context.rank)].clone()
        else:
            local = torch.empty(0, 2)
        return DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=source.shape, stride=source.stride()
        )

    for kinds in ((None, None), (torch_ckpt.SavePlanner(), torch_ckpt.LoadPlanner())):
        path = context.folder / str(kinds[0] is None)
        writer = HuggingFaceStorageWriter(path, save_distributed=True)
        dcp.save(
            {"sub": make(content), "p": torch.ones(2)}, storage_writer=writer, planner=kinds[0]
        )
        target = {"sub": make(torch.zeros(6, 2)), "p": torch.zeros(2)}
        dcp.load(target, storage_reader=HuggingFaceStorageReader(path), planner=kinds[1])
        if context.rank in ranks:
            part = content.chunk(len(ranks))[ranks.index(context.rank)]
            assert torch.equal(target["sub"].to_local(), part)
        assert torch.equal(target["p"], torch.ones(2))


@case
def sharded_tensors_with_two_shards_on_a_rank(context: Context) -> None:
    rows = 4 * context.world
    content = whole("sharded", (rows, 3))

    def make(source: torch.Tensor) -> Any:
        # The rank's two boxes are far apart, so that they cannot be merged.
        starts = (2 * context.rank, rows // 2 + 2 * context.rank)
        parts = [
            LocalShard.from_tensor_and_offsets(source[at : at + 2].clone(), [at, 0], context.rank)
            for at in starts
        ]
        return init_from_local_shards(parts, rows, 3)

    for number, kinds in enumerate(
        ((None, None), (torch_ckpt.SavePlanner, torch_ckpt.LoadPlanner))
    ):
        for consolidate in (False, True):
            path = context.folder / f"{number}-{consolidate}"
            writer = HuggingFaceStorageWriter(
                path, save_distributed=True, enable_consolidation=consolidate
            )
            planner = kinds[0] and kinds[0]()
            dcp.save({"w": make(content)}, storage_writer=writer, planner=planner)
            target = make(torch.zeros(rows, 3))
            planner = kinds[1] and kinds[1]()
            reader = HuggingFaceStorageReader(path)
            dcp.load({"w": target}, storage_reader=reader, planner=planner)
            for got, wanted in zip(
                target.local_shards(), make(content).local_shards(), strict=True
            ):
                assert torch.equal(got.tensor, wanted.tensor)
            stock = {"w": torch.zeros(rows, 3)}
            dcp.load(stock, storage_reader=dcp.HuggingFaceStorageReader(str(path)))
            assert torch.equal(stock["w"], content)


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
def fewer_ranks_save_into_the_same_directory(context: Context) -> None:
    path = context.folder / "c"
    if context.rank == 0:
        path.mkdir()
        (path / "config.json").write_text("{}")
    dist.barrier()
    rows = 2 * context.world
    table = {"w": Layout((rows, 2), (context.world,), (Shard(0),))}
    torch_ckpt.save(state(table), checkpoint_id=path)
    new = torch.full((rows, 2), 9.0)
    if context.rank == 0:
        assert len(list(path.glob("shard-*"))) == context.world
        writer = HuggingFaceStorageWriter(path, save_distributed=True)
        torch_ckpt.save({"w": new}, storage_writer=writer, no_dist=True)
        assert len(list(path.glob("shard-*"))) == 1
        assert (path / "config.json").exists()
    dist.barrier()
    target = {"w": torch.zeros(rows, 2)}
    torch_ckpt.load(target, checkpoint_id=path)
    assert torch.equal(target["w"], new)


class Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def __enter__(self) -> Warnings:
        logging.getLogger("torch_ckpt").addHandler(self)
        return self

    def __exit__(self, *ignored: Any) -> None:
        logging.getLogger("torch_ckpt").removeHandler(self)


@case
def a_leaf_that_differs_between_ranks_is_named(context: Context) -> None:
    own = {"position": context.rank, "queue": (torch.ones(2 + context.rank),)}
    source = {"w": torch.ones(2), "loader": own, "same": 5, "alike": [1]}
    for kind in (torch_ckpt.SavePlanner, dcp.DefaultSavePlanner):
        path = context.folder / kind.__module__
        with Warnings() as log:
            dcp.save(
                source,
                storage_writer=HuggingFaceStorageWriter(path, save_distributed=True),
                planner=kind(),
            )
        texts = everywhere(log.texts)[0]
        for name in ("loader.position", "loader.queue"):
            assert any(name in text for text in texts), (kind, texts)
        assert not any("same" in text for text in texts), texts


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
def a_plain_tensor_that_differs_between_ranks_is_named(context: Context) -> None:
    """One rank's is saved, and no other rank could load it. Stock says nothing."""
    for field, source in {
        "shape": {"x": torch.ones(2 + context.rank), "w": torch.ones(2)},
        "dtype": {"x": torch.ones(2, dtype=[torch.half, torch.float][context.rank > 0])},
    }.items():
        path = context.folder / field
        try:
            torch_ckpt.save(source, checkpoint_id=path)
        except torch_ckpt.InvalidArgumentError as error:
            assert error.tensor == "x" and "ranks 0 and 1 disagree" in str(error), error
        else:
            raise AssertionError("it was saved")
        assert not path.exists()
        with Warnings() as log:
            dcp.save(source, storage_writer=HuggingFaceStorageWriter(path, save_distributed=True))
        texts = everywhere(log.texts)[0]
        assert sum("x: this value differs between ranks 0 and 1" in t for t in texts) == 1, texts
        assert len(texts) == 1, texts


@case
def plain_tensors_whose_values_differ_are_named(context: Context) -> None:
    """In one warning, and all that is kept of them is of one rank. Of large ones no word."""
    own = {f"bn{i}": torch.full((3, 2 + i), float(context.rank)).t() for i in range(12)}
    own["rng"] = torch.full((64 << 10,), context.rank, dtype=torch.uint8)
    source = {
        **own,
        "steps": 3 - context.rank,
        "alike": torch.ones(5),
        "large": torch.full(((64 << 10) + 1,), context.rank, dtype=torch.uint8),
        "own": torch_ckpt.PerRank(torch.tensor(context.rank)),
    }
    calls = {
        "save": lambda path: torch_ckpt.save(source, path),
        "final": lambda path: torch_ckpt.save(source, path, layout="final"),
        "async": lambda path: torch_ckpt.async_save(source, path).result(),
        "bare": lambda path: dcp.save(
            source, storage_writer=HuggingFaceStorageWriter(path), planner=torch_ckpt.SavePlanner()
        ),
        "stock": lambda path: dcp.save(
            {name: value for name, value in source.items() if name != "own"},
            storage_writer=HuggingFaceStorageWriter(path, save_distributed=True),
        ),
    }
    for name, call in calls.items():
        with Warnings() as log:
            call(context.folder / name)
        (text,) = everywhere(log.texts)[0]
        assert text.startswith("14 values differ between ranks"), (name, text)
        assert "(ranks 0 and 1)" in text and ", and 4 more" in text, (name, text)
        for word in ("alike", "large", "own"):
            assert f"{word} (" not in text, (name, text)
        if name != "stock":  # whose planner spreads them
            loaded = torch_ckpt.load(path=context.folder / name)
            assert all(not loaded[key].any() for key in own), name
    with Warnings() as log:
        torch_ckpt.save({"rng": own["rng"], "alike": torch.ones(5)}, context.folder / "one")
    (text,) = everywhere(log.texts)[0]
    assert text.startswith("rng: this value differs between ranks 0 and 1; the lowest rank's is")


@case
def per_rank_values_come_back(context: Context) -> None:
    source = {"rng": torch_ckpt.PerRank({"seed": context.rank}), "w": torch.ones(2)}
    torch_ckpt.save(source, checkpoint_id=context.folder / "c")
    target = {"rng": torch_ckpt.PerRank(), "w": torch.zeros(2)}
    torch_ckpt.load(target, checkpoint_id=context.folder / "c")
    assert target["rng"].value == {"seed": context.rank}


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
def one_writer_many_saves(context: Context) -> None:
    path = context.folder / "c"
    writer = HuggingFaceStorageWriter(path, save_distributed=True, enable_consolidation=True)
    layout = Layout((8, 3), (context.world,), (Shard(0),))
    for number in range(4):
        source = {"w": dtensor("w", layout) * number, "step": number}
        dcp.save(source, storage_writer=writer)
        target = {"w": dtensor("w", layout, blank=True), "step": -1}
        dcp.load(target, storage_reader=HuggingFaceStorageReader(path))
        assert torch.equal(target["w"].to_local(), source["w"].to_local())
        assert target["step"] == number
        dist.barrier()


@case
def a_writer_of_one_rank_has_no_path(context: Context) -> None:
    writer = OddWriter(context.folder / "c")
    writer.place = writer.path
    if context.rank == 1:
        writer.path = 5
    torch_ckpt.save(plain(), storage_writer=writer)
    assert_same(torch_ckpt.load(path=context.folder / "c"), plain())
