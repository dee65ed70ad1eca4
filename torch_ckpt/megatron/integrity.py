"""Is every byte of a checkpoint what was written? By our digests, or by those of Megatron's."""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any

from torch_ckpt.checkpoint.checkpoint import Checkpoint
from torch_ckpt.checkpoint.names import MEGATRON_INTEGRITY
from torch_ckpt.megatron.config import CheckpointingException
from torch_ckpt.megatron.stored import Stored

_ALGORITHM = "sha256"  # the only one that Megatron writes
_STEP = 8 << 20


def verify_share(stored: Stored, share: tuple[int, int]) -> None:
    """Compare a share (which, of how many) of the checkpoint's bytes with their digests: of
    Megatron's own checkpoints those of integrity.json, where there is one, else the CRC-32s of
    their archives.

    Raises CheckpointingException that names the file where a byte or a file is another or is
    missing, and where integrity.json is not understood; what Checkpoint.verify raises.
    """
    listed = None if stored.format is None else _listed(stored.path)
    if listed is None:
        Checkpoint(stored.path).verify(share=share)
        return
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
    place = os.path.join(path, MEGATRON_INTEGRITY)
    try:
        with open(place, encoding="utf-8") as file:
            said = json.load(file)
        files = said["files"]
        algorithm = said.get("algorithm", _ALGORITHM)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointingException(
            f"is no list of the digests of files: {error}", file=place
        ) from error
    if algorithm != _ALGORITHM or not isinstance(files, dict):
        raise CheckpointingException(
            f"has digests of the kind {algorithm!r}; {_ALGORITHM} is read", file=place
        )
    return files


def _digest(path: str) -> str:
    digest = hashlib.new(_ALGORITHM)
    with open(path, "rb", buffering=0) as file:
        while step := file.read(_STEP):
            digest.update(step)
    return digest.hexdigest()
