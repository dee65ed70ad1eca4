"""What Megatron's leaves say, read by their fields."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from torch_ckpt.megatron.config import CheckpointingException
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
        if type(leaf.key) is not str or not leaf.key:
            raise CheckpointingException(f"the key of a ShardedTensor is {leaf.key!r}")
        prepended = _as_sizes(leaf, "prepend_axis_num", (leaf.prepend_axis_num,))[0]
        grid = leaf.axis_fragmentations
        box = Box(
            leaf.key,
            leaf.dtype,
            _as_sizes(leaf, "global_shape", leaf.global_shape),
            _as_sizes(leaf, "global_offset", leaf.global_offset),
            (1,) * prepended + _as_sizes(leaf, "local_shape", leaf.local_shape),
            None if grid is None else _as_sizes(leaf, "axis_fragmentations", grid),
            _is_main(leaf),
            bool(leaf.allow_shape_mismatch),
            prepended,
            leaf.data,
        )
        box._check(leaf)
        return box

    def _check(self, leaf: Any) -> None:
        # All that the class looks at when it is made: attributes may be set since.
        if getattr(leaf, "flattened_range", None) is not None:
            raise self.wrong("has a flattened_range, which is not supported")
        grid = self.shape if self.grid is None else self.grid
        if not len(self.shape) == len(self.offset) == len(self.sizes) == len(grid):
            cut = "" if self.grid is None else f" in a grid of {list(grid)}"
            raise self.wrong(f"is {self.words()}{cut}: the numbers of dimensions differ")
        if not isinstance(self.dtype, torch.dtype):
            raise self.wrong(f"is said to be {self.dtype!r}, which is no dtype")
        if self.data is not None:
            self._check_data(self.data)
        if self.grid is not None:
            for at, size in zip(self.offset, self.sizes, strict=True):
                if size and at % size:
                    raise self.wrong(f"is off its grid: {self.words()}")

    def _check_data(self, data: Any) -> None:
        if not isinstance(data, torch.Tensor):
            raise self.wrong(f"has a {type(data).__name__} for data")
        if isinstance(data, DTensor):
            # Of views of it torch would gather the parts, which not all ranks do.
            raise self.wrong("has a DTensor for data: give its to_local(), and the box that it is")
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
        if type(leaf.key) is not str or not leaf.key:
            raise CheckpointingException(f"the key of a ShardedObject is {leaf.key!r}")
        shape = _as_numbers(leaf, "global_shape", leaf.global_shape)
        offset = _as_numbers(leaf, "global_offset", leaf.global_offset)
        fits = len(shape) == len(offset) and all(
            0 <= at and (at < size or size == -1) for at, size in zip(offset, shape, strict=True)
        )
        if not fits:
            raise CheckpointingException(
                f"is the object at {list(offset)} of a grid of {list(shape)}", tensor=leaf.key
            )
        name = name_of(leaf.key, offset, shape)
        return Cell(leaf.key, shape, offset, _is_main(leaf), name, leaf.data)


def name_of(key: str, offset: Iterable[int], shape: Iterable[int]) -> str:
    """The unique key of an object: under which it is stored, in our checkpoints and Megatron's."""
    return f"{key}/shard_{'.'.join(map(str, offset))}_{'.'.join(map(str, shape))}"


def _as_numbers(leaf: Any, attribute: str, said: Any) -> Numbers:
    """`said`, which is that attribute of `leaf`. Raises CheckpointingException, which names the
    key, where it is not integers."""
    try:
        return tuple(map(operator.index, said))
    except TypeError:
        raise _no_numbers(leaf, attribute, said) from None


def _as_sizes(leaf: Any, attribute: str, said: Any) -> Numbers:
    """The same, none of them negative."""
    if type(said) is tuple:  # as nearly always: of many boxes this is most of the time
        for number in said:
            if type(number) is not int or number < 0:
                break
        else:
            return said
    numbers = _as_numbers(leaf, attribute, said)
    if numbers and min(numbers) < 0:
        raise _no_numbers(leaf, attribute, said)
    return numbers


def _no_numbers(leaf: Any, attribute: str, said: Any) -> CheckpointingException:
    return CheckpointingException(
        f"says {said!r} as its {attribute}, where no such numbers can stand", tensor=leaf.key
    )


def _is_main(leaf: Any) -> bool:
    said = leaf.replica_id
    return not said if isinstance(said, int) else not any(_as_numbers(leaf, "replica_id", said))
