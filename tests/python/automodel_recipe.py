"""The smallest recipe of NeMo AutoModel: its BaseRecipe with a Llama of some kilobytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from nemo_automodel.components.checkpoint.config import CheckpointingConfig
from nemo_automodel.components.config.loader import ConfigNode
from nemo_automodel.components.optim.scheduler import OptimizerParamScheduler
from nemo_automodel.components.training.rng import StatefulRNG
from nemo_automodel.recipes.base_recipe import BaseRecipe
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 40


def llama(seed: int = 1, *, shard: bool = True, **options: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            attention_dropout=0.1,
            **options,
        )
    )
    if shard and dist.is_initialized():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def whole_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: whole(value) for name, value in model.state_dict().items()}


def same_state(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


class Steps:
    """What a step scheduler is for a checkpoint."""

    def __init__(self) -> None:
        self.step = 0
        self.is_last_step = False

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


class Recipe(BaseRecipe):
    """seed: of random numbers, and of the weights; the data is the same for all."""

    def __init__(
        self,
        root: Path,
        seed: int,
        *,
        model: torch.nn.Module | None = None,
        loader: bool = True,
        peft: Any = None,
        **config: Any,
    ) -> None:
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.cfg = ConfigNode({"seed": 0})
        self.peft_config = peft
        self.model = llama(seed) if model is None else model
        trained = [each for each in self.model.parameters() if each.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, 0.01)
        self.lr_scheduler = [
            OptimizerParamScheduler(
                self.optimizer, 0.0, 0.01, 0.001, 2, 20, "cosine", 0.01, 0.01, 20, "constant"
            )
        ]
        self.step_scheduler = Steps()
        self.rng = StatefulRNG(seed, ranked=True)
        # With a generator of its own: making the iterator draws a number.
        self.dataloader = StatefulDataLoader(
            list(range(rank, 1000, world)), batch_size=1, generator=torch.Generator()
        )
        if not loader:
            self.untrack_state("dataloader")
        self.checkpointer = CheckpointingConfig(
            checkpoint_dir=str(root),
            is_peft=peft is not None,
            **{"save_consolidated": "false", **config},
        ).build(rank, 0, 0)
        self._batches: Any = None

    def train(self, steps: int) -> list[float]:
        """The losses; each depends on weights, moments, data and all random streams."""
        self.model.train()
        if self._batches is None:
            self._batches = iter(self.dataloader)
        losses = []
        for _ in range(steps):
            first = int(next(self._batches)) + int(numpy.random.randint(3))
            tokens = (torch.randint(0, 5, (2, 6)) + first) % VOCABULARY
            loss = self.model(input_ids=tokens, labels=tokens).loss
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()  # which waits for the copy by itself
            self.lr_scheduler[0].step(1)
            self.step_scheduler.step += 1
            losses.append(loss.item())
        return losses

    def save(self, **keywords: Any) -> str:
        """Save the step. Its directory."""
        step = self.step_scheduler.step
        self.save_checkpoint(0, step, 1.0, **keywords)
        return str(Path(self.checkpointer.config.checkpoint_dir) / f"epoch_0_step_{step}")

    def moments(self) -> list[torch.Tensor]:
        """Of all parameters, in their order."""
        return [
            whole(self.optimizer.state[parameter][key])
            for parameter in self.model.parameters()
            for key in ("exp_avg", "exp_avg_sq", "step")
            if parameter.requires_grad
        ]
