"""The leaves by which Megatron's programs say what is on this rank of what the whole job has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from torch_ckpt.megatron.config import CheckpointingException
from torch_ckpt.megatron.kinds import Kind, kind_of
from torch_ckpt.megatron.trees import dict_list_map_inplace

StateDict = dict[str, Any]
CommonStateDict = dict[str, Any]
ShardedStateDict = dict[str, Any]
ReplicaId = int | tuple[int, ...]


class ShardedBase:
    """A leaf that has a key, under which it is stored, and data, which may be None.

    replica_id: 0, or all 0, where this rank's is the one that is stored of several alike.
    """

    key: str
    data: Any
    replica_id: ReplicaId

    def validate_metadata_integrity(self) -> None:
        """Raise CheckpointingException, which names the key, where what is said does not fit."""
        raise NotImplementedError

    def without_data(self) -> ShardedBase:
        """The same, without its data."""
        raise NotImplementedError


@dataclass
class ShardedTensor(ShardedBase):
    """The box of a tensor that `data` is: at `global_offset`, in a tensor of `global_shape`, all in
    elements. The memory stays the caller's: a save reads it, and a load fills it.

    key: under which the tensor is stored.
    dtype, local_shape: those of `data`, which is None where there is none (yet).
    axis_fragmentations: into how many boxes of this size each axis is cut; None where boxes are of
        any sizes: then a rank may have several of one key.
    replica_id: 0, or all 0, where this rank's is the one that is stored of several alike.
    prepend_axis_num: so many leading axes only the global shape has; the box is 1 wide in them.
    allow_shape_mismatch: a load takes what it finds of the box in a tensor of another shape; the
        rest is 0.
    flattened_range: None. Parts of a tensor that was made flat are not supported.

    Raises CheckpointingException that names the key, where these do not fit each other.
    """

    key: str
    data: torch.Tensor | None = field(repr=False)
    dtype: torch.dtype
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    axis_fragmentations: tuple[int, ...] | None
    replica_id: ReplicaId = 0
    prepend_axis_num: int = 0
    allow_shape_mismatch: bool = False
    flattened_range: slice | None = None

    def __post_init__(self) -> None:
        self.validate_metadata_integrity()

    def validate_metadata_integrity(self) -> None:
        if self.flattened_range is not None:
            raise self._wrong("has a flattened_range, which is not supported: name its boxes")
        dims = len(self.global_shape)
        if len(self.global_offset) != dims:
            raise self._wrong(
                f"has an offset of {len(self.global_offset)} dimensions, and {dims} of them"
            )
        if self.prepend_axis_num + len(self.local_shape) != dims:
            raise self._wrong(
                f"has {dims} dimensions; its box has {len(self.local_shape)}, and "
                f"{self.prepend_axis_num} are before them"
            )
        if self.axis_fragmentations is not None and len(self.axis_fragmentations) != dims:
            raise self._wrong(
                f"has fragmentations of {len(self.axis_fragmentations)} dimensions, and {dims}"
            )
        if self.data is not None:
            if self.data.dtype != self.dtype:
                raise self._wrong(f"is said to be {self.dtype}, and its data are {self.data.dtype}")
            if tuple(self.data.shape) != tuple(self.local_shape):
                raise self._wrong(
                    f"is said to have the shape {tuple(self.local_shape)} here, and its data have "
                    f"{tuple(self.data.shape)}"
                )
        if self.axis_fragmentations is not None:
            for axis, (offset, size) in enumerate(
                zip(self.global_offset, self.box_sizes, strict=True)
            ):
                if size and offset % size:
                    raise self._wrong(
                        f"is off its grid: {offset} along axis {axis}, in steps of {size}"
                    )

    def _wrong(self, what: str) -> CheckpointingException:
        return CheckpointingException(what, tensor=self.key)

    @property
    def box_sizes(self) -> tuple[int, ...]:
        """Those of the box in all axes of the global shape."""
        return (1,) * self.prepend_axis_num + tuple(self.local_shape)

    @property
    def has_regular_grid(self) -> bool:
        """Whether all boxes of the tensor are of one size."""
        return self.axis_fragmentations is not None

    def local_chunk_offset_in_global(self) -> tuple[int, ...]:
        """The how-manieth box of the grid it is, in each axis. Raises CheckpointingException where
        boxes are on no grid."""
        if not self.has_regular_grid:
            raise self._wrong("is on no regular grid")
        return tuple(
            offset // size if size else 0
            for offset, size in zip(self.global_offset, self.box_sizes, strict=True)
        )

    def without_data(self) -> ShardedTensor:
        return replace(self, data=None)

    def init_data(
        self, device: torch.device | str, init_fn: Callable[..., torch.Tensor] = torch.empty
    ) -> None:
        """Make data where there are none: `init_fn(shape, dtype=, device=)`."""
        if self.data is None:
            self.data = init_fn(self.local_shape, dtype=self.dtype, device=device)

    def narrow(self, dim: int, start: int, length: int) -> list[ShardedTensor]:
        """What is left when every rank narrows its box alike, as `torch.narrow` does: a list of
        one, on the grid of these smaller boxes, with a view of the data. `dim` counts the axes of
        `data`. Raises IndexError for one that there is not, CheckpointingException where boxes
        differ along it."""
        if not -len(self.local_shape) <= dim < len(self.local_shape):
            raise IndexError(f"{self.key}: its data have no dimension {dim}")
        dim %= len(self.local_shape)
        size, axis = self.local_shape[dim], dim + self.prepend_axis_num
        offset, whole = self.global_offset[axis], self.global_shape[axis]
        if size == 0 or offset % size or whole % size:
            raise self._wrong(f"cannot be narrowed along axis {axis}: its boxes differ there")

        def put(values: tuple[int, ...], at: int, value: int) -> tuple[int, ...]:
            return (*values[:at], value, *values[at + 1 :])

        return [
            replace(
                self,
                data=None if self.data is None else self.data.narrow(dim, start, length),
                local_shape=put(self.local_shape, dim, length),
                global_shape=put(self.global_shape, axis, whole // size * length),
                global_offset=put(self.global_offset, axis, offset // size * length),
            )
        ]

    @classmethod
    def from_rank_offsets(
        cls,
        key: str,
        data: torch.Tensor,
        *rank_offsets: tuple[int, int, int],
        replica_id: ReplicaId = 0,
        prepend_axis_num: int = 0,
        flattened_range: None = None,
        **init_kwargs: Any,
    ) -> ShardedTensor:
        """The box that is number `offset` of `fragments` alike along `axis`, for each (axis,
        offset, fragments) of `rank_offsets`; axes count those before the tensor's own. Where none
        is named, `data` is all of the tensor. Other arguments are those of the class.

        Raises CheckpointingException for numbers that make no box, and for an axis that is named
        twice; IndexError for one that there is not; ValueError for a flattened_range.
        """
        if flattened_range is not None:
            raise ValueError(f"{key}: flattened_range is not supported: name the boxes")
        sizes = [1] * prepend_axis_num + list(data.shape)
        offsets, fragments = [0] * len(sizes), [1] * len(sizes)
        named: set[int] = set()
        for axis, offset, count in rank_offsets:
            if axis < 0 or offset < 0 or count < 1 or offset >= count or axis in named:
                raise CheckpointingException(
                    f"number {offset} of {count} along axis {axis} is no box, or is named twice: "
                    f"{rank_offsets}",
                    tensor=key,
                )
            named.add(axis)
            offsets[axis], fragments[axis] = offset * sizes[axis], count
        return cls(
            key,
            data,
            data.dtype,
            tuple(data.shape),
            tuple(size * count for size, count in zip(sizes, fragments, strict=True)),
            tuple(offsets),
            tuple(fragments),
            replica_id,
            prepend_axis_num,
            flattened_range=None,
            **init_kwargs,
        )

    def __str__(self) -> str:
        return f"{type(self).__name__}(key='{self.key}')"


@dataclass
class ShardedObject(ShardedBase):
    """Any object that typed JSON can say (format.md, section 7): the one at `global_offset` of a
    grid of `global_shape` objects.

    key: under which the grid is stored, each object with its place.
    data: the object; None where there is none (yet).
    replica_id: 0, or all 0, where this rank's is the one that is stored of several alike.

    Raises CheckpointingException that names the key, for a place that is not on the grid.
    """

    key: str
    data: object
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    replica_id: ReplicaId = 0

    def __post_init__(self) -> None:
        self.validate_metadata_integrity()

    def validate_metadata_integrity(self) -> None:
        shape, offset = self.global_shape, self.global_offset
        # Names of old checkpoints leave out the last size: -1.
        fits = len(shape) == len(offset) and all(
            0 <= at and (at < size or size == -1) for at, size in zip(offset, shape, strict=True)
        )
        if not fits:
            raise CheckpointingException(
                f"is at {tuple(offset)} of a grid of {tuple(shape)}", tensor=self.key
            )

    @property
    def unique_key(self) -> str:
        """Under which it is stored: with its place."""
        offset, shape = (".".join(map(str, n)) for n in (self.global_offset, self.global_shape))
        return f"{self.key}/shard_{offset}_{shape}"

    @classmethod
    def empty_from_unique_key(cls, unique_key: str, replica_id: ReplicaId = 0) -> ShardedObject:
        """The object of that unique key, without data. Keys may hold slashes. In names of old
        checkpoints the last size is missing: it is -1 then. Raises CheckpointingException for what
        is no unique key."""
        key, _, place = unique_key.rpartition("/")
        try:
            word, offsets, sizes = place.split("_")
            offset = tuple(int(n) for n in offsets.split(".")) if offsets else ()
            shape = tuple(int(n) for n in sizes.split(".")) if sizes else ()
            if word != "shard" or not key:
                raise ValueError
        except ValueError:
            raise CheckpointingException(
                "is no unique key, <key>/shard_<offset>_<shape>", tensor=unique_key
            ) from None
        if len(shape) + 1 == len(offset):
            shape = (*shape, -1)
        return cls(key, None, shape, offset, replica_id)

    def without_data(self) -> ShardedObject:
        return replace(self, data=None)

    def __str__(self) -> str:
        return f"{type(self).__name__}(key='{self.key}')"


@dataclass
class ShardedTensorFactory(ShardedBase):
    """Makes entries of `data` right before a save or load, and one of what was loaded after it.

    key, replica_id, flattened_range: what `build_fn` is given beside `data`.
    build_fn: (key, data, replica_id, flattened_range) to a tree of entries: dicts and lists of
        ShardedTensors, ShardedObjects and factories, and nothing else. A save and a load call it.
    merge_fn: such a tree, of what was loaded, to what belongs in the place of `data`.
    """

    key: str
    data: torch.Tensor | None
    build_fn: Callable[[str, Any, ReplicaId, slice | None], ShardedStateDict]
    merge_fn: Callable[[StateDict], torch.Tensor]
    replica_id: ReplicaId = 0
    flattened_range: slice | None = None

    def build(self) -> ShardedStateDict:
        """What `build_fn` gives."""
        return self.build_fn(self.key, self.data, self.replica_id, self.flattened_range)

    def validate_metadata_integrity(self) -> None:
        """What it builds says that of itself."""

    def without_data(self) -> ShardedTensorFactory:
        return replace(self, data=None)

    def __str__(self) -> str:
        return f"{type(self).__name__}(key='{self.key}')"


class LocalNonpersistentObject:
    """A value of this rank, `obj`, that is not stored, and that a load gives back as it was asked
    with."""

    def __init__(self, obj: Any) -> None:
        self.obj = obj

    def unwrap(self) -> Any:
        """The value."""
        return self.obj


def is_main_replica(replica_id: ReplicaId) -> bool:
    """Whether it is the one of several alike that is stored."""
    return replica_id == 0 if isinstance(replica_id, int) else not any(replica_id)


def apply_factories(sharded_state_dict: ShardedStateDict) -> None:
    """Put what each factory builds in its place."""

    def built(leaf: Any) -> Any:
        return leaf.build() if kind_of(leaf) is Kind.FACTORY else leaf

    dict_list_map_inplace(built, sharded_state_dict)


def apply_factory_merges(x1: Any, x2: Any, key: tuple[str, ...] = ()) -> Any:
    """Put what the factories of `x2` make of what was loaded in their places in `x1`, which is
    changed and returned. A list of `x2` may be a dict by position. Raises ValueError that names
    the path where the trees do not fit."""
    if kind_of(x2) is Kind.FACTORY:
        return x2.merge_fn(x1)
    places: list[tuple[Any, Any]] | None = None
    if isinstance(x2, dict):
        is_listed = isinstance(x1, list) and all(type(at) is int and at < len(x1) for at in x2)
        places = list(x2.items()) if isinstance(x1, dict) or is_listed else None
    elif isinstance(x2, list):
        fits = isinstance(x1, list) and len(x1) == len(x2)
        places = list(enumerate(x2)) if fits else None
    else:
        return x1
    said = ".".join(map(str, key)) or "the whole"
    if places is None:
        raise ValueError(
            f"{said}: a {type(x1).__name__} was loaded where a {type(x2).__name__} of {len(x2)} "
            "entries has factories"
        )
    for name, value in places:
        if isinstance(x1, dict) and name not in x1:
            raise ValueError(f"{said}: nothing was loaded for {name!r}, which has factories")
        x1[name] = apply_factory_merges(x1[name], value, (*key, str(name)))
    return x1
