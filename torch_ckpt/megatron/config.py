"""What a checkpoint's metadata.json says, and the error of this package."""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch_ckpt.checkpoint.checkpoint import Checkpoint
from torch_ckpt.checkpoint.megatron_form import BACKEND
from torch_ckpt.checkpoint.names import MEGATRON_CONFIG
from torch_ckpt.errors import CheckpointError
from torch_ckpt.options import local_path

_MAX_JSON = 64 << 20  # a name and a digest of 500,000 files


class CheckpointingException(CheckpointError):
    """The CheckpointError that Megatron's programs catch. Names key, box and ranks where they are
    known; under `patch_megatron` it is Megatron's CheckpointingException, too."""


@contextlib.contextmanager
def as_megatron_says() -> Iterator[None]:
    """Errors of torch_ckpt are those that Megatron's programs catch."""
    try:
        yield
    except CheckpointingException:
        raise
    except CheckpointError as error:
        raise CheckpointingException(
            error.message, file=error.file, tensor=error.tensor, rank=error.rank
        ) from error


@dataclass
class CheckpointingConfig:
    """sharded_backend: which format the tensors are in. sharded_backend_version: of that."""

    sharded_backend: str
    sharded_backend_version: int = 1


def maybe_load_config(checkpoint_dir: str | os.PathLike[str]) -> CheckpointingConfig | None:
    """What metadata.json in the directory says; None where there is none.

    Raises CheckpointingException where it is no such file, and for a URL.
    """
    path = _path_in(checkpoint_dir)
    said = read_json(path)
    if said is None:
        return None
    try:
        backend, version = said["sharded_backend"], said.get("sharded_backend_version", 1)
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointingException(
            "is not the metadata.json of a distributed checkpoint, an object with a "
            f"sharded_backend: {error}",
            file=str(path),
        ) from error
    if type(backend) is not str or type(version) is not int:
        raise CheckpointingException(
            f"says the backend {backend!r} of version {version!r}: a text and a number are due",
            file=str(path),
        )
    return CheckpointingConfig(backend, version)


def read_json(path: Path) -> Any:
    """What a file of Megatron's says; None where there is none. Raises CheckpointingException for
    one that is no JSON, too large or no regular file."""
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not stat.S_ISREG(found.st_mode) or found.st_size > _MAX_JSON:
        raise CheckpointingException(f"is no file of at most {_MAX_JSON >> 20} MiB", file=str(path))
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointingException(f"is no JSON: {error}", file=str(path)) from error
    if said is None:
        raise CheckpointingException("says null", file=str(path))
    return said


def save_config(config: CheckpointingConfig, checkpoint_dir: str | os.PathLike[str]) -> None:
    """Write metadata.json into the directory. A save does that by itself, as a part of its
    commit: call this for directories that are made by hand. Raises CheckpointingException for a
    URL."""
    path = _path_in(checkpoint_dir)
    path.write_text(json.dumps(asdict(config)), encoding="utf-8")


def _path_in(checkpoint_dir: str | os.PathLike[str]) -> Path:
    with as_megatron_says():
        return Path(local_path(checkpoint_dir)) / MEGATRON_CONFIG


def check_is_distributed_checkpoint(checkpoint_dir: str | os.PathLike[str]) -> bool:
    """Whether `checkpoint_dir` has a distributed checkpoint: one of ours is when it is committed.
    Not a collective call. Raises CheckpointingException for a metadata.json that is none, and for a
    URL, which would else look like a checkpoint of another format; OSError."""
    config = maybe_load_config(checkpoint_dir)
    if config is None or config.sharded_backend != BACKEND:
        return config is not None
    return Checkpoint(checkpoint_dir).is_committed()
