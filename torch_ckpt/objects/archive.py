"""What an archive of torch.save holds when its pickle is run, which only who trusts it allows."""

from __future__ import annotations

import io
import os
from typing import Any

import torch


def run_pickle(path: str, begin: int, size: int) -> Any:
    """What torch.load makes of `size` bytes of a file from `begin` on, with its tensors on the CPU,
    in the memory of the file where it is all of that. Raises what the pickle does."""
    options: Any = {"map_location": "cpu", "weights_only": False}
    if begin == 0 and size == os.path.getsize(path):
        return torch.load(path, mmap=True, **options)
    with open(path, "rb") as file:
        file.seek(begin)
        return torch.load(io.BytesIO(file.read(size)), **options)
