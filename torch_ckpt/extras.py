"""What stands in a Hugging Face directory beside the tensors: configuration, tokenizer, code."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import sys
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from torch_ckpt.errors import InvalidArgumentError

logger = logging.getLogger(__name__)

# Of a directory that is given: what holds tensors, or says where they are.
_WEIGHTS = (
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx"),
    *(".index.json", ".catalog"),
)
_OURS = ("torch_ckpt.json", "commit.json")

# Entered once, by who commits them.
ExtraFiles = contextlib.AbstractContextManager[list[str]]


@contextlib.contextmanager
def extra_files(extras: Any, dtype: str | None = None) -> Iterator[list[str]]:
    """The paths of the files that `extras` stands for; those that objects write are there until the
    end of the block.

    extras: None; a directory, of which all files but those of weights are taken; a file; an object
    with `save_pretrained` (a configuration, a tokenizer, a model, whose configurations are taken
    and not its weights); or a list of these. The configuration of a model says `dtype`, which its
    floats are stored in, or where that is None the model's own. Raises InvalidArgumentError for
    anything else, and for two files of one name. A directory's own directories are left out, with
    a line in the log.
    """
    if extras is None or (isinstance(extras, list | tuple) and not extras):
        yield []
        return
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="torch_ckpt-extras-") as made:
        items = extras if isinstance(extras, list | tuple) else [extras]
        for number, item in enumerate(items):
            if item is None:
                continue
            if not isinstance(item, str | os.PathLike):
                item = _written(item, os.path.join(made, str(number)), dtype)
            for path in _files_of(Path(os.path.abspath(item))):
                if not path.is_file():
                    raise InvalidArgumentError("extras have no such file", file=str(path))
                other = found.setdefault(path.name, str(path))
                if other != str(path):
                    raise InvalidArgumentError(
                        f"extras have two files of this name: {other}", file=str(path)
                    )
        yield list(found.values())


def files_beside(directory: str, weights: Collection[str]) -> list[str]:
    """The files of a Hugging Face directory that are no weights, neither by their names nor among
    `weights`."""
    return [str(file) for file in _files_of(Path(directory)) if file.name not in weights]


def _files_of(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files, directories = [], []
    for entry in sorted(path.iterdir()):
        if entry.name.startswith(".") or entry.name in _OURS or entry.name.endswith(_WEIGHTS):
            continue
        if entry.is_dir():
            directories.append(entry.name)
        else:
            files.append(entry)
    if directories:
        names = ", ".join(directories)
        logger.info("extras leave out the subdirectories of %s: %s", path, names)
    return files


def _written(item: Any, directory: str, dtype: str | None) -> str:
    """The directory that `item` has saved itself into."""
    os.mkdir(directory)
    peft = sys.modules.get("peft")  # imported by whoever has made a model of it
    if peft is not None and isinstance(item, peft.PeftModel):
        _write_adapter(item, directory)
        return directory
    is_model = hasattr(item, "state_dict") and hasattr(item, "config")
    if not hasattr(item.config if is_model else item, "save_pretrained"):
        raise InvalidArgumentError(
            f"extras are paths, or objects with save_pretrained; {type(item).__name__} is none"
        )
    if is_model:
        _write_model(item, directory, dtype)
    else:
        item.save_pretrained(directory)
    return directory


def _write_adapter(model: Any, directory: str) -> None:
    """What `save_pretrained` of a PeftModel writes beside the weights of the active adapter. It
    cannot be called for that alone: it looks up every weight, of whole modules too."""
    config = copy.copy(model.peft_config[model.active_adapter])
    base = model.base_model if config.is_prompt_learning else model.base_model.model
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = getattr(base, "name_or_path", None) or None
    config.inference_mode = True
    made_of = None  # without a task, those who load find the model's class by this
    if config.task_type is None:
        kind = type(base)
        made_of = {"base_model_class": kind.__name__, "parent_library": kind.__module__}
    model.create_or_update_model_card(directory)
    config.save_pretrained(directory, auto_mapping_dict=made_of)


def _write_model(model: Any, directory: str, dtype: str | None) -> None:
    """What `save_pretrained` of a PreTrainedModel writes beside the weights. It cannot be called
    for that alone: of a model that is spread over ranks it gathers the weights, on all ranks."""
    config = copy.deepcopy(model.config)
    # Those who load go by these: for the class, and (`from_pretrained`) for the dtype.
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    said = "dtype" if hasattr(config, "dtype") else "torch_dtype"  # before transformers 4.56
    setattr(config, said, dtype or str(model.dtype).removeprefix("torch."))
    if getattr(model, "_auto_class", None) is not None:  # it is of code that belongs to it
        from transformers.dynamic_module_utils import custom_object_save

        custom_object_save(model, directory, config=config)
    config.save_pretrained(directory)
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        generation.save_pretrained(directory)
