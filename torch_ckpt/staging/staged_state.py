"""A copy of a state dict: its structure at once, its tensors when they are staged."""

from __future__ import annotations

import contextlib
import copy
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from torch_ckpt.errors import UnsupportedError
from torch_ckpt.native.operators import Region
from torch_ckpt.native.tensors import PLAIN_TENSORS, has_elements, memory_of, what_is_wrong
from torch_ckpt.native.torch_private import (
    AsyncCollectiveTensor,
    LocalShardsWrapper,
    ShardedTensor,
    dtensor_of,
    is_wrapper,
    local_tensor,
    sharded_tensor_like,
)
from torch_ckpt.planning.flatten import too_deep
from torch_ckpt.planning.per_rank import PerRank
from torch_ckpt.staging.sources import MAX_DIMENSIONS, in_memory_order, reachable

# Immutable, so that a copy may share them.
_VALUES = frozenset(
    {type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device}
)

# Dicts that take any value and keep it as it is.
_DICTS = frozenset({OrderedDict, defaultdict, Counter})


class StagedState(dict[str, Any]):
    """A state dict whose tensors lie in one leased region of host memory.

    Equal to the state it was made of, type for type but for the outermost dict. The region is
    leased until `end`, or until the state and the last of its tensors are gone. How it goes to
    another process is in staging/crossing.py.
    """

    def __init__(self, *items: Any) -> None:
        super().__init__(*items)
        self._region: Region | None = None
        self.packed: Any = None  # see crossing.pack
        self._staged: list[torch.Tensor] = []  # that lie in the region

    def lies_in(self, region: Region | None, tensors: list[torch.Tensor]) -> None:
        """`tensors` are those of the state that lie in `region`."""
        self._region, self._staged = region, tensors

    @property
    def staged_bytes(self) -> int:
        """Of the region, that hold tensors."""
        return 0 if self._region is None else self._region.used

    def __reduce__(self) -> Any:
        return StagedState, (dict(self),)

    def end(self) -> None:
        """Let the region go, whoever still refers to the tensors: they are empty from now on."""
        tensors, self._staged, self._region, self.packed = self._staged, [], None, None
        with torch.no_grad():
            for tensor in tensors:
                tensor.set_()  # type: ignore[call-overload]


class StateCopy:
    """The structure of `state_dict`, copied, with its leaves that are no tensors; `tensors` are
    what is to be staged, `names` their names as DCP flattens them.

    Containers keep their types, but for a subclass of dict that refuses or changes values that are
    put into a copy of it: the copy is a plain dict of its items. Leaves that are mutable are copied
    with `copy.deepcopy`. A tensor's attributes come along where they are plain data, and not the
    gradients or modules that they may refer to. Every tensor is the memory of one leaf, or of one
    inner tensor of a DTensor, ShardedTensor or other wrapper: in host memory, or on a CUDA device,
    with its dimensions as they stand there, where kernels that conjugate or negate it may still
    run. Tensors that the engine cannot copy (sparse, quantized, nested, of too many dimensions) are
    copied here. One that has no data is refused.

    Raises InvalidArgumentError or UnsupportedError that name the leaf.
    """

    def __init__(self, state_dict: dict[str, Any]) -> None:
        self.tensors: list[torch.Tensor] = []
        self.names: list[str] = []
        self._state = StagedState()
        self._places: list[tuple[Any, Any]] = []  # container and key of every tensor
        self._orders: dict[int, list[int]] = {}  # of dimensions, for tensors that have another here
        # What can only be made of what is inside: inner ones first.
        self._finish: list[Callable[[], None]] = []
        try:
            with torch.no_grad():
                for key, value in state_dict.items():
                    self._copy(self._state, key, value, str(key))
        except RecursionError:
            raise too_deep(state_dict) from None

    def with_tensors(self, staged: list[torch.Tensor], region: Region | None) -> StagedState:
        """The copy, with `staged`, which lie in `region`, in the places of `tensors`. Call it
        once."""
        for number, order in self._orders.items():
            staged[number] = _turned(staged[number], order)
        for (container, key), tensor in zip(self._places, staged, strict=True):
            container[key] = tensor
        for finish in self._finish:
            finish()
        self._state.lies_in(region, staged)
        self.tensors, self._places, self._finish = [], [], []
        return self._state

    def _copy(self, into: Any, key: Any, value: Any, name: str) -> None:
        """Put a copy of `value` at `into[key]`, now or when there are tensors."""
        kind = type(value)
        if kind in PLAIN_TENSORS:
            self._copy_plain(into, key, value, name)
        elif kind in _VALUES:
            into[key] = value
        elif isinstance(value, torch.Tensor):
            self._copy_tensor(into, key, value, name)
        elif kind is dict or kind in _DICTS:
            into[key] = inner = {} if kind is dict else _like(value)
            for k, v in value.items():
                self._copy(inner, k, v, f"{name}.{k}")
        elif isinstance(value, dict):
            self._copy_dict(into, key, value, name)
        elif isinstance(value, Mapping):  # as the planner opens it
            into[key] = inner = {}
            for k, v in value.items():
                self._copy(inner, k, v, f"{name}.{k}")
        elif isinstance(value, list):
            into[key] = items = [None] * len(value) if kind is list else copy.copy(value)
            for i, v in enumerate(value):
                self._copy(items, i, v, f"{name}.{i}")
        elif isinstance(value, tuple):
            self._copy_tuple(into, key, value, name)
        elif kind is PerRank:
            self._copy_per_rank(into, key, value, name)
        else:
            self._copy_object(into, key, value, name)

    def _copy_object(self, into: Any, key: Any, value: Any, name: str) -> None:
        try:
            into[key] = copy.deepcopy(value)
        except RecursionError:
            raise
        except Exception as error:
            raise UnsupportedError(
                f"a {type(value).__qualname__} cannot be copied for staging: {error}", tensor=name
            ) from error

    def _copy_dict(self, into: Any, key: Any, value: dict[Any, Any], name: str) -> None:
        """Of a subclass."""
        items: dict[Any, Any] = {}
        for k, v in value.items():
            self._copy(items, k, v, f"{name}.{k}")
        like: Any = None
        with contextlib.suppress(Exception):
            like = _like(value)

        def finish() -> None:
            into[key] = like if like is not None and _takes(like, items) else items

        into[key] = None
        self._finish.append(finish)

    def _copy_per_rank(self, into: Any, key: Any, value: PerRank, name: str) -> None:
        held: list[Any] = [None]
        self._copy(held, 0, value.value, name)

        def finish() -> None:
            into[key] = PerRank(held[0])

        into[key] = None
        self._finish.append(finish)

    def _copy_tuple(self, into: Any, key: Any, value: tuple[Any, ...], name: str) -> None:
        items: list[Any] = [None] * len(value)
        for i, v in enumerate(value):
            self._copy(items, i, v, f"{name}.{i}")
        make = getattr(value, "_make", type(value))  # of a named tuple

        def finish() -> None:
            into[key] = make(items)

        into[key] = None  # its place in the order of a dict
        self._finish.append(finish)

    def _copy_tensor(self, into: Any, key: Any, value: Any, name: str) -> None:
        """A subclass of Tensor."""
        if isinstance(value, AsyncCollectiveTensor):
            self._copy_plain(into, key, value.wait(), name)
        elif isinstance(value, DTensor):
            local: list[Any] = [None]
            self._copy(local, 0, local_tensor(value), name)

            def finish_dtensor() -> None:
                into[key] = dtensor_of(local[0], value)

            into[key] = None
            self._finish.append(finish_dtensor)
        elif isinstance(value, ShardedTensor):
            self._copy_sharded(into, key, value, name)
        elif isinstance(value, LocalShardsWrapper):
            self._copy_local_shards(into, key, value, name)
        elif has_elements(value) and is_wrapper(value):
            self._copy_wrapper(into, key, value, name)
        elif hasattr(value, "__create_write_items__"):  # it says by itself what is in it
            self._copy_object(into, key, value, name)
        else:  # a subclass with memory of its own
            memory = memory_of(value)
            if memory is None:
                raise UnsupportedError(what_is_wrong(value), tensor=name)
            self._copy_plain(into, key, memory, name)

    def _copy_wrapper(self, into: Any, key: Any, value: Any, name: str) -> None:
        """One of the subclasses that are made of other tensors, as torchao's."""
        attributes, context = value.__tensor_flatten__()
        inner: dict[str, Any] = {}
        for attribute in attributes:
            self._copy(inner, attribute, getattr(value, attribute), f"{name}.{attribute}")
        make, size, stride = type(value).__tensor_unflatten__, value.size(), value.stride()

        def finish() -> None:
            into[key] = make(inner, context, size, stride)

        into[key] = None
        self._finish.append(finish)

    def _copy_local_shards(self, into: Any, key: Any, value: LocalShardsWrapper, name: str) -> None:
        """What a rank has of a DTensor in several pieces, as of torchrec's tables."""
        shards: list[Any] = [None] * len(value.local_shards())
        offsets = [tuple(offset) for offset in value.local_offsets()]
        for i, shard in enumerate(value.local_shards()):
            self._copy(shards, i, shard, name)

        def finish() -> None:
            into[key] = LocalShardsWrapper(shards, offsets)

        into[key] = None
        self._finish.append(finish)

    def _copy_sharded(self, into: Any, key: Any, value: ShardedTensor, name: str) -> None:
        locals_: list[Any] = [None] * len(value.local_shards())
        for i, shard in enumerate(value.local_shards()):
            self._copy(locals_, i, shard.tensor, name)

        def finish() -> None:
            into[key] = sharded_tensor_like(locals_, value)

        into[key] = None
        self._finish.append(finish)

    def _copy_plain(self, into: Any, key: Any, tensor: torch.Tensor, name: str) -> None:
        on_cpu = tensor.is_cpu
        if not on_cpu and tensor.is_meta:
            raise UnsupportedError(what_is_wrong(tensor), tensor=name)
        if tensor.__dict__:
            self._copy_attributes(into, key, tensor.__dict__)
        if (
            memory_of(tensor) is None  # sparse, quantized, nested
            or tensor.dim() > MAX_DIMENSIONS
        ):
            into[key] = tensor.clone() if on_cpu else tensor.cpu()
            return
        if not on_cpu:
            tensor, order = in_memory_order(reachable(tensor))
            if order is not None:
                self._orders[len(self.tensors)] = order
        into[key] = None
        self._places.append((into, key))
        self.tensors.append(tensor)
        self.names.append(name)

    def _copy_attributes(self, into: Any, key: Any, attributes: dict[str, Any]) -> None:
        """For the tensor that will be at `into[key]`."""
        copies = {name: copy.deepcopy(v) for name, v in attributes.items() if _is_data(v)}
        if copies:
            self._finish.append(lambda: into[key].__dict__.update(copies))


def _turned(tensor: torch.Tensor, order: list[int]) -> torch.Tensor:
    """The same memory with its dimensions in this order, and no view of `tensor`: `end` takes its
    memory from it."""
    begin, shape, strides = tensor.storage_offset(), tensor.shape, tensor.stride()
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
        tensor.untyped_storage(),
        begin,
        [shape[dim] for dim in order],
        [strides[dim] for dim in order],
    )


def _like(value: Any) -> Any:
    """A shallow copy of a dict, with its attributes, as the _metadata of a module's state dict."""
    inner = copy.copy(value)
    if hasattr(value, "__dict__"):
        inner.__dict__.update(value.__dict__)
    return inner


def _takes(like: Any, items: dict[Any, Any]) -> bool:
    """Whether `like`, a dict of some subclass, has taken `items` as they are."""
    try:
        for key, value in items.items():
            like[key] = value
        return len(like) == len(items) and all(
            dict.__getitem__(like, key) is value for key, value in items.items()
        )
    except Exception:  # whatever a foreign __setitem__ raises
        return False


def _is_data(value: Any) -> bool:
    kind = type(value)
    if kind is dict:
        return all(_is_data(part) for pair in value.items() for part in pair)
    if kind in (list, tuple, set, frozenset):
        return all(map(_is_data, value))
    return kind in _VALUES
