"""Loads of AutoModel's base models, and the reader of all its models."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from typing import Any

from nemo_automodel.components.checkpoint import checkpointing as stock
from nemo_automodel.shared.parameter_names import canonical_parameter_fqn
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan

from torch_ckpt.calls import api
from torch_ckpt.checkpoint.checkpoint import Checkpoint
from torch_ckpt.dcp.read.reader import CheckpointReader
from torch_ckpt.errors import IncompleteError, MissingKeyError
from torch_ckpt.planning.renaming import new_names, rename_metadata

_stock_is_bin = stock._is_bin_checkpoint
_stock_load_safetensors = stock._load_hf_safetensors_checkpoint
_stock_load_whole = stock._load_full_state_dict_into_model
_stock_convert = stock._convert_checkpoint_with_transformers

# Of the Checkpointer that loads, for functions that are not told.
loading: ContextVar[Any] = ContextVar("torch_ckpt_automodel_config", default=None)


class Reader(CheckpointReader):
    """CheckpointReader of a model, with AutoModel's `key_mapping`: names of the checkpoint's to
    those of the model."""

    def __init__(self, path: str, key_mapping: Any = None) -> None:
        super().__init__(path)
        self._key_mapping = key_mapping
        self._stored: dict[str, str] = {}  # names in the checkpoint, of what is renamed

    def read_metadata(self) -> Metadata:
        metadata = super().read_metadata()
        names = new_names(self._key_mapping, metadata.state_dict_metadata)
        self._stored = {new: stored for stored, new in names.items()}
        return rename_metadata(metadata, names) if names else metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        items = []
        for item in plan.items:
            stored = self._stored.get(item.storage_index.fqn)
            if stored is not None:
                index = dataclasses.replace(item.storage_index, fqn=stored)
                item = dataclasses.replace(item, storage_index=index)
            items.append(item)
        return super().prepare_local_plan(dataclasses.replace(plan, items=items))


def is_bin_checkpoint(path: str) -> bool:
    """Whether a base is of .bin files. Beside safetensors they are not looked at, be it another
    form of the model or a trainer's arguments."""
    return bool(_stock_is_bin(path)) and not stock._is_safetensors_checkpoint(path)


def load_bin(model_path: str) -> dict[str, Any] | None:
    """The tensors of a base of .bin files. Raises IncompleteError where a file is missing."""
    return dict(api.load(None, model_path, no_dist=True)) if is_bin_checkpoint(model_path) else None


def load_safetensors(model_path: str, *, prefault_mmap: bool = False) -> dict[str, Any] | None:
    """The tensors of a base, still in its files, as AutoModel's function of this name. Raises
    IncompleteError where a file that the index names is missing, or a tensor."""
    names: Iterable[str] = ()
    if os.path.isdir(model_path) and stock._is_safetensors_checkpoint(model_path):
        names = Checkpoint(model_path)
    loaded: dict[str, Any] | None = _stock_load_safetensors(model_path, prefault_mmap=prefault_mmap)
    for name in names:
        if name not in (loaded or {}):
            raise IncompleteError("is missing", file=model_path, tensor=name)
    return loaded


def convert_with_transformers(
    model: nn.Module, model_path: str, key_mapping: dict[str, str] | None = None
) -> dict[str, Any] | None:
    """As AutoModel's, which takes whatever files are there. Raises IncompleteError where one is
    missing."""
    Checkpoint(model_path).dtypes()
    converted: dict[str, Any] | None = _stock_convert(model, model_path, key_mapping)
    return converted


def load_whole(model_parts: list[nn.Module], state_dict: dict[str, Any]) -> None:
    """Load a base, whole tensors by the model's names, into the model. AutoModel leaves what is not
    there as it was initialized; here that raises MissingKeyError, but for what no base has: an
    adapter, the heads that its configuration names."""
    config = loading.get()
    if config is not None:
        for part in model_parts:
            _check_whole(part, state_dict, config)
    _stock_load_whole(model_parts, state_dict)


def _check_whole(part: nn.Module, state_dict: Mapping[str, Any], config: Any) -> None:
    module = stock._unwrap_ddp_model(part)
    adapter = getattr(module, "state_dict_adapter", None)
    loaded = {*state_dict, *(getattr(adapter, "view_loaded_native_keys", None) or ())}
    heads = tuple(config.skip_task_head_prefixes_for_base_model or ())
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(canonical_parameter_fqn(name))
    for of_one in names.values():  # of parameters that are tied one is enough
        name = of_one[0]
        if any(each in loaded for each in of_one) or name.startswith(heads):
            continue
        if config.is_peft and "lora" in name:
            continue
        raise MissingKeyError("the base model has no such tensor", tensor=name)
