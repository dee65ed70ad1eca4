"""Everything a run needs to go on: model, optimizer, scheduler, generators, step, data position."""

from __future__ import annotations

from typing import Any

import torch
from corpus import Batches
from settings import Settings
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.optim.lr_scheduler import LambdaLR
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def build_model(settings: Settings, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Builds the model with the same random weights on every rank."""
    torch.manual_seed(settings.seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        max_position_embeddings=4 * settings.sequence_length,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        architectures=["LlamaForCausalLM"],
    )
    return LlamaForCausalLM(config).float()


def shard_model(model: LlamaForCausalLM, mesh: DeviceMesh) -> None:
    """Shards the model over ``mesh`` with FSDP2.

    Gradients are summed, not averaged: each rank already divides its loss by the number of tokens
    of the *global* batch, so the gradient does not depend on the number of ranks.
    """
    for block in (*model.model.layers, model):
        fully_shard(block, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # Gloo cannot multiply while it reduces.
            module.set_force_sum_reduction_for_comms(True)


class TrainingState(Stateful):
    """The state of one training run as one object that DCP saves and loads."""

    def __init__(self, model: LlamaForCausalLM, batches: Batches, settings: Settings) -> None:
        self.step = 0
        self.model = model
        self.batches = batches
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95)
        )

        def rate(step: int) -> float:
            warm = min(1.0, (step + 1) / settings.warmup_steps)
            return warm * (1.0 - 0.9 * step / settings.steps)

        self.scheduler = LambdaLR(self.optimizer, rate)

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {
            "model": model,
            "optimizer": optimizer,
            "scheduler": self.scheduler.state_dict(),
            "generator": torch.get_rng_state(),
            "data": self.batches.state_dict(),
            "step": self.step,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optimizer"],
        )
        self.scheduler.load_state_dict(state_dict["scheduler"])
        torch.set_rng_state(state_dict["generator"])
        self.batches.load_state_dict(state_dict["data"])
        self.step = state_dict["step"]
