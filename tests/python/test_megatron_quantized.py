"""Quantized tensors in Megatron's state dicts: a stand-in for those of Transformer Engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_map_only

from torch_ckpt.megatron import dist_checkpointing
from torch_ckpt.megatron.boxes import Box
from torch_ckpt.megatron.dist_checkpointing.core import CheckpointingException
from torch_ckpt.megatron.dist_checkpointing.mapping import ShardedTensor
from torch_ckpt.megatron.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from torch_ckpt.megatron.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelSaveStrategyWrapper,
)

place = ShardedTensor.from_rank_offsets


class Float8(torch.Tensor):
    """bfloat16 to torch; int8 and a scale in memory."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: float) -> Float8:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, codes.shape, dtype=torch.bfloat16, device=codes.device
        )

    def __init__(self, codes: torch.Tensor, scale: float) -> None:
        self.codes, self.scale = codes, scale

    def dequantize(self) -> torch.Tensor:
        return (self.codes.float() * self.scale).bfloat16()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Float8(args[0].codes, args[0].scale)
        if func is torch.ops.aten.copy_.default and isinstance(args[0], Float8):
            args[0].codes.copy_((args[1].float() / args[0].scale).round())
            return args[0]
        plain = tree_map_only(Float8, lambda each: each.dequantize(), (args, kwargs or {}))
        return func(*plain[0], **plain[1])


def quantized(*codes: int) -> Float8:
    return Float8(torch.tensor(codes, dtype=torch.int8).view(2, -1), 0.5)


@pytest.mark.parametrize("as_parameter", [False, True])
def test_values_are_stored_and_come_back(as_parameter: bool, tmp_path: Path) -> None:
    value: torch.Tensor = quantized(1, -2, 3, 100)
    if as_parameter:
        value = torch.nn.Parameter(value)
    save = dist_checkpointing.save
    save({"w": place("w", value), "v": place("v", torch.ones(3))}, tmp_path / "c")
    stored = dist_checkpointing.load_plain_tensors(tmp_path / "c")["w"]
    assert type(stored) is torch.Tensor and stored.dtype == torch.bfloat16
    assert stored.tolist() == [[0.5, -1.0], [1.5, 50.0]]
    target = quantized(0, 0, 0, 0)
    codes = target.codes
    loaded = dist_checkpointing.load({"w": place("w", target)}, tmp_path / "c")["w"]
    assert type(loaded) is Float8 and loaded.codes is codes
    assert codes.tolist() == [[1, -2], [3, 100]]


def test_layers_and_cuts(tmp_path: Path) -> None:
    """Prepended axes, and several boxes of one tensor."""
    layers = {
        str(layer): place("w", quantized(layer, 2, 3, 4), (0, layer, 3), prepend_axis_num=1)
        for layer in range(3)
    }
    dist_checkpointing.save(layers, tmp_path / "c")
    stored = dist_checkpointing.load_plain_tensors(tmp_path / "c")["w"]
    assert stored.shape == (3, 2, 2) and stored[:, 0, 0].tolist() == [0.0, 0.5, 1.0]
    targets = {
        name: place("w", quantized(0, 0, 0, 0), (0, int(name), 3), prepend_axis_num=1)
        for name in layers
    }
    loaded = dist_checkpointing.load(targets, tmp_path / "c")
    assert [loaded[name].codes[0, 0].item() for name in sorted(loaded)] == [0, 1, 2]


class Counted(Float8):
    """Counts how many dequantized copies are alive. They are float32, as those on a device are of
    another place: what is kept of them in host memory, in bfloat16, is none of them."""

    made: ClassVar[list[StorageWeakRef]] = []
    most: ClassVar[int] = 0

    def dequantize(self) -> torch.Tensor:
        copy = super().dequantize().float()
        Counted.made.append(StorageWeakRef(copy.untyped_storage()))
        alive = sum(not each.expired() for each in Counted.made)
        Counted.most = max(Counted.most, alive)
        return copy

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Counted(args[0].codes, args[0].scale)
        return super().__torch_dispatch__(func, types, args, kwargs)


def in_the_background(state: dict[str, Any], path: Path) -> None:
    queue = AsyncCallsQueue()
    request = dist_checkpointing.save(state, path, async_sharded_save=True)
    queue.schedule_async_request(request)
    queue.maybe_finalize_async_calls(blocking=True)


@pytest.mark.parametrize(
    "save",
    [
        dist_checkpointing.save,
        lambda state, path: dist_checkpointing.save(
            state, path, FullyParallelSaveStrategyWrapper(None)
        ),
        in_the_background,
    ],
    ids=["now", "sharing", "background"],
)
def test_one_is_dequantized_at_a_time(tmp_path: Path, save: Any) -> None:
    Counted.made, Counted.most = [], 0
    state: dict[str, Any] = {}
    for number in range(6):
        codes = torch.full((4, 256), number, dtype=torch.int8)
        state[f"w{number}"] = place(f"w{number}", Counted(codes, 1.0))
        layer = Counted(codes + 1, 1.0)
        state[f"l{number}"] = place("l", layer, (0, number, 6), prepend_axis_num=1)
    save(state, tmp_path / "c")
    assert (len(Counted.made), Counted.most) == (12, 1)
    stored = dist_checkpointing.load_plain_tensors(tmp_path / "c")
    assert [stored[f"w{number}"][0, 0].item() for number in range(6)] == [*range(6)]
    assert stored["l"][:, 0, 0].tolist() == [number + 1.0 for number in range(6)]
    assert Counted.most == 1 and all(each.expired() for each in Counted.made)


def test_of_rows_no_more_is_kept_than_these() -> None:
    """In host memory, where ranks share in writing a tensor."""
    box = Box.of(place("l", quantized(1, 2, 3, 4, 5, 6), (0, 1, 3), prepend_axis_num=1))
    data = box.rows(1, 2).data
    assert data is not None and data.tolist() == [[[2.0, 2.5, 3.0]]]
    assert data.untyped_storage().nbytes() == 3 * data.dtype.itemsize


def test_values_of_another_shape_are_refused(tmp_path: Path) -> None:
    class Padded(Float8):
        def dequantize(self) -> torch.Tensor:
            return super().dequantize().view(-1)

        @classmethod
        def __torch_dispatch__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is torch.ops.aten.detach.default:
                return Padded(args[0].codes, args[0].scale)
            return super().__torch_dispatch__(func, types, args, kwargs)

    padded = Padded(torch.ones(2, 2, dtype=torch.int8), 1.0)
    with pytest.raises(CheckpointingException, match=r"'w'.*\[2, 2\] is dequantized to \[4\]"):
        dist_checkpointing.save({"w": place("w", padded)}, tmp_path / "c")
    assert not (tmp_path / "c").exists()


class Frozen(Float8):
    """To its `copy_`, as to any operator, it gives a plain copy of itself."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Frozen(args[0].codes, args[0].scale)
        plain = tree_map_only(Float8, lambda each: each.dequantize(), (args, kwargs or {}))
        return func(*plain[0], **plain[1])


def test_a_target_that_takes_nothing_is_an_error(tmp_path: Path) -> None:
    dist_checkpointing.save({"w": place("w", quantized(1, -2, 3, 100))}, tmp_path / "c")
    target = Frozen(torch.zeros(2, 2, dtype=torch.int8), 0.5)
    with pytest.raises(CheckpointingException, match="'w'.*its copy_ changes nothing"):
        dist_checkpointing.load({"w": place("w", target)}, tmp_path / "c")
