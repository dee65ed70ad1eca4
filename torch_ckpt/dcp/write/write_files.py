"""What one rank writes of a save: which tensors and objects, from which memory, to which files, and
the native calls that do it."""

from __future__ import annotations

import io
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType

from torch_ckpt.checkpoint.names import OBJECT_FILE, SHARD_FILE, SIDE_FILE
from torch_ckpt.dcp.plan import save_planner
from torch_ckpt.dcp.plan.items import ShareItem, UnwritableItem
from torch_ckpt.dcp.plan.stock_planner import check_written_boxes, has_method_of
from torch_ckpt.dcp.write.commit import RankReport
from torch_ckpt.dcp.write.layouts import Layout, Layouts
from torch_ckpt.errors import InternalError, InvalidArgumentError, UnsupportedError
from torch_ckpt.native import core, operators
from torch_ckpt.native.dtypes import DTYPE_NAMES, PACKED
from torch_ckpt.native.jobs import Job
from torch_ckpt.native.tensors import PLAIN_TENSORS, source_of
from torch_ckpt.objects import dumps_objects
from torch_ckpt.planning.collector import resumed_gc
from torch_ckpt.planning.reserved import RAW_LEAVES
from torch_ckpt.staging.sources import MAX_DIMENSIONS, queued_kernels, reachable, wait_for

_MAX_NAME_BYTES = 65_535  # kMaxNameBytes in csrc/format/names.h


@dataclass(slots=True)
class TensorColumns:
    """What is written of the tensors of one mapping index: entry i of every list is tensor i's."""

    fqns: list[str] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)  # names of safetensors
    # Of a box that is not the whole tensor; None for one that is.
    offsets: list[list[int] | None] = field(default_factory=list)
    global_shapes: list[list[int] | None] = field(default_factory=list)
    # In host memory, or on a CUDA device.
    data: list[torch.Tensor] = field(default_factory=list)
    gathered: bool = False  # some of the data are copies on a device, made for this save

    def extend(self, other: TensorColumns) -> None:
        """Add the tensors of `other`."""
        self.fqns += other.fqns
        self.dtypes += other.dtypes
        self.offsets += other.offsets
        self.global_shapes += other.global_shapes
        self.data += other.data
        self.gathered |= other.gathered


def collect_tensors(planner: SavePlanner, items: list[WriteItem]) -> TensorColumns:
    """The memory of every item's box. Raises UnsupportedError or InvalidArgumentError.

    CUDA tensors stay where they are, whatever their strides: the engine copies them piece by piece
    while it writes. Conjugated and negated ones are made real here, on their device. Tensors of
    other devices are copied to host memory. Those of the CPU go as they are: before it calls an op
    that knows no conjugated or negated views, torch's dispatcher makes them real.
    """
    columns = TensorColumns()
    resolve = planner.resolve_data
    # What `resolve` would return for a plain tensor, after three calls.
    values = planner.state_dict if _resolves_as_stock(planner) else {}
    for item in items:
        fqn = item.index.fqn
        tensor = values.get(fqn)
        if type(tensor) not in PLAIN_TENSORS:
            tensor = resolve(item.held if type(item) is ShareItem and item.held else item)
        if not isinstance(tensor, torch.Tensor):
            raise InvalidArgumentError("the planner gave no tensor for a tensor", tensor=fqn)
        if type(item) is ShareItem:
            tensor = item.of_held(tensor)
        tensor = source_of(tensor, fqn)
        dtype = DTYPE_NAMES[tensor.dtype]
        if tensor.dim() > MAX_DIMENSIONS:
            raise UnsupportedError(
                f"has {tensor.dim()} dimensions; at most {MAX_DIMENSIONS} are supported",
                tensor=fqn,
            )
        if not tensor.is_cpu:
            given = tensor.detach()
            tensor = reachable(given)
            columns.gathered |= tensor.is_cuda and tensor is not given
        data = item.tensor_data
        if data is None:
            raise InternalError("a tensor's plan has no shape", tensor=fqn)
        sizes, shape = data.chunk.sizes, data.size
        if sizes != tensor.shape:
            raise InvalidArgumentError(
                f"the plan says {tuple(sizes)}, the tensor has {tuple(tensor.shape)}", tensor=fqn
            )
        columns.fqns.append(fqn)
        columns.dtypes.append(dtype)
        columns.data.append(tensor)
        if sizes == shape:
            columns.offsets.append(None)
            columns.global_shapes.append(None)
        else:
            packed = PACKED.get(dtype, 1)
            columns.offsets.append(_unpacked(data.chunk.offsets, packed))
            columns.global_shapes.append(_unpacked(shape, packed))
    return columns


def _transforms_as_stock(planner: SavePlanner) -> TypeGuard[DefaultSavePlanner]:
    """Whether an item's data are what `lookup_object` finds, and pickling is all that follows."""
    return (
        isinstance(planner, DefaultSavePlanner)
        and has_method_of(planner, "resolve_data", DefaultSavePlanner)
        and has_method_of(planner, "transform_object", DefaultSavePlanner)
    )


def _resolves_as_stock(planner: SavePlanner) -> TypeGuard[DefaultSavePlanner]:
    """Whether the data of an item are, besides, those that the flat state dict has by its fqn."""
    return _transforms_as_stock(planner) and has_method_of(
        planner, "lookup_object", DefaultSavePlanner, save_planner.SavePlanner
    )


def _unpacked(sizes: torch.Size, packed: int) -> list[int]:
    """Sizes in elements, where the last dimension counts groups of `packed` of them."""
    return list(sizes) if packed == 1 else [*sizes[:-1], sizes[-1] * packed]


def tensors_request(tensors: TensorColumns, sources: list[torch.Tensor]) -> dict[str, Any]:
    """The fields by which the write op knows tensors (csrc/ops/write_ops.cc); appends to
    `sources`."""
    partial = any(offset is not None for offset in tensors.offsets)
    dtypes = set(tensors.dtypes)
    request = {
        "first_source": len(sources),
        "names": core.names_text(tensors.fqns),
        "dtypes": dtypes.pop() if len(dtypes) == 1 else tensors.dtypes,
        "offsets": tensors.offsets if partial else None,
        "global_shapes": tensors.global_shapes if partial else None,
    }
    sources += tensors.data
    return request


def shard_file(tensors: TensorColumns, path: str, sources: list[torch.Tensor]) -> dict[str, Any]:
    """The file `path` of this rank for tensors of one mapping index; appends to
    `sources`. The boxes of one tensor are one entry of it (csrc/engine/save/data_layout.h)."""
    return {
        "name": path,
        "role": "data",
        **tensors_request(tensors, sources),
    }


def check_item(item: WriteItem, rank: int | None) -> None:
    """Raise InvalidArgumentError or UnsupportedError for an item that the format cannot hold."""
    fqn = item.index.fqn
    check_object_name(fqn, rank)
    held = item.held if type(item) is ShareItem else item
    if type(held) is UnwritableItem:
        raise UnsupportedError(held.reason, tensor=fqn, rank=rank)
    if item.type is WriteItemType.BYTE_IO:
        return
    # Rules of safetensors (CheckTensorName in csrc/format/names.h).
    if "\0" in fqn or fqn == "__metadata__":
        raise InvalidArgumentError("safetensors cannot hold this name", tensor=fqn, rank=rank)
    data = item.tensor_data
    if data is not None and len(data.size) > MAX_DIMENSIONS:
        raise UnsupportedError(
            f"has {len(data.size)} dimensions; at most {MAX_DIMENSIONS} are supported",
            tensor=fqn,
            rank=rank,
        )


def check_object_name(fqn: str, rank: int | None) -> None:
    """Raise InvalidArgumentError for a name that an object of a checkpoint cannot have."""
    if fqn.isascii() and len(fqn) <= _MAX_NAME_BYTES:
        return
    try:
        size = len(fqn.encode())
    except UnicodeEncodeError:
        raise InvalidArgumentError(f"the name {fqn[:100]!a} is not UTF-8", rank=rank) from None
    if size > _MAX_NAME_BYTES:
        raise InvalidArgumentError(
            f"the name has {size} bytes; {_MAX_NAME_BYTES} are allowed",
            tensor=f"{fqn[:100]}...",
            rank=rank,
        )


class RawBytes:
    """What a planner of the user's made of a leaf; it alone can read it again."""

    def __init__(self, data: bytes) -> None:
        self.data = data


def _leaves(planner: SavePlanner, items: list[WriteItem]) -> Iterator[Any]:
    """The objects of `items`: themselves where the planner leaves pickling to stock's default."""
    if _transforms_as_stock(planner):
        yield from (planner.lookup_object(item.index) for item in items)
        return
    for item in items:
        data = planner.resolve_data(item)
        yield RawBytes(data.getvalue()) if isinstance(data, io.BytesIO) else data


def collect_objects(
    planner: SavePlanner,
    items: list[WriteItem],
    rank: int,
    layout: Layout,
    sources: list[torch.Tensor],
    *,
    allow_pickle: bool,
) -> tuple[list[str], list[dict[str, Any]]]:
    """The leaves that are no tensors: their fqns, and the objects file with its side file."""
    leaves, raw = {}, []
    for item, leaf in zip(items, _leaves(planner, items), strict=True):
        if isinstance(leaf, RawBytes):
            raw.append(item.index.fqn)
        leaves[item.index.fqn] = leaf.data if isinstance(leaf, RawBytes) else leaf
    if raw:
        leaves[RAW_LEAVES] = raw
    text, side = dumps_objects(leaves, file_id=secrets.token_hex(16), allow_pickle=allow_pickle)
    files = []
    for name, pieces in (
        (OBJECT_FILE.format(rank + 1), [text.encode("ascii")]),
        (SIDE_FILE.format(rank + 1), side),
    ):
        if not pieces:
            continue
        request = {
            "name": layout.path(name),
            "role": "objects",
            "first_source": len(sources),
            "source_count": len(pieces),
        }
        sources += [torch.frombuffer(bytearray(piece), dtype=torch.uint8) for piece in pieces]
        files.append(request)
    return [name for name in leaves if name != RAW_LEAVES], files


@dataclass
class RankWrite:
    """planner: resolves the items.
    staging: the directory.
    report: what was written is added to it.
    layouts: which tensors go to final files, which are there already and whose headers say where,
        and which to shards of this rank.
    file_count: into which mapping indices shards are divided, at most.
    options: "workers", "sync", "direct_io" and "join", as the write op takes them.
    """

    planner: SavePlanner
    staging: str
    report: RankReport
    layouts: Layouts
    file_count: int
    allow_pickle: bool
    options: dict[str, Any]

    def run(self, buckets: dict[int, list[WriteItem]], objects: list[WriteItem]) -> None:
        """Write the tensors of every mapping index, and the objects."""
        sources: list[torch.Tensor] = []
        files: list[dict[str, Any]] = []
        final = TensorColumns()
        rank = self.report.rank
        for index, layout, items in self._by_file(buckets):
            check_written_boxes(self.planner, items)
            tensors = collect_tensors(self.planner, items)
            if layout.final:
                final.extend(tensors)
            else:
                name = SHARD_FILE.format(rank + 1, index, self.file_count)
                files.append(shard_file(tensors, layout.path(name), sources))
            if tensors.gathered:
                # At most one bucket of copies on the device at a time.
                self._write(files, final, sources)
                del tensors
                sources, files, final = [], [], TensorColumns()
        if objects:
            self.report.objects, object_files = collect_objects(
                self.planner,
                objects,
                rank,
                self.layouts.of_objects,
                sources,
                allow_pickle=self.allow_pickle,
            )
            files += object_files
        if files or final.fqns:
            self._write(files, final, sources)

    def _by_file(
        self, buckets: dict[int, list[WriteItem]]
    ) -> Iterator[tuple[int, Layout, list[WriteItem]]]:
        """The tensors of every mapping index, by their layout."""
        layouts = self.layouts
        for index, items in buckets.items():
            if layouts.beside is None:
                yield index, layouts.main, items
                continue
            for layout in layouts:
                of_layout = [item for item in items if layouts.of(item.index.fqn) is layout]
                if of_layout:
                    yield index, layout, of_layout

    def _write(
        self, files: list[dict[str, Any]], final: TensorColumns, sources: list[torch.Tensor]
    ) -> None:
        """Write `files`, and the tensors of `final` into final files, in one call."""
        into_final = None
        if final.fqns:
            policy = self.layouts.main.dtype_policy
            into_final = tensors_request(final, sources)
            into_final["stored"] = policy.stored_dtypes(final.fqns, final.dtypes)
        wait_for(queued_kernels(sources))
        plan = {
            "staging": self.staging,
            "files": files,
            "final": into_final,
            "rank": self.report.rank,
            **self.options,
        }
        with resumed_gc(), Job() as job:
            result = operators.write(sources, plan, job)
            self.report.written_bytes += job.progress()[0]
        self.report.files += result["files"]
        if into_final is not None:
            self.report.final.append(result["final"])
