"""python host_memory.py save|load|merge|async FOLDER: prints, as JSON, by how many bytes the resident
memory of this process rose at most while a state of 1 GiB was saved, loaded or consolidated, or one
of 256 MiB saved twenty times in the background.

"save" leaves what "load" and "merge" need. Run by test_host_memory.py, in processes of their own: a peak
can be measured only where nothing else runs, and the consolidation without torch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

GIB = 1 << 30


def field(name: str) -> int:
    """Bytes that /proc/self/status says."""
    text = Path("/proc/self/status").read_text(encoding="ascii")
    return int(text.split(f"{name}:")[1].split()[0]) << 10


def peak(work: Callable[[], Any]) -> int:
    """By how much resident memory exceeded, while `work` ran, what it was before."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak becomes what is resident now
    before = field("VmRSS")
    work()
    return field("VmHWM") - before


def make() -> dict[str, Any]:
    """1 GiB, half of it in one tensor, so that a copy of a tensor shows too."""
    import torch

    rows = {"large": 1 << 14, **{f"t{number}": 1 << 11 for number in range(8)}}
    return {
        name: torch.arange(count << 13, dtype=torch.int32).mul_(number + 1).view(count, -1)
        for number, (name, count) in enumerate(rows.items())
    }


def save(folder: Path) -> dict[str, int]:
    from sample_states import stock_shard

    from torch_ckpt import save

    state = make()
    size = sum(tensor.nbytes for tensor in state.values())
    grown = peak(lambda: save(state, checkpoint_id=folder / "saved", no_dist=True))
    # And in shards of columns, whose merge has to gather short rows.
    for rank in range(2):
        boxes = {}
        for name, tensor in state.items():
            half = tensor.shape[1] // 2
            boxes[name] = (tensor.narrow(1, rank * half, half).contiguous(), [0, rank * half])
        stock_shard(folder / "columns", rank, boxes)
    return {"size": size, "grown": grown}


def load(folder: Path) -> dict[str, int]:
    import torch

    from torch_ckpt import load

    state = make()
    for tensor in state.values():
        tensor.fill_(-1)  # and so resident
    grown = peak(lambda: load(state, checkpoint_id=folder / "saved", no_dist=True))
    wrong = sum(not torch.equal(state[name], tensor) for name, tensor in make().items())
    return {"grown": grown, "wrong": wrong}


def merge(folder: Path) -> dict[str, int]:
    from torch_ckpt import consolidate_safetensors_files

    def both() -> None:
        for kind in ("saved", "columns"):
            consolidate_safetensors_files(
                folder / kind, folder / f"{kind}-out", None, overwrite=True
            )

    def many_threads(budget: str) -> None:
        out = folder / "saved-out"
        consolidate_safetensors_files(
            folder / "saved", out, None, 64, memory_budget=budget, overwrite=True
        )

    return {
        "of 32 MiB": peak(lambda: many_threads("32MiB")),  # first: buffers stay for the next
        "of 128 MiB": peak(lambda: many_threads("128MiB")),
        "grown": peak(both),
        "held": peak(lambda: len(b"x" * (GIB // 2))),  # that the measure sees what is held
    }


def async_(folder: Path) -> dict[str, int]:
    import torch
    from torch.distributed.checkpoint.staging import StagingOptions

    from torch_ckpt import PinnedMemoryStager, async_save

    state = {f"w{number}": torch.full((1 << 25,), number, dtype=torch.uint8) for number in range(8)}
    # What a first save makes for ever: threads, buffers, code.
    tiny = {"w": torch.zeros(1)}
    async_save(tiny, checkpoint_id=folder / "tiny", no_dist=True).upload_completion.result()
    stagers = [None, PinnedMemoryStager(StagingOptions())]

    def saves() -> None:
        for number in range(20):
            async_save(
                state,
                checkpoint_id=folder / "async",
                no_dist=True,
                async_stager=stagers[number % 2],
            ).staging_completion.result()
        PinnedMemoryStager(StagingOptions()).close()

    return {"grown": peak(saves)}


if __name__ == "__main__":
    work = {"save": save, "load": load, "merge": merge, "async": async_}[sys.argv[1]]
    print(json.dumps(work(Path(sys.argv[2]))))
