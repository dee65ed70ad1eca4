"""Views whose rows overlap or repeat, as torch.save keeps them: each element is delivered, whatever
part of the file it stands in."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import torch_ckpt

# Rows reach across the 512 KiB and 4 MiB at which files are read.
VIEWS = {
    "unfolded": lambda: torch.arange(150_000.0).unfold(0, 2, 1),
    "wide": lambda: torch.arange(3e5).as_strided((3, 200_000), (30_000, 1)),
    "far": lambda: torch.arange(1.5e6).as_strided((3, 1_000_000), (150_000, 1)),
    "expanded": lambda: torch.arange(150_000.0).expand(2, -1),
    "expanded inside": lambda: torch.arange(200_000.0)[:, None].expand(-1, 3),
    "both": lambda: torch.arange(150_000.0).expand(2, -1).unfold(1, 3, 2),
    "odd": lambda: torch.arange(70_001).to(torch.float64)[1:].expand(3, -1),
}


@pytest.fixture(params=VIEWS)
def view(request: pytest.FixtureRequest) -> torch.Tensor:
    made: torch.Tensor = VIEWS[request.param]()
    return made


def test_a_load_delivers_every_element(view: torch.Tensor, tmp_path: Path) -> None:
    torch.save({"w": view}, tmp_path / "v.pt")
    target = torch.full(view.shape, -1, dtype=view.dtype)
    torch_ckpt.load({"w": target}, tmp_path / "v.pt")
    assert torch.equal(target, view)
    assert torch.equal(torch_ckpt.open(tmp_path / "v.pt")["w"][:], view)


def test_casts_do_too(view: torch.Tensor, tmp_path: Path) -> None:
    torch.save({"w": view}, tmp_path / "v.pt")
    target = torch.full(view.shape, -1, dtype=torch.bfloat16)
    torch_ckpt.load({"w": target}, tmp_path / "v.pt")
    assert torch.equal(target, view.to(torch.bfloat16))


def test_parts_of_them_and_transposed_targets_do(view: torch.Tensor, tmp_path: Path) -> None:
    torch.save({"w": view}, tmp_path / "v.pt")
    stored = torch_ckpt.open(tmp_path / "v.pt")["w"]
    assert torch.equal(stored[1:, 1:], view[1:, 1:])
    dims = tuple(range(view.ndim))[::-1]
    target = torch.full(view.shape[::-1], -1, dtype=view.dtype).permute(dims)
    torch_ckpt.load({"w": target}, tmp_path / "v.pt")
    assert torch.equal(target, view)


def test_many_expanded_vectors_behind_another_tensor(tmp_path: Path) -> None:
    state = {"first": torch.ones(1 << 18)}
    for i in range(128):
        state[f"bias.{i}"] = torch.full((8192,), float(i)).expand(2, -1)
    torch.save(state, tmp_path / "v.pt")
    loaded = torch_ckpt.load(path=tmp_path / "v.pt")
    assert all(torch.equal(loaded[name], each) for name, each in state.items())


def test_merges_deliver_every_element(view: torch.Tensor, tmp_path: Path) -> None:
    torch.save({"w": view}, tmp_path / "v.pt")
    torch_ckpt.convert(tmp_path / "v.pt", tmp_path / "hf", "hf")
    assert torch.equal(torch_ckpt.load(path=tmp_path / "hf")["w"], view)
