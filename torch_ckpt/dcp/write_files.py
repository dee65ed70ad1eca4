"""From write items to the files of one rank: what goes where, and from which memory."""

from __future__ import annotations

import io
import secrets
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

from torch_ckpt.dtypes import DTYPE_NAMES, PACKED
from torch_ckpt.errors import InternalError, InvalidArgumentError, UnsupportedError
from torch_ckpt.objects import dumps_objects


@dataclass(slots=True)
class FilePlan:
    """A file for the write op. `group` is its index in the mapping, where the coordinator names
    final files (it alone knows how many ranks hold some of a file's tensors)."""

    request: dict[str, Any]
    group: int | None = None


@dataclass(slots=True)
class TensorSource:
    fqn: str
    dtype: str
    offsets: list[int] | None
    global_shape: list[int] | None
    data: torch.Tensor  # in host memory, or contiguous on a CUDA device
    gathered: bool  # data is a copy on a device, made for this save


def collect_tensors(planner: SavePlanner, items: list[WriteItem]) -> list[TensorSource]:
    """The memory of every item's box. Raises UnsupportedError or InvalidArgumentError.

    Contiguous CUDA tensors stay where they are: the engine copies them piece by piece while it
    writes. Others are gathered here, on their device. Tensors of other devices are copied to
    host memory.
    """
    sources = []
    for item in items:
        tensor = planner.resolve_data(item)
        fqn = item.index.fqn
        if not isinstance(tensor, torch.Tensor):
            raise InvalidArgumentError("the planner gave no tensor for a tensor", tensor=fqn)
        tensor = tensor.detach()
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise UnsupportedError(
                f"is {tensor.layout if not tensor.is_quantized else 'quantized'}; "
                "safetensors holds dense tensors",
                tensor=fqn,
            )
        if tensor.is_meta:
            raise InvalidArgumentError("is on the meta device and has no data", tensor=fqn)
        given = tensor
        if tensor.is_conj() or tensor.is_neg():
            tensor = tensor.resolve_conj().resolve_neg()
        if tensor.is_cuda and torch.version.cuda is not None:  # and not ROCm, which is_cuda too
            tensor = tensor.contiguous()
        elif tensor.device.type != "cpu":
            tensor = tensor.cpu()
        dtype = DTYPE_NAMES.get(tensor.dtype)
        if dtype is None:
            raise UnsupportedError(
                f"has dtype {tensor.dtype}, which safetensors cannot hold", tensor=fqn
            )
        gathered = tensor.is_cuda and tensor is not given
        sources.append(_source(item, fqn, dtype, tensor, gathered))
    return sources


def wait_for_kernels(sources: list[torch.Tensor]) -> None:
    """Wait for the work queued on the current stream of every CUDA device of `sources`: the
    engine's copies run on streams of their own."""
    for device in {source.device for source in sources if source.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


def _source(
    item: WriteItem, fqn: str, dtype: str, tensor: torch.Tensor, gathered: bool
) -> TensorSource:
    data = item.tensor_data
    if data is None:
        raise InternalError("a tensor's plan has no shape", tensor=fqn)
    sizes, shape = data.chunk.sizes, data.size
    if sizes != tensor.shape:
        raise InvalidArgumentError(
            f"the plan says {tuple(sizes)}, the tensor has {tuple(tensor.shape)}", tensor=fqn
        )
    if sizes == shape:
        return TensorSource(fqn, dtype, None, None, tensor, gathered)
    offsets, global_shape = list(data.chunk.offsets), list(shape)
    packed = PACKED.get(dtype, 1)
    if packed > 1:
        offsets[-1] *= packed
        global_shape[-1] *= packed
    return TensorSource(fqn, dtype, offsets, global_shape, tensor, gathered)


def data_files(
    tensors: list[TensorSource],
    index: int,
    count: int,
    rank: int,
    *,
    distributed: bool,
    sources: list[torch.Tensor],
) -> list[FilePlan]:
    """The data files for the tensors of mapping index `index` of `count`; appends to `sources`.

    Box k of a tensor that has several on this rank goes to file index + k * count: stock readers
    load that right, and two entries of one name cannot stand in one file.
    """
    layers: list[list[TensorSource]] = []
    seen: defaultdict[str, int] = defaultdict(int)
    for tensor in tensors:
        layer = seen[tensor.fqn]
        seen[tensor.fqn] += 1
        if layer == len(layers):
            layers.append([])
        layers[layer].append(tensor)
    files = []
    for layer, members in enumerate(layers):
        first = len(sources)
        sources += [member.data for member in members]
        if distributed:
            number, total = index + layer * count, count * len(layers)
            name = f"shard-{rank + 1:05}-model-{number:05}-of-{total:05}.safetensors"
        else:
            name = f"model-{index:05}-rank-{rank + 1:05}-{layer}.safetensors"
        offsets = [member.offsets for member in members]
        sharded = any(offset is not None for offset in offsets)
        request = {
            "name": name,
            "role": "data",
            "sharded": distributed,
            "names": [member.fqn for member in members],
            "dtypes": [member.dtype for member in members],
            "sources": list(range(first, len(sources))),
            "offsets": offsets if sharded else None,
            "global_shapes": [member.global_shape for member in members] if sharded else None,
        }
        files.append(FilePlan(request, None if distributed else index))
    return files


class RawBytes:
    """What a planner of the user's made of a leaf; it alone can read it again."""

    def __init__(self, data: bytes) -> None:
        self.data = data


def _leaf(planner: SavePlanner, item: WriteItem) -> Any:
    """The object of a leaf: itself where the planner leaves pickling to stock's default."""
    kind: Any = type(planner)
    if (
        isinstance(planner, DefaultSavePlanner)
        and kind.resolve_data is DefaultSavePlanner.resolve_data
        and kind.transform_object is DefaultSavePlanner.transform_object
    ):
        return planner.lookup_object(item.index)
    data = planner.resolve_data(item)
    if isinstance(data, io.BytesIO):
        return RawBytes(data.getvalue())
    return data


def collect_objects(
    planner: SavePlanner,
    items: list[WriteItem],
    rank: int,
    sources: list[torch.Tensor],
    *,
    allow_pickle: bool,
) -> tuple[list[str], list[FilePlan]]:
    """The leaves that are no tensors: their fqns, and the objects file with its side file."""
    leaves, raw = {}, []
    for item in items:
        leaf = _leaf(planner, item)
        if isinstance(leaf, RawBytes):
            raw.append(item.index.fqn)
            leaf = leaf.data
        leaves[item.index.fqn] = leaf
    if raw:
        leaves[RAW_LEAVES] = raw
    text, side = dumps_objects(leaves, file_id=secrets.token_hex(16), allow_pickle=allow_pickle)
    files = []
    for name, pieces in (
        (f"objects-{rank + 1:05}.json", [text.encode("ascii")]),
        (f"objects-{rank + 1:05}.bin", side),
    ):
        if not pieces:
            continue
        first = len(sources)
        sources += [torch.frombuffer(bytearray(piece), dtype=torch.uint8) for piece in pieces]
        request = {
            "name": name,
            "role": "objects",
            "sources": list(range(first, len(sources))),
        }
        files.append(FilePlan(request))
    return [name for name in leaves if name != RAW_LEAVES], files


# A reserved leaf of the objects file: the fqns whose bytes came from a planner of the user's.
RAW_LEAVES = "torch_ckpt.raw_leaves"
