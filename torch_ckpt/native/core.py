"""The ctypes door to libtorch_ckpt_core.so: everything that works without torch."""

from __future__ import annotations

import ctypes
import functools
import json
import operator
import pathlib
from typing import Any

from torch_ckpt.errors import InvalidArgumentError, error_from

# Of entries: EntryKind in csrc/format/ours/catalog.h.
ALIAS = "1"  # a tensor that is stored under another name
OBJECT = "2"  # a leaf that is no tensor
# The dtypes of which the core casts any one to any other: CanCast in csrc/values/cast.h.
CASTABLE = frozenset(("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"))
STRUCTURE = "torch_ckpt.structure"  # the leaf that says the containers
UNREAD = "3"  # a tensor that is not read, as a sparse one

_PATH = pathlib.Path(__file__).parents[1] / "libtorch_ckpt_core.so"


def library_path() -> str:
    """The file that registers the operators `torch.ops.dcp_ext.*` when it is loaded, by
    `torch.ops.load_library` or by a program on libtorch. Any process loads it once."""
    return str(_PATH.with_name("libtorch_ckpt_ext.so"))


@functools.cache
def _library() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(_PATH))
    except OSError as error:
        raise ImportError(
            f"torch_ckpt's native library could not be loaded ({error}); "
            "reinstall it, or run ./dev build in a checkout"
        ) from error
    library.torch_ckpt_call.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
    library.torch_ckpt_call.restype = ctypes.c_void_p
    library.torch_ckpt_free.argtypes = [ctypes.c_void_p]
    library.torch_ckpt_free.restype = None
    library.torch_ckpt_version.argtypes = []
    library.torch_ckpt_version.restype = ctypes.c_char_p
    return library


def version() -> str:
    """The version of the native library, "major.minor.patch"."""
    return str(_library().torch_ckpt_version().decode())


def request_text(request: dict[str, Any]) -> bytes:
    """A request or plan as UTF-8 JSON. Raises InvalidArgumentError for text that UTF-8 cannot say,
    as a path from undecodable bytes."""
    try:
        # `default`: integers of numpy are integers.
        return json.dumps(request, ensure_ascii=False, default=operator.index).encode()
    except UnicodeEncodeError as error:
        around = error.object[max(0, error.start - 60) : error.end + 20]
        raise InvalidArgumentError(f"a path or name is not UTF-8: ...{around!a}...") from None


def names_text(names: list[str]) -> str | list[str]:
    """Names as a request has them: one text, a name a line, which is much cheaper to make and to
    parse; as a list where one of them has a line break itself, or there are none."""
    text = "\n".join(names)
    return text if text.count("\n") == len(names) - 1 else names


def listed_names(said: str | list[str]) -> list[str]:
    """What `names_text` was made of."""
    return said.split("\n") if isinstance(said, str) else said


def call(request: dict[str, Any]) -> Any:
    """Run a request of the core (csrc/capi/requests.cc lists them) and return its result.

    Blocks without holding the GIL. Raises a CheckpointError of the kind that the core reports, or
    OSError for a failed system call.
    """
    library = _library()
    text = request_text(request)
    response = library.torch_ckpt_call(text, len(text))
    if response is None:
        raise MemoryError("no memory for the answer of torch_ckpt's core")
    try:
        answer = json.loads(ctypes.string_at(response))
    finally:
        library.torch_ckpt_free(response)
    if "error" in answer:
        raise error_from(answer["error"])
    return answer["ok"]
