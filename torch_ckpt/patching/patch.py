"""patch_torch: programs written for stock DCP run on this engine, unchanged.

It walks the modules that are imported and rebinds every global name that is one of the stock
objects below, and nothing else, to its stand-in: those of DCP itself, where later imports find
them, and those that `from torch.distributed.checkpoint import ...` has bound elsewhere. Undoing
walks again and gives every name of a stand-in the stock object back. Modules of torch_ckpt are left
as they are.

    group            stock objects
    hf               HuggingFaceStorageWriter and -Reader, consolidate_safetensors_files and
                     consolidate_safetensors_files_on_every_rank
    file_system      FileSystemWriter and -Reader, but in the module that chooses a default
    default_storage  the same two, there; and what carries out `dcp.async_save`
"""

from __future__ import annotations

import logging
import sys
import threading
from collections import Counter
from types import ModuleType, TracebackType
from typing import Any, NamedTuple

# Names of stock are looked up here, when this is imported: before anything is patched.
from torch.distributed.checkpoint.filesystem import FileSystemReader as StockFileSystemReader
from torch.distributed.checkpoint.filesystem import FileSystemWriter as StockFileSystemWriter
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader as StockReader
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter as StockWriter

from torch_ckpt import torch_private
from torch_ckpt.dcp.load.reader import HuggingFaceStorageReader
from torch_ckpt.dcp.save.writer import HuggingFaceStorageWriter
from torch_ckpt.patching import storage
from torch_ckpt.patching.stand_in import StandIn

logger = logging.getLogger(__name__)

_HF, _FILE_SYSTEM, _DEFAULT = "hf", "file_system", "default_storage"


class _Pair(NamedTuple):
    stock: Any
    stand_in: Any
    group: str


def _of_class(stock: type, ours: type, group: str) -> _Pair:
    return _Pair(stock, StandIn.of(stock, ours), group)


_PAIRS = [
    _of_class(StockWriter, HuggingFaceStorageWriter, _HF),
    _of_class(StockReader, HuggingFaceStorageReader, _HF),
    _of_class(StockFileSystemWriter, storage.FileSystemWriter, _FILE_SYSTEM),
    _of_class(StockFileSystemReader, storage.FileSystemReader, _FILE_SYSTEM),
    _Pair(torch_private.stock_consolidate, storage.consolidate_safetensors_files, _HF),
    _Pair(
        torch_private.stock_consolidate_on_every_rank,
        storage.consolidate_safetensors_files_on_every_rank,
        _HF,
    ),
    _Pair(torch_private.ThreadExecutor, storage.ThreadExecutor, _DEFAULT),
    _Pair(torch_private.ProcessExecutor, storage.ProcessExecutor, _DEFAULT),
]
_OF_OBJECT = {id(each): pair for pair in _PAIRS for each in (pair.stock, pair.stand_in)}

_lock = threading.Lock()
_active: Counter[str] = Counter()  # by group, how many patches want it
_bound: set[tuple[ModuleType, str]] = set()  # the names that stand for ours


class TorchPatch:
    """An active `patch_torch`. As a context manager it is undone at the end of the block."""

    def __init__(self, groups: tuple[str, ...]) -> None:
        self._groups = groups
        with _lock:
            _change(groups, 1)

    def undo(self) -> None:
        """Give every name its stock object back, but those that another patch still wants. Once
        more does nothing. A name to which somebody else has bound something of his own meanwhile
        keeps that, and is named in a warning in the log."""
        with _lock:
            groups, self._groups = self._groups, ()
            if groups:
                _change(groups, -1)

    def __enter__(self) -> TorchPatch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.undo()


def patch_torch(*, file_system: bool = False, default_storage: bool = False) -> TorchPatch:
    """Let programs that call stock DCP run on this engine as they are: accelerate, transformers,
    torchtitan, Lightning and others. Call it on every rank, before the first save or load.

    At once, and until `undo()` or the end of a `with` block, DCP's HuggingFaceStorageWriter and
    HuggingFaceStorageReader, `consolidate_safetensors_files` and
    `consolidate_safetensors_files_on_every_rank` are ours, in every module of this process.

    file_system: FileSystemWriter and FileSystemReader are too. The writer writes our sharded
        format; the reader reads every format, stock's among them.
    default_storage: `dcp.save`, `dcp.async_save` and `dcp.load` with a bare `checkpoint_id` use
        these two. A URL still goes to stock's storage for fsspec.

    The writer also leaves a file `.metadata`, by which programs recognise a checkpoint of stock. It
    is no pickle, and stock's reader refuses it. The reader refuses a directory to which both have
    saved. Arguments that transform the streams of stock's format (`_extensions`,
    `_extension_registry`) raise UnsupportedError, and so do leaves that are objects of some class.

    What stays stock's: DefaultStager and the planners; classes that are derived from stock's,
    before or meanwhile; names that are no globals of a module (attributes of objects, default
    arguments, local variables); other processes, but for the one of `dcp.async_save`. Files that a
    program writes with `torch.save` stay what they are. isinstance goes by stock's classes.

    A module that is imported meanwhile gets stock's objects back too. Patches nest: what one of
    them wants stays until that one is undone. Threads may call this; which storage a save or load
    takes that another thread begins at the same time is not said.
    """
    groups = [_HF]
    if file_system:
        groups.append(_FILE_SYSTEM)
    if default_storage:
        groups.append(_DEFAULT)
    return TorchPatch(tuple(groups))


def _change(groups: tuple[str, ...], by: int) -> None:
    for group in groups:
        _active[group] += by
    before = set(_bound)
    _bound.clear()
    for module in _modules_of_others() | {module for module, _ in before}:
        _bind(module)
    for module, name in before - _bound:
        value = vars(module).get(name)
        if value is not None and id(value) not in _OF_OBJECT:
            said = f"{module.__name__}.{name}"
            logger.warning("%s has been bound to something else meanwhile: it is left", said)
    logger.info("names that stand for torch_ckpt in other modules: %d", len(_bound))


def _modules_of_others() -> set[ModuleType]:
    return {
        module
        for name, module in list(sys.modules.items())
        if isinstance(module, ModuleType) and name.partition(".")[0] != "torch_ckpt"
    }


def _bind(module: ModuleType) -> None:
    """Give each name of a stock object or a stand-in the one that is due."""
    names = vars(module)
    for name, value in list(names.items()):
        pair = _OF_OBJECT.get(id(value))
        if pair is None:
            continue
        group = pair.group
        if group == _FILE_SYSTEM and module is torch_private.storage_choice:
            group = _DEFAULT
        if _active[group]:
            _bound.add((module, name))
        names[name] = pair.stand_in if _active[group] else pair.stock
