"""patch_torch: programs written for stock DCP run on this engine, unchanged.

It walks the modules that are imported and rebinds every global name that is one of the stock
objects below, and nothing else, to its stand-in: those of DCP itself, where later imports find
them, and those that `from torch.distributed.checkpoint import ...` has bound elsewhere. Undoing
walks again and gives every name of a stand-in the stock object back. Modules of torch_ckpt are left
as they are.

    group            stock objects
    hf               HuggingFaceStorageWriter and -Reader, consolidate_safetensors_files and
                     consolidate_safetensors_files_on_every_rank; and what carries out
                     `dcp.async_save` in a thread
    file_system      FileSystemWriter and -Reader, but in the module that chooses a default
    default_storage  the same two, there; and what carries out `dcp.async_save` in a process
"""

from __future__ import annotations

import logging
import sys
import threading
from types import ModuleType, TracebackType
from typing import Any, NamedTuple

# Names of stock are looked up here, when this is imported: before anything is patched.
from torch.distributed.checkpoint.filesystem import FileSystemReader as StockFileSystemReader
from torch.distributed.checkpoint.filesystem import FileSystemWriter as StockFileSystemWriter
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader as StockReader
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter as StockWriter

from torch_ckpt.dcp.write.writer import HuggingFaceStorageWriter
from torch_ckpt.errors import InvalidArgumentError
from torch_ckpt.native import torch_private
from torch_ckpt.patching import storage
from torch_ckpt.patching.groups import DEFAULT_STORAGE, FILE_SYSTEM, HF, is_wanted, wanted
from torch_ckpt.patching.stand_in import StandIn

logger = logging.getLogger(__name__)


class _Pair(NamedTuple):
    stock: Any
    stand_in: Any
    group: str


def _of_class(stock: type, ours: type, group: str) -> _Pair:
    return _Pair(stock, StandIn.of(stock, ours, group), group)


_PAIRS = [
    _of_class(StockWriter, HuggingFaceStorageWriter, HF),
    _of_class(StockReader, storage.HuggingFaceStorageReader, HF),
    _of_class(StockFileSystemWriter, storage.FileSystemWriter, FILE_SYSTEM),
    _of_class(StockFileSystemReader, storage.FileSystemReader, FILE_SYSTEM),
    _Pair(torch_private.stock_consolidate, storage.consolidate_safetensors_files, HF),
    _Pair(
        torch_private.stock_consolidate_on_every_rank,
        storage.consolidate_safetensors_files_on_every_rank,
        HF,
    ),
    _Pair(torch_private.ThreadExecutor, storage.ThreadExecutor, HF),
    _Pair(torch_private.ProcessExecutor, storage.ProcessExecutor, DEFAULT_STORAGE),
]
_PAIRS_OF_DEFAULT = [  # in the module that chooses one
    _of_class(StockFileSystemWriter, storage.FileSystemWriter, DEFAULT_STORAGE),
    _of_class(StockFileSystemReader, storage.FileSystemReader, DEFAULT_STORAGE),
]
_STOCK_OF = {
    id(each): pair.stock
    for pair in (*_PAIRS, *_PAIRS_OF_DEFAULT)
    for each in (pair.stock, pair.stand_in)
}
_BY_STOCK = {id(pair.stock): pair for pair in _PAIRS}
_BY_STOCK_OF_DEFAULT = {**_BY_STOCK, **{id(pair.stock): pair for pair in _PAIRS_OF_DEFAULT}}

# Signal handlers run in the middle of what this thread does, and may save.
_lock = threading.RLock()
_bound: set[tuple[ModuleType, str]] = set()  # the names that stand for ours
_DCP = "torch.distributed.checkpoint"
_MISSING = object()


class TorchPatch:
    """An active `patch_torch`. As a context manager it is undone at the end of the block."""

    def __init__(self, groups: tuple[str, ...]) -> None:
        self._is_over = False
        with _lock:
            wanted[self] = groups
            try:
                _bind_all()
            except BaseException:  # Ctrl-C: nobody has this patch, who could undo it
                self.undo()
                raise

    def undo(self) -> None:
        """Give every name its stock object back, but those that another patch still wants. Once
        more does nothing, but for what an exception such as Ctrl-C has left undone. A name that
        other code has rebound while the patch was active is left as it is, with a warning in the
        log. What a program has kept of ours elsewhere makes stock's from now on."""
        with _lock:
            if not self._is_over:
                wanted.pop(self, None)
                _bind_all()
                self._is_over = True

    def __enter__(self) -> TorchPatch:
        if self not in wanted:
            raise InvalidArgumentError("this patch is over: call patch_torch again")
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
    is no pickle, and stock's reader refuses it. FileSystemReader refuses a directory to which both
    have saved. These raise UnsupportedError: arguments that transform the streams of stock's format
    (`_extensions`, `_extension_registry`), saves by FileSystemWriter with use_collectives=False,
    and leaves that are objects of classes that torch_ckpt does not know.

    A `dcp.async_save` by one of our writers, in a thread and without a `process_group`, makes one
    of its own, of Gloo, the first time: that call is a collective one, and its saves do not meet
    those of training. A group that is given must not be used by anybody else meanwhile.

    What stays stock's: DefaultStager and the planners; classes that are derived from stock's,
    before or meanwhile; names that are no globals of a module (attributes of objects, default
    arguments, local variables); other processes, but for the one of `dcp.async_save`. Files that a
    program writes with `torch.save` stay what they are. isinstance goes by stock's classes.

    A module that is imported meanwhile gets stock's objects back too. Patches nest: what one of
    them wants stays until that one is undone. Threads may call this. If another thread begins a
    save or load while this runs, it may get either storage.
    """
    groups = [HF]
    if file_system:
        groups.append(FILE_SYSTEM)
    if default_storage:
        groups.append(DEFAULT_STORAGE)
    return TorchPatch(tuple(groups))


def _bind_all() -> None:
    """Give every name the object that is due. Can be interrupted, and called again."""
    # DCP's own modules first: what other threads import meanwhile is in `sys.modules` by then, or
    # takes its names from these.
    for module in _modules_of_dcp():
        _bind(module)
    for module in _modules_of_others() | {module for module, _ in _bound}:
        _bind(module)
    for module, name in list(_bound):
        value = vars(module).get(name, _MISSING)
        if id(value) in _STOCK_OF:
            continue
        _bound.discard((module, name))
        if value is not _MISSING:
            said = f"{module.__name__}.{name}"
            logger.warning("%s has been rebound by other code meanwhile: it is left", said)
    logger.info("names that stand for torch_ckpt in other modules: %d", len(_bound))


def _modules_of_dcp() -> list[ModuleType]:
    return [
        module
        for name, module in list(sys.modules.items())
        if isinstance(module, ModuleType) and (name == _DCP or name.startswith(f"{_DCP}."))
    ]


def _modules_of_others() -> set[ModuleType]:
    return {
        module
        for name, module in list(sys.modules.items())
        if isinstance(module, ModuleType) and name.partition(".")[0] != "torch_ckpt"
    }


def _bind(module: ModuleType) -> None:
    """Give each name of a stock object or a stand-in the one that is due."""
    pairs = _BY_STOCK_OF_DEFAULT if module is torch_private.storage_choice else _BY_STOCK
    names = vars(module)
    for name, value in list(names.items()):
        stock = _STOCK_OF.get(id(value))
        if stock is None:
            continue
        pair = pairs[id(stock)]
        if is_wanted(pair.group):
            _bound.add((module, name))
            names[name] = pair.stand_in
        else:
            names[name] = pair.stock
            _bound.discard((module, name))
