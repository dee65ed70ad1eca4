"""Programs that call stock DCP, on our engine by patch_torch.

accelerate, the transformers Trainer and transformers' own distributed checkpoints are the real
ones; the calls of torchtitan and of Lightning Fabric are re-enacted, argument by argument.
"""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks.frameworks import Built, leaves, net, same, state_of
from ranks.run import Context, cases, everywhere, raised, stock_load_says
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint._consolidate_hf_safetensors import (
    consolidate_safetensors_files_on_every_rank,
)
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType, fully_shard
from torch.distributed.tensor import DTensor

import torch_ckpt

CASES, case = cases()


def written_by(path: Path) -> str:
    return torch_ckpt.Checkpoint(path).format


def step(built: Built, backward: Callable[[torch.Tensor], Any] = torch.Tensor.backward) -> float:
    """One of training, and its loss."""
    model, optimizer = built
    loss = model(torch.ones(3, 6)).square().sum()
    backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def bits_of(built: Built) -> Any:
    """This rank's part of model and optimizer."""
    return leaves(state_of(built, StateDictOptions()))


# accelerate


def as_if_on_gpus() -> None:
    """accelerate knows FSDP on accelerators only: on CPUs it ignores the plugin."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


@contextlib.contextmanager
def accelerator(version: int) -> Iterator[Any]:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, PartialState

    with mock.patch.dict(os.environ):
        AcceleratorState._reset_state(True)
        PartialState(cpu=True)
        as_if_on_gpus()
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=version,
            state_dict_type="SHARDED_STATE_DICT",
            auto_wrap_policy="NO_WRAP",
            cpu_ram_efficient_loading=False,
            use_orig_params=version == 1 or None,
        )
        made = Accelerator(cpu=True, fsdp_plugin=plugin)
        made.state.device = torch.device("cpu")  # that of GPUs has a number
        yield made


def prepared(made: Any, seed: int, version: int) -> Built:
    model: nn.Module = net(seed)
    if version == 2:
        built: Built = made.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
        return built
    model = made.prepare(model)
    return model, made.prepare(torch.optim.AdamW(model.parameters(), lr=0.01))


def save_with_accelerate(path: Path, version: int) -> tuple[Any, float, float]:
    """What was saved, and the losses of the next two steps."""
    with accelerator(version) as made:
        built = prepared(made, 1, version)
        step(built, made.backward)
        made.save_state(str(path))
        saved = bits_of(built)
        return saved, step(built, made.backward), step(built, made.backward)


def load_with_accelerate(path: Path, version: int) -> tuple[Any, float, float]:
    with accelerator(version) as made:
        built = prepared(made, 2, version)
        step(built, made.backward)  # of an optimizer without a state FSDP1 loads none
        made.load_state(str(path))
        loaded = bits_of(built)
        return loaded, step(built, made.backward), step(built, made.backward)


def accelerate_round_trip(context: Context, version: int) -> None:
    from accelerate.utils.fsdp_utils import merge_fsdp_weights

    path = context.folder / "state"
    with torch_ckpt.patch_torch(file_system=True):
        saved = save_with_accelerate(path, version)
        assert load_with_accelerate(path, version) == saved
        for name in ("pytorch_model_fsdp_0", "optimizer_0"):
            assert written_by(path / name) == "torch_ckpt"
            torch_ckpt.Checkpoint(path / name).verify()
        with accelerator(version):
            merge_fsdp_weights(str(path / "pytorch_model_fsdp_0"), str(context.folder / "merged"))
        # Once more into the same place, as jobs with one output directory do.
        assert save_with_accelerate(path, version) == saved
        assert load_with_accelerate(path, version) == saved
    merged = load_file(context.folder / "merged" / "model.safetensors")
    assert {key: value.shape for key, value in merged.items()} == {
        key: value.shape for key, value in net(1).state_dict().items()
    }


@case
def accelerate_fsdp2(context: Context) -> None:
    accelerate_round_trip(context, 2)


@case
def accelerate_fsdp1(context: Context) -> None:
    accelerate_round_trip(context, 1)


@case
def accelerate_resumes_what_stock_saved(context: Context) -> None:
    for version in (1, 2):
        path = context.folder / str(version)
        saved = save_with_accelerate(path, version)
        assert written_by(path / "optimizer_0") == "dcp"
        with torch_ckpt.patch_torch(file_system=True):
            assert load_with_accelerate(path, version) == saved
            save_with_accelerate(path, version)  # over it
            assert load_with_accelerate(path, version) == saved
        assert written_by(path / "optimizer_0") == "torch_ckpt"


@case
def accelerate_for_another_world(context: Context) -> None:
    """clients_reload.py loads it with another number of ranks."""
    with torch_ckpt.patch_torch(file_system=True):
        with accelerator(2) as made:
            built = prepared(made, 1, 2)
            step(built, made.backward)
            made.save_state(str(context.shared / "accelerate"))
            whole = state_of(built, StateDictOptions(full_state_dict=True, cpu_offload=True))
    if context.rank == 0:
        torch.save(whole, context.shared / "accelerate.pt")


# The transformers Trainer


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, 32, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def run_trainer(path: Path, seed: int, *, stop_at: int = 0, resume: bool = False) -> Any:
    """The losses of a run of 6 steps that saves every third, and the weights at its end."""
    from accelerate.state import AcceleratorState
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    class Stop(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            control.should_training_stop |= state.global_step == stop_at

    with mock.patch.dict(os.environ):
        AcceleratorState._reset_state(True)
        arguments = TrainingArguments(
            output_dir=str(path),
            use_cpu=True,
            per_device_train_batch_size=2,
            max_steps=6,
            save_steps=3,
            logging_steps=1,
            learning_rate=0.01,
            report_to=[],
            disable_tqdm=True,
            fsdp=True,
            fsdp_config={
                "version": 2,
                "state_dict_type": "SHARDED_STATE_DICT",
                "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            },
        )
        assert arguments.device.type == "cpu"  # which sets up the state that is changed here
        as_if_on_gpus()
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=16,
        )
        trainer = Trainer(
            model=LlamaForCausalLM(config),
            args=arguments,
            train_dataset=Tokens(),
            callbacks=[Stop()],
        )
        trainer.train(resume_from_checkpoint=resume)
        assert any(isinstance(each, DTensor) for each in trainer.model.state_dict().values())
        losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
        return losses, leaves(trainer.model.state_dict())


@case
def trainer(context: Context) -> None:
    path = context.folder / "run"
    with torch_ckpt.patch_torch(file_system=True):
        whole = run_trainer(context.folder / "whole", 1)
        losses, _ = run_trainer(path, 1, stop_at=3)
        assert losses == whole[0][:3]
        for name in ("pytorch_model_fsdp_0", "optimizer_0"):
            assert written_by(path / "checkpoint-3" / name) == "torch_ckpt"
        assert run_trainer(path, 2, resume=True) == whole
        # clients_reload.py resumes it in processes of its own.
        run_trainer(context.shared / "trainer", 1, stop_at=3)
    result = context.shared / f"trainer-{context.rank}.pkl"
    result.write_bytes(pickle.dumps(whole))


@case
def trainer_resumes_what_stock_saved(context: Context) -> None:
    path = context.folder / "run"
    run_trainer(path, 1, stop_at=3)
    assert written_by(path / "checkpoint-3" / "optimizer_0") == "dcp"
    with torch_ckpt.patch_torch(file_system=True):
        resumed = run_trainer(path, 2, resume=True)
    assert written_by(path / "checkpoint-6" / "optimizer_0") == "torch_ckpt"
    assert resumed == run_trainer(context.folder / "whole", 1)


@case
def transformers_distributed_checkpoints(context: Context) -> None:
    """Names bound at import, and an optimizer with a bare checkpoint_id."""
    from transformers.distributed import checkpoint as distributed

    def built(seed: int) -> Built:
        model = net(seed)
        fully_shard(model)
        made = model, torch.optim.AdamW(model.parameters(), lr=0.01)
        step(made)
        return made

    path, optimizer_path = context.folder / "model", context.folder / "optimizer"
    saved, loaded = built(1), built(2)
    with torch_ckpt.patch_torch(default_storage=True):
        distributed._save_model_checkpoint_distributed(saved[0], path)
        distributed.save_optimizer_distributed(*saved, str(optimizer_path))
        assert written_by(path) == written_by(optimizer_path) == "torch_ckpt"
        assert distributed.is_sharded_checkpoint(path)
        distributed._load_model_checkpoint_distributed(loaded[0], path)
        distributed.load_optimizer_distributed(*loaded, str(optimizer_path))
        assert bits_of(loaded) == bits_of(saved)
        if context.rank == 0:
            distributed.consolidate_distributed_checkpoint(path)
            torch_ckpt.Checkpoint(path).verify()
            merged = load_file(path / "model-00001-of-00001.safetensors")
            assert merged.keys() == net(1).state_dict().keys()
    dist.barrier()


# torchtitan, components/checkpointer/dcp.py


def state_of_torchtitan(seed: int) -> dict[str, Any]:
    """The model's tensors at the top, beside the states of everything else."""
    model = net(seed)
    fully_shard(model)
    built = model, torch.optim.AdamW(model.parameters(), lr=0.01)
    step(built)
    state = state_of(built, StateDictOptions(flatten_optimizer_state_dict=True))
    return {
        **state["model"],
        "optimizer": state["optim"],
        "lr_scheduler": {"last_epoch": seed, "base_lrs": [0.01], "lr_lambdas": [None]},
        "dataloader": {"world_size": dist.get_world_size(), f"dp_rank_{dist.get_rank()}": b"\x80"},
        "train_state": {"step": torch.tensor(seed, dtype=torch.int32)},
    }


def is_valid_for_torchtitan(path: Path) -> bool:
    return any((path / name).is_file() for name in (".metadata", "model.safetensors.index.json"))


@case
def torchtitan(context: Context) -> None:
    saved, loaded = state_of_torchtitan(1), state_of_torchtitan(2)
    path = context.folder / "step-1"
    with torch_ckpt.patch_torch(default_storage=True):
        dcp.save(saved, storage_writer=None, checkpoint_id=str(path))
        assert written_by(path) == "torch_ckpt" and is_valid_for_torchtitan(path)
        dcp.load(loaded, checkpoint_id=str(path))
    same(loaded, saved)


@case
def torchtitan_async(context: Context) -> None:
    saved, group = state_of_torchtitan(1), dist.new_group(backend="gloo")
    path, other = context.folder / "step-1", context.folder / "step-2"
    with torch_ckpt.patch_torch(default_storage=True):
        future = dcp.async_save(
            saved, storage_writer=None, checkpoint_id=str(path), process_group=group
        )
        future.result()
        assert is_valid_for_torchtitan(path)
        late = dcp.async_save(
            saved, storage_writer=None, checkpoint_id=str(other), process_group=group
        )
    late.result()  # the patch is over, and the save is of ours all the same
    for each in (path, other):
        assert written_by(each) == "torch_ckpt"
        loaded = state_of_torchtitan(2)
        dcp.load(loaded, storage_reader=torch_ckpt.CheckpointReader(each))
        same(loaded, saved)


@case
def async_saves_beside_training_on_the_same_group(context: Context) -> None:
    """FSDP2 on Gloo trains through the default group, which stock would use as well."""
    data = torch.ones(3)
    for number, options in enumerate(
        ({"default_storage": True}, {"file_system": True}, {"file_system": True})
    ):
        path = context.folder / str(number)
        with torch_ckpt.patch_torch(**options):
            if "default_storage" in options:
                future = dcp.async_save(state_of_torchtitan(1), checkpoint_id=str(path))
            else:
                writer = dcp.FileSystemWriter(path)
                future = dcp.async_save(state_of_torchtitan(1), storage_writer=writer)
        while not all(everywhere(future.done())):
            dist.all_reduce(data.fill_(1.0))
            assert data.tolist() == [context.world] * 3
        future.result()
        loaded = state_of_torchtitan(2)
        dcp.load(loaded, storage_reader=torch_ckpt.CheckpointReader(path))
        same(loaded, state_of_torchtitan(1))


@case
def torchtitan_async_in_another_process(context: Context) -> None:
    """async_with_pinned_mem, without what needs a GPU."""
    saved, loaded = state_of_torchtitan(1), state_of_torchtitan(2)
    group = dist.new_group(backend="gloo")
    path = context.folder / "step-1"
    stager = DefaultStager(StagingOptions(False, True, True, False))
    with torch_ckpt.patch_torch(default_storage=True):
        response = dcp.async_save(
            saved,
            storage_writer=None,
            checkpoint_id=str(path),
            process_group=group,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            async_stager=stager,
        )
        response.staging_completion.result()
        response.upload_completion.result()
        assert written_by(path) == "torch_ckpt" and is_valid_for_torchtitan(path)
        dcp.load(loaded, checkpoint_id=str(path))
    same(loaded, saved)
    stager.close()


@case
def torchtitan_to_hugging_face(context: Context) -> None:
    """last_save_in_hf, with a mapping and without one."""
    model = net(1)
    fully_shard(model)
    state = model.state_dict()
    mapping = {name: 1 + number % 2 for number, name in enumerate(state)}
    wanted = net(1).state_dict()
    with torch_ckpt.patch_torch():
        for given in (mapping, None):
            path = context.folder / str(bool(given))
            writer = HuggingFaceStorageWriter(
                path=os.path.join(path, "sharded") if given else str(path),
                save_distributed=True,
                fqn_to_index_mapping=given,
                enable_consolidation=not given,
            )
            assert isinstance(writer, torch_ckpt.HuggingFaceStorageWriter)
            dcp.save(state, storage_writer=writer, checkpoint_id=None)
            if given:
                consolidate_safetensors_files_on_every_rank(
                    input_dir=os.path.join(path, "sharded"),
                    output_dir=str(path),
                    fqn_to_index_mapping=given,
                    num_threads=5,
                )
            assert is_valid_for_torchtitan(path)
            assert (path / "torch_ckpt.json").exists()
            dist.barrier()
            merged: dict[str, torch.Tensor] = {}
            for file in path.glob("*.safetensors"):
                merged.update(load_file(file))
            same(merged, wanted)


# Lightning Fabric, strategies/fsdp.py


def built_by_fabric(seed: int) -> Built:
    model = FSDP(net(seed), device_id=torch.device("cpu"), use_orig_params=True)
    built = model, torch.optim.AdamW(model.parameters(), lr=0.01)
    step(built)
    return built


def save_with_fabric(path: Path, built: Built, steps: int) -> None:
    model, optimizer = built
    path.mkdir(parents=True, exist_ok=True)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = {
            "model": model.state_dict(),
            "optimizer": FSDP.optim_state_dict(model, optimizer),
        }
    from torch.distributed.checkpoint import save

    save(state, checkpoint_id=path)
    if dist.get_rank() == 0:
        torch.save({"step": steps}, path / "meta.pt")
    dist.barrier()


def load_with_fabric(path: Path, built: Built) -> int:
    model, optimizer = built
    from torch.distributed.checkpoint import FileSystemReader, load

    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        module_state = {"model": model.state_dict()}
        load(module_state, checkpoint_id=path)
        model.load_state_dict(module_state["model"])
        optimizer_state = load_sharded_optimizer_state_dict(
            model_state_dict=module_state["model"],
            optimizer_key="optimizer",
            storage_reader=FileSystemReader(path=path),
        )
        flattened = FSDP.optim_state_dict_to_load(
            optim_state_dict=optimizer_state["optimizer"], model=model, optim=optimizer
        )
        optimizer.load_state_dict(flattened)
    return int(torch.load(path / "meta.pt")["step"])


@case
def lightning_fabric(context: Context) -> None:
    saved, path = built_by_fabric(1), context.folder / "run"
    with torch_ckpt.patch_torch(file_system=True, default_storage=True):
        for steps in (1, 2):  # twice into one directory
            save_with_fabric(path, saved, steps)
            assert written_by(path) == "torch_ckpt"
            loaded = built_by_fabric(2)
            assert load_with_fabric(path, loaded) == steps
            assert bits_of(loaded) == bits_of(saved)
            step(saved)


@case
def lightning_fabric_resumes_what_stock_saved(context: Context) -> None:
    saved, loaded, path = built_by_fabric(1), built_by_fabric(2), context.folder / "run"
    save_with_fabric(path, saved, 5)
    assert written_by(path) == "dcp"
    with torch_ckpt.patch_torch(file_system=True, default_storage=True):
        assert load_with_fabric(path, loaded) == 5
    assert bits_of(loaded) == bits_of(saved)


@case
def values_of_each_rank_are_refused(context: Context) -> None:
    """Without collectives stock gives each rank its own back, where ours has one of a name."""
    value = 1.0 + context.rank
    stock, ours = context.folder / "stock", context.folder / "ours"
    dcp.save({"a": torch.full((2,), value)}, checkpoint_id=stock, use_collectives=False)
    loaded = {"a": torch.zeros(2)}
    dcp.load(loaded, checkpoint_id=stock)
    assert loaded["a"].tolist() == [value] * 2
    with torch_ckpt.patch_torch(default_storage=True):
        raised(
            lambda: dcp.save(
                {"a": torch.full((2,), value)}, checkpoint_id=ours, use_collectives=False
            ),
            "use_collectives=True only",
        )
        raised(lambda: dcp.load(loaded, checkpoint_id=stock), stock_load_says("__0.metadata"))
    assert not ours.exists()
