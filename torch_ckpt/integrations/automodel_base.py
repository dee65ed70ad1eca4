"""Loads of AutoModel's base models, and the reader of all its models."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from typing import Any

import torch
from nemo_automodel.components.checkpoint import checkpointing as stock
from nemo_automodel.components.checkpoint.conversion_mapping import requires_tensor_merging
from nemo_automodel.shared.parameter_names import canonical_parameter_fqn
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan

from torch_ckpt.calls import api
from torch_ckpt.checkpoint.checkpoint import Checkpoint
from torch_ckpt.checkpoint.quantization import with_numbers
from torch_ckpt.dcp.read.reader import CheckpointReader
from torch_ckpt.errors import IncompleteError, MissingKeyError, UnsupportedError
from torch_ckpt.native.opened import OpenedCheckpoint, ScaledPair
from torch_ckpt.planning.renaming import new_names, rename_metadata
from torch_ckpt.tensor_mapping.mapping import Pairs, table_of
from torch_ckpt.training.models import load_model

_stock_is_bin = stock._is_bin_checkpoint
_stock_load_safetensors = stock._load_hf_safetensors_checkpoint
_stock_load_whole = stock._load_full_state_dict_into_model
_stock_convert = stock._convert_checkpoint_with_transformers
_stock_should_dequantize = stock._should_dequantize_base_checkpoint

logger = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class Base:
    """What a model is loaded from.

    dtypes: of the model's floats, by name. codes: the names of those that our reader makes numbers
    of, and of their scales; none before that is known to be so.
    """

    path: str
    dtypes: dict[str, torch.dtype]
    codes: dict[str, str] = dataclasses.field(default_factory=dict)

    def dtype_of(self, name: str) -> torch.dtype:
        """What numbers of that name are made in: what the model has them in. Where it has that name
        not, an adapter of AutoModel's renames it: then float32, which rounds nothing, unless all of
        the model is of one dtype."""
        of_all = set(self.dtypes.values())
        return self.dtypes.get(name, of_all.pop() if len(of_all) == 1 else torch.float32)


# Of the Checkpointer that loads, for functions that are not told: its configuration, and the base.
loading: ContextVar[Any] = ContextVar("torch_ckpt_automodel_config", default=None)
loading_from: ContextVar[Base | None] = ContextVar("torch_ckpt_automodel_base", default=None)


def base_of(parts: list[nn.Module], path: str) -> Base:
    """The base at `path` of a model's parts."""
    return Base(
        path,
        {
            canonical_parameter_fqn(name): each.dtype
            for part in parts
            for name, each in stock._unwrap_ddp_model(part).named_parameters(remove_duplicate=False)
            if each.is_floating_point()
        },
    )


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


def should_dequantize(model: nn.Module, requested: bool | None) -> bool:
    """As AutoModel's, which makes numbers of codes by a rank's rows, and cuts scales where these
    are no whole blocks. False for a base whose codes our reader makes numbers of, under their own
    names: then adapters have destinations of floats."""
    if not _stock_should_dequantize(model, requested):
        return False
    base = loading_from.get()
    if base is None or not os.path.isdir(base.path):
        return True
    pairs: list[ScaledPair] = []

    def note(pair: ScaledPair) -> bool:
        pairs.append(pair)
        return True

    try:
        with_numbers(OpenedCheckpoint(base.path), note)
    except UnsupportedError as error:
        logger.warning("AutoModel's own code makes numbers of it: %s", error)
        return True
    if not pairs or any(pair.name != pair.codes for pair in pairs):
        return True
    base.codes = {pair.codes: pair.scales for pair in pairs}
    return False


def is_bin_checkpoint(path: str) -> bool:
    """Whether a base is of .bin files. Beside safetensors they are not looked at, be it another
    form of the model or a trainer's arguments."""
    return bool(_stock_is_bin(path)) and not stock._is_safetensors_checkpoint(path)


def load_bin(model_path: str) -> dict[str, Any] | None:
    """The tensors of a base of .bin files. Raises IncompleteError where a file is missing."""
    return dict(api.load(None, model_path, no_dist=True)) if is_bin_checkpoint(model_path) else None


def load_safetensors(model_path: str, *, prefault_mmap: bool = False) -> dict[str, Any] | None:
    """The tensors of a base, still in its files but for numbers that are made of codes, as
    AutoModel's function of this name. Raises IncompleteError where a file that the index names is
    missing, or a tensor."""
    names: Iterable[str] = ()
    if os.path.isdir(model_path) and stock._is_safetensors_checkpoint(model_path):
        names = Checkpoint(model_path)
    loaded: dict[str, Any] | None = _stock_load_safetensors(model_path, prefault_mmap=prefault_mmap)
    for name in names:
        if name not in (loaded or {}):
            raise IncompleteError("is missing", file=model_path, tensor=name)
    base = loading_from.get()
    if loaded is not None and base is not None and base.codes and base.path == model_path:
        stored = Checkpoint(model_path)
        for codes, scales in base.codes.items():
            shape = stored[codes].shape
            loaded[codes] = stored[codes].read(out=torch.empty(shape, dtype=base.dtype_of(codes)))
            loaded.pop(scales, None)
    return loaded


def convert_with_transformers(
    model: nn.Module, model_path: str, key_mapping: dict[str, str] | None = None
) -> dict[str, Any] | None:
    """As AutoModel's, which takes whatever files are there. Raises IncompleteError where one is
    missing."""
    Checkpoint(model_path).dtypes()
    converted: dict[str, Any] | None = _stock_convert(model, model_path, key_mapping)
    return converted


def load_mapped(
    parts: list[nn.Module], path: str, key_mapping: Any, config: Any, group: Any
) -> bool:
    """Load a base of experts one by one into transformers' fused ones, in place, where a table of
    ours says which are which; AutoModel makes all of it anew on each rank, and takes codes for
    numbers. Whether it did. Raises MissingKeyError, as `load_whole`."""
    model = stock._unwrap_ddp_model(parts[0])
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if (
        key_mapping
        or hasattr(model, "state_dict_adapter")
        or not (model_type and requires_tensor_merging(model_type))
        or not (os.path.isdir(path) and stock._is_safetensors_checkpoint(path))
    ):
        return False
    table = table_of(model_type)
    # Such a model that transformers 5 has saved as it is has fused ones already.
    if table is None or not Pairs.of(table).stored_in(list(Checkpoint(path))):
        return False
    heads = tuple(config.skip_task_head_prefixes_for_base_model or ())
    report = load_model(
        parts, path, strict=False, skip=heads, tensor_mapping=table, process_group=group
    )
    for name in report.missing:
        if not _is_of_adapter(name, config):
            raise MissingKeyError("the base model has no such tensor", file=path, tensor=name)
    return True


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
        if _is_of_adapter(name, config):
            continue
        raise MissingKeyError("the base model has no such tensor", tensor=name)


def _is_of_adapter(name: str, config: Any) -> bool:
    """Whether a parameter is one of an adapter, which no base has."""
    return bool(config.is_peft) and "lora" in name
