"""Is every byte of a checkpoint what was written? By our digests, or by those of Megatron's."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from torch_ckpt.checkpoint.checkpoint import Checkpoint
from torch_ckpt.checkpoint.names import MEGATRON_INTEGRITY
from torch_ckpt.megatron.config import CheckpointingException, read_json
from torch_ckpt.megatron.stored import Stored
from torch_ckpt.native.opened import OpenedCheckpoint

_ALGORITHM = "sha256"  # the only one that Megatron writes
_STEP = 8 << 20


def verify_share(stored: Stored, share: tuple[int, int]) -> None:
    """Compare a share (which, of how many) of the checkpoint's bytes with their digests: of
    Megatron's own checkpoints those of integrity.json, where there is one, else the CRC-32s of
    their archives.

    Raises CheckpointingException that names the file where a byte or a file is another, is missing
    or is not listed, and where integrity.json is not understood; what Checkpoint.verify raises.
    """
    # As "megatron" the common state belongs to it.
    format = None if stored.format is None else "megatron"
    listed = None if format is None else _listed(stored.path)
    if listed is None:
        Checkpoint(stored.path, format=format).verify(share=share)
        return
    listing = OpenedCheckpoint(stored.path, format).listing(whole=True, tensors=False)
    for file in listing.files:
        if file.name not in listed:
            raise CheckpointingException(
                f"{MEGATRON_INTEGRITY} has no digest of it",
                file=os.path.join(stored.path, file.name),
            )
    which, of = share
    for name in sorted(listed)[which::of]:
        path = os.path.join(stored.path, name)
        if os.path.basename(name) != name or not os.path.isfile(path):
            raise CheckpointingException(f"{MEGATRON_INTEGRITY} lists it: no such file", file=path)
        if _digest(path) != listed[name]:
            raise CheckpointingException(
                f"is not what was written: its {_ALGORITHM} is not that of {MEGATRON_INTEGRITY}",
                file=path,
            )


def _listed(path: str) -> dict[str, Any] | None:
    """The digests of the files by their names; None where none are written."""
    place = Path(path, MEGATRON_INTEGRITY)
    said = read_json(place)
    if said is None:
        return None
    files = said.get("files") if isinstance(said, dict) else None
    if not isinstance(files, dict) or said.get("algorithm", _ALGORITHM) != _ALGORITHM:
        raise CheckpointingException(
            f"is no list of the {_ALGORITHM} of files, which is what is read", file=str(place)
        )
    return files


def _digest(path: str) -> str:
    digest = hashlib.new(_ALGORITHM)
    with open(path, "rb", buffering=0) as file:
        while step := file.read(_STEP):
            digest.update(step)
    return digest.hexdigest()
