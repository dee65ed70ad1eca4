"""float4_e2m1fn_x2, whose element is two of the file's: saved, loaded, merged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from sample_states import FAILED

import torch_ckpt

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


@pytest.mark.parametrize("layout", ["sharded", "final"])
def test_one_without_a_dimension_is_refused_by_name(tmp_path: Path, layout: str) -> None:
    state = {"w": packed(torch.zeros(1, dtype=torch.uint8)).reshape(())}
    with pytest.raises(FAILED, match=r"'w'.*packed elements need a dimension"):
        torch_ckpt.save(state, checkpoint_id=tmp_path / "c", layout=layout, no_dist=True)
    assert not (tmp_path / "c").exists()
