"""Files of torch.save, directories of stock DCP and of Megatron's: laid out by the installed torch,
filled by the engine.

torch pickles tensors that have no elements and leaves room for these; the core streams them in, and
puts what is whole into place (csrc/engine/merge/fill_archives.h). So the pickles are those of this
torch, and a checkpoint of any size takes little memory.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import pickle
import struct
import zipfile
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp

from torch_ckpt.calls.stored import StoredTensor
from torch_ckpt.checkpoint.description import entry_paths
from torch_ckpt.checkpoint.megatron_form import MegatronForm, form_of
from torch_ckpt.checkpoint.names import (
    DISTCP,
    MEGATRON_COMMON,
    MEGATRON_COMMON_FILE,
    MEGATRON_CONFIG,
    MEGATRON_CONTENT,
    MEGATRON_OBJECT,
    METADATA,
)
from torch_ckpt.dcp.read.read_objects import ObjectReader, not_read
from torch_ckpt.errors import InternalError, UnsupportedError
from torch_ckpt.export.merge import MergeRequest
from torch_ckpt.native import core
from torch_ckpt.native.dtypes import PACKED, TORCH_DTYPES
from torch_ckpt.native.jobs import Job
from torch_ckpt.native.opened import OpenedCheckpoint
from torch_ckpt.native.progress import Progress, told
from torch_ckpt.native.sessions import ArchiveSession
from torch_ckpt.native.torch_private import StorageInfo, without_elements
from torch_ckpt.objects.stand_ins import StandIns
from torch_ckpt.planning.flatten import Flat, check_structure, rebuild
from torch_ckpt.planning.reserved import STRUCTURE_FQN

_DATA_FILE = f"__0_0{DISTCP}"


@dataclass(frozen=True)
class _Leaves:
    """What is to be written.

    tensors: without elements, by the names to be; tied ones are the same.
    stored: of each, what it is called in the source.
    """

    tensors: dict[str, torch.Tensor]
    stored: dict[str, str]
    objects: dict[str, Any]
    paths: dict[str, tuple[Any, ...]]
    structure: Any
    stand_ins: StandIns


def write_archives(
    request: MergeRequest, target: str, to: str, progress: Progress | None
) -> dict[str, Any]:
    """The checkpoint of `request` at `target`: with "torch" as one file of torch.save, which where
    the request says so replaces such a file, as a whole, and nothing else; with "dcp" as a
    directory of stock DCP, of one rank, which must not be there, or be empty; with "megatron" as
    one of Megatron's."""
    place = {"to": to, "overwrite": request["overwrite"]}
    session = ArchiveSession(target, place)
    try:
        leaves = _leaves_of(request)
        layout, tensors = _LAYOUTS[to](request, leaves, session.staging)
        with Job() as job, told(job, progress):
            whole = {
                "job": job.id,
                "layout": layout.id,
                "tensors": tensors,
                "path": target,
                **place,
                **{key: request[key] for key in ("checkpoint", "workers", "verify", "direct_io")},
            }
            answer: dict[str, Any] = job.run(lambda: session.commit(whole))
    finally:
        session.end()
    return answer


def _lay_out_torch(
    request: MergeRequest, leaves: _Leaves, staging: str
) -> tuple[OpenedCheckpoint, dict[str, str]]:
    """What the engine is to fill, and what in the source its tensors are."""
    nested = rebuild({**leaves.tensors, **leaves.objects}, leaves.paths, leaves.structure)
    place = os.path.join(staging, "archive.pt")
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        leaves.stand_ins.save(nested, place)
    # By identity: a list from which a leaf was left out counts anew.
    names = {id(tensor): name for name, tensor in leaves.tensors.items()}
    found = Flat(nested, 0, 1).values.items()
    tensors = {fqn: names[id(leaf)] for fqn, leaf in found if id(leaf) in names}
    # Where keys are no names, as tuples, all of a mapping is one leaf to who reads it.
    known = OpenedCheckpoint(place, "torch").listing().names
    inside = {tensors.pop(fqn) for fqn in tensors.keys() - set(known)}
    held = {
        id(tensor): _elements(request, leaves, name) if name in inside else torch.empty(0)
        for name, tensor in leaves.tensors.items()
    }
    values = {name: held[id(tensor)] for name, tensor in leaves.tensors.items()}
    whole = rebuild({**values, **leaves.objects}, leaves.paths, leaves.structure)
    _fill_in_objects(place, whole, leaves.stand_ins)
    tensors = {fqn: leaves.stored[name] for fqn, name in tensors.items()}
    return OpenedCheckpoint(place, "torch"), tensors


def _lay_out_dcp(
    request: MergeRequest, leaves: _Leaves, staging: str
) -> tuple[OpenedCheckpoint, dict[str, str]]:
    """The same."""
    if leaves.structure is not None:
        leaves.objects[STRUCTURE_FQN] = leaves.structure
        leaves.paths[STRUCTURE_FQN] = (STRUCTURE_FQN,)
    metadata = _write_data_file(leaves, staging)
    with open(os.path.join(staging, METADATA), "wb") as file:
        pickle.dump(metadata, file)
    return OpenedCheckpoint(staging, "dcp"), leaves.stored


def _lay_out_megatron(
    request: MergeRequest, leaves: _Leaves, staging: str
) -> tuple[OpenedCheckpoint, dict[str, str]]:
    """The same."""
    form = form_of(request.opened) or MegatronForm()
    common_names = form.leaves or frozenset()
    of_common = {name for name, stored in leaves.stored.items() if stored in common_names}
    values: dict[str, Any] = {name: _elements(request, leaves, name) for name in of_common}
    cells: dict[str, Any] = {}
    common: dict[Any, Any] = {}
    for name, value in leaves.objects.items():
        if name in (MEGATRON_COMMON, MEGATRON_CONTENT) and _is_list_of_dict(value):
            key = name.partition(MEGATRON_OBJECT)[0]
            common.update(value[0] if name == MEGATRON_COMMON else {key: value[0]})
        elif MEGATRON_OBJECT in name and name not in common_names:
            cells[name] = [value] if form.bare else value
        else:
            values[name] = value
    nested = rebuild(values, leaves.paths, leaves.structure)
    leaves.stand_ins.save({**nested, **common}, os.path.join(staging, MEGATRON_COMMON_FILE))
    tensors = {name: each for name, each in leaves.tensors.items() if name not in of_common}
    stored = {name: leaves.stored[name] for name in tensors}
    paths: dict[str, tuple[Any, ...]] = {name: (name,) for name in (*tensors, *cells)}
    metadata = _write_data_file(
        _Leaves(tensors, stored, cells, paths, None, leaves.stand_ins), staging
    )
    with open(os.path.join(staging, METADATA), "wb") as file:
        pickle.dump(metadata, file)
    said = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    with open(os.path.join(staging, MEGATRON_CONFIG), "w", encoding="utf-8") as text:
        json.dump(said, text)
    return OpenedCheckpoint(staging, "megatron"), stored


def _is_list_of_dict(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict)


_LAYOUTS = {"torch": _lay_out_torch, "dcp": _lay_out_dcp, "megatron": _lay_out_megatron}


def _elements(request: MergeRequest, leaves: _Leaves, name: str) -> torch.Tensor:
    """All of a tensor, in memory."""
    opened, stored = request.opened, leaves.stored[name]
    tensor = StoredTensor(
        opened,
        stored,
        opened.listing().tensors()[stored],
        (),
        verify=request["verify"],
        direct_io=request["direct_io"],
    )
    like = leaves.tensors[name]
    return tensor.read(out=torch.empty(like.shape, dtype=like.dtype, device="cpu"))


def _fill_in_objects(place: str, nested: Any, stand_ins: StandIns) -> None:
    """Writes the tensors that stand inside of other leaves into the archive at `place`, where they
    were left out like all the others. `nested` is what it holds, with tensors of no elements in the
    places of those that the engine fills in: torch numbers storages in the order in which it meets
    them."""
    packed = io.BytesIO()
    stand_ins.save(nested, packed)
    with zipfile.ZipFile(packed) as archive, zipfile.ZipFile(place) as laid_out:
        holes = {m.filename.partition("/")[2]: m for m in laid_out.infolist()}
        with open(place, "r+b") as file:
            for member in archive.infolist():
                name = member.filename.partition("/")[2]
                if not name.startswith("data/") or not member.file_size:
                    continue
                hole = holes.get(name)
                if hole is None or hole.file_size != member.file_size:
                    raise InternalError(f"torch numbers {name} in another way", file=place)
                file.seek(_content_begin(file, hole))
                file.write(archive.read(member))


def _content_begin(file: Any, member: zipfile.ZipInfo) -> int:
    """Where the content of an archive's member begins: behind its name and extra fields, whose
    lengths its local header says."""
    file.seek(member.header_offset + 26)
    name, extra = struct.unpack("<HH", file.read(4))
    return int(member.header_offset + 30 + name + extra)


def _leaves_of(request: MergeRequest) -> _Leaves:
    opened = request.opened
    listing = opened.listing()
    new_names, dtypes = request["new_names"], request["dtypes"]
    tensors: dict[str, torch.Tensor] = {}
    paths: dict[str, tuple[Any, ...]] = {}
    names = []
    for (stored, kind, at), path in zip(listing.entries(), entry_paths(listing), strict=True):
        name = new_names.get(stored, stored)
        if kind == core.UNREAD:
            raise not_read(opened.path, stored, listing.unread[stored])
        if kind == core.OBJECT:
            names.append(stored)
        elif stored not in listing.aliases:
            dtype_name, shape, _ = listing.types[at]
            tensors[name] = _without_elements(
                name, dtypes.get(name, dtype_name), shape or [], opened
            )
        if stored != STRUCTURE_FQN:
            paths[name] = path if name == stored else _renamed_path(path, stored, name)
    aliases = listing.aliases.items()
    for alias, of in aliases:
        tensors[new_names.get(alias, alias)] = tensors[new_names.get(of, of)]
    sources = {new_names.get(name, name): name for name in listing.names}
    sources.update({new_names.get(alias, alias): of for alias, of in aliases})
    objects: dict[str, Any] = {}
    stand_ins = StandIns()
    if request["objects"]:
        reader = ObjectReader(
            opened, listing, verify=request["verify"], allow_pickle=False, stand_ins=stand_ins
        )
        objects = {name: reader.read_one(name) for name in names}
    else:
        for name in names:
            paths.pop(name, None)
    structure = objects.pop(STRUCTURE_FQN, None)
    if structure is not None:
        structure = check_structure(structure)
    held = {name: sources[name] for name in tensors}
    return _Leaves(tensors, held, objects, paths, structure, stand_ins)


def _renamed_path(path: tuple[Any, ...], stored: str, name: str) -> tuple[Any, ...]:
    """Where a leaf stands under its new name: in its container, where only its last part is new."""
    container, _, last = name.rpartition(".")
    stays = len(path) > 1 and container == stored.rpartition(".")[0]
    return (*path[:-1], last) if stays and type(path[-1]) is str else (name,)


def _without_elements(
    name: str, dtype_name: str, shape: list[int], opened: OpenedCheckpoint
) -> torch.Tensor:
    dtype = TORCH_DTYPES.get(dtype_name)
    if dtype is None:
        raise UnsupportedError(
            f"has dtype {dtype_name}, which this torch does not have",
            file=opened.path,
            tensor=name,
        )
    sizes = list(shape)
    if sizes and dtype_name in PACKED:
        sizes[-1] //= PACKED[dtype_name]
    return without_elements(sizes, dtype)


def _write_data_file(leaves: _Leaves, layout: str) -> dcp.Metadata:
    """Writes it, with holes where elements belong, and returns what describes it."""
    state: dict[str, Any] = {}
    storage: dict[dcp.MetadataIndex, Any] = {}
    scratch = os.path.join(layout, "archive")
    with open(os.path.join(layout, _DATA_FILE), "wb") as out:
        for name, value in leaves.objects.items():
            packed = io.BytesIO()
            leaves.stand_ins.save(value, packed)
            state[name] = dcp.BytesStorageMetadata()
            begin = out.tell()
            size = out.write(packed.getvalue())
            storage[dcp.MetadataIndex(name)] = StorageInfo(_DATA_FILE, begin, size)
        for name, tensor in leaves.tensors.items():
            zeros = torch.Size([0] * tensor.dim())
            state[name] = dcp.TensorStorageMetadata(
                dcp.TensorProperties.create_from_tensor(tensor),
                tensor.size(),
                [dcp.ChunkStorageMetadata(zeros, tensor.size())],
            )
            with torch.serialization.skip_data(materialize_fake_tensors=True):
                torch.save(tensor, scratch)
            begin = out.tell()
            size = _append(scratch, out)
            storage[dcp.MetadataIndex(name, zeros, 0)] = StorageInfo(_DATA_FILE, begin, size)
        out.truncate()
    if os.path.exists(scratch):
        os.remove(scratch)
    found = dcp.Metadata(state, dict(leaves.paths), storage)
    version = getattr(dcp, "CURRENT_DCP_VERSION", None)
    if version is not None and any(f.name == "version" for f in dataclasses.fields(found)):
        found = dataclasses.replace(found, version=version)
    return found


def _append(archive: str, out: Any) -> int:
    """Adds an archive of one tensor to `out`, but for its elements; returns its bytes."""
    begin, size = out.tell(), os.path.getsize(archive)
    with zipfile.ZipFile(archive) as members, open(archive, "rb") as file:
        (data,) = (m for m in members.infolist() if m.filename.endswith("/data/0"))
        first = _content_begin(file, data)
        file.seek(0)
        out.write(file.read(first))
        file.seek(first + data.file_size)
        out.seek(begin + first + data.file_size)
        out.write(file.read())
    assert out.tell() == begin + size
    return size
