"""patch_megatron: programs written for Megatron's dist_checkpointing run on this engine, unchanged.

These functions and classes of `megatron.core.dist_checkpointing` have stand-ins:

    core                     check_is_distributed_checkpoint
    serialization            save, load, what tells of a checkpoint, and default strategies
    strategies.torch         get_async_strategy (since 0.17)
    strategies.async_utils   AsyncCallsQueue, AsyncRequest

Other strategies stay Megatron's: ours takes them for options.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from torch_ckpt.errors import UnsupportedError
from torch_ckpt.megatron.async_calls import AsyncCallsQueue, AsyncRequest, get_async_strategy
from torch_ckpt.megatron.config import CheckpointingException, check_is_distributed_checkpoint
from torch_ckpt.megatron.dist_checkpointing import serialization
from torch_ckpt.patching.groups import is_wanted
from torch_ckpt.patching.rebind import Patch, Replacement, Table
from torch_ckpt.patching.stand_in import StandIn

_PACKAGE = "megatron.core.dist_checkpointing"
_GROUP = "megatron"
_FUNCTIONS = (
    *("save", "load", "load_common_state_dict", "load_content_metadata", "load_plain_tensors"),
    *("load_tensors_metadata", "load_sharded_metadata", "remove_sharded_tensors"),
    # Which look at the directory, and know no backend of ours.
    *("get_default_save_sharded_strategy", "get_default_load_sharded_strategy"),
)


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"{_PACKAGE}.{name}")


@functools.cache
def _error() -> type[CheckpointingException]:
    """Our error, which programs catch as Megatron's."""
    theirs = _module("core").CheckpointingException
    bases = (CheckpointingException, theirs)
    return type("CheckpointingException", bases, {"__doc__": theirs.__doc__})


@contextlib.contextmanager
def _as_theirs_raised() -> Iterator[None]:
    try:
        yield
    except CheckpointingException as error:
        if isinstance(error, _error()):
            raise
        raise _error()(
            error.message, file=error.file, tensor=error.tensor, rank=error.rank
        ) from error


# Ours, whose errors programs catch as Megatron's.
class _Queue(AsyncCallsQueue):
    __doc__ = AsyncCallsQueue.__doc__

    def schedule_async_request(self, async_request: Any) -> int:
        with _as_theirs_raised():
            return super().schedule_async_request(async_request)

    def maybe_finalize_async_calls(
        self, blocking: bool = False, no_dist: bool = False
    ) -> list[int]:
        with _as_theirs_raised():
            return super().maybe_finalize_async_calls(blocking, no_dist)


class _Request(AsyncRequest):
    __doc__ = AsyncRequest.__doc__ or ""
    __slots__ = ()

    def execute_sync(self) -> None:
        with _as_theirs_raised():
            super().execute_sync()


_CLASSES = {"AsyncCallsQueue": _Queue, "AsyncRequest": _Request}


def _function(stock: Callable[..., Any], ours: Callable[..., Any]) -> Replacement:
    """`ours` in the place of `stock`, whose arguments it is given by their names: which come first
    has changed between releases."""
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def call(*arguments: Any, **keywords: Any) -> Any:
        if not is_wanted(_GROUP):
            return stock(*arguments, **keywords)
        given = signature.bind(*arguments, **keywords).arguments
        with _as_theirs_raised():
            result = ours(**given)
        return _Request(*result) if type(result) is AsyncRequest else result

    return Replacement(stock, call, _GROUP)


def _told(ours: Callable[..., Any]) -> Callable[..., Any]:
    """What `ours` tells of a checkpoint, in Megatron's classes."""
    mapping = _module("mapping")

    def call(**keywords: Any) -> Any:
        found = ours(**keywords)
        return {name: _as_theirs(mapping, entry) for name, entry in found.items()}

    return call


def _as_theirs(mapping: ModuleType, entry: Any) -> Any:
    kind = getattr(mapping, type(entry).__name__)
    taken = {field.name for field in dataclasses.fields(kind)}
    return kind(
        **{
            field.name: getattr(entry, field.name)
            for field in dataclasses.fields(entry)
            if field.name in taken
        }
    )


def _async_strategy(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Ours under both names, beside what serves other formats."""

    def call(async_strategy: str = "nvrx", module: str | None = None) -> Any:
        name, ours = get_async_strategy(async_strategy)
        ours |= _CLASSES
        if module in ours:
            return name, ours[module]
        theirs = stock("mcore", module)[1]
        return name, theirs if module is not None else {**theirs, **ours}

    return call


@functools.cache
def _table() -> Table:
    try:
        core, stock = _module("core"), _module("serialization")
    except ImportError as error:
        raise UnsupportedError(f"patch_megatron needs megatron-core: {error}") from error
    queues, strategies = _module("strategies.async_utils"), _module("strategies.torch")
    rows = [_function(core.check_is_distributed_checkpoint, check_is_distributed_checkpoint)]
    for name in _FUNCTIONS:
        ours = getattr(serialization, name)
        if name in ("load_tensors_metadata", "load_sharded_metadata"):
            ours = _told(ours)
        if hasattr(stock, name):
            rows.append(_function(getattr(stock, name), ours))
    if hasattr(strategies, "get_async_strategy"):
        theirs = strategies.get_async_strategy
        rows.append(_function(theirs, _async_strategy(theirs)))
    for name, ours in _CLASSES.items():
        theirs = getattr(queues, name)
        rows.append(Replacement(theirs, StandIn.of(theirs, ours, _GROUP), _GROUP))
    return Table("patch_megatron", _PACKAGE, rows)


class MegatronPatch(Patch):
    """An active `patch_megatron`. As a context manager it is undone at the end of the block."""

    undo = Patch.undo  # of this class for the reference as well


def patch_megatron() -> MegatronPatch:
    """Let programs that call `megatron.core.dist_checkpointing` run on this engine as they are:
    Megatron-LM, Megatron-Bridge, verl and others. Call it on every rank, before the first save or
    load.

    At once, and until `undo()` or the end of a `with` block, `save`, `load` and the functions that
    tell of a checkpoint, AsyncCallsQueue, AsyncRequest and `get_async_strategy` are ours, in every
    module of this process that has them as globals, also in those that are imported meanwhile.
    Checkpoints of Megatron's are read as before.

    What stays Megatron's: its classes, strategies among them, which ours takes as they are; other
    checkpoint formats (torch_dcp, fsdp_dtensor); names that are no globals of a module.

    Raises UnsupportedError where megatron-core cannot be imported.
    """
    return MegatronPatch(_table(), [_GROUP])
