"""What stands in a Hugging Face directory beside the tensors: configuration, tokenizer, code."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch_ckpt.errors import InvalidArgumentError

# Of a directory that is given: what holds tensors, or says where they are.
_WEIGHTS = (
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx"),
    *(".index.json", ".catalog"),
)
_OURS = ("torch_ckpt.json", "commit.json")


@contextlib.contextmanager
def extra_files(extras: Any) -> Iterator[list[str]]:
    """The paths of the files that `extras` stands for; those that objects write are there until the
    end of the block.

    extras: None; a directory, of which all files but those of weights are taken; a file; an object
    with `save_pretrained` (a configuration, a tokenizer, a model, whose configurations are taken
    and not its weights); or a list of these. Raises InvalidArgumentError for anything else, for two
    files of one name, and for directories within directories.
    """
    if extras is None:
        yield []
        return
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="torch_ckpt-extras-") as made:
        items = extras if isinstance(extras, list | tuple) else [extras]
        for number, item in enumerate(items):
            if item is None:
                continue
            if not isinstance(item, str | os.PathLike):
                item = _written(item, os.path.join(made, str(number)))
            for path in _files_of(Path(os.path.abspath(item))):
                if not path.is_file():
                    raise InvalidArgumentError("extras have no such file", file=str(path))
                other = found.setdefault(path.name, str(path))
                if other != str(path):
                    raise InvalidArgumentError(
                        f"extras have two files of this name: {other}", file=str(path)
                    )
        yield list(found.values())


def _files_of(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = []
    for entry in sorted(path.iterdir()):
        if entry.name.startswith(".") or entry.name in _OURS or entry.name.endswith(_WEIGHTS):
            continue
        if entry.is_dir():
            raise InvalidArgumentError(
                "extras have no directories within directories; list the files that you want",
                file=str(entry),
            )
        files.append(entry)
    return files


def _written(item: Any, directory: str) -> str:
    """The directory that `item` has saved itself into."""
    os.mkdir(directory)
    if hasattr(item, "state_dict") and hasattr(
        item, "config"
    ):  # a model: its weights are not extra
        parts = [item.config, getattr(item, "generation_config", None)]
    else:
        parts = [item]
    for part in parts:
        if part is None:
            continue
        if not hasattr(part, "save_pretrained"):
            raise InvalidArgumentError(
                f"extras are paths, or objects with save_pretrained; {type(item).__name__} is none"
            )
        part.save_pretrained(directory)
    return directory
