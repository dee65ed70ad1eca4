"""A training of torchtitan's own parts, on CPUs: its debug model, optimizers, schedulers, loader and
checkpoint manager, built of its configuration as its Trainer builds them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchtitan.components.checkpointer.dcp import CheckpointManager as Titans
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config.override import apply_overrides
from torchtitan.models.llama3.config_registry import llama3_debugmodel

PACKED = False  # a batch of sequences, one after the other
try:
    from torchtitan.components.dataloader import ParallelAwareDataloader
except ModuleNotFoundError:  # the development version has another one, of its own data
    PACKED = True

    class ParallelAwareDataloader(StatefulDataLoader):  # type: ignore[no-redef]
        def __init__(self, data: Any, rank: int, world: int, **options: Any) -> None:
            super().__init__(data, **options)
            self.rank, self.world = rank, world

        def state_dict(self) -> dict[str, Any]:
            return {f"dp_rank_{self.rank}": super().state_dict(), "world_size": self.world}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            assert state["world_size"] == self.world, "resharding is not supported"
            super().load_state_dict(state[f"dp_rank_{self.rank}"])


USE = "torch_ckpt.integrations.torchtitan.use_torch_ckpt"


class Numbers(IterableDataset[torch.Tensor]):
    """Tokens, which go on where a state says."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.place = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            self.place += 1
            yield torch.arange(16) * (self.place + 31 * self.rank) % 97

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


class Attention(torch.nn.Module):
    """In the place of those of torchtitan, which need a device to train."""

    def forward(self, q: Any, k: Any, v: Any, **_: Any) -> torch.Tensor:
        heads = (each.transpose(-3, -2) for each in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(
            *heads, is_causal=True, enable_gqa=True
        )
        return out.transpose(-3, -2)


class Job:
    """What torchtitan's Trainer has of this."""

    def __init__(
        self, root: Path, *, ours: bool = True, assets: Path | None = None, **options: Any
    ):
        rank, world = dist.get_rank(), dist.get_world_size()
        config = llama3_debugmodel()
        model_config = config.model_spec.model
        config.checkpoint = Titans.Config(
            **{"enable": True, "folder": "steps", "interval": 1, **options}
        )
        if ours:
            config.override.imports = [USE]
            apply_overrides(config.override, config)
        torch.manual_seed(5)
        with torch.device("meta"):
            self.model = model_config.build()
        mesh = init_device_mesh("cpu", (world,))
        for block in self.model.layers.values():
            block.attention.inner_attention = Attention()
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.model.to_empty(device="cpu")
        torch.manual_seed(7)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.normal_(0, 0.02)
            self.model.init_states(buffer_device=torch.device("cpu"))
        self.optimizers = default_adamw(lr=8e-4, implementation="for-loop").build(
            model_parts=[self.model]
        )
        schedule = LRSchedulersContainer.Config(warmup_steps=2, decay_ratio=0.8)
        self.schedulers = schedule.build(optimizers=self.optimizers, training_steps=20)
        self.loader = ParallelAwareDataloader(Numbers(rank), rank, world, batch_size=2)
        self.step, self.ntokens_seen = 0, 0
        adapter = config.model_spec.state_dict_adapter
        self.manager = config.checkpoint.build(
            dataloader=self.loader,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={"train_state": self},
            sd_adapter=adapter(model_config, None if assets is None else str(assets)),
            base_folder=str(root),
        )

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.ntokens_seen = state["step"], state["ntokens_seen"]

    def train(self, steps: int, *, last: bool = False, saves: bool = True) -> list[float]:
        losses = []
        batches = iter(self.loader)
        for number in range(steps):
            self.step += 1
            tokens = next(batches)
            self.ntokens_seen += tokens.numel()
            self.optimizers.zero_grad()
            logits = self.model(tokens.flatten() if PACKED else tokens).flatten(0, -2)
            loss = torch.nn.functional.cross_entropy(logits[:-1], tokens.flatten()[1:])
            loss.backward()
            self.manager.maybe_wait_for_staging()
            self.optimizers.step()
            self.schedulers.step()
            losses.append(loss.item())
            if saves:
                self.manager.save(self.step, last_step=last and number == steps - 1)
        return losses
