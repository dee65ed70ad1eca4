"""CheckpointReader: DCP's StorageReader protocol on the engine."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader as StockReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.futures import Future

from torch_ckpt.checkpoint.hulls import warn_of_hulls, warn_of_notes
from torch_ckpt.checkpoint.selection import Patterns, left_out_of
from torch_ckpt.dcp.node import transfer_workers
from torch_ckpt.dcp.plan.stock_planner import check_read_boxes
from torch_ckpt.dcp.read.read_metadata import metadata_of, shapes_of_numbers
from torch_ckpt.dcp.read.read_objects import ObjectReader
from torch_ckpt.dcp.read.read_requests import check_filled, check_no_numbers
from torch_ckpt.dcp.read.read_tensors import TensorReader
from torch_ckpt.errors import CheckpointError, ConflictError, raise_with_rank
from torch_ckpt.native.opened import Listing, OpenedCheckpoint
from torch_ckpt.planning.collector import paused_gc, seldom_full_collections, usual_full_collections
from torch_ckpt.planning.reserved import STRUCTURE_FQN

logger = logging.getLogger(__name__)

# The dcp.load of torch 2.10 and 2.11 says only "metadata is None" where later ones tell why.
_DCP_TELLS_WHY = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 12)


@dataclass(frozen=True, slots=True)
class SeenSave:
    """The save that a rank is about to load."""

    rank: int | None
    save_id: str


class ReplacedError(ConflictError):
    """Another save has replaced the checkpoint, as this rank or another one sees it: who looks
    again in a second will see the newer one."""


def check_seen(path: str, storage_data: Sequence[Any]) -> None:
    """Of the plans of all ranks, of which `CheckpointReader` has noted which save they see. Refuse
    to mix two: while one is replaced by another, ranks on different nodes can see different ones,
    and each would be right by itself. Raises ReplacedError."""
    seen = [each for each in storage_data if isinstance(each, SeenSave)]
    other = next((each for each in seen if each.save_id != seen[0].save_id), None)
    if other is not None:
        raise ReplacedError(
            f"is being replaced: rank {seen[0].rank} sees save {seen[0].save_id or 'none'}, "
            f"rank {other.rank} sees {other.save_id or 'none'}",
            file=path,
        )


class CheckpointReader(StockReader):
    """A StorageReader over every format that is read: see `torch_ckpt.open`.

    The positional arguments are those of
    `torch.distributed.checkpoint.HuggingFaceStorageReader`:

    path: the checkpoint directory, or a file of safetensors or torch.save.
    thread_count: threads that read; at least 4, and 12 among the ranks of a node.

    Keyword-only arguments of ours:

    format: what the checkpoint is read as: "torch_ckpt", "hf", "dcp", "megatron" or "torch"; None
        to find out by the names in the directory.
    include, exclude: patterns of names as in a shell ("optim*"), or a list of such: what none of
        `include` matches, and what one of `exclude` does, is as if it were not in the checkpoint.
    verify: compare every segment (1 MiB of a file) that is read with its CRC-32C, and in files of
        torch.save and stock DCP every storage that is read as a whole with its CRC-32. Safetensors
        of others have no digests.
    strict_dtype: refuse a target whose dtype is not the stored one.
    allow_pickle: unpickle leaves that were saved with allow_pickle, and those of torch.save and
        stock DCP that are read in no other way; and let stock's planners and ours unpickle what a
        planner of the user's has packed. Never do that with a checkpoint that you do not trust.
    direct_io: False reads through the page cache.

    A subclass that overrides `_process_read_request(f, req, planner)` is handed one request per
    stored shard with an open `safetensors.safe_open` file, as with stock; so is one that overrides
    `_read_files_from_queue`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        thread_count: int = 1,
        *,
        format: str | None = None,
        include: Patterns = None,
        exclude: Patterns = None,
        verify: bool = True,
        strict_dtype: bool = False,
        allow_pickle: bool = False,
        direct_io: bool = True,
    ) -> None:
        super().__init__(path=os.fspath(path), thread_count=thread_count)
        self.format = format
        self.include = include
        self.exclude = exclude
        self.verify = verify
        self.strict_dtype = strict_dtype
        self.allow_pickle = allow_pickle
        self.direct_io = direct_io
        # What read_metadata saw: a load fails if the checkpoint is replaced in between.
        self._opened: OpenedCheckpoint | None = None
        self._listing: Listing | None = None
        # With what `include` and `exclude` leave out: scales may be among that.
        self._whole: OpenedCheckpoint | None = None

    def _reads_by_request(self) -> bool:
        """Whether a subclass reads in its own way, as stock's hooks allow it to."""
        own = type(self)
        return (
            own._process_read_request is not StockReader._process_read_request
            or own._read_files_from_queue is not StockReader._read_files_from_queue
        )

    @property
    def save_id(self) -> str:
        """The id of the save that is seen, which is looked for if it was not yet; "" for what has
        none. Raises what `read_metadata` does."""
        return self._list().save_id

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        super().reset(checkpoint_id)
        self._forget()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None, "_listing": None, "_whole": None}

    def _forget(self) -> None:
        self._opened, self._listing, self._whole = None, None, None

    def _format_here(self) -> str | None:
        """What the checkpoint at `path` is read as."""
        return self.format

    def _look(self) -> OpenedCheckpoint:
        """The checkpoint at `path`, with tensors as a subclass has them."""
        return OpenedCheckpoint(os.fspath(self.path), self._format_here())

    def _open(self) -> OpenedCheckpoint:
        if self._opened is None:
            self._whole = whole = self._look()
            left_out = left_out_of(whole, self.include, self.exclude)
            self._opened = whole.without(left_out) if left_out else whole
        return self._opened

    def _list_whole(self) -> tuple[OpenedCheckpoint, Listing]:
        """What `_look` has seen, with what is left out."""
        opened, listing = self._open(), self._list()
        if self._whole is None or self._whole is opened:
            return opened, listing
        return self._whole, self._whole.listing()

    def _list(self) -> Listing:
        if self._listing is None:
            self._listing = self._open().listing(whole=self._reads_by_request())
        return self._listing

    # No **kwargs here: DCP would retry a rank that failed without collectives, and hang the others.
    def read_metadata(self) -> Metadata:
        """The names, shapes, dtypes and paths of the checkpoint.

        Presents each tensor as one chunk, since the engine resolves the stored boxes; to a subclass
        with its own `_process_read_request` as the stored chunks. Raises IncompleteError,
        CorruptError, ConflictError or OSError for a directory that cannot be loaded whole, and logs
        the error too where DCP drops it. Logs a warning for shapes that no file says, and for
        dtypes that this torch does not have: such tensors are left out.
        """
        self._forget()
        try:
            with paused_gc(keeps=True):
                metadata = metadata_of(
                    self._list(),
                    os.fspath(self.path),
                    self.load_id,
                    chunks=self._reads_by_request(),
                )
            self._take_structure(metadata)
            if not dist.is_initialized() or dist.get_rank() == 0:
                warn_of_hulls(os.fspath(self.path), self._list().hulls)
                warn_of_notes(os.fspath(self.path), self._open().notes)
            return metadata
        except (CheckpointError, OSError) as error:
            if not _DCP_TELLS_WHY:
                logger.error("%s", error)
            raise

    def _take_structure(self, metadata: Metadata) -> None:
        """The leaf in which SavePlanner keeps the containers is no leaf of the user's."""
        if not isinstance(metadata.state_dict_metadata.get(STRUCTURE_FQN), BytesStorageMetadata):
            return
        del metadata.state_dict_metadata[STRUCTURE_FQN]
        reader = ObjectReader(self._open(), self._list(), verify=self.verify, allow_pickle=False)
        metadata.planner_data[STRUCTURE_FQN] = reader.read_one(STRUCTURE_FQN)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
        seldom_full_collections(self)  # while the planner plans

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Note which save this rank sees, for the coordinator."""
        plan = super().prepare_local_plan(plan)
        seen = SeenSave(self.rank, self.save_id)
        return replace(plan, storage_data=seen) if plan.storage_data is None else plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        check_seen(os.fspath(self.path), [plan.storage_data for plan in plans])
        return super().prepare_global_plan(plans)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the planner's tensors and objects. Coverage is proved before a byte is copied."""
        usual_full_collections()
        tensors = [item for item in plan.items if item.type != LoadItemType.BYTE_IO]
        objects = [item for item in plan.items if item.type == LoadItemType.BYTE_IO]
        path = os.fspath(self.path)
        workers = transfer_workers(self.thread_count)
        try:
            check_read_boxes(planner, tensors)
            if tensors and self._reads_by_request():
                check_filled(tensors, planner, path)
                check_no_numbers(tensors, self._list().scaled, path)
                super().read_data(LoadPlan(tensors), planner)
            elif tensors:
                strict = self.strict_dtype or bool(getattr(planner, "strict_dtype", False))
                opened, listing = self._list_whole()
                TensorReader(
                    opened,
                    listing.tensors(),
                    made=shapes_of_numbers(listing),
                    workers=workers,
                    verify=self.verify,
                    strict_dtype=strict,
                    direct_io=self.direct_io,
                    aliases=listing.aliases,
                    scaled=listing.scaled,
                ).read(tensors, planner)
            if objects:
                ObjectReader(
                    self._open(),
                    self._list(),
                    verify=self.verify,
                    allow_pickle=self.allow_pickle,
                ).read(objects, planner)
        except ConflictError as error:
            raise ReplacedError(error.message, file=error.file, rank=self.rank) from error
        except (CheckpointError, OSError) as error:
            if self.rank is None:
                raise
            raise_with_rank(error, self.rank)
        done: Future[None] = Future()
        done.set_result(None)
        return done


class HuggingFaceStorageReader(CheckpointReader):
    """CheckpointReader under the name of stock's class."""
