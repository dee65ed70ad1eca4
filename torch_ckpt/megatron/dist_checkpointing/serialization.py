"""save, load, and what tells of a checkpoint. See docs/megatron.md."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from torch_ckpt.checkpoint.checkpoint import look_again
from torch_ckpt.dcp.read.reader import ReplacedError
from torch_ckpt.errors import CheckpointError
from torch_ckpt.megatron.async_calls import AsyncRequest, check_async_strategy
from torch_ckpt.megatron.config import as_megatron_says, check_is_distributed_checkpoint
from torch_ckpt.megatron.leaves import (
    CommonStateDict,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    StateDict,
)
from torch_ckpt.megatron.loading import LoadOptions, load_request
from torch_ckpt.megatron.removal import remove_tensors
from torch_ckpt.megatron.saving import SaveOptions, prepared_save, save_now
from torch_ckpt.megatron.stored import CONTENT_KEY, Stored
from torch_ckpt.megatron.strategies import (
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
    sharing_of,
    sharing_of_load,
)
from torch_ckpt.megatron.strict import StrictHandling, parse_strict_flag
from torch_ckpt.options import local_path
from torch_ckpt.ranks import Ranks

__all__ = [
    "CkptShardedMetadata",
    "check_is_distributed_checkpoint",
    "get_default_load_sharded_strategy",
    "get_default_save_sharded_strategy",
    "load",
    "load_common_state_dict",
    "load_content_metadata",
    "load_plain_tensors",
    "load_sharded_metadata",
    "load_tensors_metadata",
    "remove_sharded_tensors",
    "save",
]

T = TypeVar("T")
CheckpointDir = str | os.PathLike[str]
CkptShardedMetadata = dict[str, ShardedTensor | ShardedObject]


def save(
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: CheckpointDir,
    sharded_strategy: Any = None,
    validate_access_integrity: bool = True,
    async_sharded_save: bool = False,
    preprocess_common_before_consistancy_check: (
        Callable[[CommonStateDict], StateDict] | None
    ) = None,
    content_metadata: dict[str, Any] | None = None,
    async_strategy: str = "nvrx",
    verify_integrity: bool = False,
    *,
    common_strategy: Any = None,
) -> AsyncRequest | None:
    """Save what all ranks have, all or nothing: the directory has the old checkpoint or the new
    one. A collective call of all ranks.

    sharded_state_dict: nested dicts and lists, which stay as they are. ShardedTensors,
        ShardedObjects and factories are stored under their keys; of everything else, common state,
        what rank 0 has.
    checkpoint_dir: is made where it is not there. A checkpoint in it is replaced; other files stay.
    sharded_strategy: None, ("torch_dist", 1), or one of `strategies`: options.
    validate_access_integrity: prove that every part has one main replica, and tell of common state
        that differs between ranks. False: of equal parts one is stored; that they make whole
        tensors and grids of objects is proved all the same.
    preprocess_common_before_consistancy_check: makes of the common state what is compared between
        ranks; it must not change it.
    content_metadata: what the checkpoint is to say of itself: see `load_content_metadata`.
    async_sharded_save: return a request, which an AsyncCallsQueue begins and finalizes. The state
        dict is looked at now; its tensors and values are copied when the request is scheduled, but
        for quantized tensors, which are dequantized now.
    async_strategy: "nvrx" or "mcore", which are the same.
    common_strategy, verify_integrity: do nothing. Every file has digests.

    Raises CheckpointingException or OSError, on every rank, that names key, box and ranks; nothing
    of a failed save is left. TypeError for another async_strategy, and for what is no strategy of
    a save; ValueError for a backend that is not written.
    """

    def arguments() -> SaveOptions:
        check_async_strategy(async_strategy)
        local_path(checkpoint_dir)
        return SaveOptions(
            replicas=validate_access_integrity,
            sharing=sharing_of(sharded_strategy),
            preprocess=preprocess_common_before_consistancy_check,
            content=content_metadata,
        )

    with as_megatron_says():
        options = _agreed("arguments of a save", None, arguments)
        if async_sharded_save:
            prepared = prepared_save(sharded_state_dict, checkpoint_dir, options)
            return AsyncRequest(prepared, (), [prepared.committed])
        save_now(sharded_state_dict, checkpoint_dir, options)
    return None


def load(
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: CheckpointDir,
    sharded_strategy: Any = None,
    validate_access_integrity: bool = True,
    strict: str | StrictHandling = StrictHandling.ASSUME_OK_UNEXPECTED,
    verify_integrity: bool = False,
    process_group: dist.ProcessGroup | None = None,
    *,
    common_strategy: Any = None,
) -> StateDict | tuple[StateDict, set[str], set[str]]:
    """Load what `sharded_state_dict` asks for, whatever ranks and cuts it was saved with. A
    collective call of the ranks of `process_group`, which is the default one if None.

    sharded_state_dict: as of a save. It stays as it is, but for the memory of its tensors: the data
        of ShardedTensors are filled, and made on the CPU where there are none. Common values in it
        are ignored.
    checkpoint_dir: one of ours, or of Megatron's, torch_dist or zarr.
    sharded_strategy: None, ("torch_dist", 1), ("zarr", 1), or one of `strategies`.
    validate_access_integrity: prove that all ranks' main replicas make whole tensors.
    strict: what to do about keys that are asked for and not stored, or stored and not asked for:
        see StrictHandling.
    verify_integrity: compare all of the checkpoint that has a digest first, and what is read anew
        then: of Megatron's own with those of integrity.json, else with its archives' CRC-32s. What
        has none at all, as zarr, is an error.
    common_strategy: does nothing.

    Returns the common state that was stored, with what was loaded in its places; for the two
    `return_*` flags that, the missing and the unexpected keys. Raises ValueError for another flag,
    and for a backend that is not read; TypeError for what is no strategy of a load;
    NotImplementedError for an exchange_algo that is none of Megatron's; CheckpointingException or
    OSError, on every rank: tensors may then be filled in part.
    """

    def arguments() -> LoadOptions:
        return LoadOptions(
            strict=parse_strict_flag(strict),
            replicas=validate_access_integrity,
            verify=verify_integrity,
            group=process_group,
            sharing=sharing_of_load(sharded_strategy),
        )

    with as_megatron_says():
        options = _agreed("arguments of a load", process_group, arguments)
        loaded = load_request(sharded_state_dict, checkpoint_dir, options)
    if options.strict in (StrictHandling.RETURN_UNEXPECTED, StrictHandling.RETURN_ALL):
        return loaded.state, loaded.missing, loaded.unexpected
    return loaded.state


def _agreed(what: str, group: dist.ProcessGroup | None, make: Callable[[], T]) -> T:
    """What `make` gives on this rank. A collective call: what it raises on one rank is an error of
    all, and where it raises on this one, too, that is raised here."""
    own: list[Exception] = []

    def made() -> T:
        try:
            return make()
        except Exception as error:
            own.append(error)
            raise

    try:
        return Ranks.of(group).each(what, made)
    except CheckpointError as error:
        if own and own[0] is not error:
            raise own[0] from None
        raise
    finally:
        own.clear()


def load_common_state_dict(checkpoint_dir: CheckpointDir) -> StateDict:
    """The common state of the checkpoint in `checkpoint_dir`, ours or Megatron's: what was saved of
    rank 0 under no key. Where a list had entries under keys, a dict of the others by their places.
    Not a collective call. Raises CheckpointingException where no checkpoint is, or where it cannot
    be read; OSError.
    """
    with as_megatron_says():
        return look_again(lambda: Stored(checkpoint_dir).common(), ReplacedError)


def load_content_metadata(
    checkpoint_dir: CheckpointDir | None = None, *, preloaded_state_dict: StateDict | None = None
) -> dict[str, Any] | None:
    """What a save was given as `content_metadata`, None if nothing: of the checkpoint in
    `checkpoint_dir`, or as it stands in `preloaded_state_dict`, the state that a load returned,
    which is looked at alone where it is given. Not a collective call. Raises ValueError where
    neither is given, else as `load_common_state_dict`."""
    if preloaded_state_dict is None:
        if checkpoint_dir is None:
            raise ValueError("load_content_metadata needs a directory, or a state that was loaded")
        preloaded_state_dict = load_common_state_dict(checkpoint_dir)
    return preloaded_state_dict.get(CONTENT_KEY)


def load_tensors_metadata(
    checkpoint_dir: CheckpointDir, sharded_strategy: Any = None
) -> CkptShardedMetadata:
    """A ShardedTensor without data of each whole tensor that is stored, by its key, with its global
    shape, in elements, and dtype: a request for `load`, with validate_access_integrity=False where
    several ranks make it. Not a collective call.

    checkpoint_dir: one of ours, or of Megatron's. No data of tensors are read.
    sharded_strategy: as of `load`; it is looked at and does nothing.

    Raises CheckpointingException where no checkpoint is, or where it cannot be read; OSError; for
    `sharded_strategy` what `load` does.
    """
    sharing_of_load(sharded_strategy)
    with as_megatron_says():
        found = Stored(checkpoint_dir).tensors()
    return {
        key: ShardedTensor(
            key, None, dtype, shape, shape, (0,) * len(shape), (1,) * len(shape), replica_id=0
        )
        for key, (dtype, shape) in found.items()
    }


def load_sharded_metadata(
    checkpoint_dir: CheckpointDir, sharded_strategy: Any = None, common_strategy: Any = None
) -> CkptShardedMetadata:
    """What `load_tensors_metadata` gives, and a ShardedObject without data of each object that is
    stored, by its unique key. Nothing of the common state. Not a collective call.

    checkpoint_dir, sharded_strategy: as of `load_tensors_metadata`, and so are the errors.
    common_strategy: does nothing.
    """
    sharing_of_load(sharded_strategy)
    with as_megatron_says():
        objects = Stored(checkpoint_dir).objects()
        return {
            **load_tensors_metadata(checkpoint_dir),
            **{name: ShardedObject.empty_from_unique_key(name) for name in objects},
        }


def load_plain_tensors(checkpoint_dir: CheckpointDir) -> StateDict:
    """All tensors of the checkpoint in `checkpoint_dir`, of their global shapes and dtypes, in new
    memory of the CPU on every rank, by their keys, and the common state. A collective call. Raises
    CheckpointingException or OSError, on every rank; also where it is replaced meanwhile by one
    that lacks some."""
    with as_megatron_says():
        ranks = Ranks.of(None)
        found = ranks.each("tensors that are stored", lambda: load_tensors_metadata(checkpoint_dir))
    request: ShardedStateDict = dict(found)
    state = load(request, checkpoint_dir, validate_access_integrity=False)
    assert isinstance(state, dict)
    return state


def remove_sharded_tensors(checkpoint_dir: CheckpointDir, key_prefix: str) -> None:
    """Remove the tensors and objects whose keys begin with `key_prefix` from the checkpoint of ours
    in `checkpoint_dir`: a commit, in which the others are written anew. The common state stays, and
    content_metadata. One process calls it. After a kill the checkpoint is there as it was, or
    without them. Logs a warning where there are none.

    Raises CheckpointingException for a checkpoint of Megatron's, and where none of its tensors
    would be left; OSError.
    """
    with as_megatron_says():
        remove_tensors(checkpoint_dir, key_prefix)


def get_default_save_sharded_strategy(
    backend: str = "torch_dist", version: int = 1
) -> TorchDistSaveShardedStrategy:
    """The options of a plain save."""
    sharing_of((backend, version))
    return TorchDistSaveShardedStrategy(backend, version)


def get_default_load_sharded_strategy(
    checkpoint_dir: str | Path | None = None,
) -> TorchDistLoadShardedStrategy:
    """The options of a plain load, whatever the directory holds."""
    return TorchDistLoadShardedStrategy()
