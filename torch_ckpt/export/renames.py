"""Other names for tensors on their way into or out of a checkpoint. Nothing here needs torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from torch_ckpt.errors import InvalidArgumentError

KeyMapping = Mapping[str, str] | Sequence[tuple[str, str]] | Callable[[str], str]


def renamed(key_mapping: KeyMapping | None, names: Iterable[str]) -> dict[str, str]:
    """{name: its new name} for those of `names` that `key_mapping` changes.

    key_mapping: a function from name to name; or (regular expression, replacement) pairs, as a list
        or a dict, of which the first that is found in a name is applied, wherever it is found, with
        groups as in `re.sub` (that is what transformers does with its `key_mapping`).

    Raises InvalidArgumentError for what is neither, and, naming both, where two get one name.
    """
    if key_mapping is None:
        return {}
    rename = key_mapping if callable(key_mapping) else _by_patterns(key_mapping)
    changed = {}
    taken: dict[str, str] = {}
    for name in names:
        new = rename(name)
        if not isinstance(new, str):
            raise InvalidArgumentError(f"key_mapping gives {new!r}, which is no name", tensor=name)
        other = taken.setdefault(new, name)
        if other != name:
            raise InvalidArgumentError(
                f"key_mapping gives it the name '{new}', which is that of '{other}', too",
                tensor=name,
            )
        if new != name:
            changed[name] = new
    return changed


def _by_patterns(
    key_mapping: Mapping[str, str] | Sequence[tuple[str, str]],
) -> Callable[[str], str]:
    try:
        pairs = key_mapping.items() if isinstance(key_mapping, Mapping) else key_mapping
        rules = [(re.compile(pattern), replacement) for pattern, replacement in pairs]
    except (TypeError, ValueError, re.error) as error:
        raise InvalidArgumentError(
            f"key_mapping is a function, or pairs of regular expression and replacement: {error}"
        ) from error

    def rename(name: str) -> str:
        for pattern, replacement in rules:
            try:
                new, count = pattern.subn(replacement, name)
            except (re.error, IndexError) as error:
                raise InvalidArgumentError(
                    f"key_mapping: replacement {replacement!r}: {error}", tensor=name
                ) from error
            if count:
                return new
        return name

    return rename
