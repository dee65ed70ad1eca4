"""Columns to rows, before a final save is planned: DTensors in rows too short to be written one by
one are redistributed by all-to-alls of their mesh's own groups, on the caller's thread.

The ranks of a mesh must do the same here, or would wait for each other: see `agree`. A DTensor is
exchanged along one dimension of its mesh after the other (row_steps.py).
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from torch_ckpt.dcp.agreement import agree
from torch_ckpt.dcp.items import PLAIN_TENSORS
from torch_ckpt.dcp.rings import this_node
from torch_ckpt.dcp.row_steps import Pieces, Step, pieces_of, steps_of
from torch_ckpt.dcp.ties import identity
from torch_ckpt.errors import CheckpointError

# How long ranks wait for each other before they leave the tensors as they are, for a ring or for
# the coordinator.
_SECONDS = 60.0
# About as much of a rank's tensors is exchanged at once; buffers for it are beside the tensors.
_BUCKET_BYTES = 64 << 20
_ALIGNMENT = 16  # of pieces in a buffer, which is seen as tensors of their dtypes
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def redistribute(
    state_dict: dict[str, Any],
    group: dist.ProcessGroup | None,
    key: str,
    wanted: bool | None,
    *,
    in_background: bool,
) -> tuple[dict[str, Any], int]:
    """`state_dict` with rows in the place of columns, and the bytes of these rows on this rank.

    Every rank of `group`, which saves, calls it. Nothing of `state_dict` is changed: what is not
    redistributed is the same object in both. The rows take as much memory as the columns, on the
    same device.

    key: of `agreement.next_key`.
    wanted: True for all tensors in short rows; None for those whose columns are on several nodes,
        which no ring can take; False for none. Where ranks say different things none are.
    in_background: a trainer waits for this, and not for what comes after. None is for tensors on
        devices only, then: through host memory it takes longer than staging them.

    Raises CheckpointError where the exchange fails.
    """
    meshes = {} if wanted is False else _columns(state_dict, group, wanted, in_background)
    report = {
        "node": this_node() or f"of rank {dist.get_rank()}",
        "room": _has_room(tensor for columns in meshes.values() for tensor in columns.values()),
        "meshes": [_described(mesh, columns, wanted) for mesh, columns in meshes.items()],
    }
    rows: dict[Any, DTensor] = {}  # by identity: what is tied stays so
    try:
        dims = agree(group, key, report, _chosen, _SECONDS, waits=len(meshes) > 0) or {}
        # In one order on all ranks, since meshes may have ranks in common.
        for mesh, columns in sorted(meshes.items(), key=lambda item: _name(item[0])):
            tensors = {identity(tensor): tensor for tensor in columns.values()}
            rows |= _exchanged(
                mesh, tensors, dims.get(_described(mesh, columns, wanted)["what"], [])
            )
    except RuntimeError as error:  # a rank that is gone, no memory
        rows.clear()
        raise CheckpointError(f"the columns were not redistributed: {error}") from error
    if not rows:
        return state_dict, 0
    changed: dict[str, Any] = _replaced(state_dict, rows)
    return changed, sum(tensor._local_tensor.nbytes for tensor in rows.values())


def _columns(
    state_dict: dict[str, Any],
    group: dist.ProcessGroup | None,
    wanted: bool | None,
    in_background: bool,
) -> dict[DeviceMesh, dict[str, DTensor]]:
    """Tensors in short rows, by mesh and name: the same on all ranks of a mesh, if they have the
    same tensors."""
    saving = set(dist.get_process_group_ranks(group))
    meshes: dict[DeviceMesh, dict[str, DTensor]] = {}
    try:
        for name, tensor in _dtensors(state_dict, ""):
            if wanted is None and in_background and tensor._local_tensor.is_cpu:
                continue
            if not any(getattr(placed, "dim", 0) for placed in tensor.placements):
                continue  # most are in rows, and a state may have many
            mesh = tensor.device_mesh
            if mesh.get_coordinate() is not None and _steps(tensor):
                meshes.setdefault(mesh, {})[name] = tensor
    except RecursionError:  # planning says so
        return {}
    return {
        mesh: columns
        for mesh, columns in meshes.items()
        if saving.issuperset(mesh.mesh.flatten().tolist())
    }


def _dtensors(value: Any, name: str) -> Iterator[tuple[str, DTensor]]:
    """Those in dicts and lists; in other containers they stay as they are."""
    kind = type(value)
    if kind in (dict, OrderedDict):
        items = value.items()
    elif kind is list:
        items = enumerate(value)
    else:
        return
    for key, inner in items:
        if type(inner) is DTensor:
            yield f"{name}.{key}", inner
        else:
            yield from _dtensors(inner, f"{name}.{key}")


def _replaced(value: Any, rows: Mapping[Any, DTensor]) -> Any:
    """`value`, or a copy of a container with `rows` in it."""
    kind = type(value)
    if kind is DTensor:
        return rows.get(identity(value), value)
    items = {}
    if kind in (dict, OrderedDict):
        items = {key: _replaced(inner, rows) for key, inner in value.items()}
    elif kind is list:
        items = {position: _replaced(inner, rows) for position, inner in enumerate(value)}
    items = {key: inner for key, inner in items.items() if inner is not value[key]}
    if not items:
        return value
    copy = kind(value)
    for key, inner in items.items():
        copy[key] = inner
    return copy


def _steps(tensor: DTensor) -> tuple[Step, ...]:
    mesh = tuple(tensor.device_mesh.shape)
    return steps_of(tuple(tensor.shape), tensor.dtype.itemsize, mesh, tuple(tensor.placements))


def _pieces(tensor: DTensor, step: Step) -> Pieces | None:
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    return pieces_of(tuple(tensor.shape), tuple(mesh.shape), step, tuple(coordinate))


def _is_exchangeable(tensor: DTensor) -> bool:
    """Whether this rank can take part in what makes rows of its columns."""
    mesh, local = tensor.device_mesh, tensor._local_tensor
    if type(local) not in PLAIN_TENSORS or local.layout is not torch.strided:
        return False
    if local.is_conj() or local.is_neg() or local.is_meta or local.is_quantized:
        return False
    for step in _steps(tensor):
        try:
            devices = mesh.get_group(step.mesh_dim)._device_types
        except (RuntimeError, AssertionError):  # a mesh without groups, or whose groups are gone
            return False
        if local.device.type not in {device.type for device in devices}:
            return False
    pieces = [_pieces(tensor, step) for step in _steps(tensor)]
    if pieces[0] is None or None in pieces:
        return False
    # Else it is no part of the tensor that it says it is, which planning finds.
    has_shape = local.shape == pieces[0].before
    is_empty = local.numel() == math.prod(pieces[0].before) == 0
    return (has_shape or is_empty) and local.dtype == tensor.dtype


# What ranks agree about.


def _name(mesh: DeviceMesh) -> str:
    return f"{mesh.device_type} {mesh.mesh_dim_names} {mesh.mesh.tolist()}"


def _described(
    mesh: DeviceMesh, columns: Mapping[str, DTensor], wanted: bool | None
) -> dict[str, Any]:
    """What a rank says of its columns on a mesh.

    what: the same for the same tensors, also on another mesh of the same shape: a tensor may be on
        several, as replicas.
    line: for each dimension of the mesh, the first rank of the group that this rank is in.
    """
    first: dict[Any, int] = {}
    numbers = [first.setdefault(identity(tensor), at) for at, tensor in enumerate(columns.values())]
    what = [
        (name, number, tuple(tensor.shape), str(tensor.dtype), str(tensor.placements))
        + (tensor._local_tensor.device.type,)
        for (name, tensor), number in zip(columns.items(), numbers, strict=True)
    ]
    lines = [mesh.mesh.movedim(dim, -1).reshape(-1, mesh.size(dim)) for dim in range(mesh.ndim)]
    firsts = [int(of_dim[(of_dim == dist.get_rank()).any(-1), 0]) for of_dim in lines]
    return {
        "mesh": _digest(_name(mesh)),
        "size": mesh.size(),
        "what": _digest(repr((wanted, tuple(mesh.shape), what))),
        "all": wanted is True,
        "line": firsts,
        "ready": all(map(_is_exchangeable, columns.values())),
    }


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _chosen(reports: list[dict[str, Any]]) -> dict[str, list[int]]:
    """The dimensions of meshes along which tensors are to be redistributed, by what is on them:
    those over several nodes, or all that are wanted. None at all if a rank lacks something."""
    ranks: dict[str, int] = {}  # of each mesh, that are still to be seen
    whats: dict[str, str] = {}
    nodes: dict[tuple[str, int, int], set[str]] = {}  # of each group
    chosen: dict[str, set[int]] = {}
    for of_rank in reports:
        for known in of_rank["meshes"]:
            mesh, what = known["mesh"], known["what"]
            ranks[mesh] = ranks.get(mesh, known["size"]) - 1
            if whats.setdefault(mesh, what) != what or not (known["ready"] and of_rank["room"]):
                return {}
            for dim, line in enumerate(known["line"]):
                on = nodes.setdefault((mesh, dim, line), set())
                on.add(str(of_rank["node"]))
                if known["all"] or len(on) > 1:
                    chosen.setdefault(what, set()).add(dim)
    if any(ranks.values()):
        return {}
    return {what: sorted(dims) for what, dims in chosen.items()}


def _has_room(tensors: Iterable[DTensor]) -> bool:
    """Whether the rows, and buffers for a bucket, fit beside the columns on a CUDA device."""
    sizes: dict[torch.device, list[int]] = {}
    for tensor in tensors:
        local = tensor._local_tensor
        if local.is_cuda:
            sizes.setdefault(local.device, []).append(local.nbytes)
    for device, of_device in sizes.items():
        free, _ = torch.cuda.mem_get_info(device)
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        if sum(of_device) + 3 * (_BUCKET_BYTES + max(of_device)) > free + kept:
            return False
    return True


# The exchange.


def _exchanged(
    mesh: DeviceMesh, tensors: Mapping[Any, DTensor], dims: list[int]
) -> dict[Any, DTensor]:
    """The rows of those of `tensors` that have steps along `dims`."""
    alike: dict[tuple[str, tuple[int, ...]], list[Any]] = {}
    for key, tensor in tensors.items():
        along = tuple(step.mesh_dim for step in _steps(tensor))
        if not set(along).isdisjoint(dims):
            alike.setdefault((tensor._local_tensor.device.type, along), []).append(key)
    rows: dict[Any, DTensor] = {}
    with torch.no_grad():
        for (_, along), keys in alike.items():
            for bucket in _buckets({key: tensors[key] for key in keys}):
                locals_ = [tensors[key]._local_tensor.detach() for key in bucket]
                for number, mesh_dim in enumerate(along):
                    pieces = [_pieces(tensors[k], _steps(tensors[k])[number]) for k in bucket]
                    locals_ = _all_to_all(mesh, mesh_dim, locals_, pieces)  # type: ignore[arg-type]
                for key, local in zip(bucket, locals_, strict=True):
                    rows[key] = _with_local(tensors[key], local)
    return rows


def _with_local(tensor: DTensor, local: torch.Tensor) -> DTensor:
    spec = tensor._spec
    spec = DTensorSpec(spec.mesh, _steps(tensor)[-1].after, tensor_meta=spec.tensor_meta)
    return DTensor(local, spec, requires_grad=tensor.requires_grad)


def _buckets(tensors: Mapping[Any, DTensor]) -> Iterator[list[Any]]:
    """Keys of tensors to exchange together: the same on all ranks, so not by their local sizes."""
    bucket: list[Any] = []
    size = 0
    for key, tensor in tensors.items():
        bucket.append(key)
        places = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
        parts = math.prod(count for count, placed in places if not placed.is_replicate())
        size += tensor.numel() * tensor.dtype.itemsize // parts
        if size >= _BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket


def _all_to_all(
    mesh: DeviceMesh, mesh_dim: int, tensors: list[torch.Tensor], pieces: list[Pieces]
) -> list[torch.Tensor]:
    """The new local tensors, given those of a bucket."""
    own = mesh.get_local_rank(mesh_dim)
    places = range(mesh.size(mesh_dim))
    device = tensors[0].device
    words = [_WORDS.get(tensor.dtype.itemsize, tensor.dtype) for tensor in tensors]
    old = [tensor.view(word) for tensor, word in zip(tensors, words, strict=True)]
    new = [
        torch.empty(of_tensor.after, dtype=word, device=device)
        for of_tensor, word in zip(pieces, words, strict=True)
    ]
    given = [[one.gives[place] if place != own else None for one in pieces] for place in places]
    got = [[one.gets[place] if place != own else None for one in pieces] for place in places]
    outgoing = _Buffer(old, given, device)
    for source, part in outgoing.parts:
        part.copy_(source)
    incoming = _Buffer(new, got, device)
    dist.all_to_all_single(
        incoming.bytes, outgoing.bytes, incoming.sizes, outgoing.sizes, mesh.get_group(mesh_dim)
    )
    for target, part in incoming.parts:
        target.copy_(part)
    for source, target, one in zip(old, new, pieces, strict=True):
        gives, gets = one.gives[own], one.gets[own]
        if gives is not None and gets is not None:
            target[gets].copy_(source[gives])
    return [tensor.view(before.dtype) for tensor, before in zip(new, tensors, strict=True)]


class _Buffer:
    """Memory for the pieces of a bucket, one rank's after the other's.

    bytes: all of it, sizes: the bytes of each rank, parts: for each piece the part of a tensor of
    the bucket, and of the buffer.
    """

    def __init__(
        self,
        tensors: list[torch.Tensor],
        pieces: list[list[tuple[slice, ...] | None]],
        device: torch.device,
    ) -> None:
        self.sizes: list[int] = []
        places: list[tuple[torch.Tensor, int]] = []
        end = 0
        for of_rank in pieces:
            begin = end
            for tensor, piece in zip(tensors, of_rank, strict=True):
                if piece is not None:
                    part = tensor[piece]
                    places.append((part, end))
                    end += -(-part.nbytes // _ALIGNMENT) * _ALIGNMENT
            self.sizes.append(end - begin)
        self.bytes = torch.empty(end, dtype=torch.uint8, device=device)
        self.parts = [
            (part, self.bytes[at : at + part.nbytes].view(part.dtype).view(part.shape))
            for part, at in places
        ]
