"""Write and read items for leaves of a state dict, the way stock's planners make them, but one item
per true box of a DTensor and as little work per tensor as the stock types allow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    ReadItem,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.utils import find_state_dict_object
from torch.distributed.tensor import DTensor

from torch_ckpt.errors import InvalidArgumentError, UnsupportedError
from torch_ckpt.native import tensors
from torch_ckpt.native.tensors import PLAIN_TENSORS
from torch_ckpt.native.torch_private import (
    ShardedTensor,
    create_chunk_list,
    create_write_items,
    local_tensor,
)
from torch_ckpt.planning.boxes import local_boxes, local_part
from torch_ckpt.planning.collector import paused_gc
from torch_ckpt.planning.local_boxes import LocalBoxes

# An offset of zeros per number of dimensions: shared, since torch.Size is immutable.
ZEROS = tuple(torch.Size((0,) * ndim) for ndim in range(65))
_NO_SIZE = torch.Size((0,))
_TENSOR = LoadItemType.TENSOR  # looked up once: attributes of an Enum are slow


@dataclass(frozen=True)
class UnwritableItem(WriteItem):
    """A tensor that the engine cannot write, where a writer of torch's could: ours refuses it when
    it sees the plan, before anything is written.

    reason: what is wrong with it, in words.
    """

    reason: str = ""


@dataclass(frozen=True)
class ShareItem(WriteItem):
    """A share of a box that a rank has, which is cut because several have it.

    held: the item by which the rank offered all of the box.
    """

    held: WriteItem | None = None

    @staticmethod
    def of(held: WriteItem, axis: int, begin: int, end: int) -> ShareItem:
        """What `held` has from `begin` to `end` along `axis`."""
        data = held.tensor_data
        assert data is not None
        offsets, sizes = [*data.chunk.offsets], [*data.chunk.sizes]
        offsets[axis] += begin
        sizes[axis] = end - begin
        chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        return ShareItem(
            MetadataIndex(held.index.fqn, chunk.offsets),
            WriteItemType.SHARD,
            None,
            TensorWriteData(chunk, data.properties, data.size),
            held,
        )

    def of_held(self, tensor: torch.Tensor) -> torch.Tensor:
        """Its part of `tensor`, the box that `held` offers: a view."""
        assert self.held is not None and self.held.tensor_data is not None
        assert self.tensor_data is not None
        held, own = self.held.tensor_data.chunk, self.tensor_data.chunk
        for axis, (at, size) in enumerate(zip(own.offsets, own.sizes, strict=True)):
            tensor = tensor.narrow(axis, at - held.offsets[axis], size)
        return tensor


class WriteItems(list[WriteItem]):
    """Items of a plan, which pickle as their names and what else many of them have in common: a
    tenth of the time, and most of it in Python, so that other threads run meanwhile."""

    def __reduce__(self) -> Any:
        kinds: dict[Any, int] = {}
        firsts: list[WriteItem] = []
        numbers = []
        for item in self:
            index, data = item.index, item.tensor_data
            kind: Any = id(item)  # of a subclass, which may hold more
            if type(item) is WriteItem and type(index) is MetadataIndex:
                # The type is one of an Enum, whose hash takes longer than all of this.
                kind = (index.offset, index.index, id(item.type), id(item.bytes_io_data), id(data))
            number = kinds.setdefault(kind, len(firsts))
            if number == len(firsts):
                firsts.append(item)
            numbers.append(number)
        return _unpickled, ([item.index.fqn for item in self], numbers, firsts)


def _unpickled(fqns: list[str], numbers: list[int], firsts: list[WriteItem]) -> WriteItems:
    items = WriteItems()
    new, put = object.__new__, object.__setattr__
    with paused_gc():
        for fqn, number in zip(fqns, numbers, strict=True):
            first = firsts[number]
            index = new(type(first.index))
            index.__dict__.update(first.index.__dict__)
            put(index, "fqn", fqn)
            item = new(type(first))
            item.__dict__.update(first.__dict__)
            put(item, "index", index)
            items.append(item)
    return items


def dtensor_part(tensor: DTensor, index: MetadataIndex) -> torch.Tensor:
    """The local data of the box of `tensor` at `index`."""
    if hasattr(local_tensor(tensor), "__get_tensor_shard__"):
        return find_state_dict_object({index.fqn: tensor}, index)  # type: ignore[no-any-return]
    for box in local_boxes(tensor, index.fqn):
        if index.offset is None or box.offsets == index.offset:
            return local_part(tensor, box)
    raise ValueError(f"{index.fqn}: this rank has no box at offset {index.offset}")


def write_items(state_dict: Mapping[str, Any]) -> WriteItems:
    """The items by which this rank offers to write the leaves of a flat state dict.

    Boxes that are alike share one TensorWriteData: making it costs more than the rest of an item,
    and a pickled plan holds it once.
    """
    items = WriteItems()
    whole: dict[tuple[Any, ...], TensorWriteData] = {}
    boxes: dict[tuple[Any, ...], TensorWriteData] = {}
    # What the constructors of these frozen classes do, without calling them: that takes half.
    new, put, tensor_type = object.__new__, object.__setattr__, WriteItemType.TENSOR
    for fqn, value in state_dict.items():
        if type(value) not in PLAIN_TENSORS or value.is_nested or value.is_meta:
            items += _special_items(fqn, value, boxes)
            continue
        size = value.size()
        alike = (size, value.dtype, value.layout, value.requires_grad)
        data = whole.get(alike)
        if data is None:
            if not tensors.is_writable(value):
                items += _special_items(fqn, value, boxes)
                continue
            chunk = ChunkStorageMetadata(ZEROS[len(size)], size)
            # pin_memory and the strides of torch 2.15 are never read.
            data = whole[alike] = TensorWriteData(chunk, TensorProperties(*alike[1:]), size)
        index = new(MetadataIndex)
        put(index, "fqn", fqn)
        put(index, "offset", data.chunk.offsets)
        # The hint (position among the tensor's chunks) of a tensor in one piece, so that the
        # global plan need not replace the item.
        put(index, "index", 0)
        item = new(WriteItem)
        put(item, "index", index)
        put(item, "type", tensor_type)
        put(item, "bytes_io_data", None)
        put(item, "tensor_data", data)
        items.append(item)
    return items


def _special_items(
    fqn: str, value: Any, known: dict[tuple[Any, ...], TensorWriteData]
) -> list[WriteItem]:
    """The items of a leaf that is no plain tensor, or one that the engine cannot write. `known` has
    what boxes share."""
    local = local_tensor(value) if isinstance(value, DTensor) else value
    if type(value) is LocalBoxes:
        boxes = [(offsets, tensor.size()) for offsets, tensor in value.boxes]
        return _items_of_boxes(fqn, value, WriteItemType.SHARD, boxes, known)
    if hasattr(local, "__create_write_items__") or isinstance(value, ShardedTensor):
        return list(create_write_items(fqn, value))  # it knows its own boxes
    if not isinstance(value, torch.Tensor):
        return [WriteItem(MetadataIndex(fqn), WriteItemType.BYTE_IO)]
    wrong = None if tensors.is_writable(local) else tensors.what_is_wrong(local)
    if wrong is not None and tensors.is_shapeless(local):  # no plan can say it
        raise UnsupportedError(wrong, tensor=fqn)
    if isinstance(value, DTensor):
        boxes = [box[:2] for box in local_boxes(value, fqn)]
        return _items_of_boxes(fqn, value, WriteItemType.SHARD, boxes, known, wrong)
    size = value.size()
    boxes = [(ZEROS[len(size)], size)]
    return _items_of_boxes(fqn, value, WriteItemType.TENSOR, boxes, known, wrong)


def _items_of_boxes(
    fqn: str,
    value: torch.Tensor,
    kind: WriteItemType,
    boxes: Iterable[tuple[torch.Size, torch.Size]],
    known: dict[tuple[Any, ...], TensorWriteData],
    wrong: str | None = None,
) -> list[WriteItem]:
    """Of offsets and sizes. `wrong`: why the engine cannot write them."""
    size = value.size()
    properties = (value.dtype, value.layout, value.requires_grad)
    items: list[WriteItem] = []
    for position, (offsets, sizes) in enumerate(boxes):
        alike = (offsets, sizes, size, properties)
        data = known.get(alike)
        if data is None:
            chunk = ChunkStorageMetadata(offsets, sizes)
            data = known[alike] = TensorWriteData(chunk, TensorProperties(*properties), size)
        index = MetadataIndex(fqn, offsets, position)
        items.append(
            WriteItem(index, kind, None, data)
            if wrong is None
            else UnwritableItem(index, kind, None, data, wrong)
        )
    return items


def object_read_item(fqn: str) -> ReadItem:
    index = MetadataIndex(fqn)
    return ReadItem(LoadItemType.BYTE_IO, index, _NO_SIZE, index, _NO_SIZE, _NO_SIZE)


def _whole_read_item(fqn: str, size: torch.Size) -> ReadItem:
    """ReadItem(TENSOR, ...) of a tensor in one piece, as write_items makes its items."""
    new, put, zeros = object.__new__, object.__setattr__, ZEROS[len(size)]
    index = new(MetadataIndex)
    put(index, "fqn", fqn)
    put(index, "offset", zeros)
    put(index, "index", 0)
    item = new(ReadItem)
    put(item, "type", _TENSOR)
    put(item, "dest_index", index)
    put(item, "dest_offsets", zeros)
    put(item, "storage_index", index)
    put(item, "storage_offsets", zeros)
    put(item, "lengths", size)
    return item


def read_items(
    fqn: str, saved: TensorStorageMetadata | BytesStorageMetadata, target: Any
) -> list[ReadItem]:
    """The items that fill `target` from what was saved as `fqn`.

    Raises InvalidArgumentError naming the fqn, what the target expects, and what was found;
    UnsupportedError for a target without a shape.
    """
    if isinstance(saved, BytesStorageMetadata):
        return [object_read_item(fqn)]
    if not isinstance(target, torch.Tensor):
        raise InvalidArgumentError(
            f"{fqn}: the target expects an object (it has a {type(target).__name__}), the "
            f"checkpoint has a tensor of shape {list(saved.size)} and {saved.properties.dtype}"
        )
    kind = type(target)
    if (kind not in PLAIN_TENSORS or target.is_nested) and tensors.is_shapeless(target):
        raise UnsupportedError(f"its target {tensors.what_is_wrong(target)}", tensor=fqn)
    size = target.size()
    if size != saved.size:
        raise InvalidArgumentError(
            f"Size mismatch between saved {saved.size} and current: {size} for {fqn}: the target "
            f"expects shape {list(size)}, the checkpoint has {list(saved.size)}"
        )
    if kind in PLAIN_TENSORS:
        chunks = saved.chunks
        zeros = ZEROS[len(size)]
        if len(chunks) == 1 and chunks[0].sizes == size:
            return [_whole_read_item(fqn, size)]
        local_chunks = [ChunkStorageMetadata(zeros, size)]
    elif isinstance(target, DTensor) and not hasattr(local_tensor(target), "__create_chunk_list__"):
        local_chunks = [
            ChunkStorageMetadata(box.offsets, box.sizes) for box in local_boxes(target, fqn)
        ]
    else:
        local_chunks = list(create_chunk_list(target))
    return list(create_read_items_for_chunk_list(fqn, saved, local_chunks))
