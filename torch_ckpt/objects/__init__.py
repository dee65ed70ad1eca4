"""Leaves of a state dict that are no tensors, as typed JSON: encode, decode, the objects file."""

from torch_ckpt.objects.decode import decode_object
from torch_ckpt.objects.encode import SideBytes, encode_object
from torch_ckpt.objects.file import ObjectFile, dumps_objects, loads_objects, object_digest
from torch_ckpt.objects.types import (
    CorruptObjectError,
    ObjectError,
    UnsupportedObjectError,
)

__all__ = [
    "CorruptObjectError",
    "ObjectError",
    "ObjectFile",
    "SideBytes",
    "UnsupportedObjectError",
    "decode_object",
    "dumps_objects",
    "encode_object",
    "loads_objects",
    "object_digest",
]
