"""Mapped and scaled saves and conversions that end in the middle, on a full disk, or of damaged
files: what was there stays, and nothing else is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import scaled_bases
import torch
from launch import HERE, PACKAGE

import torch_ckpt

PAIRS = [("e.{e}", "w[{e}].T")]
CONVERT = f"""
import sys, torch_ckpt
torch_ckpt.convert(sys.argv[1], sys.argv[2], "hf", dtype="bf16", overwrite=True,
                   tensor_mapping={PAIRS!r})
"""
SAVE = f"""
import sys, torch, torch_ckpt
state = {{"w": torch.arange(6 * 300 * 200.).view(6, 200, 300)}}
torch_ckpt.save(state, sys.argv[2], tensor_mapping={PAIRS!r}, overwrite=True)
"""
POINTS = ("pwrite:2", "fsync:1", "renameat:1", "renameat:2")


def base(path: Path) -> tuple[Path, torch.Tensor]:
    """Six matrices of codes with their scales, and the numbers that they are."""
    generator = torch.Generator().manual_seed(3)
    stored, whole = {}, []
    for expert in range(6):
        codes = scaled_bases.float8((300, 200), torch.float8_e4m3fn, generator)
        grid = scaled_bases.scales((3, 2), torch.float32, generator)
        stored |= {f"e.{expert}": codes, f"e.{expert}_scale_inv": grid}
        whole.append(scaled_bases.numbers(codes, grid, (128, 128)).T)
    return scaled_bases.base(path, stored), torch.stack(whole)


def ended(program: str, faults: str, *arguments: Path) -> tuple[int, str]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(PACKAGE), str(HERE)]),
        "TORCH_CKPT_FAULTS": faults,
    }
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stderr


@pytest.mark.usefixtures("fault_points")
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("what", ["convert", "save"])
def test_a_kill_leaves_the_old_or_the_new(tmp_path: Path, what: str, point: str) -> None:
    source, whole = base(tmp_path / "base")
    target = tmp_path / "out"
    old = {"old": torch.ones(3)}
    torch_ckpt.save(old, target)
    program = CONVERT if what == "convert" else SAVE
    status, said = ended(program, f"{point}:kill", source, target)
    assert status == -signal.SIGKILL, said
    found = torch_ckpt.open(target)
    if set(found) != set(old):
        assert set(found) == ({"w"} if what == "convert" else {f"e.{e}" for e in range(6)})
    if what == "convert":
        torch_ckpt.convert(source, target, "hf", dtype="bf16", overwrite=True, tensor_mapping=PAIRS)
        assert torch.equal(torch_ckpt.open(target)["w"][...], whole.bfloat16())
    else:
        state = torch.arange(6 * 300 * 200.0).view(6, 200, 300)
        torch_ckpt.save({"w": state}, target, tensor_mapping=PAIRS, overwrite=True)
        found = torch_ckpt.open(target)
        assert all(torch.equal(found[f"e.{e}"][...], state[e].T) for e in range(6))
    assert sorted(os.listdir(tmp_path)) == ["base", "out"]


@pytest.mark.usefixtures("fault_points")
@pytest.mark.parametrize("what", ["convert", "save"])
def test_a_full_disk(tmp_path: Path, what: str) -> None:
    source, _ = base(tmp_path / "base")
    program = CONVERT if what == "convert" else SAVE
    status, said = ended(program, "pwrite:2:ENOSPC", source, tmp_path / "out")
    assert status == 1 and "No space left on device" in said, said
    assert sorted(os.listdir(tmp_path)) == ["base"]


@pytest.mark.parametrize("of", ["codes", "scales"])
def test_a_flipped_bit_of_ours_is_found(tmp_path: Path, of: str) -> None:
    """Of a checkpoint that has digests: in loads into models and in conversions."""
    source, _ = base(tmp_path / "base")
    stored = torch_ckpt.load(None, source)
    torch_ckpt.save(stored, tmp_path / "c")
    name = "e.3" if of == "codes" else "e.3_scale_inv"
    held = stored[name].flatten().view(torch.uint8).numpy().tobytes()
    (shard,) = (tmp_path / "c").glob("*.safetensors")
    text = bytearray(shard.read_bytes())
    at = text.find(held[:24])
    assert at > 0 and text.find(held[:24], at + 1) < 0
    text[at + 5] ^= 1
    shard.write_bytes(text)
    model = torch.nn.Module()
    model.w = torch.nn.Parameter(torch.zeros(6, 200, 300), requires_grad=False)
    with pytest.raises(torch_ckpt.CorruptError, match=shard.name):
        torch_ckpt.load_model(model, tmp_path / "c", tensor_mapping=PAIRS)
    with pytest.raises(torch_ckpt.CorruptError, match=shard.name):
        torch_ckpt.convert(
            tmp_path / "c", tmp_path / "out", "hf", dtype="bf16", tensor_mapping=PAIRS
        )
    assert not (tmp_path / "out").exists()


def test_a_file_that_was_cut(tmp_path: Path) -> None:
    source, _ = base(tmp_path / "base")
    file = source / "model.safetensors"
    os.truncate(file, file.stat().st_size - 1000)
    model = torch.nn.Module()
    model.w = torch.nn.Parameter(torch.zeros(6, 200, 300), requires_grad=False)
    for call in (
        lambda: torch_ckpt.load_model(model, source, tensor_mapping=PAIRS),
        lambda: torch_ckpt.convert(
            source, tmp_path / "out", "hf", dtype="bf16", tensor_mapping=PAIRS
        ),
    ):
        with pytest.raises(torch_ckpt.CheckpointError, match="model.safetensors"):
            call()
    assert not model.w.any() and not (tmp_path / "out").exists()
