"""The tensors of a model under the model's own names, whatever it is wrapped in."""

from __future__ import annotations

import functools
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torch_ckpt.checkpoint.quantization import CONFIGS_OF_PARTS
from torch_ckpt.errors import InvalidArgumentError, UnsupportedError
from torch_ckpt.native.torch_private import local_tensor
from torch_ckpt.planning.mapped_state import Kinds, kinds_of, map_state
from torch_ckpt.planning.wrappers import is_made_of_others
from torch_ckpt.tensor_mapping.mapping import Pairs, TensorMapping

# What wraps a module and is no part of it: by module and name of its class, the attribute that
# holds the module. A class counts that derives from one of these.
_WRAPPERS = {
    ("torch.nn.parallel.distributed", "DistributedDataParallel"): "module",
    ("torch.nn.parallel.data_parallel", "DataParallel"): "module",
    ("torch._dynamo.eval_frame", "OptimizedModule"): "_orig_mod",
    (
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "ActivationWrapper",
    ): "_checkpoint_wrapped_module",
}
_FSDP1 = ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel")


@functools.cache
def _classes(kind: type) -> tuple[tuple[str, str], ...]:
    """Module and name of a class and its bases."""
    return tuple((each.__module__, each.__qualname__) for each in kind.__mro__)


@functools.cache
def _wrapped_by(kind: type) -> str | None:
    return next((_WRAPPERS[each] for each in _classes(kind) if each in _WRAPPERS), None)


def _inner_name(module: nn.Module) -> str | None:
    """The attribute that holds what `module` wraps; None where it is no wrapper."""
    return _wrapped_by(_kind(module))


def _kind(module: nn.Module) -> Any:
    """Its class. To mypy, modules have a hash of their own and so their classes have none."""
    return type(module)


def unwrapped(module: nn.Module) -> nn.Module:
    """What `module` is without what it is wrapped in."""
    inner = _inner_name(module)
    return module if inner is None else unwrapped(getattr(module, inner))


def clean_name(module: nn.Module, name: str) -> str:
    """`name`, of a parameter, a buffer or an entry of a state dict of `module`, without the names
    of wrappers. Some of these have left theirs out already."""
    parts, clean = name.split("."), []
    at: nn.Module | None = module
    while parts:
        while at is not None and (inner := _inner_name(at)) is not None:
            if parts[0] == inner and inner in at._modules:
                parts = parts[1:]
            at = getattr(at, inner)
        if not parts:
            break
        clean.append(parts.pop(0))
        at = at._modules.get(clean[-1]) if at is not None else None
    return ".".join(clean)


_MOST_LISTED = 20


def listed(names: Collection[str]) -> str:
    """Names for a message."""
    shown, more = ", ".join(sorted(names)[:_MOST_LISTED]), len(names) - _MOST_LISTED
    return shown + (f" and {more} more" if more > 0 else "") if names else "none"


def memory_of(tensor: Any) -> Any:
    """What tensors have in common that are one memory, whole; of anything else the same for itself
    alone."""
    if not isinstance(tensor, torch.Tensor) or not tensor.numel():
        return id(tensor)
    if isinstance(tensor, DTensor):
        tensor = local_tensor(tensor)
    try:
        return tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape
    except (NotImplementedError, RuntimeError):  # of a class that has no storage
        return id(tensor)


class ModelState:
    """The state of a model, or of the parts of one that this rank has (pipeline stages).

    adapter: the PeftModel that it is, whose adapter alone is saved; None for any other model.
    pairs: how its tensors are stored, where that is not as they are; kinds: those of all ranks
        then, which whoever makes this sets: see `merged`.

    Raises InvalidArgumentError where two parts have one name and for tensors without memory,
    UnsupportedError, naming it, for what cannot be saved by name: a module of FSDP1, a tensor that
    is made of others, and what is trained beside a PEFT adapter.
    """

    def __init__(
        self, model: nn.Module | Sequence[nn.Module], tensor_mapping: TensorMapping | None = None
    ) -> None:
        self.pairs = None if tensor_mapping is None else Pairs.of(tensor_mapping)
        self.kinds: Kinds = {}
        self.parts = [model] if isinstance(model, nn.Module) else list(model)
        if not self.parts or not all(isinstance(part, nn.Module) for part in self.parts):
            raise InvalidArgumentError("model is a torch.nn.Module, or a list of its parts")
        for part in self.parts:
            for name, module in part.named_modules():
                if _FSDP1 in _classes(_kind(module)):
                    raise UnsupportedError(
                        f"{name or type(module).__name__} is sharded by FullyShardedDataParallel, "
                        "whose parameters have no names of their own: use fully_shard"
                    )
        models = [unwrapped(part) for part in self.parts]
        peft = sys.modules.get("peft")  # imported by whoever has made a model of it
        found = [
            model for model in models if peft is not None and isinstance(model, peft.PeftModel)
        ]
        if found and len(models) > 1:
            raise UnsupportedError("a PeftModel in parts cannot be saved")
        self.adapter: Any = found[0] if found else None
        if found and self.pairs is not None:
            raise UnsupportedError("an adapter has no tensor_mapping: peft reads it as it is")
        # Whether embeddings are saved as well. Decided once: peft may ask the Hub for it.
        self._with_embeddings = bool(found) and _saves_embeddings(found[0])

    def parameters(self) -> dict[nn.Parameter, str]:
        """The name of each parameter; of a tied one the first."""
        names: dict[nn.Parameter, str] = {}
        for part in self.parts:
            for name, parameter in part.named_parameters():
                names.setdefault(parameter, clean_name(part, name))
        return names

    def tied_names(self) -> dict[str, str]:
        """Names that a configuration says to be tied, and the names that they are tied to."""
        tied: dict[str, str] = {}
        for part in self.parts:
            model = unwrapped(part)
            said = getattr(model, "_tied_weights_keys", None)  # of transformers 5
            config = getattr(model, "config", None)
            if isinstance(said, Mapping) and getattr(config, "tie_word_embeddings", False):
                tied.update(said)
        return tied

    def state_dict(self) -> dict[str, Any]:
        """What is saved of it: by name the tensors themselves, and what `get_extra_state` gives, if
        that is no tensor, as a tuple of one: then it is one leaf whatever it is made of."""
        state: dict[str, Any] = {}
        for part in self.parts:
            given = part.state_dict() if self.adapter is None else self._of_adapter()
            for name, value in given.items():
                name = clean_name(part, name)
                if name in state:
                    raise InvalidArgumentError("two parts of the model have this name", tensor=name)
                if not isinstance(value, torch.Tensor):
                    state[name] = (value,)
                    continue
                if value.is_meta:
                    raise InvalidArgumentError(
                        "is on the meta device: give the model memory first, by to_empty",
                        tensor=name,
                    )
                if is_made_of_others(value):
                    raise UnsupportedError(
                        f"is a {type(value).__name__}, which has no form in a Hugging Face file; "
                        "torch_ckpt.save stores it",
                        tensor=name,
                    )
                state[name] = value
        return state

    def own_kinds(self) -> Kinds:
        """What this rank says of its tensors, for `kinds`; nothing where nothing is mapped."""
        return {} if self.pairs is None else kinds_of(self.state_dict())

    def stored_state(self) -> dict[str, Any]:
        """`state_dict`, as it is stored: of what is mapped there are LocalBoxes in its memory."""
        return self.stored()[0]

    def stored(self) -> tuple[dict[str, Any], list[torch.Tensor]]:
        """`stored_state`, and the padding in parameters, for which nothing is stored."""
        state = self.state_dict()
        if self.pairs is None:
            return state, []
        numbers = self.pairs.numbers_in(self.config)
        # Those of this rank may have other dtypes by now.
        mapped = map_state(state, self.kinds | kinds_of(state), self.pairs, numbers)
        self.pairs.check_matched(mapped.unmatched)
        return mapped.values, mapped.zeros

    def _of_adapter(self) -> dict[str, Any]:
        model = self.adapter
        state = _state_by_peft(model, save_embedding_layers=self._with_embeddings)
        saved = {memory_of(value) for value in state.values() if isinstance(value, torch.Tensor)}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and memory_of(parameter) not in saved:
                raise UnsupportedError(
                    "is trained, and is no part of the adapter that peft saves: freeze it, or add "
                    "it to modules_to_save",
                    tensor=clean_name(model, name),
                )
        return state

    @property
    def naming(self) -> Literal["hf", "peft"]:
        """What its files are called."""
        return "hf" if self.adapter is None else "peft"

    def beside(self, extras: Any) -> list[Any] | None:
        """What stands beside its files: its own configuration, where it has one, and `extras`."""
        model = self.adapter or unwrapped(self.parts[0])
        own = [model] if hasattr(model, "save_pretrained") else []
        given = extras if isinstance(extras, list | tuple) else [extras]
        return [*own, *(each for each in given if each is not None)] or None

    @property
    def config(self) -> Any:
        """Its configuration; None where it has none."""
        return getattr(unwrapped(self.parts[0]), "config", None)

    def forget_quantization(self) -> None:
        """Take what says how weights were quantized from its configuration: they are numbers."""
        for part in self.parts:
            config: Any = getattr(unwrapped(part), "config", None)
            for each in (config, *(getattr(config, key, None) for key in CONFIGS_OF_PARTS)):
                if hasattr(each, "quantization_config"):
                    del each.quantization_config

    def load_state_dict(self, state: Any, /) -> None:
        """For the protocol of what has a state; loads go by `take`."""
        self.take(state)

    def take(self, loaded: Mapping[str, Any]) -> None:
        """Make `loaded` the state, whose tensors were filled in place where `state_dict` or
        `stored_state` has given them: the rest goes through the modules' own `load_state_dict`.
        Other names stay."""
        for part in self.parts:
            module = part if self.adapter is None else self.adapter
            live = {memory_of(each) for each in [*module.parameters(), *module.buffers()]}
            given = {
                name: loaded[clean_name(part, name)]
                for name in (part.state_dict() if self.adapter is None else self._of_adapter())
                if clean_name(part, name) in loaded
            }
            rest = {name: value for name, value in given.items() if memory_of(value) not in live}
            if rest and self.adapter is not None:
                raise UnsupportedError(
                    "is no parameter of the adapter's model", tensor=next(iter(rest))
                )
            if rest:
                values = {
                    name: value[0] if isinstance(value, tuple) else value
                    for name, value in rest.items()
                }
                part.load_state_dict(values, strict=False)


def is_extra(name: str) -> bool:
    """Whether an entry of a module's state is what its `get_extra_state` gives."""
    return name.rpartition(".")[2] == "_extra_state"


def _active(model: Any) -> str:
    """The adapter of a PeftModel that is saved."""
    name = model.active_adapter
    if isinstance(name, str):
        return name
    raise UnsupportedError(f"several adapters are active ({name}): one can be saved")


def _saves_embeddings(model: Any) -> bool:
    """Whether peft saves embeddings beside the adapter: where they are targets of it, or have
    another size than those of the base model."""
    return len(_state_by_peft(model)) > len(_state_by_peft(model, save_embedding_layers=False))


def _state_by_peft(model: Any, **options: Any) -> dict[str, Any]:
    """What peft saves of the adapter, by its names, and those of wrappers inside the model."""
    given: dict[str, Any] | None = None
    if any(_inner_name(module) is not None for module in model.modules()):
        # peft looks for the names of modules, which those of wrappers belong to, in a state dict
        # that has left them out: it finds nothing.
        given = dict(model.named_parameters(remove_duplicate=False))
        for name, module in model.named_modules():
            for key in module._buffers.keys() - module._non_persistent_buffers_set:
                given[f"{name}.{key}" if name else key] = module._buffers[key]
    get = sys.modules["peft"].get_peft_model_state_dict
    state: dict[str, Any] = get(model, given, adapter_name=_active(model), **options)
    return state
