"""Removing tensors and objects from a checkpoint that is committed."""

from __future__ import annotations

import logging
import os

from torch_ckpt.export.dtype_policy import DtypePolicy
from torch_ckpt.export.extras import extra_files
from torch_ckpt.export.files import SHARDS
from torch_ckpt.export.merge import merge, merge_request
from torch_ckpt.megatron.config import CheckpointingException
from torch_ckpt.megatron.stored import Stored, key_of

logger = logging.getLogger(__name__)


def remove_tensors(checkpoint_dir: str | os.PathLike[str], key_prefix: str) -> None:
    """See `dist_checkpointing.remove_sharded_tensors`."""
    stored = Stored(checkpoint_dir)
    if stored.format is not None:
        raise CheckpointingException(
            "is a checkpoint of Megatron's, from which nothing is removed here", file=stored.path
        )
    tensors = list(stored.shapes())
    gone = [name for name in tensors if name.startswith(key_prefix)]
    gone += [name for name in stored.objects() if key_of(name).startswith(key_prefix)]
    if not gone:
        logger.warning("%s: no key begins with %r: nothing is removed", stored.path, key_prefix)
        return
    if not set(tensors).difference(gone):
        raise CheckpointingException(
            f"has no tensor but those whose keys begin with {key_prefix!r}: remove the checkpoint",
            file=stored.path,
        )
    request = merge_request(
        stored.path,
        stored.path,
        None,
        1,
        policy=DtypePolicy(None, ()),
        naming=SHARDS,
        overwrite=True,
    )
    request.leave_out(gone)
    request["replaces"] = True
    merge(request, extra_files(None))
