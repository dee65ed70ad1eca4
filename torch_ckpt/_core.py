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
STRUCTURE = "torch_ckpt.structure"  # the leaf that says the containers
UNREAD = "3"  # a tensor that is not read, as a sparse one

_PATH = pathlib.Path(__file__).with_name("libtorch_ckpt_core.so")


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


def describe(which: dict[str, Any], *, whole: bool, tensors: bool = True) -> dict[str, Any]:
    """What the checkpoint holds that `which` names, by its "path" or by its number.

    tensor_count: of tensors, tied ones too; dtypes: {"tensors", "bytes"} by dtype, of them once.
    names, paths (None where a name is the path): of all entries, in one order;
        without `tensors` of objects only, and so is all that follows.
    kinds: a character for each: OBJECT for those that are no tensors, ALIAS for tied ones, UNREAD
        for tensors that are not read: "unread" says why by name, their types may have dtypes of
        torch's and None as the shape, and there is nothing else of them.
    types: [dtype, shape, bytes], each once; type_of: the place in it, for each entry.
    holders: for each object the place of its file in `files`; None for an archived one, unless
        `whole`.
    archived: the names of objects that are archives in files of a foreign format.
    files: those of objects only, and placements empty, without `whole`; with it all files, and for
        each tensor its boxes. Those of an alias are None: they are its tensor's.
    """
    request = {"op": "describe", "whole": whole, "tensors": tensors, **which}
    answer: dict[str, Any] = call(request)
    answer["names"] = listed_names(answer["names"])
    return answer


def files_of(checkpoint: int) -> list[dict[str, Any]]:
    """{"name", "role", "bytes"} of every file of the checkpoint of that number."""
    answer = call({"op": "files", "checkpoint": checkpoint})
    columns = zip(
        listed_names(answer["names"]), listed_names(answer["roles"]), answer["bytes"], strict=True
    )
    return [{"name": name, "role": role, "bytes": size} for name, role, size in columns]


def objects_of(described: dict[str, Any]) -> list[str]:
    """The names of the entries that are no tensors."""
    columns = zip(described["names"], described["kinds"], strict=True)
    return [name for name, kind in columns if kind == OBJECT]


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
