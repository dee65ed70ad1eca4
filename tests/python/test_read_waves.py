"""Loads that cannot be read in place: through host memory, in waves of bounded size."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import torch_ckpt
from torch_ckpt.dcp.read import read_tensors

State = dict[str, torch.Tensor]


def load(path: Path, into: State) -> None:
    dcp.load(into, storage_reader=torch_ckpt.HuggingFaceStorageReader(str(path)), no_dist=True)


@pytest.fixture
def waves(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Waves of 1 KiB; what each read took: (tensors, the end of the memory it was given)."""
    seen: list[tuple[int, int]] = []
    carve = read_tensors.carve

    def watched(memory: torch.Tensor, wave: list[read_tensors.Request]) -> list[torch.Tensor]:
        held = carve(memory, wave)
        seen.append((len(held), memory.numel()))
        return held

    monkeypatch.setattr(read_tensors, "WAVE_BYTES", 1024)
    monkeypatch.setattr(read_tensors, "DEVICE_WAVE_BYTES", 1024)
    monkeypatch.setattr(read_tensors, "carve", watched)
    return seen


def test_many_and_large_tensors_cross_in_waves(
    tmp_path: Path, waves: list[tuple[int, int]]
) -> None:
    def values(*shape: int) -> torch.Tensor:
        return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32)

    stored = {f"small{i}": values(i) for i in range(40)}
    stored["scalar"] = torch.tensor(25, dtype=torch.int32)
    stored["rows"] = values(300, 7)
    stored["one_row"] = values(1, 3, 2000)
    stored["exact"] = values(256)
    save_file(stored, tmp_path / "model.safetensors")
    into = {name: torch.zeros(t.shape, dtype=torch.int64) for name, t in stored.items()}
    load(tmp_path, into)
    for name, tensor in stored.items():
        assert torch.equal(into[name], tensor.long()), name
    assert len(waves) > 30
    assert {size for _, size in waves} == {1024}
    assert max(count for count, _ in waves) > 1


def test_strided_targets_of_a_cast(tmp_path: Path, waves: list[tuple[int, int]]) -> None:
    stored = torch.arange(5 * 6 * 70, dtype=torch.int32).reshape(5, 6, 70)
    save_file({"x": stored}, tmp_path / "model.safetensors")
    into = torch.zeros(70, 6, 5, dtype=torch.int64).permute(2, 1, 0)
    load(tmp_path, {"x": into})
    assert torch.equal(into, stored.long()) and len(waves) > 8


def test_floats_are_cast_before_they_are_held(tmp_path: Path, waves: list[tuple[int, int]]) -> None:
    stored = torch.randn(512)
    save_file({"x": stored}, tmp_path / "model.safetensors")
    into = torch._neg_view(torch.zeros(512, dtype=torch.bfloat16))  # written by torch alone
    with pytest.warns(UserWarning, match="x: stored as"):
        load(tmp_path, {"x": into})
    assert torch.equal(into, stored.bfloat16())
    assert waves == [(1, 1024)]  # 512 of two bytes


def test_a_lossy_value_in_a_late_part_is_found(
    tmp_path: Path, waves: list[tuple[int, int]]
) -> None:
    stored = torch.zeros(5000, dtype=torch.int32)
    stored[4900] = 10**6
    save_file({"x": stored}, tmp_path / "model.safetensors")
    with warnings.catch_warnings(), pytest.raises(BaseException, match="out of range"):
        warnings.simplefilter("ignore")
        load(tmp_path, {"x": torch.zeros(5000, dtype=torch.float16)})
    assert waves


def test_a_small_load_takes_small_memory(tmp_path: Path, waves: list[tuple[int, int]]) -> None:
    save_file({"x": torch.arange(10, dtype=torch.int32)}, tmp_path / "model.safetensors")
    into = torch.zeros(10, dtype=torch.int64)
    load(tmp_path, {"x": into})
    assert torch.equal(into, torch.arange(10))
    assert waves == [(1, 64)]


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="no packed dtype in this torch")
def test_packed_elements_are_cut_at_whole_bytes() -> None:
    data = torch.arange(9000, dtype=torch.int32).to(torch.uint8)
    item: read_tensors.ReadItem = None  # type: ignore[assignment]  # looked at by nobody here
    request = read_tensors.Request(
        item, data.view(torch.float4_e2m1fn_x2), [40], torch.float4_e2m1fn_x2, 2
    )
    parts = list(read_tensors.cut(request, 4000))
    assert [part.offsets for part in parts] == [[40], [8040], [16040]]
    assert [part.target.numel() for part in parts] == [4000, 4000, 1000]
