"""torch_ckpt.megatron.dist_checkpointing over random shapes, cuts, prepended axes and boxes: what was
saved in one cut is loaded in another."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_ckpt.megatron import dist_checkpointing
from torch_ckpt.megatron.dist_checkpointing.mapping import ShardedTensor

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8)
Cuts = list[list[int]]  # where each axis is cut, its ends among them


@st.composite
def cut_of(draw: Any, shape: list[int], *, regular: bool) -> Cuts:
    cuts = []
    for size in shape:
        if regular:
            pieces = draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0] or [1]))
            step = size // pieces
            cuts.append([step * n for n in range(pieces + 1)])
        else:
            inner = draw(st.sets(st.integers(1, size - 1), max_size=3)) if size > 1 else set()
            cuts.append([0, *sorted(inner), size])
    return cuts


@st.composite
def tensors(draw: Any) -> dict[str, Any]:
    prepended = draw(st.integers(0, 2))
    shape = draw(st.lists(st.integers(1, 6), min_size=prepended, max_size=prepended + 2))
    regular = draw(st.booleans())
    # Boxes are 1 wide in axes that are prepended.
    ones = [list(range(size + 1)) for size in shape[:prepended]]
    return {
        "shape": shape,
        "prepended": prepended,
        "dtype": draw(st.sampled_from(DTYPES)),
        "saved": (regular, [*ones, *draw(cut_of(shape[prepended:], regular=regular))]),
        "loaded": [*ones, *draw(cut_of(shape[prepended:], regular=False))],
    }


def value_of(tensor: dict[str, Any]) -> torch.Tensor:
    count = torch.Size(tensor["shape"]).numel()
    return torch.arange(count).view(tensor["shape"]).remainder(251).to(tensor["dtype"])


def entries(
    key: str, tensor: dict[str, Any], cuts: Cuts, *, regular: bool, filled: bool
) -> dict[str, ShardedTensor]:
    """All boxes of a cut, by their places."""
    value, prepended = value_of(tensor), tensor["prepended"]
    spans = [list(itertools.pairwise(cut)) for cut in cuts]
    found = {}
    for box in itertools.product(*spans):
        part = value[tuple(slice(begin, end) for begin, end in box)]
        data = part.reshape(part.shape[prepended:]).clone()
        found[f"{key}{box}"] = ShardedTensor(
            key,
            data if filled else torch.zeros_like(data),
            tensor["dtype"],
            tuple(data.shape),
            tuple(tensor["shape"]),
            tuple(begin for begin, _ in box),
            tuple(len(span) for span in spans) if regular else None,
            prepend_axis_num=prepended,
        )
    return found


@settings(max_examples=40, deadline=None)
@given(st.lists(tensors(), min_size=1, max_size=3))
def test_one_cut_to_another(tmp_path_factory: Any, wanted: list[dict[str, Any]]) -> None:
    path: Path = tmp_path_factory.mktemp("random") / "c"
    saved: dict[str, Any] = {}
    request: dict[str, Any] = {}
    for number, tensor in enumerate(wanted):
        regular, cuts = tensor["saved"]
        saved.update(entries(f"t{number}", tensor, cuts, regular=regular, filled=True))
        request.update(entries(f"t{number}", tensor, tensor["loaded"], regular=False, filled=False))
    dist_checkpointing.save(saved, path)
    assert len(list(path.glob("shard-*.safetensors"))) == 1
    loaded = dist_checkpointing.load(request, path)
    for number, tensor in enumerate(wanted):
        whole = entries(f"t{number}", tensor, tensor["loaded"], regular=False, filled=True)
        for name, entry in whole.items():
            assert torch.equal(loaded[name], entry.data), name
    plain = dist_checkpointing.load_plain_tensors(path)
    for number, tensor in enumerate(wanted):
        assert torch.equal(plain[f"t{number}"], value_of(tensor))
    shutil.rmtree(path)
