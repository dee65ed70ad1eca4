"""The writer as DCP and its users see it: signatures, attributes, hooks, pickling, options."""

from __future__ import annotations

import inspect
import io
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from sample_states import FAILED, assert_same, blank, load, load_ours, save
from torch.distributed.checkpoint._consolidate_hf_safetensors import (
    consolidate_safetensors_files_on_every_rank as stock_consolidate_on_every_rank,
)
from torch.distributed.checkpoint.staging import (
    AsyncStager,
)

import torch_ckpt
from torch_ckpt import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch_ckpt.dcp.plan.load_planner import MissingKeyError
from torch_ckpt.dcp.write.options import WriterOptions
from torch_ckpt.errors import error_from, with_rank
from torch_ckpt.native import operators
from torch_ckpt.objects.types import CorruptObjectError, UnsupportedObjectError

FINAL = "model-00001-of-00001.safetensors"
STATE = {"w": torch.arange(12.0).reshape(3, 4), "b": torch.ones(3, dtype=torch.bfloat16)}


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    return [(p.name, p.default, p.kind) for p in inspect.signature(function).parameters.values()]


PAIRS = [
    (HuggingFaceStorageWriter.__init__, dcp.HuggingFaceStorageWriter.__init__),
    (HuggingFaceStorageReader.__init__, dcp.HuggingFaceStorageReader.__init__),
    (torch_ckpt.SavePlanner.__init__, dcp.DefaultSavePlanner.__init__),
    (torch_ckpt.LoadPlanner.__init__, dcp.DefaultLoadPlanner.__init__),
]


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair[0].__qualname__)
def test_signatures_begin_with_those_of_stock(pair: Any) -> None:
    ours, stock = (parameters(function) for function in pair)
    assert ours[: len(stock)] == stock
    own = {kind for _, _, kind in ours[len(stock) :]}
    assert own <= {inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD}


FUNCTIONS = [
    (torch_ckpt.save, dcp.save),
    (torch_ckpt.load, dcp.load),
    (torch_ckpt.async_save, dcp.async_save),
    (torch_ckpt.consolidate_safetensors_files_on_every_rank, stock_consolidate_on_every_rank),
]


@pytest.mark.parametrize("pair", FUNCTIONS, ids=lambda pair: pair[0].__qualname__)
def test_every_call_of_stocks_function_is_one_of_ours(pair: Any) -> None:
    """Ours have more arguments, and defaults where stock has none."""
    ours, stock = (inspect.signature(function).parameters for function in pair)
    positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
    of_stock = [name for name, parameter in stock.items() if parameter.kind is positional]
    assert list(ours)[: len(of_stock)] == of_stock
    for name, parameter in stock.items():
        assert ours[name].kind is parameter.kind
        if parameter.default is not inspect.Parameter.empty:
            assert ours[name].default == parameter.default


METHODS = [
    "reset",
    "set_up_storage_writer",
    "prepare_local_plan",
    "prepare_global_plan",
    "write_data",
    "finish",
    "storage_meta",
    "stage",
    "close",
    "synchronize_staging",
    "validate_checkpoint_id",
    "_split_by_storage_plan",
    "_write_data",
]
READER_METHODS = [
    "reset",
    "read_metadata",
    "set_up_storage_reader",
    "prepare_local_plan",
    "prepare_global_plan",
    "read_data",
    "validate_checkpoint_id",
    "_process_read_request",
    "_read_files_from_queue",
]


@pytest.mark.parametrize("kind", ["writer", "reader"])
def test_methods_have_the_parameters_of_stock(kind: str) -> None:
    classes = {
        "writer": (HuggingFaceStorageWriter, dcp.HuggingFaceStorageWriter, METHODS),
        "reader": (HuggingFaceStorageReader, dcp.HuggingFaceStorageReader, READER_METHODS),
    }
    ours, stock, names = classes[kind]
    for name in names:
        assert parameters(getattr(ours, name)) == parameters(getattr(stock, name)), name
    assert issubclass(ours, stock)


def test_traps_of_the_protocol() -> None:
    # DCP gives rank= and use_collectives= only where a parameter is named exactly kwargs, and
    # retries a failed read_metadata without collectives if it has one.
    assert "kwargs" in inspect.signature(HuggingFaceStorageWriter.set_up_storage_writer).parameters
    assert "kwargs" in inspect.signature(HuggingFaceStorageReader.set_up_storage_reader).parameters
    assert "kwargs" not in inspect.signature(HuggingFaceStorageReader.read_metadata).parameters
    names = {kind.__name__ for kind in HuggingFaceStorageWriter.__mro__}
    assert {
        "FileSystemWriter",
        "_FileSystemWriter",
        "StorageWriter",
        "BlockingAsyncStager",
    } <= names


def test_attributes(tmp_path: Path) -> None:
    stock = dcp.HuggingFaceStorageWriter(str(tmp_path), {"w": 1}, 3, True, True, 4)
    ours = HuggingFaceStorageWriter(str(tmp_path), {"w": 1}, 3, True, True, 4)
    assert isinstance(ours, AsyncStager)
    for name in vars(stock):
        if name in ("save_id", "fs", "path", "transforms"):
            continue
        assert getattr(ours, name) == getattr(stock, name), name
    assert ours.path == stock.path == tmp_path / "sharded" and isinstance(ours.path, Path)
    assert type(ours.fs) is type(stock.fs) and type(ours.transforms) is type(stock.transforms)
    assert ours.checkpoint_id == stock.checkpoint_id
    assert ours.metadata_path == stock.metadata_path == "model.safetensors.index.json"
    assert ours.consolidated_output_path == str(tmp_path)
    assert ours.should_synchronize_after_execute is False
    assert HuggingFaceStorageWriter.validate_checkpoint_id(str(tmp_path))
    assert ours.stage({"w": torch.ones(2)})["w"].sum() == 2
    assert stock.stage({"w": torch.ones(2)})["w"].sum() == 2
    assert ours.per_thread_copy_ahead == stock.per_thread_copy_ahead == 0
    first = ours.save_id
    ours.reset()
    assert ours.save_id != first
    ours.reset(tmp_path / "other")
    assert ours.path == tmp_path / "other" / "sharded"
    assert ours.consolidated_output_path == str(tmp_path / "other")
    meta = ours.storage_meta()
    assert meta is not None and meta.save_id == ours.save_id
    # Stock's own attributes exist in our reader too.
    reader, stock_reader = (
        HuggingFaceStorageReader(tmp_path, 2),
        dcp.HuggingFaceStorageReader("x", 2),
    )
    assert set(vars(stock_reader)) <= set(vars(reader))
    assert reader.thread_count == 2 and reader.checkpoint_id == tmp_path


def test_paths_of_every_kind(tmp_path: Path) -> None:
    save(STATE, HuggingFaceStorageWriter(str(tmp_path / "a")))
    save(STATE, HuggingFaceStorageWriter(tmp_path / "b"))
    save(STATE, HuggingFaceStorageWriter(path=tmp_path / "c" / "deep" / "er"))
    for name in ("a", "b", "c/deep/er"):
        assert_same(load_ours(tmp_path / name, STATE), STATE)
    before = os.getcwd()
    os.chdir(tmp_path)
    try:
        save(STATE, HuggingFaceStorageWriter("relative"))
        assert_same(load_ours(Path("relative"), STATE), STATE)
        save(STATE, HuggingFaceStorageWriter("unused"), checkpoint_id="by_id")
    finally:
        os.chdir(before)
    assert (tmp_path / "by_id" / FINAL).exists() and not (tmp_path / "unused").exists()


class Split(HuggingFaceStorageWriter):
    """Overrides what torchtitan and others override."""

    def _split_by_storage_plan(self, storage_plan: Any, items: Any) -> dict[int, list[Any]]:
        self.seen = [item.index.fqn for item in items]
        return {
            1: [i for i in items if i.index.fqn == "w"],
            2: [i for i in items if i.index.fqn != "w"],
        }

    def _write_data(self, planner: Any, file_queue: Any) -> Any:
        self.queued = file_queue.qsize()
        return super()._write_data(planner, file_queue)

    def finish(self, metadata: Any, results: Any) -> None:
        self.finished = sorted(metadata.state_dict_metadata)
        super().finish(metadata=metadata, results=results)


def test_overridden_hooks_are_called(tmp_path: Path) -> None:
    writer = Split(tmp_path / "c", {"w": 1, "b": 2})
    save(STATE, writer)
    assert sorted(writer.seen) == ["b", "w"] and writer.queued == 2
    assert writer.finished == ["b", "w"]
    assert list(load_file(tmp_path / "c" / "model-00001-of-00002.safetensors")) == ["w"]
    assert_same(load_ours(tmp_path / "c", STATE), STATE)


class Half(dcp.DefaultSavePlanner):
    """The documentation's planner that saves in another dtype than its plan says."""

    def transform_object(self, write_item: Any, object: Any) -> Any:  # noqa: A002
        return object

    def resolve_data(self, write_item: Any) -> Any:
        data = super().resolve_data(write_item)
        return data.half() if isinstance(data, torch.Tensor) else data


def test_planner_with_another_dtype_than_its_plan(tmp_path: Path) -> None:
    state = {"w": torch.randn(4)}
    sharded = HuggingFaceStorageWriter(tmp_path / "c", save_distributed=True)
    save(state, sharded, planner=Half())
    assert load_ours(tmp_path / "c", {"w": torch.zeros(4).half()})["w"].dtype == torch.float16
    # Of final files the headers are written before any rank says what it has.
    with pytest.raises(FAILED, match="'w': is F16 .* on this rank, and F32"):
        save(state, HuggingFaceStorageWriter(tmp_path / "final"), planner=Half())
    assert not (tmp_path / "final").exists()


@pytest.mark.parametrize("base", [dcp.DefaultSavePlanner, torch_ckpt.SavePlanner])
def test_planner_that_looks_tensors_up_its_own_way(tmp_path: Path, base: Any) -> None:
    class Plus(base):  # type: ignore[misc]
        def lookup_object(self, index: Any) -> Any:
            return super().lookup_object(index) + 1

    on_instance = base()
    on_instance.lookup_object = lambda index: base.lookup_object(on_instance, index) + 1
    for planner in (Plus(), on_instance):
        save(STATE, HuggingFaceStorageWriter(tmp_path / "c"), planner=planner)
        found = load_file(tmp_path / "c" / FINAL)
        assert torch.equal(found["w"], STATE["w"] + 1)


class Wrapped(dcp.DefaultSavePlanner):
    def transform_object(self, write_item: Any, obj: Any) -> Any:
        if isinstance(obj, int):
            obj = {"wrapped": obj}
        return super().transform_object(write_item, obj)


class Unwrapped(dcp.DefaultLoadPlanner):
    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        wrapped = torch.load(value, weights_only=False)
        self.state_dict[read_item.dest_index.fqn] = wrapped["wrapped"]
        self.original_state_dict[read_item.dest_index.fqn] = wrapped["wrapped"]


def test_planner_with_its_own_bytes(tmp_path: Path) -> None:
    save({"n": 5}, HuggingFaceStorageWriter(tmp_path / "c"), planner=Wrapped())
    target = {"n": 0}
    load(target, HuggingFaceStorageReader(tmp_path / "c"), planner=Unwrapped())
    assert target == {"n": 5}


# Pickling.


def test_writers_readers_and_planners_pickle(tmp_path: Path) -> None:
    writer = HuggingFaceStorageWriter(tmp_path / "c", {"w": 1, "b": 1}, save_distributed=True)
    for number in range(2):  # fresh, then used
        writer = pickle.loads(pickle.dumps(writer))
        save({**STATE, "n": number}, writer, planner=torch_ckpt.SavePlanner())
    reader = HuggingFaceStorageReader(tmp_path / "c", strict_dtype=True)
    for _ in range(2):
        reader = pickle.loads(pickle.dumps(reader))
        assert reader.strict_dtype
        target = {**blank(STATE), "n": None}
        load(target, reader)
        assert target["n"] == 1
    for kind in (torch_ckpt.SavePlanner, torch_ckpt.LoadPlanner):
        assert type(pickle.loads(pickle.dumps(kind()))) is kind
    # In the middle of a save, too: process-based async save sends the writer then.
    writer.set_up_storage_writer(True, rank=0, use_collectives=True)
    writer.prepare_global_plan([dcp.SavePlan([])])
    copy = pickle.loads(pickle.dumps(writer))
    assert copy.path == writer.path
    writer.reset()
    save(STATE, writer)


def test_a_writer_that_is_not_told_its_rank_says_so(tmp_path: Path) -> None:
    """DCP tells the rank only to a set_up_storage_writer that takes **kwargs. All ranks of a writer
    that overrides it without would write as rank 0."""
    writer = HuggingFaceStorageWriter(tmp_path / "c", layout="final")
    with pytest.raises(torch_ckpt.InvalidArgumentError, match="was not told its rank"):
        writer.set_up_storage_writer(False)


def test_errors_pickle_and_keep_what_they_say() -> None:
    for kind in (
        torch_ckpt.CheckpointError,
        torch_ckpt.CorruptError,
        torch_ckpt.IncompleteError,
        torch_ckpt.InvalidArgumentError,
        torch_ckpt.ConflictError,
        torch_ckpt.UnsupportedError,
        torch_ckpt.CancelledError,
        torch_ckpt.ExhaustedError,
        torch_ckpt.InternalError,
        MissingKeyError,
        UnsupportedObjectError,
        CorruptObjectError,
    ):
        error = with_rank(kind("what", file="/a/b", tensor="t"), 3)
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            copy = pickle.loads(pickle.dumps(error, protocol))
            assert type(copy) is kind
            assert vars(copy) == vars(error) and str(copy) == str(error)
        assert str(error) == "rank 3: /a/b: tensor 't': what"
    fields = {"kind": "io", "message": "write: No space", "errno": 28, "file": "/f", "tensor": "t"}
    error = with_rank(error_from(fields), 1)
    copy = pickle.loads(pickle.dumps(error))
    assert isinstance(copy, OSError) and copy.errno == 28 and copy.filename == "/f"
    assert "rank 1" in str(copy) and "'t'" in str(copy)


def test_system_errors_keep_errno_and_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError) as caught:
        torch_ckpt.save(STATE, checkpoint_id=tmp_path / "file" / "below")
    assert caught.value.errno in (17, 20) and "file" in str(caught.value)
    with pytest.raises((OSError, torch_ckpt.CheckpointError), match="nowhere"):
        torch_ckpt.load(blank(STATE), checkpoint_id=tmp_path / "nowhere")


REFUSED = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8),
    "complex128": lambda: torch.ones(2, dtype=torch.complex128),
    "meta": lambda: torch.ones(2, device="meta"),
    "nine dimensions": lambda: torch.ones([1] * 9),
}


@pytest.mark.parametrize("case", REFUSED)
def test_tensors_that_safetensors_cannot_hold_are_refused_by_name(
    tmp_path: Path, case: str
) -> None:
    # Stock's planner asks for strides in torch 2.15, and fails before it comes to ours.
    with pytest.raises(FAILED, match="bad.one|Sparse CSR tensors do not have strides"):
        save({"bad": {"one": REFUSED[case]()}}, HuggingFaceStorageWriter(tmp_path / "c"))
    assert not list(tmp_path.rglob("model-*"))


# Directories.


def test_saving_into_a_directory_of_others(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "vocab").write_text("a")
    writer = HuggingFaceStorageWriter(tmp_path, save_distributed=True, enable_consolidation=True)
    for number in range(3):
        state = {"w": torch.full((4,), float(number)), "n": number}
        save(state, writer)
        assert_same(load_ours(tmp_path, state), state)
    assert (tmp_path / "config.json").read_text() == "{}"
    assert (tmp_path / "tokenizer" / "vocab").read_text() == "a"
    assert not [name for name in os.listdir(tmp_path) if "stage" in name]


def test_shrinking_saves_leave_nothing_behind(tmp_path: Path) -> None:
    big = {f"t{n}": torch.full((100,), float(n)) for n in range(6)}
    mapping = {f"t{n}": n + 1 for n in range(6)}
    small = {"t0": torch.ones(3)}
    save({**big, "object": b"x" * (1 << 20)}, HuggingFaceStorageWriter(tmp_path / "c", mapping))
    save(small, HuggingFaceStorageWriter(tmp_path / "c"))
    names = set(os.listdir(tmp_path / "c"))
    assert names == {FINAL, "model.safetensors.index.json", "torch_ckpt.json", "torch_ckpt.catalog"}
    assert_same(load_ours(tmp_path / "c", small), small)


def test_overwrite_false(tmp_path: Path) -> None:
    writer = HuggingFaceStorageWriter(tmp_path / "c", overwrite=False)
    assert writer.overwrite is False
    save(STATE, writer)
    with pytest.raises(FAILED, match="overwrite"):
        save({"w": torch.zeros(3, 4), "b": STATE["b"]}, writer)
    assert_same(load_ours(tmp_path / "c", STATE), STATE)
    with pytest.raises(torch_ckpt.ConflictError):
        torch_ckpt.save(STATE, storage_writer=writer)


@pytest.mark.parametrize(
    ("options", "sync", "direct"),
    [({}, True, True), ({"sync_files": False}, False, True), ({"direct_io": False}, True, False)],
    ids=["default", "sync_files", "direct_io"],
)
def test_other_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: Any, sync: bool, direct: bool
) -> None:
    plans = []
    write = operators.write

    def watched(tensors: Any, plan: dict[str, Any], job: Any) -> Any:
        plans.append(plan)
        return write(tensors, plan, job)

    monkeypatch.setattr(operators, "write", watched)
    save(STATE, HuggingFaceStorageWriter(tmp_path / "c", save_distributed=True, **options))
    assert [(plan["sync"], plan["direct_io"]) for plan in plans] == [(sync, direct)]
    assert_same(load_ours(tmp_path / "c", STATE), STATE)


def test_empty_state(tmp_path: Path) -> None:
    save({}, HuggingFaceStorageWriter(tmp_path / "c", save_distributed=True))
    target: dict[str, Any] = {}
    load(target, HuggingFaceStorageReader(tmp_path / "c"))
    assert target == {}


@torch.compile(fullgraph=False, backend="eager")
def compiled_round_trip(path: str, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    doubled = weight * 2
    torch_ckpt.save({"w": doubled}, checkpoint_id=path, no_dist=True)
    torch_ckpt.load({"w": target}, checkpoint_id=path, no_dist=True)
    return target + 1


def test_public_calls_are_not_traced(tmp_path: Path) -> None:
    got = compiled_round_trip(str(tmp_path / "c"), torch.ones(3), torch.zeros(3))
    assert torch.equal(got, torch.full((3,), 3.0))


def test_metadata_is_returned(tmp_path: Path) -> None:
    metadata = torch_ckpt.save(STATE, checkpoint_id=tmp_path / "c", no_dist=True)
    assert set(metadata.state_dict_metadata) == set(STATE)


def test_results_are_by_keyword_and_of_our_own(tmp_path: Path) -> None:
    writer = HuggingFaceStorageWriter(tmp_path / "c")
    with pytest.raises(torch_ckpt.InvalidArgumentError):
        writer.finish(metadata=dcp.Metadata({}), results=[])


def test_the_writers_options_are_typed() -> None:
    """`save` and `async_save` take them as keywords."""
    own = inspect.signature(torch_ckpt.HuggingFaceStorageWriter).parameters.keys() - {"path"}
    assert own == WriterOptions.__annotations__.keys()


@pytest.mark.parametrize("options", [{"layout": "final"}, {"save_distributed": True}])
def test_the_mapping_holds_for_a_subclass_that_prepares_plans_itself(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    class Own(torch_ckpt.HuggingFaceStorageWriter):
        def prepare_local_plan(self, plan):
            return plan

    class Mapping(torch_ckpt.HuggingFaceStorageWriter):
        def prepare_local_plan(self, plan):
            self.fqn_to_index_mapping = {"a": 1, "b": 2}
            return super().prepare_local_plan(plan)

    state = {"a": torch.ones(2), "b": torch.zeros(3)}
    for name, kind, mapping in (
        ("own", Own, {"a": 1, "b": 2}),
        ("mapping", Mapping, {"a": 1, "b": 1}),
    ):
        path = tmp_path / name
        writer = kind(path, fqn_to_index_mapping=mapping, **options)
        dcp.save(state, storage_writer=writer, no_dist=True)
        assert len(list(path.glob("*.safetensors"))) == 2
        loaded = torch_ckpt.load(path=path)
        assert all(torch.equal(loaded[key], value) for key, value in state.items())
