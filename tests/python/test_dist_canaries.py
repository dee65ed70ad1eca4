"""A load of torch_ckpt.megatron.dist_checkpointing fills its targets and nothing beside them: these
are views in the middle of one memory, and every byte around them stays what it was."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from sample_states import DTYPES, sample

from torch_ckpt.megatron import dist_checkpointing
from torch_ckpt.megatron.dist_checkpointing.mapping import ShardedTensor

CANARY = 0xA5
TORCH_DIST = Path(__file__).parents[1] / "fixtures" / "megatron_torch_dist_019_2ranks"


class Memory:
    """Bytes that are canaries, but for the views that were taken."""

    def __init__(self, size: int) -> None:
        self.bytes = torch.full((size + -size % 16,), CANARY, dtype=torch.uint8)
        self.taken = torch.zeros_like(self.bytes)
        self.at = 0

    def take(
        self,
        dtype: torch.dtype,
        sizes: Sequence[int],
        *,
        gap: int = 1,
        step: int = 1,
        pad: int = 0,
        turned: bool = False,
    ) -> torch.Tensor:
        """A view after `gap` canaries of its dtype: of every `step`th element, with `pad` canaries
        after each row, its axes in the other order in memory where it is `turned`."""
        strides, least = [0] * len(sizes), step
        for axis in range(len(sizes)) if turned else reversed(range(len(sizes))):
            strides[axis] = least
            least = least * max(1, sizes[axis]) + pad
        wide = dtype.itemsize
        begin = -(-self.at // wide) + gap
        self.at = (begin + least) * wide
        assert self.at < self.bytes.numel()
        for of, value in ((self.taken, 1), (self.bytes, CANARY ^ 0xFF)):
            each = of.view(-1, wide).as_strided((*sizes, wide), (*(n * wide for n in strides), 1))
            each = each.as_strided(each.shape, each.stride(), begin * wide)
            each.fill_(value)
        return self.bytes.view(dtype).as_strided(sizes, strides, begin)

    def check(self) -> None:
        beside = self.bytes[self.taken == 0]
        assert beside.numel() and bool((beside == CANARY).all())


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """With an axis of the bytes of each element."""
    plain = torch.empty(tensor.shape, dtype=tensor.dtype)  # one element may have any stride
    shape, wide = tensor.shape, tensor.dtype.itemsize
    return plain.copy_(tensor).view(-1).view(torch.uint8).view(*shape, wide)


class Asked(NamedTuple):
    """A box that is asked for, and how it lies in memory."""

    offset: list[int]
    sizes: list[int]
    layout: dict[str, Any]


@dataclasses.dataclass
class Case:
    """A tensor of shape `stored`, boxes of which are asked for as of one of `shape`."""

    dtype: torch.dtype
    stored: list[int]
    shape: list[int]
    prepended: int
    asked: list[Asked]

    def entries(self, key: str, memory: Memory) -> list[ShardedTensor]:
        return [
            ShardedTensor(
                key,
                memory.take(self.dtype, sizes[self.prepended :], **layout),
                self.dtype,
                tuple(sizes[self.prepended :]),
                tuple(self.shape),
                tuple(offset),
                None,
                prepend_axis_num=self.prepended,
                allow_shape_mismatch=self.shape != self.stored,
            )
            for offset, sizes, layout in self.asked
        ]

    def check(self, whole: torch.Tensor, loaded: list[torch.Tensor]) -> None:
        for (offset, sizes, _), found in zip(self.asked, loaded, strict=True):
            wanted = torch.zeros(*sizes, self.dtype.itemsize, dtype=torch.uint8)
            box = [slice(at, at + n) for at, n in zip(offset, sizes, strict=True)]
            there = bytes_of(whole)[tuple(box)]
            wanted[tuple(slice(n) for n in there.shape)] = there
            assert torch.equal(bytes_of(found).view(-1), wanted.view(-1)), (offset, sizes)


@st.composite
def cases(draw: Any) -> Case:
    stored = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    prepended = draw(st.integers(0, len(stored) - 1))
    shape = [*stored]
    if draw(st.booleans()):
        shape[prepended:] = [draw(st.integers(1, 8)) for _ in stored[prepended:]]
    asked = []
    for _ in range(draw(st.integers(1, 3))):
        offset = [draw(st.integers(0, size - 1)) for size in shape]
        sizes = [draw(st.integers(1, n - at)) for n, at in zip(shape, offset, strict=True)]
        sizes[:prepended] = [1] * prepended
        layout = {
            "gap": draw(st.integers(1, 5)),
            "step": draw(st.integers(1, 3)),
            "pad": draw(st.integers(0, 3)),
            "turned": draw(st.booleans()),
        }
        asked.append(Asked(offset, sizes, layout))
    return Case(draw(st.sampled_from(DTYPES)), stored, shape, prepended, asked)


def run(path: Path, wanted: list[Case], size: int) -> None:
    wholes = {f"t{number}": sample(case.dtype, *case.stored) for number, case in enumerate(wanted)}
    place = ShardedTensor.from_rank_offsets
    dist_checkpointing.save({key: place(key, whole) for key, whole in wholes.items()}, path)
    memory = Memory(size)
    request = {key: case.entries(key, memory) for key, case in zip(wholes, wanted, strict=True)}
    loaded = dist_checkpointing.load(dict(request), path, validate_access_integrity=False)
    memory.check()
    for (key, whole), case in zip(wholes.items(), wanted, strict=True):
        for found, entry in zip(loaded[key], request[key], strict=True):
            assert found.data_ptr() == entry.data.data_ptr()
        case.check(whole, loaded[key])


@settings(max_examples=50, deadline=None)
@given(st.lists(cases(), min_size=1, max_size=4))
def test_random_views_of_one_memory(tmp_path_factory: Any, wanted: list[Case]) -> None:
    path: Path = tmp_path_factory.mktemp("canaries") / "c"
    run(path, wanted, 1 << 20)
    shutil.rmtree(path)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_of_every_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    """With a prepended axis, in rows that are apart, and in another shape than the one stored."""
    whole = Asked([2, 0, 0], [1, 5, 7], {})
    part = Asked([0, 1, 2], [1, 3, 4], {"pad": 2})
    larger = [Asked([1, 3, 0], [1, 6, 7], {}), Asked([1, 6, 7], [1, 3, 2], {"step": 2})]
    cases = [
        Case(dtype, [3, 5, 7], [3, 5, 7], 1, [whole, part]),
        Case(torch.int8, [3, 5, 7], [3, 5, 7], 1, [part, whole]),
        Case(dtype, [3, 5, 7], [3, 9, 9], 1, larger),
    ]
    run(tmp_path / "c", cases, 1 << 14)


@pytest.mark.parametrize("gap", [1, 3, 1024])
def test_large_ones(tmp_path: Path, gap: int) -> None:
    """Which are read in pieces."""
    rows = 1 << 20
    boxes = [
        Asked([0, 0], [2, rows], {"gap": gap}),
        Asked([1, 5], [2, rows - 9], {"gap": gap, "pad": 3}),
    ]
    larger = [Asked([2, 0], [2, rows], {"gap": gap})]
    cases = [
        Case(torch.float32, [3, rows], [3, rows], 0, boxes),
        Case(torch.float32, [3, rows], [4, rows], 0, larger),
    ]
    run(tmp_path / "c", cases, 40 << 20)


@pytest.mark.filterwarnings("ignore:.*AttnBackend is not imported here")
def test_of_a_checkpoint_of_megatron() -> None:
    wanted = load_file(TORCH_DIST / "expected.safetensors")
    memory = Memory(1 << 22)
    request = {
        key: ShardedTensor.from_rank_offsets(key, memory.take(value.dtype, value.shape, pad=1))
        for key, value in wanted.items()
    }
    loaded = dist_checkpointing.load(
        dict(request), TORCH_DIST / "checkpoint", validate_access_integrity=False
    )
    memory.check()
    assert all(torch.equal(loaded[key], value) for key, value in wanted.items())
