"""torch_ckpt.megatron.dist_checkpointing with tensors on a CUDA device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from torch_ckpt.megatron import dist_checkpointing
from torch_ckpt.megatron.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch_ckpt.megatron.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

place = ShardedTensor.from_rank_offsets
SIZE = 3 << 20  # a tensor is more than a buffer of the engine


def halves(key: str, data: torch.Tensor, replica: Any, _: Any) -> list[ShardedTensor]:
    return [
        place(key, half, (0, at, 2), replica_id=replica) for at, half in enumerate(data.chunk(2))
    ]


def state(filled: bool) -> dict[str, Any]:
    values = torch.arange(SIZE, dtype=torch.float32, device="cuda").view(4, -1)
    if not filled:
        values.fill_(-1.0)
    return {
        "device": place("device", values),
        "cast": place("cast", values.bfloat16()),
        "columns": place("columns", values[:, 5:999].contiguous()),
        "merged": ShardedTensorFactory("merged", values.clone(), halves, torch.cat),
        "layer": place("layer", values[0].clone(), (0, 0, 1), prepend_axis_num=1),
        "host": place("host", values.cpu()),
        "step": 7 if filled else 0,
    }


def check(loaded: dict[str, Any]) -> None:
    expected = state(True)
    assert loaded.pop("step") == expected.pop("step")
    assert loaded.keys() == expected.keys()
    for name, entry in expected.items():
        assert loaded[name].device == entry.data.device, name
        assert torch.equal(loaded[name], entry.data), name


def test_tensors_of_a_device_come_back_into_their_memory(tmp_path: Path) -> None:
    dist_checkpointing.save(state(True), tmp_path / "c")
    request = state(False)
    places = {name: each.data.data_ptr() for name, each in request.items() if name != "step"}
    loaded = dist_checkpointing.load(request, tmp_path / "c", verify_integrity=True)
    assert places == {name: loaded[name].data_ptr() for name in places}
    check(loaded)


def test_device_tensors_may_change_once_a_save_is_scheduled(tmp_path: Path) -> None:
    queue = AsyncCallsQueue()
    saved = state(True)
    request = dist_checkpointing.save(saved, tmp_path / "c", async_sharded_save=True)
    assert request is not None
    queue.schedule_async_request(request)
    for name, entry in saved.items():
        if name != "step":
            entry.data.zero_()
    assert queue.maybe_finalize_async_calls(blocking=True) == [0]
    queue.close()
    check(dist_checkpointing.load(state(False), tmp_path / "c"))


def test_memory_is_made_on_the_host_without_a_target(tmp_path: Path) -> None:
    """As upstream: a request without data gets a tensor of the CPU."""
    dist_checkpointing.save(state(True), tmp_path / "c")
    request = {"device": place("device", torch.empty(4, SIZE // 4)).without_data()}
    found = dist_checkpointing.load(request, tmp_path / "c")["device"]
    assert found.device.type == "cpu"
    assert torch.equal(found, state(True)["device"].data.cpu())
