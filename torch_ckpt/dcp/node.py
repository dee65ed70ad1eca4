"""The node that this process shares with other ranks: how many they are, and its disk."""

from __future__ import annotations

import os

import torch.distributed as dist

from torch_ckpt.native.jobs import MIN_WORKERS

# Set by torchrun, Open MPI, and MPICH with its kin.
_LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
# Transfers under way at once, so that the disk need not wait for the next one. By one process, at a
# disk of 4 GB/s, 4 loaded at 84 % of that, 8 at 90, 12 at 92 and 16 at 94. Each takes 4 MiB.
_TRANSFERS = 12


def ranks_of_node() -> int:
    """How many processes of this job run on this node; all of the job, where nobody says."""
    for name in _LOCAL_SIZES:
        value = os.environ.get(name, "")
        if value.isdecimal() and int(value) > 0:
            return int(value)
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return 1


def transfer_workers(thread_count: int = 1) -> int:
    """With how many threads a rank reads or writes that was given this `thread_count`: no fewer
    than that, and with the other ranks of its node as many as the disk takes."""
    return max(MIN_WORKERS, thread_count, _TRANSFERS // ranks_of_node())
