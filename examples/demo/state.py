"""Everything a run needs to go on, and the Checkpointer that saves and loads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from corpus import Batches
from settings import Settings
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.optim.lr_scheduler import LambdaLR
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from torch_ckpt import Checkpointer


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


class Training:
    """What a training run changes: the model, its optimizer, the schedule and the data position."""

    def __init__(self, model: LlamaForCausalLM, batches: Batches, settings: Settings) -> None:
        self.model = model
        self.batches = batches
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95)
        )

        def rate(step: int) -> float:
            warm = min(1.0, (step + 1) / settings.warmup_steps)
            return warm * (1.0 - 0.9 * step / settings.steps)

        self.scheduler = LambdaLR(self.optimizer, rate)

    def checkpointer(self, root: Path, **options: Any) -> Checkpointer:
        """Saves and loads all of it below ``root``."""
        return Checkpointer(
            root,
            self.model,
            self.optimizer,
            scheduler=self.scheduler,
            dataloader=self.batches,
            data_rank=(0, 1),  # every rank draws the same batches
            keep_last=3,
            **options,
        )
