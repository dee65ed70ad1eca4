"""Any box of codes and scales, into memory of any strides: the numbers of the whole tensor."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import scaled_bases
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_ckpt.native import operators
from torch_ckpt.native.jobs import Job
from torch_ckpt.native.opened import OpenedCheckpoint

KINDS = scaled_bases.kinds(torch.Generator().manual_seed(9))


@functools.cache
def opened(kind: str) -> tuple[OpenedCheckpoint, Any]:
    """Of a kind as numbers; its directory goes when the process ends."""
    folder = tempfile.TemporaryDirectory()
    path = scaled_bases.base(Path(folder.name) / "base", KINDS[kind][0])
    return OpenedCheckpoint(str(path)).dequantized().opened, folder


def read(checkpoint: OpenedCheckpoint, target: torch.Tensor, offsets: list[int]) -> None:
    plan = {
        "checkpoint": checkpoint.id,
        "workers": 2,
        "names": checkpoint.listing().scaled[0],
        "offsets": [offsets],
    }
    with Job() as job:
        operators.read([target], plan, job)


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_any_box(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(sorted(KINDS)))
    whole = KINDS[kind][1]
    offsets, sizes = [], []
    for size in whole.shape:
        offsets.append(data.draw(st.integers(0, size - 1)))
        sizes.append(data.draw(st.integers(0, size - offsets[-1])))
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float32, torch.float64]))
    order = data.draw(st.permutations(range(whole.dim())))
    step = data.draw(st.integers(1, 2))
    # Memory whose dimensions are in another order, with gaps in the last one.
    memory = torch.full([*(sizes[d] for d in order[:-1]), sizes[order[-1]] * step], -7.0)
    memory = memory.to(dtype)
    target = memory[..., ::step].permute([order.index(d) for d in range(whole.dim())])
    assert list(target.shape) == sizes
    read(opened(kind)[0], target, offsets)
    box = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
    assert torch.equal(target, whole[box].to(dtype))
    assert memory[..., 1::step].eq(-7).all() or step == 1


def test_more_scales_than_are_held_at_once(tmp_path: Path) -> None:
    """Each has 40 MB of them, of which 64 MiB are held: they are read one after the other."""
    codes = torch.ones(2500, 4000).to(torch.float8_e4m3fn)
    stored = {}
    for name, scale in (("a", 2.0), ("b", 3.0)):
        stored |= {name: codes, f"{name}_scale_inv": torch.full((2500, 4000), scale)}
    path = scaled_bases.base(tmp_path / "base", stored)
    checkpoint = OpenedCheckpoint(str(path)).dequantized(blocks=(1, 1)).opened
    targets = [torch.zeros(2500, 4000, dtype=torch.bfloat16) for _ in range(2)]
    plan = {"checkpoint": checkpoint.id, "workers": 2, "names": ["a", "b"]}
    with Job() as job:
        operators.read(targets, plan, job)
    assert targets[0].eq(2).all() and targets[1].eq(3).all()
