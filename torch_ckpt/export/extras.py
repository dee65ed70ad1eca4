"""What stands in a Hugging Face directory beside the tensors: configuration, tokenizer, code."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import os
import sys
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from torch_ckpt.checkpoint.names import JOURNAL_NAME, MANIFEST, rank_of
from torch_ckpt.checkpoint.quantization import CONFIGS_OF_PARTS, QUANTIZATION_KEYS
from torch_ckpt.errors import InvalidArgumentError

logger = logging.getLogger(__name__)

# Of a directory that is given: what holds tensors, or says where they are.
_WEIGHTS = (
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx"),
    *(".index.json", ".catalog"),
)
_OURS = (MANIFEST, JOURNAL_NAME)
# Of the directory that is converted, where nobody has said what to take: what configurations,
# tokenizers and code are written as. All else may be weights of some kind, data or logs.
_BESIDE = (
    *(".json", ".jsonl", ".txt", ".py", ".md", ".jinja", ".yaml", ".yml", ".license"),
    *(".model", ".tiktoken", ".spm", ".vocab", ".merges", ".bpe", ".codes"),
    *("LICENSE", "NOTICE"),
)
_DTYPE_KEYS = ("dtype", "torch_dtype")  # the second before transformers 4.56

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


@contextlib.contextmanager
def files_beside(
    directory: str,
    weights: Collection[str],
    taken: Collection[str],
    dtype: str | None,
    *,
    plain: bool = False,
) -> Iterator[list[str]]:
    """The paths of what stands beside the `weights` of a Hugging Face directory: configuration,
    tokenizer and code, by their names. What else is there is left out, with a line in the log; so
    are the names that are `taken`, with a warning there. With a `dtype` the one of config.json is a
    copy that says it; with `plain` one that says nothing of quantization."""
    found: list[Path] = []
    left: list[Path] = []
    stay: list[Path] = []
    for file in _files_of(Path(directory)):
        if file.name in weights:
            continue
        known = file.name.endswith(_BESIDE) and file.name.isprintable() and file.is_file()
        (left if not known else stay if file.name in taken else found).append(file)
    if stay:
        logger.warning(
            "%s: the target has files of these names that it keeps, so they are left out; to have "
            "them, remove those there first: %s",
            directory,
            ", ".join(file.name for file in stay),
        )
    if left:
        names = ", ".join(ascii(file.name) for file in left)
        logger.info("left out of what stands beside the weights in %s: %s", directory, names)
    with tempfile.TemporaryDirectory(prefix="torch_ckpt-extras-") as made:
        yield [
            _changed(file, dtype, plain, made) if file.name == "config.json" else str(file)
            for file in found
        ]


def _changed(file: Path, dtype: str | None, plain: bool, made: str) -> str:
    """A copy of the configuration `file` of a model, in the directory `made`, that says `dtype`
    where it says one, and with `plain` nothing of quantization; `file` itself where nothing
    changes."""
    try:
        config = json.loads(file.read_bytes())
    except (ValueError, RecursionError):
        return str(file)  # it is copied as it is
    if not isinstance(config, dict):
        return str(file)
    of_parts = [each for key, each in config.items() if key in CONFIGS_OF_PARTS]
    changed = False
    for part in (config, *(each for each in of_parts if isinstance(each, dict))):
        for key in _DTYPE_KEYS if dtype else ():
            if isinstance(part.get(key), str):
                part[key], changed = dtype, True
        for key in QUANTIZATION_KEYS if plain else ():
            changed = part.pop(key, None) is not None or changed
    if not changed:
        return str(file)
    copied = os.path.join(made, file.name)
    with open(copied, "w", encoding="utf-8") as out:
        json.dump(config, out, indent=2)
        out.write("\n")
    return copied


def _files_of(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files, directories = [], []
    for entry in sorted(path.iterdir()):
        if entry.name.startswith(".") or entry.name in _OURS or entry.name.endswith(_WEIGHTS):
            continue
        if rank_of(entry.name) is not None:
            continue  # as objects-00001.json: the names of what we write ourselves
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
