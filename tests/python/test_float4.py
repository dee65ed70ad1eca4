"""float4_e2m1fn_x2, whose element is two of the file's: saved, loaded, merged."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from sample_states import FAILED

import torch_ckpt
from torch_ckpt.megatron import dist_checkpointing

pytestmark = pytest.mark.skipif(
    not hasattr(torch, "float4_e2m1fn_x2"), reason="this torch has no float4_e2m1fn_x2"
)


def packed(data: torch.Tensor) -> torch.Tensor:
    return data.view(torch.float4_e2m1fn_x2)


def header(path: Path) -> dict[str, object]:
    """The entry of tensor "w" in a safetensors file."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    entry: dict[str, object] = json.loads(data[8 : 8 + size])["w"]
    return entry


def test_a_packed_tensor_comes_back(tmp_path: Path) -> None:
    data = torch.arange(3 * 5, dtype=torch.uint8).reshape(3, 5) * 17
    torch_ckpt.save({"w": packed(data)}, checkpoint_id=tmp_path / "c", no_dist=True)
    torch_ckpt.consolidate_safetensors_files(tmp_path / "c", tmp_path / "out", None)
    for folder in ("c", "out"):
        target = {"w": packed(torch.full_like(data, 255))}
        torch_ckpt.load(target, checkpoint_id=tmp_path / folder, no_dist=True)
        assert target["w"].dtype == torch.float4_e2m1fn_x2
        assert torch.equal(target["w"].view(torch.uint8), data), folder
        (file,) = (tmp_path / folder).glob("*.safetensors")
        entry = header(file)
        assert entry["dtype"] == "F4" and entry["shape"] == [3, 10]


def test_megatrons_calls_count_its_elements(tmp_path: Path) -> None:
    """As torch does, in shapes and boxes."""
    data = torch.arange(4 * 6, dtype=torch.uint8).reshape(4, 6) * 10
    place = dist_checkpointing.ShardedTensor.from_rank_offsets

    def state(values: torch.Tensor, axis: int) -> dict[str, Any]:
        parts = enumerate(values.chunk(2, axis))
        return {str(n): place("w", packed(part.contiguous()), (axis, n, 2)) for n, part in parts}

    for saved, asked in itertools.product((0, 1), repeat=2):
        dist_checkpointing.save(state(data, saved), tmp_path / "c")
        loaded = dist_checkpointing.load(state(torch.zeros_like(data), asked), tmp_path / "c")
        found = [loaded[str(n)].view(torch.uint8) for n in range(2)]
        assert torch.equal(torch.cat(found, asked), data)
    (told,) = dist_checkpointing.load_tensors_metadata(tmp_path / "c").values()
    assert told.global_shape == (4, 6) and told.dtype == torch.float4_e2m1fn_x2
    whole = dist_checkpointing.load_plain_tensors(tmp_path / "c")["w"]
    assert torch.equal(whole.view(torch.uint8), data)


@pytest.mark.parametrize("layout", ["sharded", "final"])
def test_one_without_a_dimension_is_refused_by_name(tmp_path: Path, layout: str) -> None:
    state = {"w": packed(torch.zeros(1, dtype=torch.uint8)).reshape(())}
    with pytest.raises(FAILED, match=r"'w'.*packed elements need a dimension"):
        torch_ckpt.save(state, checkpoint_id=tmp_path / "c", layout=layout, no_dist=True)
    assert not (tmp_path / "c").exists()
