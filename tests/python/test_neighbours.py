"""What ranks of one node want alike is read from storage once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import torch_ckpt
from torch_ckpt.dcp import node
from torch_ckpt.dcp.read import neighbours

HERE = Path(__file__).parent
RANKS = 4
MIB = 1 << 20

WAYS = ("whole", "replica", "rows", "columns")

# As rank RANK of RANKS, loads the 64 MiB that checkpoint argv[1] has in each of WAYS, and adds to the
# file argv[3] how many bytes this process has read from the disk meanwhile: "rows 16777216". Not to
# stdout, where Gloo prints what it likes.
LOAD = """
import os, sys
import torch, torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
import torch_ckpt
from test_neighbours import WAYS, drop_cache

path, store, told = sys.argv[1:]
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
mesh = init_device_mesh("cpu", (size,))
shape = (4096, 4096)

def from_disk():
    with open("/proc/self/io") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))

def load(way):
    if way == "whole":
        state = {"w": torch.empty(shape)}
    else:
        placement = Replicate() if way == "replica" else Shard(int(way == "columns"))
        sizes = [n // size if placement.is_shard(d) else n for d, n in enumerate(shape)]
        local = torch.empty(sizes)
        state = {"w": DTensor.from_local(local, mesh, [placement], run_check=False)}
    if rank == 0:
        drop_cache(path)
    dist.barrier()
    before = from_disk()
    torch_ckpt.load(state, checkpoint_id=path)
    dist.barrier()
    with open(told, "a") as file:
        print(way, from_disk() - before, file=file)
    value = state["w"]
    local = value.to_local() if isinstance(value, DTensor) else value
    first = {"rows": rank * 1024 * 4096, "columns": rank * 1024}.get(way, 0)
    assert int(local[0, 0]) == first and int(local[1, 1]) == first + 4097

for way in WAYS:
    load(way)
dist.destroy_process_group()
# Not to the end of Python, where a thread of Gloo that still holds the last tensor of a collective
# aborts now and then (github.com/pytorch/pytorch/pull/179291).
os._exit(0)
"""


def drop_cache(path: Path | str) -> None:
    for file in Path(path).glob("*.safetensors"):
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def counts_reads(path: Path) -> bool:
    """Whether /proc/self/io sees what comes from this file system when the cache is cold."""
    file = path / "count.safetensors"
    file.write_bytes(os.urandom(8 * MIB))
    drop_cache(path)
    reading = (
        "import sys\n"
        "def count():\n"
        "    lines = open('/proc/self/io').read().split()\n"
        "    return int(lines[lines.index('read_bytes:') + 1])\n"
        "before = count()\n"
        "open(sys.argv[1], 'rb').read()\n"
        "print(count() - before)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", reading, str(file)], capture_output=True, text=True, check=True
    )
    file.unlink()
    return int(done.stdout) >= 8 * MIB


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("neighbours")
    if not counts_reads(root):
        pytest.skip("this file system does not count what it reads, or keeps its cache")
    state = {"w": torch.arange(1 << 24, dtype=torch.float32).view(4096, 4096)}
    torch_ckpt.save(state, checkpoint_id=root / "c", no_dist=True)
    return root / "c"


@pytest.fixture(scope="module")
def read(checkpoint: Path) -> dict[str, int]:
    """For each of WAYS, the bytes that all ranks have read from the disk."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(HERE), *(path for path in sys.path if path)]),
        "WORLD_SIZE": str(RANKS),
        "LOCAL_WORLD_SIZE": str(RANKS),
    }
    store = checkpoint.parent / "store"
    told = [checkpoint.parent / f"rank-{rank}" for rank in range(RANKS)]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", LOAD, str(checkpoint), str(store), str(told[rank])],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    total = dict.fromkeys(WAYS, 0)
    for process, file in zip(ranks, told, strict=True):
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        for line in file.read_text().splitlines():
            way, _, number = line.partition(" ")
            total[way] += int(number)
    return total


@pytest.mark.parametrize("way", WAYS)
def test_four_ranks_read_the_same_bytes_from_disk_once(read: dict[str, int], way: str) -> None:
    # Once, and not four times; beside it headers, readahead, modules that were not loaded yet.
    assert 60 * MIB < read[way] < 96 * MIB, f"{read[way] / MIB:.0f} MiB from disk"


def test_what_a_launcher_says_of_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in node._LOCAL_SIZES:
        monkeypatch.delenv(name, raising=False)
    assert node.ranks_of_node() == 1
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "8")
    assert node.ranks_of_node() == 8
    for nonsense in ("", "x", "0", "-1"):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", nonsense)
        assert node.ranks_of_node() == 8
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert node.ranks_of_node() == 2


@pytest.mark.parametrize(
    ("placements", "mesh_dims", "ranks", "wanted"),
    [
        ((Replicate(), Replicate()), None, 4, True),
        ((Shard(0), Shard(1)), None, 8, False),
        ((Replicate(), Shard(0)), None, 8, True),
        ((Replicate(), Shard(0)), None, 4, False),  # the replica is on the other node
        ((Shard(0), Replicate()), None, 4, True),
        ((Shard(0),), "inner", 4, False),
        ((Shard(0),), "inner", 8, True),  # nobody knows what the other four load
        ((Shard(0),), "outer", 4, True),
    ],
)
def test_a_dtensor_says_who_has_the_same_shard(
    placements: Any, mesh_dims: str | None, ranks: int, wanted: bool
) -> None:
    dist.init_process_group("fake", rank=1, world_size=8, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("outer", "inner"))
        mesh = mesh[mesh_dims] if mesh_dims else mesh
        value = DTensor.from_local(torch.empty(2, 2), mesh, placements, run_check=False)
        assert neighbours.wanted_by_neighbours(value, (2, 2), ranks) is wanted
    finally:
        dist.destroy_process_group()


def test_whole_leaves_are_taken_for_replicas() -> None:
    leaf = torch.empty(4, 6)
    assert neighbours.wanted_by_neighbours(leaf, torch.Size([4, 6]), 2)
    assert not neighbours.wanted_by_neighbours(leaf, torch.Size([2, 6]), 2)
    assert not neighbours.wanted_by_neighbours(leaf, torch.Size([4, 6]), 1)
