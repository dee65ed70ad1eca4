"""The jobs of the rows of training runs: a model, its optimizer, and ways to save and load them."""

from __future__ import annotations

import dataclasses
import importlib
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks import rivals

DTYPE = torch.bfloat16


def llama(scale: float, layers: int) -> nn.Module:
    """A Llama of transformers, 155 million parameters at 7 layers, with values that are the same on
    all ranks."""
    transformers = importlib.import_module("transformers")
    width = max(64, int(1024 * scale**0.5) // 64 * 64)
    config = transformers.LlamaConfig(
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=max(64, int(32000 * scale**0.5)),
        tie_word_embeddings=False,
        dtype=DTYPE,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).to(DTYPE)


def sharded(model: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    whole: nn.Module = model
    return whole


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """That has taken a step, and so has its state."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def bytes_of(model: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


@dataclasses.dataclass
class Saver:
    """One way to save a step.

    save: the step of this number; futures of what goes on in the background. place: the directory
    of that step. is_durable: whether what it has written is synced when it is done.
    """

    save: Callable[[int], list[Future[Any]]]
    place: Callable[[int], Path]
    is_durable: bool
    close: Callable[[], None] = lambda: None


Make = Callable[[nn.Module, torch.optim.Optimizer, Path], Saver]


def checkpointer(background: bool) -> Make:
    """The three lines of docs/training.md."""

    def make(model: nn.Module, optimizer: torch.optim.Optimizer, root: Path) -> Saver:
        made = rivals.ours("Checkpointer")(root, model, optimizer, background=background)

        def save(step: int) -> list[Future[Any]]:
            return [made.save(step)]

        return Saver(save, lambda step: root / f"step-{step}", True, made.close)

    return make


def one_sharded_save(model: nn.Module, optimizer: torch.optim.Optimizer, root: Path) -> Saver:
    """The same tensors by one bare call, without a final form."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}

    def state() -> dict[str, Any]:
        found: dict[str, Any] = dict(model.state_dict())
        for parameter, values in optimizer.state.items():
            for key, value in values.items():
                found[f"optimizer.state.{names[id(parameter)]}.{key}"] = value
        return found

    def save(step: int) -> list[Future[Any]]:
        rivals.ours("save")(state(), root / f"step-{step}")
        return []

    return Saver(save, lambda step: root / f"step-{step}", True)


def stager_without_device() -> Any:
    """Stock's stager as both frameworks have it, but for pinned memory, which needs a device."""
    staging = importlib.import_module("torch.distributed.checkpoint.staging")
    return staging.DefaultStager(staging.StagingOptions(False, True, True, False))


def titan(mode: str, ours: bool) -> Make:
    """torchtitan's manager of 0.3.0, with its container of optimizers; or the same with ours."""

    def make(model: nn.Module, optimizer: torch.optim.Optimizer, root: Path) -> Saver:
        os.environ.setdefault("LOCAL_RANK", "0")
        dcp = importlib.import_module("torchtitan.components.checkpointer.dcp")
        optimizers = importlib.import_module("torchtitan.components.optimizer")
        kind = dcp.CheckpointManager
        if ours:
            kind = importlib.import_module("torch_ckpt.integrations.torchtitan").CheckpointManager
        container = optimizers.default_adamw(lr=1e-3, implementation="for-loop").build(
            model_parts=[model]
        )
        (inside,) = container.optimizers
        inside.state.update(optimizer.state)
        schedule = optimizers.LRSchedulersContainer.Config(warmup_steps=1)
        config = kind.Config(
            enable=True, folder="steps", interval=1, async_mode=mode, keep_latest_k=0
        )
        manager: Any = config.build(
            dataloader=None,
            model_parts=[model],
            optimizers=container,
            lr_schedulers=schedule.build(optimizers=container, training_steps=10),
            states={},
            sd_adapter=None,
            base_folder=str(root),
        )

        if mode == "async_with_pinned_mem" and not ours:
            manager.stager = stager_without_device()

        def save(step: int) -> list[Future[Any]]:
            manager.maybe_wait_for_saving()
            manager.save(step)
            manager.maybe_wait_for_staging()
            return [manager.save_future] if manager.save_future else []

        return Saver(save, lambda step: root / f"steps/step-{step}", ours, manager.close)

    return make


def automodel(ours: bool, *, background: bool = False, final: bool = False) -> Make:
    """NeMo AutoModel's Checkpointer of 0.7.0, by the calls of its recipes; or the same with ours.
    final: with the consolidated form of the model in each step."""

    def make(model: nn.Module, optimizer: torch.optim.Optimizer, root: Path) -> Saver:
        if ours:
            importlib.import_module("torch_ckpt.integrations.automodel").install()
        elif background:
            module = importlib.import_module("nemo_automodel.components.checkpoint.checkpointing")
            module.DefaultStager = lambda: stager_without_device()
        config = importlib.import_module("nemo_automodel.components.checkpoint.config")
        made = config.CheckpointingConfig(
            checkpoint_dir=str(root),
            save_consolidated="every" if final else "false",
            is_async=background,
        ).build(dist.get_rank(), 0, 0)

        def save(step: int) -> list[Future[Any]]:
            made.async_wait()
            made.lifecycle.complete_pending()
            path = str(root / f"epoch_0_step_{step}")
            made.lifecycle.reserve(path)
            made.save_model(model, path)
            made.save_optimizer(optimizer, model, path)
            made.maybe_wait_for_staging()
            values = {"best_val_metric": None, "metric_key": None}
            if not background:
                made.lifecycle.publish(path, **values)
                return []
            futures = [each.future for each in (made._model_ctx, made._optim_ctx)]
            made.lifecycle.defer_publication(path, **values)
            if ours:  # until the step counts, which rank 0 makes it do
                published = made.lifecycle._work
                return [*futures, *([published] if published else ())]
            return [each.upload_completion for each in futures]

        def close() -> None:
            made.finalize()
            made.close()

        return Saver(save, lambda step: root / f"epoch_0_step_{step}", ours, close)

    return make


STEPS: Mapping[str, Make] = {
    "torchtitan": titan("disabled", ours=False),
    "AutoModel, sharded": automodel(ours=False),
    "AutoModel, consolidated": automodel(ours=False, final=True),
    "ours, Checkpointer": checkpointer(background=False),
    "ours, torchtitan's manager": titan("disabled", ours=True),
    "ours, AutoModel's, sharded": automodel(ours=True),
    "ours, AutoModel's, consolidated": automodel(ours=True, final=True),
    "ours, one sharded save": one_sharded_save,
}
BACKGROUND: Mapping[str, Make] = {
    "torchtitan, async": titan("async", ours=False),
    "torchtitan, async_with_pinned_mem, not pinned": titan("async_with_pinned_mem", ours=False),
    "AutoModel, async, not pinned": automodel(ours=False, background=True),
    "ours, Checkpointer": checkpointer(background=True),
    "ours, torchtitan's async": titan("async", ours=True),
    "ours, torchtitan's async_with_pinned_mem": titan("async_with_pinned_mem", ours=True),
    "ours, AutoModel's async": automodel(ours=True, background=True),
}


# --- base models ------------------------------------------------------------


def load_with_ours(model: nn.Module, path: Path) -> None:
    rivals.ours("load_model")(model, path)


def load_bare(model: nn.Module, path: Path) -> None:
    rivals.ours("load")(model.state_dict(), path)


def load_with_stock(model: nn.Module, path: Path) -> None:
    reader = importlib.import_module("torch.distributed.checkpoint").HuggingFaceStorageReader(path)
    importlib.import_module("torch.distributed.checkpoint").load(
        model.state_dict(), storage_reader=reader
    )


def load_with_transformers(model: nn.Module, path: Path) -> None:
    """Each rank loads the whole model, and keeps its part: what a program without DCP does."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    transformers = importlib.import_module("transformers")
    whole = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=DTYPE).state_dict()
    with torch.no_grad():
        for name, target in model.state_dict().items():
            source = whole[name]
            if isinstance(target, DTensor):
                source = distribute_tensor(source, target.device_mesh, target.placements)
            target.copy_(source)


def base_of_automodel(ours: bool) -> Callable[[nn.Module, Path], None]:
    """Its load of a base model, and the same with ours."""

    def load(model: nn.Module, path: Path) -> None:
        if ours:
            importlib.import_module("torch_ckpt.integrations.automodel").install()
        config = importlib.import_module("nemo_automodel.components.checkpoint.config")
        made = config.CheckpointingConfig(
            checkpoint_dir=str(path.with_name("none")), save_consolidated="false"
        ).build(dist.get_rank(), 0, 0)
        made.load_model(model, str(path), is_init_step=True)

    return load


def import_automodel() -> None:
    importlib.import_module("torch_ckpt.integrations.automodel")


def import_rivals() -> None:
    transformers = importlib.import_module("transformers")
    _ = transformers.AutoModelForCausalLM
    importlib.import_module("torch.distributed.checkpoint.hf_storage")


LOADS: Mapping[str, Callable[[nn.Module, Path], None]] = {
    "transformers": load_with_transformers,
    "DCP HF reader": load_with_stock,
    "AutoModel": base_of_automodel(ours=False),
    "ours, load_model": load_with_ours,
    "ours, bare load": load_bare,
    "ours, AutoModel's": base_of_automodel(ours=True),
}
