"""LocalBoxes: what one rank has of a tensor, in boxes that it names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from torch_ckpt.errors import InvalidArgumentError, UnsupportedError


class LocalBoxes(torch.Tensor):
    """A leaf of a state dict: what this rank has, or wants, of a tensor of `global_shape`, in any
    number of boxes, none among them. For what DTensor cannot say.

    global_shape: the shape of the whole tensor, the same on all ranks.
    boxes: pairs (offsets, tensor): where in the whole the first element of `tensor` stands, in
        elements, and the box itself, in memory that a save reads and a load fills. All have as many
        dimensions as the whole, one dtype and one device.
    dtype: needed where there are no boxes.

    Boxes of one rank, and of several, that are saved must not overlap, but for those that several
    ranks have alike, of which one is written; together they cover the whole. A save of ours that
    finds otherwise is an error on all ranks. It is DCP's protocol for such leaves
    (`__create_write_items__` and its kin), so stock's planners take it as well.

    No operator computes with it: use the tensors in `boxes`.

    Raises InvalidArgumentError for a box that does not fit.
    """

    global_shape: torch.Size
    boxes: tuple[tuple[torch.Size, torch.Tensor], ...]

    @staticmethod
    def __new__(
        cls,
        global_shape: Sequence[int],
        boxes: Iterable[tuple[Sequence[int], torch.Tensor]],
        dtype: torch.dtype | None = None,
    ) -> LocalBoxes:
        shape = torch.Size(global_shape)
        held = tuple((torch.Size(offsets), tensor) for offsets, tensor in boxes)
        if not held and dtype is None:
            raise InvalidArgumentError("LocalBoxes without boxes need a dtype")
        of = held[0][1] if held else torch.empty(0, dtype=dtype, device="cpu")
        for offsets, tensor in held:
            _check(shape, offsets, tensor, of.dtype if dtype is None else dtype, of.device)
        made: LocalBoxes = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=of.dtype, device=of.device
        )
        made.global_shape, made.boxes = shape, held
        # What __tensor_flatten__ names are attributes.
        for number, (_, tensor) in enumerate(held):
            made.__dict__[f"box_{number}"] = tensor
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def __repr__(self) -> str:  # type: ignore[override]
        boxes = ", ".join(f"{list(tensor.shape)} at {list(at)}" for at, tensor in self.boxes)
        return f"LocalBoxes({list(self.global_shape)}, {self.dtype}: {boxes or 'no boxes'})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        boxes = [(tuple(offsets), tensor) for offsets, tensor in self.boxes]
        return LocalBoxes, (tuple(self.global_shape), boxes, self.dtype)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if str(func) == "aten.detach.default":
            return args[0]
        raise UnsupportedError(f"{func} of a LocalBoxes: use the tensors in its `boxes`")

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        names = [f"box_{number}" for number in range(len(self.boxes))]
        return names, (self.global_shape, [offsets for offsets, _ in self.boxes], self.dtype)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], context: Any, size: Any = None, stride: Any = None
    ) -> LocalBoxes:
        shape, offsets, dtype = context
        return LocalBoxes(shape, zip(offsets, inner.values(), strict=True), dtype)

    # DCP's protocol for tensors that know their own boxes.

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties(self.dtype)
        return [
            WriteItem(
                MetadataIndex(fqn, offsets, number),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    ChunkStorageMetadata(offsets, tensor.size()), properties, self.global_shape
                ),
            )
            for number, (offsets, tensor) in enumerate(self.boxes)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets, tensor.size()) for offsets, tensor in self.boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        # The number tells those of a load apart that begin at one offset.
        number = index.index
        if number is not None and number < len(self.boxes):
            offsets, tensor = self.boxes[number]
            if offsets == index.offset:
                return tensor
        for offsets, tensor in self.boxes:
            if offsets == index.offset:
                return tensor
        raise InvalidArgumentError(
            f"this rank has no box at offset {index.offset}", tensor=index.fqn
        )


def _check(
    shape: torch.Size,
    offsets: torch.Size,
    tensor: torch.Tensor,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    fits = len(shape) == len(offsets) == tensor.dim()
    if not fits:
        wrong = f"is none of a tensor of {len(shape)} dimensions"
    for at, size, whole in zip(offsets, tensor.shape, shape, strict=fits):
        if at < 0 or at + size > whole:
            fits, wrong = False, f"is not inside of {list(shape)}"
    if tensor.dtype != dtype or tensor.device != device:
        fits = False
        wrong = f"is {tensor.dtype} on {tensor.device}; the others are {dtype} on {device}"
    if not fits:  # in words only then: there may be tens of thousands
        raise InvalidArgumentError(f"a box of {list(tensor.shape)} at {list(offsets)} {wrong}")
