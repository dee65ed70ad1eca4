"""Files of torch.save and directories of stock DCP: laid out by the installed torch, filled by the
engine.

torch pickles tensors that have no elements and leaves room for these; the core streams them in
(csrc/engine/merge/fill_archives.h). So the pickles are those of this torch, and a checkpoint of any
size takes little memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import io
import os
import pickle
import shutil
import struct
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp

from torch_ckpt.checkpoint.description import entry_paths
from torch_ckpt.checkpoint.names import CONVERSION, DISTCP, METADATA
from torch_ckpt.dcp.read.read_objects import ObjectReader, not_read
from torch_ckpt.dcp.read.stored import StoredTensor
from torch_ckpt.errors import ConflictError, InternalError, UnsupportedError
from torch_ckpt.export.merge import MergeRequest
from torch_ckpt.native import core
from torch_ckpt.native.dtypes import PACKED, TORCH_DTYPES
from torch_ckpt.native.jobs import Job
from torch_ckpt.native.opened import OpenedCheckpoint
from torch_ckpt.native.progress import Progress, told
from torch_ckpt.native.torch_private import StorageInfo, without_elements
from torch_ckpt.planning.flatten import Flat, check_structure, rebuild
from torch_ckpt.planning.reserved import STRUCTURE_FQN
from torch_ckpt.runs.leftovers import remove_dead_conversion
from torch_ckpt.runs.place import sync_directory

_DATA_FILE = f"__0_0{DISTCP}"
# What says that a file system has no such lock, as csrc/os/lock.cc knows it.
_NO_LOCKS = (errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK, errno.EINVAL, errno.EBADF)
_ARCHIVE = "archive.pt"


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


def write_torch(request: MergeRequest, target: str, progress: Progress | None) -> dict[str, Any]:
    """The checkpoint of `request` as one file of torch.save. Where the request says so it replaces
    such a file at `target`, as a whole, and nothing else."""
    if os.path.lexists(target) and not _is_archive(target):
        raise ConflictError("is there already, and no file of torch.save", file=target)
    if os.path.lexists(target) and not request["overwrite"]:
        raise ConflictError(
            "is there already; overwrite=True (--overwrite) replaces it", file=target
        )
    with _staged(target) as (layout, filled):
        leaves = _leaves_of(request)
        nested = rebuild({**leaves.tensors, **leaves.objects}, leaves.paths, leaves.structure)
        place = os.path.join(layout, _ARCHIVE)
        with torch.serialization.skip_data(materialize_fake_tensors=True):
            torch.save(nested, place)
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
        _fill_in_objects(
            place, rebuild({**values, **leaves.objects}, leaves.paths, leaves.structure)
        )
        tensors = {fqn: leaves.stored[name] for fqn, name in tensors.items()}
        answer = _fill(request, OpenedCheckpoint(place, "torch"), tensors, filled, progress)
        os.replace(os.path.join(filled, _ARCHIVE), target)
        sync_directory(os.path.dirname(target))
    return answer


def write_dcp(request: MergeRequest, target: str, progress: Progress | None) -> dict[str, Any]:
    """The checkpoint of `request` as a directory of stock DCP, of one rank. `target` must not be
    there, or be empty."""
    taken = ConflictError("is there already; give another directory", file=target)
    if os.path.lexists(target) and not (os.path.isdir(target) and not os.listdir(target)):
        raise taken
    with _staged(target) as (layout, filled):
        leaves = _leaves_of(request)
        if leaves.structure is not None:
            leaves.objects[STRUCTURE_FQN] = leaves.structure
            leaves.paths[STRUCTURE_FQN] = (STRUCTURE_FQN,)
        metadata = _lay_out_dcp(leaves, layout)
        with open(os.path.join(layout, METADATA), "wb") as file:
            pickle.dump(metadata, file)
        opened = OpenedCheckpoint(layout, "dcp")
        answer = _fill(request, opened, leaves.stored, filled, progress)
        place = os.path.join(filled, METADATA)
        shutil.copyfile(os.path.join(layout, METADATA), place)
        with open(place, "rb") as file:
            os.fsync(file.fileno())
        sync_directory(filled)
        try:
            os.rename(filled, target)  # onto what is not there, or empty
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                raise taken from None
            raise
        sync_directory(os.path.dirname(target))
    return answer


def _is_archive(path: str) -> bool:
    """Whether it is a regular file that begins as torch.save has them since 1.6."""
    if not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        return file.read(4) == b"PK\x03\x04"


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


def _fill_in_objects(place: str, nested: Any) -> None:
    """Writes the tensors that stand inside of other leaves into the archive at `place`, where they
    were left out like all the others. `nested` is what it holds, with tensors of no elements in the
    places of those that the engine fills in: torch numbers storages in the order in which it meets
    them."""
    packed = io.BytesIO()
    torch.save(nested, packed)
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


@contextlib.contextmanager
def _staged(target: str) -> Iterator[tuple[str, str]]:
    """Two directories beside `target` while the block runs: for what is laid out, and filled.
    Removes those for the same target that a kill has left."""
    parent, name = os.path.split(target)
    os.makedirs(parent, exist_ok=True)
    start = f"{CONVERSION}{hashlib.sha256(os.fsencode(name)).hexdigest()[:16]}-"
    for left in os.listdir(parent):
        if left.startswith(start):
            remove_dead_conversion(os.path.join(parent, left))
    staging, held = _make_staging(start, parent)
    try:
        places = os.path.join(staging, "layout"), os.path.join(staging, "filled")
        for place in places:
            os.mkdir(place)
        yield places
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        os.close(held)


def _make_staging(start: str, parent: str) -> tuple[str, int]:
    """A new directory, and the descriptor that has it locked, where there are locks, for as long
    as this process lives."""
    while True:
        staging = tempfile.mkdtemp(prefix=start, dir=parent)
        held = -1
        try:
            held = os.open(staging, os.O_RDONLY | os.O_DIRECTORY)
            _lock(held)
            os.stat(staging)
            return staging, held
        except BaseException as error:
            if held >= 0:
                os.close(held)
            with contextlib.suppress(OSError):
                os.rmdir(staging)
            # Another process has taken it for dead.
            if not isinstance(error, BlockingIOError | FileNotFoundError):
                raise


def _lock(directory: int) -> None:
    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        # Without locks nobody can take it for dead either.
        if error.errno not in _NO_LOCKS:
            raise


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
    if request["objects"]:
        reader = ObjectReader(opened, listing, verify=request["verify"], allow_pickle=False)
        objects = {name: reader.read_one(name) for name in names}
    else:
        for name in names:
            paths.pop(name, None)
    structure = objects.pop(STRUCTURE_FQN, None)
    if structure is not None:
        structure = check_structure(structure)
    return _Leaves(tensors, {name: sources[name] for name in tensors}, objects, paths, structure)


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
        first = _content_begin(file, data)
        file.seek(0)
        out.write(file.read(first))
        file.seek(first + data.file_size)
        out.seek(begin + first + data.file_size)
        out.write(file.read())
    assert out.tell() == begin + size
    return size


def _fill(
    request: MergeRequest,
    layout: OpenedCheckpoint,
    tensors: dict[str, str],
    place: str,
    progress: Progress | None,
) -> dict[str, Any]:
    """Writes the files of `layout` into `place`; `tensors`: its names, and the source's."""
    with Job() as job, told(job, progress):
        whole = {
            "op": "fill_archives",
            "job": job.id,
            "layout": layout.id,
            "tensors": tensors,
            "directory": place,
            **{key: request[key] for key in ("checkpoint", "workers", "verify", "direct_io")},
        }
        answer: dict[str, Any] = job.run(lambda: core.call(whole))
    return answer
