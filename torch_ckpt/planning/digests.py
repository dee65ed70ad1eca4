"""What ranks compare of leaves that several of them save under one name. One rank's is kept of such
a leaf, whatever the others': where they differ that is said."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torch_ckpt.native import operators
from torch_ckpt.native.tensors import PLAIN_TENSORS
from torch_ckpt.objects import ObjectError, object_digest

logger = logging.getLogger(__name__)

# Of larger ones a look would be a pass over the data. Random states, counters and the running
# statistics of a module are smaller.
MAX_TENSOR_BYTES = 64 << 10
_SHOWN = 10  # names in a warning

Digest = bytes | int


def object_digests(state_dict: Mapping[str, Any], own_part: str | None = None) -> dict[str, Digest]:
    """{fqn: digest} of the leaves that are no tensors; without those whose name ends in
    `own_part`, which are a rank's own."""
    digests: dict[str, Digest] = {}
    for fqn, value in state_dict.items():
        if isinstance(value, torch.Tensor) or (own_part is not None and fqn.endswith(own_part)):
            continue
        try:
            digests[fqn] = object_digest(value, fqn)
        except ObjectError:
            continue  # whether it can be written at all is for the storage writer to say
    return digests


def tensor_digests(state_dict: Mapping[str, Any]) -> dict[str, Digest]:
    """The same of plain tensors of up to MAX_TENSOR_BYTES in host memory. Not of those on a device:
    each would be waited for."""
    strided, limit = torch.strided, MAX_TENSOR_BYTES  # looked up once, and not for each tensor
    small = {
        fqn: value
        for fqn, value in state_dict.items()
        if type(value) in PLAIN_TENSORS
        and value.is_cpu
        and value.layout is strided
        and not value.is_nested
        and value.nbytes <= limit
    }
    numbers = operators.digests(list(small.values()))
    if numbers and min(numbers) < 0:
        return {fqn: number for fqn, number in zip(small, numbers, strict=True) if number >= 0}
    return dict(zip(small, numbers, strict=True))


def differences(digests: Sequence[Mapping[str, Digest]]) -> dict[str, tuple[int, int]]:
    """By the name of each leaf whose digests differ, the lowest rank that has it and the first that
    has another. `digests` has one {fqn: digest} per rank."""
    first: dict[str, tuple[int, Digest]] = {}
    differing: dict[str, tuple[int, int]] = {}
    alike: Mapping[str, Digest] = {}
    for rank, of_rank in enumerate(digests):
        if of_rank == alike:  # as a rule; asked for all at once it costs next to nothing
            continue
        alike = alike or of_rank
        for fqn, digest in of_rank.items():
            known = first.setdefault(fqn, (rank, digest))
            if known[1] != digest:
                differing.setdefault(fqn, (known[0], rank))
    return differing


def warn_of(differing: Mapping[str, tuple[int, int]], saved: str, remedy: str) -> None:
    """Log one warning for all of them. `saved` says whose values are saved, `remedy` what to do."""
    if not differing:
        return
    shown = list(differing.items())[:_SHOWN]
    fqn, (rank, other) = shown[0]
    if len(differing) == 1:
        logger.warning(
            "%s: this value differs between ranks %d and %d; %s is saved. %s",
            *(fqn, rank, other, saved, remedy),
        )
        return
    names = ", ".join(f"{fqn} (ranks {rank} and {other})" for fqn, (rank, other) in shown)
    more = f", and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
    logger.warning(
        "%d values differ between ranks, and %s of each is saved: %s%s. %s",
        *(len(differing), saved, names, more, remedy),
    )
