"""Columns of several ranks into one final file, through shared memory, and ranks that end there.

How the engine goes on where there can be no ring is in tests/cpp/engine_ring_test.cc.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
from final_rank import ENDED, SMALL, columns, small
from launch import run_scripts
from safetensors.torch import load_file

import torch_ckpt

WORLD = 3


def check_saved(path: Path) -> None:
    saved = load_file(path / "model-00001-of-00001.safetensors")
    assert torch.equal(saved.pop("w"), torch.cat([columns(rank) for rank in range(WORLD)], 1))
    parts = [small(rank) for rank in range(WORLD)]
    assert len(saved) == SMALL
    for name, tensor in saved.items():
        assert torch.equal(tensor, torch.cat([part[name] for part in parts])), name
    torch_ckpt.Checkpoint(path).verify()


def save(path: Path, faults: dict[int, str] | None = None) -> list[tuple[int, str]]:
    environments = {rank: {"TORCH_CKPT_FAULTS": text} for rank, text in (faults or {}).items()}
    return run_scripts("final_rank.py", WORLD, [str(path)], environments)


@pytest.mark.slow
def test_nearly_all_goes_through_the_ring(tmp_path: Path) -> None:
    for status, said in save(tmp_path / "c"):
        ring_bytes, spill_bytes = map(int, said.split())
        assert status == 0
        assert ring_bytes == columns(0).nbytes + SMALL * 1200 and spill_bytes <= 2 * 4096
    check_saved(tmp_path / "c")


@pytest.mark.slow
@pytest.mark.usefixtures("fault_points")
@pytest.mark.parametrize(
    ("rank", "fault"),
    [
        (1, "recvmsg:1:kill"),
        (2, "memfd_create:1:ENOSYS"),
        (0, "pwrite:12:kill"),
        (0, "pwrite:12:ENOSPC"),
    ],
)
def test_a_rank_that_ends_in_the_middle_ends_the_others(
    tmp_path: Path, rank: int, fault: str
) -> None:
    path = tmp_path / "c"
    began = time.monotonic()
    done = save(path, {rank: fault})
    assert time.monotonic() - began < 50, "somebody waited for a deadline"
    if "ENOSYS" in fault:  # no ring, and nothing else
        assert [status for status, _ in done] == [0] * WORLD
        assert [int(said.split()[0]) for _, said in done] == [0] * WORLD  # through no ring
        check_saved(path)
        return
    assert done[rank][0] == (-9 if "kill" in fault else ENDED)
    for other in range(WORLD):
        if other != rank:
            assert done[other][0] == ENDED, done
    if "ENOSPC" in fault:
        # Every rank says what has happened where it happened.
        assert all("No space left" in said and "rank 0" in said for _, said in done), done
    assert not path.exists()
    assert [status for status, _ in save(path)] == [0] * WORLD
    check_saved(path)
    assert sorted(os.listdir(tmp_path)) == ["c"]
