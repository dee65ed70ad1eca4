"""What Megatron's leaves say, read by their fields."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import torch

from torch_ckpt.megatron.config import CheckpointingException
from torch_ckpt.megatron.leaves import is_main_replica
from torch_ckpt.planning.share import outermost

Numbers = tuple[int, ...]


@dataclasses.dataclass(slots=True, eq=False)
class Box:
    """A ShardedTensor: the box of `sizes` at `offset` of a tensor of `shape`.

    grid: into how many boxes each axis is cut; None where boxes are of any sizes.
    main: whether this rank's is the one that is stored of several alike.
    bends: whether a load takes what there is of it in a tensor of another shape.
    data: the memory of the box; it has fewer axes where some are prepended. None where there is
        none. A load puts the tensor that it fills here.
    quantized: in a load, the quantized tensor that is set to what `data` was filled with.
    prepended: how many axes `data` lacks.
    absent: whether the load found that it is not stored, and is to leave it out.
    """

    key: str
    dtype: torch.dtype
    shape: Numbers
    offset: Numbers
    sizes: Numbers
    grid: Numbers | None
    main: bool
    bends: bool
    prepended: int
    data: torch.Tensor | None
    absent: bool = False
    quantized: torch.Tensor | None = None

    @staticmethod
    def of(leaf: Any) -> Box:
        """Raises CheckpointingException, which names the key, for what is no box."""
        prepended = leaf.prepend_axis_num
        grid = leaf.axis_fragmentations
        box = Box(
            leaf.key,
            leaf.dtype,
            tuple(leaf.global_shape),
            tuple(leaf.global_offset),
            (1,) * prepended + tuple(leaf.local_shape),
            None if grid is None else tuple(grid),
            is_main_replica(leaf.replica_id),
            bool(leaf.allow_shape_mismatch),
            prepended,
            leaf.data,
        )
        box._check(leaf)
        return box

    def _check(self, leaf: Any) -> None:
        if type(self.key) is not str or not self.key:
            raise CheckpointingException(f"the key of a ShardedTensor is {self.key!r}")
        if getattr(leaf, "flattened_range", None) is not None:
            raise self.wrong("has a flattened_range, which is not supported")
        if not len(self.shape) == len(self.offset) == len(self.sizes):
            raise self.wrong(
                f"is {list(self.sizes)} at {list(self.offset)} of {list(self.shape)}: the numbers "
                "of dimensions differ"
            )
        data = self.data
        if data is None:
            return
        if not isinstance(data, torch.Tensor):
            raise self.wrong(f"has a {type(data).__name__} for data")
        if data.dtype != self.dtype or tuple(data.shape) != self.sizes[self.prepended :]:
            raise self.wrong(
                f"is said to be {self.dtype} of {list(self.sizes[self.prepended :])} here, and its "
                f"data are {data.dtype} of {list(data.shape)}"
            )

    def wrong(self, what: str) -> CheckpointingException:
        return CheckpointingException(what, tensor=self.key)

    @property
    def elements(self) -> int:
        return math.prod(self.sizes)

    def memory(self) -> torch.Tensor:
        """`data` with all axes of the box: a view. There must be data. Those of a quantized tensor
        are dequantized, one tensor at a time on its device, into memory of the CPU."""
        assert self.data is not None
        view = self.data.detach()
        if is_quantized(view):
            view = view.dequantize().to("cpu", self.dtype)
            if view.shape != self.data.shape:
                raise self.wrong(f"of {list(self.data.shape)} is dequantized to {list(view.shape)}")
        for _ in range(self.prepended):
            view = view.unsqueeze(0)
        return view

    def rows(self, begin: int, end: int) -> Box:
        """What it is from row `begin` to `end` along its outermost axis: `self`, or a box of a view
        of its memory; of a quantized tensor, of a copy of these rows alone."""
        axis = outermost(self.sizes)
        if not self.sizes or (begin, end) == (0, max(1, self.sizes[axis])):
            return self
        offset, sizes = [*self.offset], [*self.sizes]
        offset[axis] += begin
        sizes[axis] = end - begin
        data = self.memory().narrow(axis, begin, end - begin)
        if self.data is not None and is_quantized(self.data):
            data = data.clone()  # or all of it is kept until the save is over
        return dataclasses.replace(
            self,
            offset=tuple(offset),
            sizes=tuple(sizes),
            grid=None,
            prepended=0,
            data=data,
        )

    def is_inside(self) -> bool:
        """Whether the tensor holds all of it."""
        return all(
            0 <= at and at + size <= whole
            for at, size, whole in zip(self.offset, self.sizes, self.shape, strict=True)
        )

    def words(self) -> str:
        return f"{list(self.sizes)} at {list(self.offset)} of {list(self.shape)}"


def is_quantized(tensor: torch.Tensor) -> bool:
    """Whether its class says how it is dequantized, as those of Transformer Engine do."""
    return type(tensor).dequantize is not torch.Tensor.dequantize


@dataclasses.dataclass(slots=True, eq=False)
class Cell:
    """A ShardedObject: the one at `offset` of a grid of `shape` objects.

    name: what it is stored under, key and place. value: what is saved, and what a load has found.
    """

    key: str
    shape: Numbers
    offset: Numbers
    main: bool
    name: str
    value: Any
    absent: bool = False

    @staticmethod
    def of(leaf: Any) -> Cell:
        shape, offset = tuple(leaf.global_shape), tuple(leaf.global_offset)
        if type(leaf.key) is not str or not leaf.key:
            raise CheckpointingException(f"the key of a ShardedObject is {leaf.key!r}")
        fits = len(shape) == len(offset) and all(
            0 <= at and (at < size or size == -1) for at, size in zip(offset, shape, strict=True)
        )
        if not fits:
            raise CheckpointingException(
                f"is the object at {list(offset)} of a grid of {list(shape)}", tensor=leaf.key
            )
        main = is_main_replica(leaf.replica_id)
        return Cell(leaf.key, shape, offset, main, name_of(leaf.key, offset, shape), leaf.data)


def name_of(key: str, offset: Iterable[int], shape: Iterable[int]) -> str:
    """The unique key of an object: under which it is stored, in our checkpoints and Megatron's."""
    return f"{key}/shard_{'.'.join(map(str, offset))}_{'.'.join(map(str, shape))}"
