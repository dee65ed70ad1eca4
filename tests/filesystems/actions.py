"""What runs on nodes, each function in a process of its own; see agent.py."""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
import time
from typing import Any

import torch
from facts import ask, hold_lock, try_lock  # noqa: F401
from fault_actions import (  # noqa: F401
    async_save,
    consolidate,
    hold,
    leftovers,
    load,
    overwrite_many,
    save,
    save_final,
)

MIB = 1 << 20


def _large(number: int, mib: int) -> dict[str, Any]:
    """A state of four tensors; of the same number, the same bytes."""
    random = torch.Generator().manual_seed(number)
    part = torch.randint(
        -(1 << 30), 1 << 30, (mib * MIB // 16,), dtype=torch.int32, generator=random
    )
    return {**{f"w{i}": part.roll(i).view(-1, 64) for i in range(4)}, "step": number}


def save_large(path: str, number: int, mib: int, background: bool = False) -> float:
    """Seconds that the save took."""
    import torch_ckpt

    state = _large(number, mib)
    begin = time.monotonic()
    if background:
        torch_ckpt.async_save(state, checkpoint_id=path, no_dist=True).upload_completion.result()
    else:
        torch_ckpt.save(state, checkpoint_id=path, no_dist=True)
    return time.monotonic() - begin


def load_large(path: str, numbers: list[int], mib: int) -> tuple[int, float]:
    """The number of the state that is there, bit for bit, and how long loading took."""
    import torch_ckpt

    loaded: dict[str, Any] = {
        name: torch.zeros_like(value) if isinstance(value, torch.Tensor) else -1
        for name, value in _large(0, mib).items()
    }
    begin = time.monotonic()
    torch_ckpt.load(loaded, checkpoint_id=path, no_dist=True)
    took = time.monotonic() - begin
    if loaded["step"] in numbers:
        state = _large(loaded["step"], mib)
        if all(torch.equal(loaded[name], state[name]) for name in state if name != "step"):
            return loaded["step"], took
    raise AssertionError(f"{path} holds a mixture: step {loaded['step']}")


def save_until(path: str, first: int, done: str, mib: int) -> dict[str, Any]:
    """Save states `first`, `first` + 1, ... until `done` is there, not on the file system that is
    tried. The last one acknowledged, the last one begun, and all errors."""
    acknowledged, number, errors = -1, first - 1, []
    while not os.path.exists(done):
        number += 1
        try:
            save_large(path, number, mib)
            acknowledged = number
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
            time.sleep(0.2)
    return {"acknowledged": acknowledged, "begun": number, "errors": errors}


def load_until(path: str, numbers: list[int], done: str, mib: int) -> dict[str, Any]:
    loads, errors = 0, []
    while not os.path.exists(done):
        try:
            load_large(path, numbers, mib)
            loads += 1
        except AssertionError:
            raise
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
            time.sleep(0.2)
    return {"loads": loads, "errors": errors}


def save_at(path: str, number: int, at: float, mib: int) -> None:
    """Save at a time of the clock that all nodes have; a small state where mib is 0."""
    import torch_ckpt

    assert torch_ckpt.save  # the import is done before the race
    time.sleep(max(0.0, at - time.time()))
    save_large(path, number, mib) if mib else save(path, number)


def load_any(path: str, numbers: list[int], mib: int) -> int:
    return load_large(path, numbers, mib)[0] if mib else load(path, numbers)


def overwrite_until(path: str, done: str) -> int:
    """Overwrite again and again until `done` is there: how often."""
    number = 0
    while not os.path.exists(done):
        number += 1
        save(path, 1 + number % 2)
    return number


def look(path: str, times: int, seconds: float) -> dict[str, Any]:
    """Look at a path that another node overwrites: how often it was seen whole, as being replaced,
    and how else."""
    import torch_ckpt

    checkpoint = torch_ckpt.Checkpoint(path)
    seen: dict[str, int] = {}
    until, saves = time.monotonic() + seconds, set()
    for _ in range(times):
        if time.monotonic() > until:
            break
        try:
            committed = checkpoint.is_committed()
            description = checkpoint.describe()
            saves.add(description.save_id)
            whole = committed and {"w", "b"} <= {t.name.split(".")[-1] for t in description.tensors}
            word = "whole" if whole else f"committed: {committed}"
        except torch_ckpt.ConflictError as error:
            word = "being replaced" if "replaced" in str(error) else f"ConflictError: {error}"
        except Exception as error:
            word = f"{type(error).__name__}: {error}"
        seen[word] = seen.get(word, 0) + 1
    return {"seen": seen, "saves": len(saves)}


def look_at_fresh(folder: str, count: int, seconds: float) -> dict[str, Any]:
    """See checkpoints appear one after the other: not there, then whole, with nothing between."""
    import torch_ckpt

    seen: dict[str, int] = {}
    until = time.monotonic() + seconds
    for i in range(count):
        checkpoint = torch_ckpt.Checkpoint(f"{folder}/{i}")
        while time.monotonic() < until:
            try:
                word = "not there"
                if checkpoint.is_committed():
                    checkpoint.describe()
                    word = "whole"
            except Exception as error:
                word = f"{type(error).__name__}: {error}"
            seen[word] = seen.get(word, 0) + 1
            if word == "whole":
                break
    return seen


def save_fresh(folder: str, count: int) -> None:
    for i in range(count):
        save(f"{folder}/{i}", 1)


def fill(path: str, leave_mib: int) -> int:
    """Fill the file system up to `leave_mib`: the bytes of the file that does it."""
    block = os.urandom(MIB)  # that nothing compresses
    # With some, what was written is refused only when the file is closed.
    with contextlib.suppress(OSError), open(path, "wb", buffering=0) as file:
        for number in itertools.count(1):
            file.write(block)
            if number % 64 == 0:
                os.fsync(file.fileno())
    left = max(0, os.stat(path).st_size - leave_mib * MIB)
    os.truncate(path, left)
    return left


def save_as_rank(path: str, number: int) -> None:
    """One rank of a save by the ranks that the environment says."""
    import datetime

    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    import torch_ckpt

    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    part = torch.full((16, 1024), number, dtype=torch.int32)
    state = {"x": DTensor.from_local(part, mesh, [Shard(0)], run_check=False), "step": number}
    assert rank >= 0
    torch_ckpt.save(state, checkpoint_id=path)


def save_alone(path: str, number: int) -> None:
    """The same state as `save_as_rank` of two, by this process alone."""
    import torch_ckpt

    state = {"x": torch.full((32, 1024), number, dtype=torch.int32), "step": number}
    torch_ckpt.save(state, checkpoint_id=path, no_dist=True)


def load_ranks(path: str, numbers: list[int]) -> int:
    """The number of the state that `save_as_rank` left, bit for bit."""
    import torch_ckpt

    shape = {t.name: t.shape for t in torch_ckpt.Checkpoint(path).describe().tensors}["x"]
    loaded = {"x": torch.zeros(shape, dtype=torch.int32), "step": -1}
    torch_ckpt.load(loaded, checkpoint_id=path, no_dist=True)
    number = int(loaded["step"])
    if number in numbers and bool((loaded["x"] == number).all()):
        return number
    raise AssertionError(f"{path} holds a mixture: step {number}")


def verify(path: str) -> int:
    import torch_ckpt

    return torch_ckpt.Checkpoint(path).verify().bytes


def entries(path: str) -> list[str]:
    return sorted(str(entry.relative_to(path)) for entry in pathlib.Path(path).rglob("*"))
