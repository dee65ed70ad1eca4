"""Tensors and other leaves of an opened checkpoint, read one by one."""

from __future__ import annotations

import operator
from collections.abc import Container, Iterator, Mapping, Sequence
from types import EllipsisType
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from torch_ckpt.checkpoint.quantization import scale_names
from torch_ckpt.checkpoint.values import statistics
from torch_ckpt.dcp.node import transfer_workers
from torch_ckpt.dcp.read.read_objects import ObjectReader, not_read
from torch_ckpt.dcp.read.read_tensors import TensorReader
from torch_ckpt.dcp.read.targets import check_places, check_target, copy_by_itself, copy_into
from torch_ckpt.errors import CorruptError, InvalidArgumentError, UnsupportedError
from torch_ckpt.native import core
from torch_ckpt.native.dtypes import DTYPE_NAMES, PACKED, TORCH_DTYPES
from torch_ckpt.native.opened import Listing, OpenedCheckpoint, StoredType
from torch_ckpt.native.progress import Progress
from torch_ckpt.native.tensors import memory_of
from torch_ckpt.planning.reserved import STRUCTURE_FQN

Index = int | slice | EllipsisType | tuple[int | slice | EllipsisType, ...]


class StoredTensor:
    """A tensor in a checkpoint. What is read of it is what an index asks for, and no more.

    name: its fqn.
    shape: the global shape, in torch's elements; () where nothing says it, of a tensor that cannot
        be read. Reading such a one raises UnsupportedError, which says why.
    dtype: the stored one. Raises UnsupportedError where this torch, or safetensors, lacks it.
    """

    def __init__(
        self,
        opened: OpenedCheckpoint,
        name: str,
        stored: StoredType,
        names: Container[str],
        *,
        verify: bool,
        direct_io: bool,
        unread: str | None = None,
    ) -> None:
        """`stored`: dtype name, shape in the header's elements, bytes. `names` of all tensors.
        `unread`: why it cannot be read."""
        self.name = name
        self._opened = opened
        self._stored = stored
        self._names = names
        self._verify = verify
        self._direct_io = direct_io
        self._packed = PACKED.get(stored[0], 1)
        self._unread = unread
        sizes = list(stored[1] or ())
        if self._packed > 1 and sizes:
            sizes[-1] //= self._packed
        self.shape = torch.Size(sizes)

    def _check_read(self) -> None:
        if self._unread is not None:
            raise not_read(self._opened.path, self.name, self._unread)

    @property
    def dtype(self) -> torch.dtype:
        dtype = TORCH_DTYPES.get(self._stored.dtype)
        if dtype is None:
            self._check_read()
            raise UnsupportedError(
                f"has dtype {self._stored.dtype}, which this torch does not have",
                file=self._opened.path,
                tensor=self.name,
            )
        return dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self._stored.bytes

    def __repr__(self) -> str:
        return f"StoredTensor({self.name!r}, {self._stored.dtype}{list(self.shape)})"

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a tensor without dimensions has no length")
        return self.shape[0]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (self[at] for at in range(len(self)))

    def __getitem__(self, index: Index) -> torch.Tensor:
        """A new CPU tensor with what torch's own basic indexing would give: integers, slices with
        positive steps, `...`. Read, and held meanwhile, is the box around it. Raises IndexError,
        TypeError, ValueError for other steps, and what `read` raises."""
        return self.read(index)

    def read(self, index: Index = ..., *, out: torch.Tensor | None = None) -> torch.Tensor:
        """`self[index]`, into `out` where that is given: a tensor of that shape, of any dtype,
        strides or device, or one with a `copy_` of its own. Casts, and refuses, as
        `torch_ckpt.load` does, and warns of no cast: the dtype is the caller's.

        The bytes are compared with their digests, where there are any. Raises CheckpointError kinds
        and OSError; `out` may then be filled in part.
        """
        self._check_read()
        box = _Box(self.shape, index)
        if out is not None:
            check_target(out, self.name)
        if out is not None and out.shape != box.shape:
            raise InvalidArgumentError(
                f"out has shape {tuple(out.shape)}, the index gives {tuple(box.shape)}",
                tensor=self.name,
            )
        memory = None if out is None else memory_of(out)
        if memory is not None:
            check_places(memory, self.name)
        if out is not None and memory is not None and not box.stepped:
            self._fill(box, box.unsqueezed(memory))
            return out
        dtype = self.dtype
        if out is not None and out.dtype in DTYPE_NAMES:
            dtype = out.dtype
        target = torch.empty(box.sizes, dtype=dtype, device="cpu")
        self._fill(box, target)
        found = box.picked(target)
        if out is None:
            return found.contiguous() if box.stepped else found
        if memory is None:
            copy_by_itself(out, found, self.name)
        else:
            copy_into(memory, found)
        return out

    def statistics(self, progress: Progress | None = None) -> dict[str, Any]:
        """{"min", "max", "mean", "nan", "inf"}: of the finite elements, and how many are not
        numbers or not finite; read in pieces, in 64 MiB of memory. None for what a dtype does not
        have, and of no elements. Complex numbers are only counted; of packed ones nothing is said.

        progress: called with bytes read and bytes in all, about ten times a second, on another
        thread. Raises what `read` does.
        """
        self._check_read()
        return statistics(
            self._opened,
            self.name,
            verify=self._verify,
            direct_io=self._direct_io,
            progress=progress and (lambda done, _: progress(done, self.nbytes)),
        )

    def _fill(self, box: _Box, target: torch.Tensor) -> None:
        names = [self.name, *(name for name in scale_names(self.name) if name in self._names)]
        # Of scales beside it only the names count.
        item = _item(self.name, box.offsets, box.sizes)
        planner: Any = _Targets({self.name: target})
        TensorReader(
            self._opened,
            dict.fromkeys(names, self._stored),
            workers=transfer_workers(),
            verify=self._verify,
            strict_dtype=False,
            direct_io=self._direct_io,
            warns=False,  # `out` is of the dtype that the caller wants
        ).read([item], planner)

    def _placements(self) -> list[dict[str, Any]]:
        """Where its boxes are. Raises ConflictError where their files are others by now."""
        request = {"op": "placements", "checkpoint": self._opened.id, "name": self.name}
        placements: list[dict[str, Any]] = core.call(request)["placements"]
        return placements

    def mmap(self) -> torch.Tensor:
        """The whole tensor as a view of its file, mapped: nothing is read before it is used, and no
        digest is compared. What is written to it stays in this process.

        Raises UnsupportedError where the tensor is not in one piece of one file, or not aligned
        there for its dtype. A file that is cut short while it is mapped ends the process (SIGBUS).
        """
        self._check_read()
        placements = self._placements()
        dtype = self.dtype
        if not self.shape.numel():
            return torch.empty(self.shape, dtype=dtype, device="cpu")
        if len(placements) != 1:
            raise UnsupportedError(
                f"is stored in {len(placements)} pieces and cannot be mapped as one",
                file=self._opened.path,
                tensor=self.name,
            )
        (placed,) = placements
        strides = placed.get("strides")
        if placed["offset"] % dtype.itemsize or any(s % dtype.itemsize for s in strides or ()):
            raise UnsupportedError(
                f"begins at byte {placed['offset']} of its file, where a {dtype} cannot be mapped",
                file=placed["path"],
                tensor=self.name,
            )
        steps = (
            torch.empty(self.shape, device="meta").stride()
            if strides is None
            else [stride // dtype.itemsize for stride in strides]
        )
        span = 1 + sum((size - 1) * step for size, step in zip(self.shape, steps, strict=True))
        end = placed["offset"] + span * dtype.itemsize
        try:
            storage: Any = torch.UntypedStorage.from_file(placed["path"], False, end)
        except RuntimeError as error:
            self._placements()  # says what has become of the file
            raise CorruptError(
                f"cannot be mapped: {error}", file=placed["path"], tensor=self.name
            ) from error
        # Whatever is there now is what was looked at.
        self._placements()
        view = torch.empty(0, dtype=dtype, device="cpu")
        return view.set_(storage, placed["offset"] // dtype.itemsize, self.shape, steps)


def _item(name: str, offsets: Sequence[int], sizes: Sequence[int]) -> ReadItem:
    """What is read of a tensor: a box, into a target of its sizes."""
    place = MetadataIndex(name)
    zeros = torch.Size([0] * len(sizes))
    box = torch.Size(offsets), torch.Size(sizes)
    return ReadItem(LoadItemType.TENSOR, place, zeros, place, *box)


class _Box:
    """What an index takes of a tensor: a box of it, and what is then picked of the box."""

    def __init__(self, shape: torch.Size, index: Index) -> None:
        parts = index if isinstance(index, tuple) else (index,)
        for part in parts:
            if not isinstance(part, slice) and part is not Ellipsis:
                if isinstance(part, bool | torch.Tensor):
                    raise TypeError("an index is made of integers, slices and ...")
                operator.index(part)
        dots = [at for at, part in enumerate(parts) if part is Ellipsis]
        missing = len(shape) - (len(parts) - len(dots))
        if missing < 0 or len(dots) > 1:
            raise IndexError(f"too many indices for a tensor of {len(shape)} dimensions")
        at = dots[0] if dots else len(parts)
        full: tuple[Any, ...] = (*parts[:at], *[slice(None)] * missing, *parts[at + 1 :])
        offsets: list[int] = []
        sizes: list[int] = []
        picks: list[slice | int] = []
        for size, part in zip(shape, full, strict=True):
            if isinstance(part, slice):
                begin, end, step = part.indices(size)
                if step < 1:
                    raise ValueError("a slice of a stored tensor has a step above 0")
                count = len(range(begin, end, step))
                offsets.append(begin if count else 0)
                sizes.append((count - 1) * step + 1 if count else 0)
                picks.append(slice(None, None, step))
                continue
            position = operator.index(part)
            if not -size <= position < size:
                raise IndexError(f"index {position} is out of range for a dimension of {size}")
            offsets.append(position % size)
            sizes.append(1)
            picks.append(0)
        self.offsets, self.sizes = torch.Size(offsets), torch.Size(sizes)
        self._picks = picks
        self.stepped = any(isinstance(pick, slice) and pick.step > 1 for pick in picks)
        self.shape = torch.Size(
            -(-size // pick.step)
            for size, pick in zip(sizes, picks, strict=True)
            if isinstance(pick, slice)
        )

    def picked(self, box: torch.Tensor) -> torch.Tensor:
        return box[tuple(self._picks)] if self._picks else box

    def unsqueezed(self, out: torch.Tensor) -> torch.Tensor:
        """A view of `out` with the dimensions of the box."""
        for dim, pick in enumerate(self._picks):
            if not isinstance(pick, slice):
                out = out.unsqueeze(dim)
        return out


class _Targets:
    """What a reader asks of a planner: the tensors that are filled, by their names."""

    def __init__(self, targets: dict[str, torch.Tensor]) -> None:
        self.targets = targets

    def resolve_tensor(self, item: ReadItem) -> torch.Tensor:
        return self.targets[item.storage_index.fqn]

    def commit_tensor(self, item: ReadItem, tensor: torch.Tensor) -> None:
        pass


class StoredObjects(Mapping[str, Any]):
    """The leaves of an opened checkpoint that are no tensors, by their fqns. Each is read when it
    is asked for, from typed JSON: no pickle is run. Raises UnsupportedError for a leaf that is an
    object of some class."""

    def __init__(self, opened: OpenedCheckpoint, listing: Listing, verify: bool) -> None:
        self._reader = ObjectReader(opened, listing, verify=verify, allow_pickle=False)
        self._names = {name: None for name in listing.objects() if name != STRUCTURE_FQN}

    def __getitem__(self, name: str) -> Any:
        if name not in self._names:
            raise KeyError(name)
        return self._reader.read_one(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return f"StoredObjects({list(self._names)})"
