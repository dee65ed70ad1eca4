"""What people say of a checkpoint, which stands in its manifest: names, and values that JSON has.
Nothing here needs torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from torch_ckpt.errors import InvalidArgumentError

_MOST_BYTES = 1 << 20  # of all values, as text: every reader reads the manifest


def encoded(metadata: Mapping[str, Any] | None) -> dict[str, str]:
    """The values as JSON texts. Raises InvalidArgumentError, naming it, for a name that is no text
    and for a value that JSON does not say exactly: not-a-number, a key that is no text, a tensor.
    """
    texts: dict[str, str] = {}
    for name, value in (metadata or {}).items():
        if type(name) is not str:
            raise InvalidArgumentError(f"metadata: the name {name!r} is no text")
        try:
            texts[name] = json.dumps(value, allow_nan=False)
            if json.loads(texts[name]) != value:  # keys that became text
                raise ValueError("it would not come back as it is")
            texts[name].encode()
            name.encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidArgumentError(f"metadata: {name!r} is not JSON: {error}") from None
    size = sum(len(text) for text in texts.values())
    if size > _MOST_BYTES:
        raise InvalidArgumentError(f"metadata has {size} bytes as text; {_MOST_BYTES} are allowed")
    return texts


def decoded(texts: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """The values of texts that were read. One that is no JSON stays text."""
    values: dict[str, Any] = {}
    for name, text in texts:
        try:
            values[name] = json.loads(text)
        except (ValueError, RecursionError):
            values[name] = text
    return values
