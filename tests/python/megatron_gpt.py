"""One rank of a GPT of Megatron Core's that trains on the CPU by Megatron's own code: GPTModel,
DistributedDataParallel, DistributedOptimizer, and its calls to save and load, under patch_megatron.

`python megatron_gpt.py FOLDER --tp 2 --steps 6 ...` is started once for each rank.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.serialization import (
    get_default_load_sharded_strategy,
    get_default_save_sharded_strategy,
)
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.overrides import TorchFunctionMode

from torch_ckpt.megatron import patch_megatron

WORDS, LENGTH, BATCH = 64, 16, 2
TRACKER = "latest_checkpointed_iteration.txt"


class OnCpu(TorchFunctionMode):
    """Megatron's code asks for the GPU by name."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if function is torch.Tensor.cuda:
            return args[0]
        answer = function(*args, **kwargs)
        if function is torch.Tensor.type and isinstance(answer, str):
            return answer.replace("torch.", "torch.cuda.")
        return answer


def without_gpus() -> None:
    """What Megatron calls of torch.cuda does nothing."""
    cuda: Any = torch.cuda
    cuda.synchronize = cuda.empty_cache = lambda *_, **__: None
    cuda.current_device = lambda: "cpu"
    for name in ("Float", "Half", "BFloat16", "Int", "Byte"):
        setattr(cuda, f"{name}Tensor", getattr(torch, f"{name}Tensor"))

    @contextlib.contextmanager
    def fork(*_: Any, **__: Any) -> Iterator[None]:
        yield

    tensor_parallel.random.CudaRNGStatesTracker.fork = fork


def with_torchs_adam() -> None:
    """Megatron's loads expect a fused Adam, which keeps no step by parameter: it stays as it is."""
    of_states = DistributedOptimizer._set_main_param_and_optimizer_states

    def set_states(self: Any, parameter: Any, tensors: dict[str, Any]) -> None:
        step = self._get_main_param_and_optimizer_states(parameter)["step"]
        of_states(self, parameter, {**tensors, "step": step})

    DistributedOptimizer._set_main_param_and_optimizer_states = set_states


class Trainer:
    def __init__(self, folder: Path, kind: str) -> None:
        self.folder = folder
        self.kind = kind
        config = TransformerConfig(
            num_layers=2,
            hidden_size=32,
            num_attention_heads=4,
            use_cpu_initialization=True,
            bf16=True,
            params_dtype=torch.bfloat16,
            pipeline_dtype=torch.bfloat16,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            bias_activation_fusion=False,
            bias_dropout_fusion=False,
            masked_softmax_fusion=False,
            gradient_accumulation_fusion=False,
            tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        )
        torch.manual_seed(1)
        model = GPTModel(config, get_gpt_layer_local_spec(), WORDS, LENGTH).bfloat16()
        self.model = DistributedDataParallel(
            config, DistributedDataParallelConfig(use_distributed_optimizer=True), model
        )
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=0.01,
                bf16=True,
                params_dtype=torch.bfloat16,
                use_distributed_optimizer=True,
                clip_grad=0.0,
            ),
            [self.model],
        )
        group = parallel_state.get_data_parallel_group()
        self.saving = FullyParallelSaveStrategyWrapper(
            get_default_save_sharded_strategy("torch_dist", 1), group, True
        )
        self.group = group
        self.queue = AsyncCallsQueue()

    def state(self, step: int, is_loading: bool = False) -> dict[str, Any]:
        of_model = self.model.module.sharded_state_dict()
        of_optimizer = self.optimizer.sharded_state_dict(
            of_model, is_loading, metadata={"distrib_optim_sharding_type": self.kind}
        )
        return {"model": of_model, "optimizer": of_optimizer, "iteration": step}

    def save(self, step: int, path: Path, *, beside: bool) -> None:
        request = dist_checkpointing.save(
            self.state(step),
            str(path),
            self.saving,
            async_sharded_save=beside,
            content_metadata={"distrib_optim_sharding_type": self.kind},
        )
        if request is None:
            return

        def tell() -> None:
            dist.barrier()
            if dist.get_rank() == 0:
                (self.folder / TRACKER).write_text(str(step))

        request.add_finalize_fn(tell)
        self.queue.schedule_async_request(request)

    def load(self) -> int:
        """The step that was saved last, of which everything comes back."""
        self.train(0)  # without apex the optimizer describes no state before its first step
        step = int((self.folder / TRACKER).read_text())
        path = str(self.folder / f"iter_{step}")
        assert dist_checkpointing.load_content_metadata(path) == {
            "distrib_optim_sharding_type": self.kind
        }
        strategy = FullyParallelLoadStrategyWrapper(
            get_default_load_sharded_strategy(path), self.group
        )
        loaded = dist_checkpointing.load(self.state(0, is_loading=True), path, strategy)
        self.model.module.load_state_dict(loaded["model"])
        self.optimizer.load_state_dict(loaded["optimizer"])
        (optimizer,) = self.optimizer.chained_optimizers
        for of_parameter in optimizer.optimizer.state.values():
            of_parameter["step"] = of_parameter["step"].clone()  # which Megatron has made one
        assert loaded["iteration"] == step
        return step

    def train(self, step: int) -> float:
        """One step; the loss of all."""
        replica = parallel_state.get_data_parallel_rank()
        seeded = torch.Generator().manual_seed(1000 * step + replica)
        words = torch.randint(0, WORDS, (BATCH, LENGTH + 1), generator=seeded)
        places = torch.arange(LENGTH).expand(BATCH, LENGTH)
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)[None, None]
        losses = self.model(
            words[:, :-1].contiguous(), places, mask, labels=words[:, 1:].contiguous()
        )
        loss = losses.float().mean()
        loss.backward()
        self.model.finish_grad_sync()
        self.optimizer.step()
        self.model.zero_grad_buffer()
        total = loss.detach().clone()
        dist.all_reduce(total, group=self.group)
        return float(total)

    def whole_state(self) -> dict[str, torch.Tensor]:
        """What DP rank 0 of each TP rank has of the optimizer, gathered: however it is cut."""
        found: dict[str, torch.Tensor] = {}

        def visit(value: Any, path: str) -> None:
            if isinstance(value, torch.Tensor):
                found[path] = value.clone()
            elif isinstance(value, dict):
                for key, each in value.items():
                    visit(each, f"{path}/{key}")
            elif isinstance(value, list):
                for key, each in enumerate(value):
                    visit(each, f"{path}/{key}")

        (optimizer,) = self.optimizer.chained_optimizers
        visit(optimizer.get_parameter_state_dp_zero(), "optimizer")
        for name, parameter in self.model.module.named_parameters():
            found[f"model/{name}"] = parameter.detach().clone()
        return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tp", type=int, required=True)
    parser.add_argument("--kind", required=True)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--save-every", type=int, default=2)
    parser.add_argument("--die-at", type=int, default=-1)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--report", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    without_gpus()
    with_torchs_adam()
    patch_megatron()
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=options.tp)
    with OnCpu():
        trainer = Trainer(options.folder, options.kind)
        step = trainer.load() if options.resume else 0
        if options.resume:
            # What came back, saved again by this number of ranks.
            trainer.save(step, options.report.with_suffix(".again"), beside=False)
        losses: dict[int, str] = {}
        while step < options.steps:
            # Before its death one save is through, whatever becomes of the next.
            trainer.queue.maybe_finalize_async_calls(blocking=step + 2 == options.die_at)
            step += 1
            if step == options.die_at and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            losses[step] = trainer.train(step).hex()
            if step % options.save_every == 0:
                trainer.save(step, options.folder / f"iter_{step}", beside=True)
        trainer.queue.close()
        whole = trainer.whole_state()
    rank, place = dist.get_rank(), parallel_state.get_tensor_model_parallel_rank()
    if parallel_state.get_data_parallel_rank() == 0:
        torch.save(whole, options.report.with_suffix(f".{place}.pt"))
    if rank == 0:
        options.report.write_text(json.dumps({"losses": losses, "step": step}))
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
