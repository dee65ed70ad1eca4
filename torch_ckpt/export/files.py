"""Which final file each tensor goes to, and what the files are called."""

from __future__ import annotations

import json
import operator
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch_ckpt.checkpoint.names import INDEX, SHARD_STEM
from torch_ckpt.errors import InvalidArgumentError

MAX_INDEX = 99_999  # five digits, as everybody's file names have

_NUMBERED = re.compile(r"-(\d{5})-of-\d{5}\.safetensors$")


class Naming(NamedTuple):
    """What final files are called: "<stem>-00001-of-00002.safetensors"."""

    stem: str
    number_single: bool  # else a single file is "<stem>.safetensors", without an index
    has_index: bool = True  # else no index stands beside the files


NAMINGS = {
    "dcp": Naming("model", True),
    "hf": Naming("model", False),
    "diffusers": Naming("diffusion_pytorch_model", False),
    "peft": Naming("adapter_model", False),
}

# As the shards of the one rank of a save.
SHARDS = Naming(SHARD_STEM.format(1), True, has_index=False)


def checked_mapping(
    mapping: Mapping[str, Any] | str | os.PathLike[str] | None,
) -> dict[str, int] | None:
    """`mapping` with plain integers, or that of an index file. Raises InvalidArgumentError, naming
    the tensor, for an index that is no integer from 1 to MAX_INDEX."""
    if mapping is None:
        return None
    if isinstance(mapping, str | os.PathLike):
        mapping = mapping_of_index(mapping)
    checked = {}
    for fqn, index in mapping.items():
        try:
            number = operator.index(index)
        except TypeError:
            number = 0
        if isinstance(index, bool) or not 1 <= number <= MAX_INDEX:
            raise InvalidArgumentError(
                f"has index {index!r} in fqn_to_index_mapping; they are integers from 1 to "
                f"{MAX_INDEX}",
                tensor=str(fqn),
            )
        checked[fqn] = number
    return checked


def mapping_of_index(path: str | os.PathLike[str]) -> dict[str, int]:
    """The mapping that an index file implies, or the one in a directory: the numbers in its file
    names, or their order. Raises InvalidArgumentError, OSError."""
    file = Path(path)
    if file.is_dir():
        found = sorted(file.glob("*.safetensors.index.json"))
        file = found[0] if len(found) == 1 else file / INDEX
    if not file.is_file():
        raise InvalidArgumentError("there is no such index", file=str(file))
    index = load_json(file)
    weights = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weights, dict) or not all(type(name) is str for name in weights.values()):
        raise InvalidArgumentError(
            "has no weight_map of tensor names and file names", file=str(file)
        )
    names = sorted(set(weights.values()))
    numbers = {name: number for number, name in enumerate(names, start=1)}
    matches = {name: _NUMBERED.search(name) for name in names}
    if all(matches.values()):
        numbers = {name: int(match[1]) for name, match in matches.items() if match}
    if len(set(numbers.values())) != len(names):
        raise InvalidArgumentError("names two files of one number", file=str(file))
    return {tensor: numbers[name] for tensor, name in weights.items()}


def load_json(path: str | os.PathLike[str]) -> Any:
    """The JSON in a file. Raises InvalidArgumentError where it is none, or has a name twice."""
    try:
        return json.loads(Path(path).read_bytes(), object_pairs_hook=_unique_names)
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"is not JSON: {error}", file=os.fspath(path)) from None


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = dict(pairs)
    if len(names) != len(pairs):
        raise ValueError("a name stands in it twice")
    return names
