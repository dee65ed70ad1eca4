"""direct_io= on every door, and file systems that refuse direct I/O: nobody above csrc/os notices."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROWS = 1 << 10

# Saves, loads, verifies and consolidates below argv[1]; argv[2] is direct_io.
JOBS = f"""
import os, sys
from pathlib import Path
import torch, torch_ckpt
from torch_ckpt.cli import cli
root, direct_io = Path(sys.argv[1]), sys.argv[2] == "True"
state = {{"w": torch.arange({ROWS} * 1025, dtype=torch.float32).view({ROWS}, 1025)}}

def cold(path):
    for file in path.glob("*.safetensors"):
        fd = os.open(file, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)

def check(path):
    cold(path)
    loaded = {{"w": torch.empty_like(state["w"])}}
    torch_ckpt.load(loaded, checkpoint_id=path, direct_io=direct_io)
    assert torch.equal(loaded["w"], state["w"])
    cold(path)
    torch_ckpt.Checkpoint(path).verify(direct_io=direct_io)

torch_ckpt.save(state, checkpoint_id=root / "c", direct_io=direct_io)
check(root / "c")
cold(root / "c")
torch_ckpt.consolidate_safetensors_files(root / "c", root / "out", None, direct_io=direct_io)
check(root / "out")
reader = torch_ckpt.HuggingFaceStorageReader(root / "out", direct_io=direct_io)
cold(root / "out")
torch_ckpt.load({{"w": torch.empty_like(state["w"])}}, storage_reader=reader)
no_direct_io = [] if direct_io else ["--no-direct-io"]
cli(["verify", str(root / "out"), *no_direct_io], standalone_mode=False)
cli(["consolidate", str(root / "c"), str(root / "again"), *no_direct_io], standalone_mode=False)
check(root / "again")
"""


def run(root: Path, direct_io: bool, faults: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", JOBS, str(root), str(direct_io)],
        env={**os.environ, "TORCH_CKPT_FAULTS": faults},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.usefixtures("fault_points")
def test_without_direct_io_nothing_goes_past_the_page_cache(tmp_path: Path) -> None:
    done = run(tmp_path, False, "direct:1:EIO")
    assert done.returncode == 0, done.stderr
    if "ext4" in file_system(tmp_path) or "xfs" in file_system(tmp_path):
        # The fault would have been met.
        (tmp_path / "x").mkdir()
        failed = run(tmp_path / "x", True, "direct:1:EIO")
        assert failed.returncode != 0 and "Input/output error" in failed.stderr, failed.stderr


@pytest.mark.usefixtures("fault_points")
@pytest.mark.parametrize("first", [1, 2, 3])
def test_a_refusal_is_met_through_the_page_cache(tmp_path: Path, first: int) -> None:
    # Of any transfer from the first one on, the second of a file and so on.
    faults = ",".join(f"direct:{n}:EINVAL" for n in range(first, 200, first))
    done = run(tmp_path, True, faults)
    assert done.returncode == 0, done.stderr


def file_system(path: Path) -> str:
    found = subprocess.run(
        ["stat", "-f", "-c", "%T", str(path)], capture_output=True, text=True, check=True
    )
    return found.stdout
