"""What a file system can do, asked with plain system calls and none of the product's code."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import pathlib
import struct
import time
from collections.abc import Callable, Iterator

_LIBC = ctypes.CDLL(None, use_errno=True)
_STATX = 332
_STATX_DIOALIGN = 0x2000
_AT_FDCWD, _RENAME_NOREPLACE = -100, 1
_SETLK = 37  # F_OFD_SETLK


def _word(call: Callable[[], object]) -> str:
    """ "yes", or the name of its errno."""
    try:
        call()
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, str(error.errno))
    return "yes"


def _check(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _alignment(path: str) -> str:
    """Of offsets and of memory, as statx says them."""
    buffer = ctypes.create_string_buffer(256)
    _check(_LIBC.syscall(_STATX, _AT_FDCWD, path.encode(), 0, _STATX_DIOALIGN, buffer))
    (mask,) = struct.unpack_from("I", buffer, 0)
    memory, offset = struct.unpack_from("II", buffer, 0x98)
    return f"{offset}/{memory}" if mask & _STATX_DIOALIGN else "not said"


def _direct_write(path: str, size: int) -> None:
    with contextlib.ExitStack() as stack:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        stack.callback(os.close, descriptor)
        memory = mmap.mmap(-1, 1 << 20)
        os.pwrite(descriptor, memoryview(memory)[:size], 0)
        os.preadv(descriptor, [memoryview(memory)[:size]], 0)


def _no_replace(folder: str) -> None:
    """A rename that must refuse an existing target, of a file."""
    a, b = f"{folder}/a", f"{folder}/b"
    pathlib.Path(a).touch()
    with contextlib.suppress(FileNotFoundError):
        os.unlink(b)
    rename = (_AT_FDCWD, a.encode(), _AT_FDCWD, b.encode(), _RENAME_NOREPLACE)
    _check(_LIBC.renameat2(*rename))


def _fallocate(descriptor: int) -> None:
    """Not glibc's posix_fallocate, which writes where the file system cannot."""
    _check(_LIBC.fallocate64(descriptor, 0, ctypes.c_int64(0), ctypes.c_int64(1 << 20)))


def _open_lock(descriptor: int) -> None:
    lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    fcntl.fcntl(descriptor, _SETLK, lock)


def _opened(path: str, flags: int, call: Callable[[int], object]) -> Callable[[], None]:
    def run() -> None:
        descriptor = os.open(path, flags)
        try:
            call(descriptor)
        finally:
            os.close(descriptor)

    return run


def ask(path: str) -> dict[str, str]:
    folder = pathlib.Path(path)
    folder.mkdir()
    file = str(folder / "file")
    pathlib.Path(file).write_bytes(bytes(1 << 16))
    directory = os.O_RDONLY | os.O_DIRECTORY
    return {
        "direct I/O of 4 KiB": _word(lambda: _direct_write(file, 4096)),
        "direct I/O of 64 KiB": _word(lambda: _direct_write(file, 1 << 16)),
        "alignment of offsets/memory": _alignment(file),
        "fallocate": _word(_opened(file, os.O_RDWR, _fallocate)),
        "renameat2 that does not replace": _word(lambda: _no_replace(path)),
        "fsync of a directory": _word(_opened(path, directory, os.fsync)),
        "flock of a directory": _word(
            _opened(path, directory, lambda fd: fcntl.flock(fd, fcntl.LOCK_EX))
        ),
        "open file description lock": _word(_opened(file, os.O_RDWR, _open_lock)),
    }


@contextlib.contextmanager
def _held(kind: str, path: str) -> Iterator[None]:
    flags = os.O_RDONLY | os.O_DIRECTORY if kind == "flock directory" else os.O_RDWR | os.O_CREAT
    descriptor = os.open(path, flags)
    try:
        if kind.startswith("flock"):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        else:
            _open_lock(descriptor)
        yield
    finally:
        os.close(descriptor)


LOCKS = {
    "flock directory": "flock of a directory",
    "flock file": "flock of a file",
    "ofd file": "open file description lock",
}


def hold_lock(kind: str, path: str, ready: str, release: str) -> None:
    with _held(kind, path):
        pathlib.Path(ready).touch()
        while not os.path.exists(release):
            time.sleep(0.01)


def try_lock(kind: str, path: str) -> str:
    """What a node hears while another one holds the lock."""
    try:
        with _held(kind, path):
            return "no: taken by both"
    except BlockingIOError:
        return "yes"
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, str(error.errno))
