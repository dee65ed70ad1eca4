"""patch_megatron: Megatron's own names, on this engine and back."""

from __future__ import annotations

import functools
import inspect
import multiprocessing
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from torch_ckpt.megatron import patch_megatron
from torch_ckpt.megatron.patch import _async_strategy

pytest.importorskip("megatron.core.dist_checkpointing")
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import core, serialization
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies import async_utils
from megatron.core.dist_checkpointing.strategies import torch as their_torch
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.dist_checkpointing.validation import StrictHandling


def state(value: float) -> dict[str, Any]:
    return {
        "w": ShardedTensor.from_rank_offsets("w", torch.full((3,), value)),
        "o": ShardedObject("o", {"x": value}, (1,), (0,)),
        "step": 4,
    }


def test_their_calls_are_ours_and_theirs_again(tmp_path: Path) -> None:
    names = [
        (dist_checkpointing, "save"),
        (serialization, "load"),
        (async_utils, "AsyncCallsQueue"),
    ]
    stock = [getattr(module, name) for module, name in names]
    path = str(tmp_path / "c")
    with patch_megatron():
        program = types.ModuleType("a_program")
        program.save = dist_checkpointing.save  # type: ignore[attr-defined]
        sys.modules["a_program"] = program
        assert all(getattr(m, n) is not s for (m, n), s in zip(names, stock, strict=True))
        dist_checkpointing.save(state(2.0), path, content_metadata={"a": 1})
        assert '"torch_ckpt"' in (tmp_path / "c" / "metadata.json").read_text()
        loaded = dist_checkpointing.load(state(0.0), path, strict=StrictHandling.RAISE_ALL)
        assert loaded["w"].tolist() == [2.0] * 3 and loaded["o"] == {"x": 2.0}
        assert dist_checkpointing.load_content_metadata(path) == {"a": 1}
        assert dist_checkpointing.check_is_distributed_checkpoint(path)
        found = serialization.load_sharded_metadata(path)
        assert type(found["w"]) is ShardedTensor and type(found["o/shard_0_1"]) is ShardedObject
    assert [getattr(module, name) for module, name in names] == stock
    assert program.save is stock[0]
    del sys.modules["a_program"]


def test_errors_are_caught_as_theirs(tmp_path: Path) -> None:
    with patch_megatron():
        with pytest.raises(core.CheckpointingException, match="no such directory"):
            dist_checkpointing.load({}, str(tmp_path / "absent"))
        with pytest.raises(ValueError):
            dist_checkpointing.load({}, str(tmp_path), strict="what")


@pytest.mark.parametrize("how", ["at a poll", "at once"])
def test_errors_of_async_saves_are_caught_as_theirs(tmp_path: Path, how: str) -> None:
    directory = tmp_path / "c"
    with patch_megatron():
        request = dist_checkpointing.save(state(5.0), str(directory), async_sharded_save=True)
        assert isinstance(request, async_utils.AsyncRequest)
        shutil.rmtree(directory, ignore_errors=True)
        directory.write_text("a file")
        with pytest.raises(core.CheckpointingException, match="c"):
            if how == "at once":
                request.execute_sync()
            queue = async_utils.AsyncCallsQueue()
            queue.schedule_async_request(request)
            queue.close()


def test_no_process_is_started_for_saves() -> None:
    """As Megatron's training/async_utils.py calls what `get_async_strategy` gives."""
    before = set(multiprocessing.active_children())
    with patch_megatron():
        _, classes = _async_strategy(lambda *_: (None, {}))("nvrx")
        for queue in (classes["AsyncCallsQueue"], async_utils.AsyncCallsQueue):
            queue.warmup_persistent_caller(0, cpu_priority=10, io_priority=None, cpu_shm_mode=True)
        kind = classes["AsyncCallsQueue"]
        for call in (kind.__init__, kind.warmup_persistent_caller):
            assert "cpu_shm_mode" in inspect.signature(call).parameters
        assert "mp_mode" in inspect.signature(classes["get_write_results_queue"]).parameters
        classes["get_write_results_queue"](mp_mode="fork")
        assert isinstance(kind(persistent=True, cpu_shm_mode=True), async_utils.AsyncCallsQueue)
    assert set(multiprocessing.active_children()) == before


@pytest.mark.skipif(
    not hasattr(their_torch, "get_async_strategy"), reason="Megatron has it since 0.17"
)
def test_async_strategies_have_two_names_and_our_queue() -> None:
    with patch_megatron():
        for name in ("nvrx", "mcore"):
            said, classes = their_torch.get_async_strategy(name)
            assert said == name
            assert isinstance(classes["AsyncCallsQueue"](), async_utils.AsyncCallsQueue)
            assert "FileSystemWriterAsync" in classes  # of other formats
            kind = their_torch.get_async_strategy(name, "AsyncRequest")[1]
            assert isinstance(kind(None, (), []), async_utils.AsyncRequest)
        with pytest.raises(TypeError, match="async_strategy"):
            their_torch.get_async_strategy("other")


def test_requests_of_others_are_refused() -> None:
    """They would start processes: those of Megatron's own strategies and of its other formats."""
    with patch_megatron():
        queue = async_utils.AsyncCallsQueue()
        for module in (
            "megatron.core.dist_checkpointing.strategies.filesystem_async",
            "nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async",
        ):

            def write() -> None:
                raise AssertionError

            write.__module__ = module
            function = functools.partial(write)
            with pytest.raises(TypeError, match="make it by the save of torch_ckpt"):
                queue.schedule_async_request(async_utils.AsyncRequest(function, (), []))
        with pytest.raises(TypeError, match="no AsyncRequest"):
            queue.schedule_async_request(print)
        assert queue.get_num_unfinalized_calls() == 0


def test_their_strategies_are_options(tmp_path: Path) -> None:
    class Own(TorchDistSaveShardedStrategy):
        """As Megatron-Bridge derives one."""

    path = str(tmp_path / "c")
    with patch_megatron():
        saving = FullyParallelSaveStrategyWrapper(Own("torch_dist", 1))
        dist_checkpointing.save(state(2.0), path, saving)
        reading = serialization.get_default_load_sharded_strategy
        with pytest.raises(TypeError, match="no strategy"):
            dist_checkpointing.load(state(0.0), path, object())
        assert callable(reading)
        wrapped = FullyParallelLoadStrategyWrapper(None)
        loaded = dist_checkpointing.load(state(0.0), path, wrapped)
        assert loaded["step"] == 4 and loaded["w"].tolist() == [2.0] * 3
        unknown = FullyParallelLoadStrategyWrapper(None, exchange_algo="telepathy")
        with pytest.raises(NotImplementedError, match="telepathy"):
            dist_checkpointing.load(state(0.0), path, unknown)
        with pytest.raises(core.CheckpointingException, match="is a URL"):
            dist_checkpointing.check_is_distributed_checkpoint("msc://profile/c")


def _children() -> set[str]:
    lists = Path("/proc/self/task").glob("*/children")
    return {pid for each in lists for pid in each.read_text().split()}


def test_async_saves(tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    before = _children()
    with patch_megatron():
        request = dist_checkpointing.save(state(5.0), path, async_sharded_save=True)
        called: list[int] = []
        request.add_finalize_fn(lambda: called.append(1))
        queue = async_utils.AsyncCallsQueue()
        assert queue.schedule_async_request(request) == 0
        assert _children() == before
        assert queue.maybe_finalize_async_calls(blocking=True) == [0]
        assert called == [1] and _children() == before
        assert dist_checkpointing.load(state(0.0), path)["w"].tolist() == [5.0] * 3
        own = async_utils.AsyncRequest(lambda: called.append(2), (), [])
        queue.schedule_async_request(own)
        queue.close()
        assert called == [1, 2]
