"""Files of torch.save and directories of stock DCP: laid out by the installed torch, filled by the
engine.

torch pickles tensors that have no elements and leaves room for these; the core streams them in
(csrc/engine/merge/fill_archives.h). So the pickles are those of this torch, and a checkpoint of any
size takes little memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import pickle
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp

from torch_ckpt import _core
from torch_ckpt.dcp.load.read_objects import ObjectReader
from torch_ckpt.dcp.plan.flatten import check_structure, rebuild
from torch_ckpt.dcp.reserved import STRUCTURE_FQN
from torch_ckpt.description import entry_paths
from torch_ckpt.dtypes import PACKED, TORCH_DTYPES
from torch_ckpt.errors import ConflictError, UnsupportedError
from torch_ckpt.jobs import Job, OpenedCheckpoint
from torch_ckpt.merge import MergeRequest
from torch_ckpt.progress import Progress, told
from torch_ckpt.torch_private import StorageInfo, without_elements

_DATA_FILE = "__0_0.distcp"


@dataclass(frozen=True)
class _Leaves:
    """What is to be written. tensors: without elements, tied ones the same."""

    tensors: dict[str, torch.Tensor]
    objects: dict[str, Any]
    paths: dict[str, tuple[Any, ...]]
    structure: Any


def write_torch(request: MergeRequest, target: str, progress: Progress | None) -> dict[str, Any]:
    """The checkpoint of `request` as one file of torch.save. Replaces the file `target`, whole."""
    if os.path.isdir(target):
        raise ConflictError("is a directory; a file of torch.save is written here", file=target)
    with _staged(target) as (layout, filled):
        name = os.path.basename(target)
        leaves = _leaves_of(request)
        values = {**leaves.tensors, **leaves.objects}
        with torch.serialization.skip_data(materialize_fake_tensors=True):
            torch.save(rebuild(values, leaves.paths, leaves.structure), os.path.join(layout, name))
        place = os.path.join(layout, name)
        answer = _fill(request, OpenedCheckpoint(place, "torch"), filled, progress)
        os.replace(os.path.join(filled, name), target)
        _sync_directory(os.path.dirname(target))
    return answer


def write_dcp(request: MergeRequest, target: str, progress: Progress | None) -> dict[str, Any]:
    """The checkpoint of `request` as a directory of stock DCP, of one rank. `target` must not be
    there, or be empty."""
    if os.path.lexists(target) and not (os.path.isdir(target) and not os.listdir(target)):
        raise ConflictError("is there already; give another directory", file=target)
    with _staged(target) as (layout, filled):
        leaves = _leaves_of(request)
        if leaves.structure is not None:
            leaves.objects[STRUCTURE_FQN] = leaves.structure
            leaves.paths[STRUCTURE_FQN] = (STRUCTURE_FQN,)
        metadata = _lay_out_dcp(leaves, layout)
        with open(os.path.join(layout, ".metadata"), "wb") as file:
            pickle.dump(metadata, file)
        answer = _fill(request, OpenedCheckpoint(layout, "dcp"), filled, progress)
        place = os.path.join(filled, ".metadata")
        shutil.copyfile(os.path.join(layout, ".metadata"), place)
        with open(place, "rb") as file:
            os.fsync(file.fileno())
        _sync_directory(filled)
        os.rename(filled, target)  # onto what is not there, or empty
        _sync_directory(os.path.dirname(target))
    return answer


@contextlib.contextmanager
def _staged(target: str) -> Iterator[tuple[str, str]]:
    """Two directories beside `target` while the block runs: for what is laid out, and filled.
    Removes those that a kill has left; another conversion to the same target fails then."""
    parent, name = os.path.split(target)
    os.makedirs(parent, exist_ok=True)
    start = f".{name}.torch_ckpt-"
    for left in os.listdir(parent):
        if left.startswith(start):
            shutil.rmtree(os.path.join(parent, left))
    staging = tempfile.mkdtemp(prefix=start, dir=parent)
    try:
        places = os.path.join(staging, "layout"), os.path.join(staging, "filled")
        for place in places:
            os.mkdir(place)
        yield places
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _leaves_of(request: MergeRequest) -> _Leaves:
    opened = request.opened
    described = opened.describe()
    new_names, dtypes = request["new_names"], request["dtypes"]
    tensors: dict[str, torch.Tensor] = {}
    paths: dict[str, tuple[Any, ...]] = {}
    names = []
    columns = (described[column] for column in ("names", "kinds", "type_of"))
    for (stored, kind, at), path in zip(
        zip(*columns, strict=True), entry_paths(described), strict=True
    ):
        name = new_names.get(stored, stored)
        if kind == _core.OBJECT:
            names.append(stored)
        elif stored not in described["aliases"]:
            dtype_name, shape, _ = described["types"][at]
            tensors[name] = _without_elements(name, dtypes.get(name, dtype_name), shape, opened)
        if stored != STRUCTURE_FQN:
            paths[name] = path if name == stored else (name,)
    for alias, of in described["aliases"].items():
        tensors[new_names.get(alias, alias)] = tensors[new_names.get(of, of)]
    objects: dict[str, Any] = {}
    if request["objects"]:
        reader = ObjectReader(opened, described, verify=request["verify"], allow_pickle=False)
        objects = {name: reader.read_one(name) for name in names}
    else:
        for name in names:
            paths.pop(name, None)
    structure = objects.pop(STRUCTURE_FQN, None)
    if structure is not None:
        structure = check_structure(structure)
    return _Leaves(tensors, objects, paths, structure)


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


def _lay_out_dcp(leaves: _Leaves, layout: str) -> dcp.Metadata:
    """Writes the data file, with holes where elements belong, and returns what describes it."""
    state: dict[str, Any] = {}
    storage: dict[dcp.MetadataIndex, Any] = {}
    scratch = os.path.join(layout, "archive")
    with open(os.path.join(layout, _DATA_FILE), "wb") as out:
        for name, value in leaves.objects.items():
            packed = io.BytesIO()
            torch.save(value, packed)
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
        file.seek(data.header_offset + 26)
        lengths = file.read(4)
        first = data.header_offset + 30 + lengths[0] + 256 * lengths[1]
        first += lengths[2] + 256 * lengths[3]
        file.seek(0)
        out.write(file.read(first))
        file.seek(first + data.file_size)
        out.seek(begin + first + data.file_size)
        out.write(file.read())
    assert out.tell() == begin + size
    return size


def _fill(
    request: MergeRequest, layout: OpenedCheckpoint, place: str, progress: Progress | None
) -> dict[str, Any]:
    with Job() as job, told(job, progress):
        whole = {
            "op": "fill_archives",
            "job": job.id,
            "layout": layout.id,
            "directory": place,
            **{key: request[key] for key in ("checkpoint", "new_names", "workers")},
            **{key: request[key] for key in ("verify", "direct_io")},
        }
        answer: dict[str, Any] = job.run(lambda: _core.call(whole))
    return answer


def _sync_directory(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
