"""The objects file of one rank, and its side file: what a set of object leaves looks like on disk.

    {"format_version": 1, "file_id": "<32 hex digits>", "side_bytes": <size of the side file>,
     "objects": {"<fqn>": <value>, ...}}

ASCII text, one leaf a line. Pure functions on text and bytes; writing and reading files is the
engine's.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch_ckpt.objects.decode import Decoder
from torch_ckpt.objects.encode import Encoder, SideBytes
from torch_ckpt.objects.stand_ins import StandIns
from torch_ckpt.objects.types import FORMAT_VERSION, CorruptObjectError, UnsupportedObjectError

_MEMBERS = ["format_version", "file_id", "side_bytes", "objects"]


# Made once: an encoder for each leaf takes as long as what it does.
_dump = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode


def dumps_objects(
    objects: Mapping[str, Any], *, file_id: str, allow_pickle: bool = False
) -> tuple[str, list[bytes]]:
    """Return the text of the objects file and the pieces of its side file, which stand in it one
    after the other without gaps (no pieces: no side file).

    `objects` maps fqn to leaf. Raises UnsupportedObjectError, a TypeError, naming the path of the
    first leaf that cannot be written.
    """
    side = SideBytes()
    lines = []
    for fqn, obj in objects.items():
        try:
            fqn.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UnsupportedObjectError(f"{fqn!r}: a name that is not valid Unicode") from error
        lines.append(f"{_dump(fqn)}:{_dump(Encoder(fqn, allow_pickle, side).encode(obj))}")
    head = f'{{"format_version":{FORMAT_VERSION},"file_id":{_dump(file_id)},'
    body = ",\n".join(lines)
    return f'{head}"side_bytes":{side.size},"objects":{{\n{body}\n}}}}\n', side.pieces


class ObjectFile:
    """A parsed objects file; leaves are decoded one by one on demand. Not for several threads."""

    def __init__(self, text: str | bytes, *, name: str = "objects file") -> None:
        """Parse `text`; `name` is the file's name for messages. Raises CorruptObjectError for text
        that breaks the grammar and UnsupportedObjectError for a newer format version."""
        self.name = name
        try:
            if isinstance(text, bytes):
                text = text.decode("ascii")
            document = json.loads(
                text, object_pairs_hook=_unique_members, parse_constant=_no_constant
            )
        except (ValueError, RecursionError) as error:
            raise CorruptObjectError(f"{name}: not valid JSON: {error}"[:400]) from error
        if type(document) is not dict or type(document.get("format_version")) is not int:
            raise CorruptObjectError(f"{name}: not an objects file")
        if document["format_version"] != FORMAT_VERSION:
            raise UnsupportedObjectError(
                f"{name}: format version {document['format_version']}; "
                f"this torch_ckpt reads version {FORMAT_VERSION}"
            )
        if (
            list(document) != _MEMBERS
            or type(document["file_id"]) is not str
            or type(document["side_bytes"]) is not int
            or document["side_bytes"] < 0
            or type(document["objects"]) is not dict
        ):
            raise CorruptObjectError(f"{name}: wrong members at the top of an objects file")
        self.file_id: str = document["file_id"]
        self.side_bytes: int = document["side_bytes"]
        self._objects: dict[str, Any] = document["objects"]

    def fqns(self) -> Collection[str]:
        """The names of the leaves, in the order in which they were saved."""
        return self._objects.keys()

    def load(
        self,
        fqns: Iterable[str] | None = None,
        *,
        side: bytes | memoryview = b"",
        allow_pickle: bool = False,
        stand_ins: StandIns | None = None,
    ) -> dict[str, Any]:
        """Return {fqn: object} for `fqns` (all of them by default).

        `side` is the whole side file, needed where side_bytes is not 0. Raises ObjectError, and
        KeyError for a name that the file does not have.
        """
        if len(side) != self.side_bytes:
            raise CorruptObjectError(
                f"{self.name}: its side file has {len(side)} bytes instead of {self.side_bytes}"
            )
        decoder = Decoder(side, allow_pickle, stand_ins=stand_ins)
        found = {}
        for fqn in self._objects if fqns is None else fqns:
            decoder.path = fqn
            try:
                found[fqn] = decoder.decode(self._objects[fqn])
            except RecursionError as error:
                raise decoder.fail("nested too deeply") from error
        return found


def loads_objects(
    text: str | bytes, side: bytes | memoryview = b"", *, allow_pickle: bool = False
) -> dict[str, Any]:
    """Return {fqn: object} of an objects file's text and the bytes of its side file.

    Raises CorruptObjectError for anything dumps_objects would not have written.
    """
    return ObjectFile(text).load(side=side, allow_pickle=allow_pickle)


def object_digest(obj: Any, path: str) -> bytes:
    """16 bytes that two ranks share exactly if what they would write for `obj` is the same.

    Raises UnsupportedObjectError.
    """
    side = SideBytes()
    text = _dump(Encoder(path, False, side).encode(obj))
    digest = hashlib.blake2b(text.encode("ascii"), digest_size=16)
    for piece in side.pieces:
        digest.update(piece)
    return digest.digest()


def _unique_members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("a JSON object with a repeated name")
    return members


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
