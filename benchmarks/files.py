"""Files around a timed region: make durable, drop from or bring into memory, remove."""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
from collections.abc import Iterable
from pathlib import Path


def files_in(path: Path) -> list[Path]:
    """All regular files at or below ``path``, in order of their names."""
    if path.is_file():
        return [path]
    return sorted(found for found in path.rglob("*") if found.is_file())


def sync(path: Path) -> None:
    """fsync of one file or directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_durable(path: Path) -> None:
    """fsync of everything at or below ``path``, and of the directory that holds it."""
    if path.is_dir():
        for found in path.rglob("*"):
            sync(found)
    sync(path)
    sync(path.parent)


def drop_from_memory(paths: Iterable[Path]) -> None:
    """Makes the next read of these files come from the disk."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def bring_into_memory(paths: Iterable[Path]) -> None:
    """Reads these files once, so that the next read comes from the page cache."""
    buffer = bytearray(1 << 20)
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def bytes_in_memory(paths: Iterable[Path]) -> int:
    """How many bytes of these files the page cache has."""
    pages = 0
    for path in paths:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size == 0:
                continue
            with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) as mapped:
                found = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
                start = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
                libc = ctypes.CDLL(None, use_errno=True)
                where = ctypes.c_void_p(start), ctypes.c_size_t(size)
                if libc.mincore(*where, found) != 0:
                    raise OSError(ctypes.get_errno(), "mincore", str(path))
                pages += sum(each & 1 for each in found)
    return pages * mmap.PAGESIZE


def empty(directory: Path) -> None:
    """Removes all that is in a directory."""
    for path in directory.iterdir():
        remove(path)


def remove(path: Path) -> None:
    """Removes a file or a tree and waits until the file system has freed its blocks.

    The wait keeps the freeing (with discard, if the disk wants it) out of the next timed region.
    """
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    sync(path.parent)
