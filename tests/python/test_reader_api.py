"""The reader as DCP and its users see it: hooks, metadata, targets, partial loads."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from sample_states import (
    DTYPES,
    FAILED,
    assert_same,
    blank,
    load,
    sample,
    save,
    stock_rows,
)
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

import torch_ckpt
from torch_ckpt import CheckpointReader, HuggingFaceStorageReader, HuggingFaceStorageWriter

FINAL = "model-00001-of-00001.safetensors"


def saved(path: Path, state: dict[str, Any]) -> Path:
    save(state, HuggingFaceStorageWriter(path, save_distributed=True))
    return path


# The hook that the quantized reader and users override.


class Doubling(HuggingFaceStorageReader):
    def _process_read_request(self, f: Any, req: Any, planner: Any) -> None:
        self.seen = [*getattr(self, "seen", []), req.storage_index.fqn]
        assert req.storage_index.fqn in f.keys()  # safe_open is no dict
        f.metadata()
        slices = tuple(
            slice(start, start + size)
            for start, size in zip(req.storage_offsets, req.lengths, strict=True)
        )
        value = f.get_slice(req.storage_index.fqn)[slices]
        target = planner.resolve_tensor(req).detach()
        target.copy_(value * 2)
        planner.commit_tensor(req, target)


@pytest.mark.parametrize("threads", [1, 3])
def test_requests_go_to_an_overridden_hook(tmp_path: Path, threads: int) -> None:
    whole = torch.arange(24.0).reshape(12, 2)
    stock_rows(tmp_path / "in", whole, 3)
    reader = Doubling(tmp_path / "in", threads)
    target = {"w": torch.zeros(12, 2)}
    load(target, reader)
    assert torch.equal(target["w"], whole * 2)
    assert reader.seen == ["w"] * 3, "one request per stored shard, as with stock"


def test_requests_and_objects_together(tmp_path: Path) -> None:
    saved(tmp_path / "in", {"w": torch.ones(3), "n": {"step": 4}})
    target = {"w": torch.zeros(3), "n": {"step": 0}}
    load(target, Doubling(tmp_path / "in"))
    assert torch.equal(target["w"], torch.full((3,), 2.0)) and target["n"] == {"step": 4}


def test_a_reader_that_is_not_overridden_is_not_asked(tmp_path: Path) -> None:
    class Same(HuggingFaceStorageReader):
        """A subclass without the hook takes the fast way."""

    saved(tmp_path / "in", {"w": torch.ones(3)})
    metadata = Same(tmp_path / "in").read_metadata()
    assert len(metadata.state_dict_metadata["w"].chunks) == 1


def test_chunks_beside_a_tensor_that_is_not_read(tmp_path: Path) -> None:
    state = {"a": torch.ones(2), "s": torch.ones(3).to_sparse(), "w": torch.ones(5)}
    torch.save(state, tmp_path / "pytorch_model.bin")
    entries = Doubling(tmp_path).read_metadata().state_dict_metadata
    assert isinstance(entries["s"], BytesStorageMetadata)
    assert [entries[name].chunks[0].sizes for name in "aw"] == [(2,), (5,)]


# Metadata.


def test_metadata(tmp_path: Path) -> None:
    state = {"model": {"w": torch.zeros(4, 2), "s": torch.tensor(1)}, "groups": [{"lr": 0.1}]}
    saved(tmp_path / "in", state)
    reader = HuggingFaceStorageReader(tmp_path / "in")
    metadata = reader.read_metadata()
    entries = metadata.state_dict_metadata
    assert set(entries) == {"model.w", "model.s", "groups.0.lr"}
    assert isinstance(entries["groups.0.lr"], BytesStorageMetadata)
    weight = entries["model.w"]
    assert isinstance(weight, TensorStorageMetadata)
    assert weight.size == torch.Size([4, 2]) and weight.properties.dtype == torch.float32
    assert metadata.planner_data["model.w"] == ("model", "w")
    assert metadata.planner_data["groups.0.lr"] == ("groups", 0, "lr")
    assert metadata.storage_meta is not None and metadata.storage_meta.load_id == reader.load_id


def test_paths_come_back_however_the_names_look(tmp_path: Path) -> None:
    state = {
        "plain": torch.ones(1),
        "flat.with.dots": torch.ones(1),
        "nested": {"a": torch.ones(1), "b.c": torch.ones(1), "": torch.ones(1)},
        "list": [torch.ones(1), {"7": torch.ones(1)}],
        'quo"te\\': {"ü\n": torch.ones(1)},
    }
    saved(tmp_path / "in", state)
    paths = HuggingFaceStorageReader(tmp_path / "in").read_metadata().planner_data
    assert paths == planned_paths(state)


def planned_paths(state: dict[str, Any]) -> dict[str, Any]:
    planner = torch_ckpt.SavePlanner()
    planner.set_up_planner(state, None, True)
    return planner.mappings


def test_metadata_presents_one_chunk_whatever_is_stored(tmp_path: Path) -> None:
    stock_rows(tmp_path / "in", torch.zeros(8, 2), 4)
    one = HuggingFaceStorageReader(tmp_path / "in").read_metadata()
    assert len(one.state_dict_metadata["w"].chunks) == 1
    four = Doubling(tmp_path / "in").read_metadata()
    assert len(four.state_dict_metadata["w"].chunks) == 4
    assert len(four.storage_data) == 4


def test_state_without_a_target(tmp_path: Path) -> None:
    state = {"model": {"w": torch.randn(4, 2)}, "more": {"step": 3, "list": [torch.ones(1)]}}
    saved(tmp_path / "in", state)
    got = _load_state_dict_from_keys(storage_reader=HuggingFaceStorageReader(tmp_path / "in"))
    assert_same(got, state)
    got = _load_state_dict_from_keys(
        {"model.w"}, storage_reader=HuggingFaceStorageReader(tmp_path / "in")
    )
    assert_same(got, {"model": state["model"]})


def test_a_checkpoint_that_is_replaced_between_metadata_and_data(tmp_path: Path) -> None:
    path = saved(tmp_path / "in", {"w": torch.zeros(3)})
    reader = HuggingFaceStorageReader(path)
    planner = dcp.DefaultLoadPlanner()
    target = {"w": torch.full((3,), -1.0)}
    metadata = reader.read_metadata()
    planner.set_up_planner(target, metadata, True)
    reader.set_up_storage_reader(metadata, True)
    saved(path, {"w": torch.ones(3)})
    with pytest.raises(torch_ckpt.ConflictError, match="in"):
        reader.read_data(planner.create_local_plan(), planner)
    assert (target["w"] == -1).all()


def test_a_load_begins_again_when_the_checkpoint_was_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(tmp_path / "in", {"w": torch.zeros(3), "more": torch.zeros(2)})
    read, times = CheckpointReader.read_data, []

    def replaced(self: CheckpointReader, *args: Any) -> Any:
        times.append(1)
        if len(times) < 3:
            saved(path, {"w": torch.full((3,), float(len(times))), "more": torch.zeros(2)})
        return read(self, *args)

    monkeypatch.setattr(CheckpointReader, "read_data", replaced)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    target = {"w": torch.full((3,), -1.0), "more": torch.ones(2)}
    torch_ckpt.load(target, checkpoint_id=path)
    assert len(times) == 3
    assert (target["w"] == 2).all() and not target["more"].any()


# Targets.

TARGETS: dict[str, Any] = {
    "contiguous": lambda: torch.zeros(6, 4),
    "transposed": lambda: torch.zeros(4, 6).t(),
    "strided": lambda: torch.zeros(12, 8)[::2, ::2],
    "a part of another": lambda: torch.zeros(10, 10)[2:8, 3:7],
    "double": lambda: torch.zeros(6, 4, dtype=torch.float64),
    "double, transposed": lambda: torch.zeros(4, 6, dtype=torch.float64).t(),
    "needs a gradient": lambda: torch.zeros(6, 4, requires_grad=True),
    "a parameter": lambda: torch.nn.Parameter(torch.zeros(6, 4)),
    "shared memory": lambda: torch.zeros(6, 4).share_memory_(),
    "conjugated": lambda: torch.zeros(6, 4, dtype=torch.complex64).conj(),
}


@pytest.mark.parametrize("planner", [dcp.DefaultLoadPlanner, torch_ckpt.LoadPlanner])
@pytest.mark.parametrize("case", TARGETS)
def test_targets_of_every_kind_are_filled_in_place(tmp_path: Path, case: str, planner: Any) -> None:
    value = torch.randn(6, 4)
    path = saved(tmp_path / "in", {"w": value})
    target = TARGETS[case]()
    pointer, version = target.data_ptr(), target._version
    into = {"w": target}
    load(into, HuggingFaceStorageReader(path), planner=planner())
    assert into["w"] is target and target.data_ptr() == pointer
    assert torch.equal(
        target.detach().to(value.dtype) if not target.is_complex() else target.real, value
    )
    assert target._version > version, "autograd sees that the tensor changed"


def test_autograd_sees_what_a_load_that_fails_has_changed(tmp_path: Path) -> None:
    path = saved(tmp_path / "in", {"w": torch.tensor([1.0, 7e4])})
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    loss = (weight * weight).sum()
    with pytest.warns(UserWarning), pytest.raises(FAILED, match="'w': at least 1 values of F32"):
        load({"w": weight}, HuggingFaceStorageReader(path))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_memory_around_a_view_is_left_alone(tmp_path: Path) -> None:
    path = saved(tmp_path / "in", {"w": torch.ones(6, 4)})
    base = torch.zeros(10, 10)
    load({"w": base[2:8, 3:7]}, HuggingFaceStorageReader(path))
    assert base.sum() == 24 and base[2:8, 3:7].sum() == 24


def test_saved_gradients_of_a_loaded_parameter_are_noticed(tmp_path: Path) -> None:
    path = saved(tmp_path / "in", {"w": torch.ones(3)})
    weight = torch.nn.Parameter(torch.zeros(3))
    result = (weight * weight).sum()
    load({"w": weight}, HuggingFaceStorageReader(path))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()


def test_module_state_is_loaded_in_place(tmp_path: Path) -> None:
    source, target = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    path = saved(tmp_path / "in", {"model": source.state_dict()})
    load({"model": target.state_dict()}, HuggingFaceStorageReader(path))
    assert_same(dict(target.state_dict()), dict(source.state_dict()))


class Staging(dcp.DefaultLoadPlanner):
    """Gives the reader a buffer of its own, and moves it when it is committed."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.committed: list[str] = []

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        return torch.zeros(read_item.lengths, dtype=self.dtype)

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        self.committed.append(read_item.dest_index.fqn)
        self.lookup_tensor(read_item.dest_index).copy_(tensor.float() + 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_planner_with_buffers_of_its_own(tmp_path: Path, dtype: torch.dtype) -> None:
    state = {"a": torch.randn(5), "b": torch.randn(2, 2)}
    path = saved(tmp_path / "in", state)
    target, planner = blank(state), Staging(dtype)
    load(target, HuggingFaceStorageReader(path), planner=planner)
    assert sorted(planner.committed) == ["a", "b"]
    assert_same(target, {name: value + 1 for name, value in state.items()})


# Parts, shapes and names that do not fit.


@pytest.mark.parametrize("kind", [dcp.DefaultLoadPlanner, torch_ckpt.LoadPlanner])
def test_partial_loads(tmp_path: Path, kind: Any) -> None:
    path = saved(tmp_path / "in", {"a": torch.ones(2), "b": torch.ones(2), "n": 1})
    target = {"a": torch.zeros(2), "new": torch.full((2,), 7.0), "step": 9}
    with pytest.raises(FAILED, match="new"):
        load(dict(target), HuggingFaceStorageReader(path), planner=kind())
    load(target, HuggingFaceStorageReader(path), planner=kind(allow_partial_load=True))
    assert_same(target, {"a": torch.ones(2), "new": torch.full((2,), 7.0), "step": 9})


@pytest.mark.parametrize("kind", [dcp.DefaultLoadPlanner, torch_ckpt.LoadPlanner])
def test_shapes_that_differ_are_named(tmp_path: Path, kind: Any) -> None:
    path = saved(tmp_path / "in", {"a": torch.ones(2, 3)})
    with pytest.raises(FAILED, match="(?s)2, 3.*a"):
        load({"a": torch.zeros(3, 2)}, HuggingFaceStorageReader(path), planner=kind())


def test_directories_that_are_no_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    for name in ("empty", "file", "missing"):
        with pytest.raises(FAILED, match=re.escape(str(tmp_path / name))):
            load({"w": torch.zeros(1)}, HuggingFaceStorageReader(tmp_path / name))


def test_index_and_files_must_agree(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / FINAL)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": FINAL, "b": FINAL}}))
    target = {"a": torch.zeros(2)}
    load(target, HuggingFaceStorageReader(tmp_path))
    assert (target["a"] == 1).all()
    with pytest.raises(FAILED, match="Missing key in checkpoint state_dict: b|'b'"):
        load({"a": torch.zeros(2), "b": torch.zeros(2)}, HuggingFaceStorageReader(tmp_path))
    gone = {"a": FINAL, "c": "model-00002-of-00002.safetensors"}
    index.write_text(json.dumps({"weight_map": gone}))
    with pytest.raises(FAILED, match="model-00002"):
        load({"a": torch.zeros(2)}, HuggingFaceStorageReader(tmp_path))
    index.write_text(json.dumps({"weight_map": {"a": "../" + tmp_path.name + "/" + FINAL}}))
    with pytest.raises(FAILED, match="index.json"):
        load({"a": torch.zeros(2)}, HuggingFaceStorageReader(tmp_path))


def test_readers_never_write(tmp_path: Path) -> None:
    path = saved(tmp_path / "in", {"w": torch.ones(3), "n": 1})
    os.chmod(path, 0o555)

    def times() -> dict[str, int]:
        # The directory's own too: it tells of files that came and went.
        return {name: os.stat(path / name).st_mtime_ns for name in (".", *os.listdir(path))}

    before = times()
    load({"w": torch.zeros(3), "n": 0}, HuggingFaceStorageReader(path))
    torch_ckpt.Checkpoint(path).verify()
    assert times() == before
    os.chmod(path, 0o755)


def test_checkpoint_id_of_the_call_holds(tmp_path: Path) -> None:
    saved(tmp_path / "a", {"w": torch.zeros(2)})
    saved(tmp_path / "b", {"w": torch.ones(2)})
    reader = HuggingFaceStorageReader(tmp_path / "a")
    for name, wanted in (("b", 1.0), ("a", 0.0), ("b", 1.0)):
        target = {"w": torch.full((2,), -1.0)}
        load(target, reader, checkpoint_id=tmp_path / name)
        assert (target["w"] == wanted).all()


def test_verify_may_be_left_out(tmp_path: Path) -> None:
    state = {f"{dtype}": sample(dtype, 3, 3) for dtype in DTYPES}
    path = saved(tmp_path / "in", state)
    target = blank(state)
    load(target, HuggingFaceStorageReader(path, verify=False))
    assert_same(target, state)


def test_verify_is_what_finds_a_flipped_bit(tmp_path: Path) -> None:
    path = saved(tmp_path / "in", {"w": torch.zeros(1000)})
    (file,) = path.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 0x40
    file.write_bytes(data)
    target = {"w": torch.ones(1000)}
    with pytest.raises(FAILED, match=file.name):
        load(target, HuggingFaceStorageReader(path))
    load(target, HuggingFaceStorageReader(path, verify=False))
    assert target["w"][-1] == 2 and not target["w"][:-1].any()
    with pytest.raises(torch_ckpt.CorruptError, match=file.name):
        torch_ckpt.consolidate_safetensors_files(path, tmp_path / "out", None)
    torch_ckpt.consolidate_safetensors_files(path, tmp_path / "out", None, verify=False)
    assert load_file(tmp_path / "out" / FINAL)["w"][-1] == 2


QUANTIZED = {
    "w.weight": torch.ones(130, 200).to(torch.float8_e4m3fn),
    "w.weight_scale_inv": torch.tensor([[2.0, 3.0], [4.0, 5.0]]),
    "plain": torch.randn(4),
}


class OursQuantized(dcp.QuantizedHuggingFaceStorageReader, HuggingFaceStorageReader):
    """Stock's dequantization on our metadata."""


@pytest.mark.parametrize("kind", [dcp.QuantizedHuggingFaceStorageReader, OursQuantized])
@pytest.mark.parametrize("files", [1, 2])
def test_quantized_reader_on_our_files(tmp_path: Path, kind: Any, files: int) -> None:
    mapping = {"w.weight": 1, "w.weight_scale_inv": files, "plain": 1}
    save(QUANTIZED, HuggingFaceStorageWriter(tmp_path / "in", mapping))
    target = {"w.weight": torch.zeros(130, 200), "plain": torch.zeros(4)}
    load(target, kind(str(tmp_path / "in")))
    scale = QUANTIZED["w.weight_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
    assert torch.equal(target["w.weight"], scale[:130, :200])
    assert torch.equal(target["plain"], QUANTIZED["plain"])


def test_a_target_whose_elements_share_memory(tmp_path: Path) -> None:
    save({"w": torch.ones(3)}, HuggingFaceStorageWriter(tmp_path / "c"))
    target = {"w": torch.zeros(1).expand(3)}
    with pytest.raises(FAILED, match="'w': the target is expanded"):
        load(target, HuggingFaceStorageReader(tmp_path / "c"))


def test_planners_and_readers_of_the_users_see_whole_plans(tmp_path: Path) -> None:
    seen: list[tuple[str, int]] = []

    class Planner(torch_ckpt.LoadPlanner):
        def create_global_plan(self, global_plan):  # type: ignore[no-untyped-def]
            seen.append(("planner", len(global_plan[0].items)))
            return super().create_global_plan(global_plan)

    class Reader(torch_ckpt.HuggingFaceStorageReader):
        def prepare_global_plan(self, plans):  # type: ignore[no-untyped-def]
            seen.append(("reader", len(plans[0].items)))
            return [dataclasses.replace(plan, items=plan.items[:1]) for plan in plans]

    torch_ckpt.save({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path / "c")
    for planner, reader, found, filled in (
        (Planner(), None, [("planner", 2)], 4.0),
        (None, Reader(tmp_path / "c"), [("reader", 2)], 2.0),
        (Planner(), Reader(tmp_path / "c"), [("planner", 2), ("reader", 2)], 2.0),
    ):
        seen.clear()
        target = {"a": torch.zeros(2), "b": torch.zeros(2)}
        torch_ckpt.load(target, tmp_path / "c", storage_reader=reader, planner=planner)
        assert seen == found
        assert float(sum(value.sum() for value in target.values())) == filled
