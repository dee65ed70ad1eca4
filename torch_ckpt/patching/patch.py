"""patch_torch: programs written for stock DCP run on this engine, unchanged.

`rebind.py` binds the names of these stock objects to stand-ins:

    group            stock objects
    hf               HuggingFaceStorageWriter and -Reader, QuantizedHuggingFaceStorageReader,
                     consolidate_safetensors_files and
                     consolidate_safetensors_files_on_every_rank; and what carries out
                     `dcp.async_save` in a thread
    file_system      FileSystemWriter and -Reader, but in the module that chooses a default
    default_storage  the same two, there; and what carries out `dcp.async_save` in a process
"""

from __future__ import annotations

from types import ModuleType

# Names of stock are looked up here, when this is imported: before anything is patched.
from torch.distributed.checkpoint.filesystem import FileSystemReader as StockFileSystemReader
from torch.distributed.checkpoint.filesystem import FileSystemWriter as StockFileSystemWriter
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader as StockReader
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter as StockWriter
from torch.distributed.checkpoint.quantized_hf_storage import (
    QuantizedHuggingFaceStorageReader as StockQuantizedReader,
)

from torch_ckpt.dcp.read.quantized import QuantizedHuggingFaceStorageReader
from torch_ckpt.dcp.write.writer import HuggingFaceStorageWriter
from torch_ckpt.native import torch_private
from torch_ckpt.patching import storage
from torch_ckpt.patching.groups import DEFAULT_STORAGE, FILE_SYSTEM, HF
from torch_ckpt.patching.rebind import Patch, Replacement, Table
from torch_ckpt.patching.stand_in import StandIn


def _of_class(stock: type, ours: type, group: str, module: ModuleType | None = None) -> Replacement:
    return Replacement(stock, StandIn.of(stock, ours, group), group, module)


_CHOICE = torch_private.storage_choice  # the module that chooses a default
_TABLE = Table(
    "patch_torch",
    "torch.distributed.checkpoint",
    [
        _of_class(StockWriter, HuggingFaceStorageWriter, HF),
        _of_class(StockReader, storage.HuggingFaceStorageReader, HF),
        _of_class(StockQuantizedReader, QuantizedHuggingFaceStorageReader, HF),
        _of_class(StockFileSystemWriter, storage.FileSystemWriter, FILE_SYSTEM),
        _of_class(StockFileSystemReader, storage.FileSystemReader, FILE_SYSTEM),
        _of_class(StockFileSystemWriter, storage.FileSystemWriter, DEFAULT_STORAGE, _CHOICE),
        _of_class(StockFileSystemReader, storage.FileSystemReader, DEFAULT_STORAGE, _CHOICE),
        Replacement(torch_private.stock_consolidate, storage.consolidate_safetensors_files, HF),
        Replacement(
            torch_private.stock_consolidate_on_every_rank,
            storage.consolidate_safetensors_files_on_every_rank,
            HF,
        ),
        Replacement(torch_private.ThreadExecutor, storage.ThreadExecutor, HF),
        Replacement(torch_private.ProcessExecutor, storage.ProcessExecutor, DEFAULT_STORAGE),
    ],
)


class TorchPatch(Patch):
    """An active `patch_torch`. As a context manager it is undone at the end of the block."""

    undo = Patch.undo  # of this class for the reference as well


def patch_torch(*, file_system: bool = False, default_storage: bool = False) -> TorchPatch:
    """Let programs that call stock DCP run on this engine as they are: accelerate, transformers,
    torchtitan, Lightning and others. Call it on every rank, before the first save or load.

    At once, and until `undo()` or the end of a `with` block, DCP's HuggingFaceStorageWriter,
    HuggingFaceStorageReader and QuantizedHuggingFaceStorageReader, `consolidate_safetensors_files`
    and `consolidate_safetensors_files_on_every_rank` are ours, in every module of this process.

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
    return TorchPatch(_TABLE, groups)
