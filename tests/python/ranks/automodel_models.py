"""Models of NeMo AutoModel: their final files, adapters and bases."""

from __future__ import annotations

import copy
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import scaled_bases
import torch
import torch.distributed as dist
from automodel_recipe import Recipe, llama, same_state, whole_state
from nemo_automodel.components.checkpoint import checkpointing
from nemo_automodel.components.checkpoint.state_dict_adapter import (
    CheckpointLoadPart,
    StateDictAdapter,
)
from ranks.run import Context, cases, raised
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import torch_ckpt
from torch_ckpt.integrations.automodel import Checkpointer, install

CASES, case = cases()


# --- final files ------------------------------------------------------------------------


@case
def exports(context: Context) -> None:
    with install():
        for mode, final, is_async, single in (
            ("every", False, False, False),
            ("every", False, True, False),
            ("every", False, True, True),
            ("final", True, False, True),
            ("final", False, False, False),
            ("false", True, False, False),
        ):
            root = context.folder / f"{mode}-{final}-{is_async}-{single}"
            options = {"is_async": is_async, "single_rank_consolidation": single}
            recipe = Recipe(root, 3, save_consolidated=mode, **options)
            recipe.train(1)
            recipe.step_scheduler.is_last_step = final
            wanted = whole_state(recipe.model)
            step = recipe.save()
            recipe.checkpointer.finalize()
            assert os.path.exists(f"{step}/model/.hf_metadata/config.json")
            assert os.path.exists(f"{step}/model/consolidate.sh")
            out = f"{step}/model/consolidated"
            assert os.path.isdir(out) == (mode == "every" or (mode, final) == ("final", True))
            if os.path.isdir(out):
                assert os.path.exists(f"{out}/model.safetensors.index.json")
                same_state(LlamaForCausalLM.from_pretrained(out).state_dict(), wanted)
                torch_ckpt.open(out).verify()


@case
def dtypes_and_division_of_the_original(context: Context) -> None:
    original = context.folder / "original"
    if context.rank == 0:
        model = llama(shard=False, tie_word_embeddings=False).to(torch.bfloat16)
        model.model.norm.to(torch.float32)
        model.save_pretrained(original, max_shard_size="4KB")
    dist.barrier()
    index = json.loads((original / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 2
    with install():
        recipe = Recipe(
            context.folder / "run", 3, save_consolidated="every", model_repo_id=str(original)
        )
        step = recipe.save()
        out = Path(step, "model/consolidated")
        assert json.loads((out / "model.safetensors.index.json").read_text())["weight_map"] == index
        dtypes = {
            value for name, value in torch_ckpt.open(out).dtypes().items() if "norm" not in name
        }
        assert dtypes == {"BF16"} and torch_ckpt.open(out).dtypes()["model.norm.weight"] == "F32"
        recipe = Recipe(
            context.folder / "diffusers", 3, save_consolidated="every", diffusers_compatible=True
        )
        out = Path(recipe.save(), "model/consolidated")
        torch_ckpt.open(out).verify()
        assert list(out.glob("diffusion_pytorch_model*.safetensors"))


class Stage(torch.nn.Module):
    """A stage of a pipeline: layers that other ranks have not."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        for layer in (2 * rank, 2 * rank + 1):
            self.add_module(f"layer{layer}", torch.nn.Linear(3, 2, bias=layer % 2 == 0))


@case
def one_division_for_all_stages(context: Context) -> None:
    """F1: every rank divided the names that it has, and an index named what no file had."""
    with install():
        config = Recipe(context.folder, 1).checkpointer.config
        config.save_consolidated = checkpointing.SaveConsolidatedMode.EVERY
        config.model_state_dict_keys = [f"layer{n}.weight" for n in range(50)]  # of the whole model
        for keys in (config.model_state_dict_keys, None):
            config.model_state_dict_keys = keys
            checkpointer = Checkpointer(config, context.rank, 0, context.rank)
            path = context.folder / f"keys-{keys is not None}"
            checkpointer.save_model(Stage(context.rank), str(path))
            out = path / "model/consolidated"
            files = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
            names = {f"layer{n}.weight" for n in range(2 * context.world)}
            names |= {f"layer{n}.bias" for n in range(0, 2 * context.world, 2)}
            assert files.keys() == names
            for name, file in files.items():
                with safe_open(out / file, "pt") as opened:
                    assert name in opened.keys()  # noqa: SIM118


# --- adapters and base models ---------------------------------------------------------------


def with_adapter(seed: int) -> tuple[torch.nn.Module, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "triton", None)  # with which its kernels of 0.7.0 do not import
        from nemo_automodel.components._peft.lora import PeftConfig, apply_lora_to_linear_modules

    peft = PeftConfig(target_modules=["*_proj"], dim=2, use_memory_efficient_lora=False)
    model = llama(1, shard=False)
    apply_lora_to_linear_modules(model, peft)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
        if parameter.requires_grad:
            parameter.data.copy_(torch.rand(parameter.shape, generator=generator))
    if dist.is_initialized():
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, peft


@case
def adapters(context: Context) -> None:
    with install():
        for mode in (False, True):
            root = context.folder / f"run-{mode}"
            model, peft = with_adapter(3)
            recipe = Recipe(root, 3, model=model, peft=peft, is_async=mode)
            recipe.train(1)
            step = Path(recipe.save())
            wanted = recipe.train(2)
            recipe.checkpointer.finalize()
            assert {"adapter_model.safetensors", "adapter_config.json"} <= set(
                os.listdir(step / "model")
            )
            model, peft = with_adapter(4)
            recipe = Recipe(root, 5, model=model, peft=peft, is_async=mode)
            recipe.load_checkpoint()
            assert recipe.train(2) == wanted
        # peft reads it.
        from peft import PeftModel

        loaded = PeftModel.from_pretrained(llama(1, shard=False), str(step / "model"))
        assert any("lora_A" in name for name, _ in loaded.named_parameters())
        dist.barrier()
        flip(context, step / "model/adapter_model.safetensors")
        raised(recipe.load_checkpoint, "adapter_model.safetensors", "rank 0")


def flip(context: Context, path: Path) -> None:
    """Flip a bit in the last bytes of a file."""
    dist.barrier()
    if context.rank == 0:
        data = bytearray(path.read_bytes())
        data[-9] ^= 4
        path.write_bytes(data)
    dist.barrier()


@case
def base_models(context: Context) -> None:
    """F5, F6: a stray .bin left most of a base as it was initialized; what was missing stayed so."""
    hub = context.folder / "hub"
    source = llama(7, shard=False)
    if context.rank == 0:
        source.save_pretrained(hub, max_shard_size="4KB")
    dist.barrier()
    wanted = source.state_dict()

    def load(**options: Any) -> None:
        model = llama(1, **options)
        checkpointer = Recipe(context.folder / "run", 1, model=model, loader=False).checkpointer
        checkpointer.load_base_model(model, torch.device("cpu"), str(hub), str(hub))
        same_state(whole_state(model), wanted)

    with install():
        load()
        load(shard=False)
        if context.rank == 0:
            torch.save({"model.embed_tokens.weight": torch.zeros(40, 16)}, hub / "stray.bin")
        dist.barrier()
        load()
        files = sorted(hub.glob("model-*.safetensors"))
        for lost in (files[1], files[-1]):
            dist.barrier()
            if context.rank == 0:
                lost.rename(context.folder / lost.name)
            dist.barrier()
            raised(load, lost.name)
            raised(lambda: checkpointing.load_hf_safetensors_state_dict(str(hub)), lost.name)
            dist.barrier()
            if context.rank == 0:
                (context.folder / lost.name).rename(lost)
        dist.barrier()
        # Under other names.
        model = llama(1)
        checkpointer = Recipe(context.folder / "run", 1, model=model, loader=False).checkpointer
        prefixed = context.folder / "prefixed"
        if context.rank == 0:
            prefixed.mkdir()
            renamed = {name.replace("model.", "base.", 1): t for name, t in wanted.items()}
            save_file(renamed, prefixed / "model.safetensors")
        dist.barrier()
        for mapping in ({"^base": "model"}, lambda name: name.replace("base.", "model.", 1)):
            with torch.no_grad():
                model.lm_head.weight.zero_()
            checkpointer.load_model(model, str(prefixed), is_init_step=True, key_mapping=mapping)
            same_state(whole_state(model), wanted)
        # A tensor that the base lacks.
        raised(lambda: load(attention_bias=True), "bias")
        # .bin files alone.
        bins = context.folder / "bins"
        if context.rank == 0:
            bins.mkdir()
            torch.save(wanted, bins / "pytorch_model.bin")
            shutil.copy(hub / "config.json", bins)
        dist.barrier()
        hub = bins
        load()
        raised(lambda: load(attention_bias=True), "bias")


class Transposing(StateDictAdapter):
    """Matrices are stored the other way round, under other names; in parts on demand."""

    def to_hf(self, state_dict: dict[str, Any], **_: Any) -> dict[str, Any]:
        return {f"hf.{k}": v.t() if v.ndim == 2 else v for k, v in state_dict.items()}

    def from_hf(self, hf_state_dict: dict[str, Any], *_: Any, **__: Any) -> dict[str, Any]:
        return {
            k.removeprefix("hf."): v.t() if v.ndim == 2 else v for k, v in hf_state_dict.items()
        }

    def convert_single_tensor_to_hf(self, fqn: str, tensor: Any, **_: Any) -> Any:
        return list(self.to_hf({fqn: tensor}).items())

    def iter_checkpoint_load_parts(
        self, model_state_dict: dict[str, Any], device_mesh: Any = None
    ) -> Iterator[CheckpointLoadPart]:
        for name, value in model_state_dict.items():
            part = self.to_hf({name: value})
            yield CheckpointLoadPart(part, frozenset([name]), frozenset(), lambda: None)


@case
def adapters_of_names(context: Context) -> None:
    """Tensors that are views of the model's: read in place."""

    def made(seed: int) -> torch.nn.Module:
        model = llama(seed, shard=False)
        model.state_dict_adapter = Transposing()
        return model

    root = context.folder / "run"
    with install():
        recipe = Recipe(root, 3, model=made(3), loader=False, save_consolidated="every")
        step = recipe.save()
        out = torch_ckpt.open(f"{step}/model/consolidated")
        assert out["hf.model.layers.0.mlp.up_proj.weight"].shape == (16, 24)
        loaded = Recipe(root, 4, model=made(4), loader=False)
        loaded.load_checkpoint()
        same_state(whole_state(loaded.model), whole_state(recipe.model))
        # A quantized base, part by part.
        model = made(5)
        model.config.quantization_config = {"quant_method": "of a test"}
        base = f"{step}/model/consolidated"
        loaded.checkpointer.load_model(model, base, is_init_step=True)
        same_state(whole_state(model), whole_state(recipe.model))
        model.register_buffer("more", torch.zeros(1))
        raised(lambda: loaded.checkpointer.load_model(model, base, is_init_step=True), "more")


class OfCodes(StateDictAdapter):
    """As AutoModel's own of float8 bases: codes and whole scales as destinations, where AutoModel
    makes numbers of them."""

    def to_hf(self, state_dict: dict[str, Any], **words: Any) -> dict[str, Any]:
        made = dict(state_dict)
        for name, value in state_dict.items():
            if words.get("quantization") and name.endswith("_proj.weight"):
                made[name] = value.to(torch.float8_e4m3fn)
                grid = [-(-size // 8) for size in value.shape]
                made[f"{name}_scale_inv"] = torch.ones(grid)
        return made

    def from_hf(self, hf_state_dict: dict[str, Any], *_: Any, **__: Any) -> dict[str, Any]:
        assert not any(name.endswith("_scale_inv") for name in hf_state_dict)
        return hf_state_dict

    def convert_single_tensor_to_hf(self, fqn: str, tensor: Any, **_: Any) -> Any:
        return list(self.to_hf({fqn: tensor}).items())


class OfCodesInPlace(OfCodes):
    """Into the model's own memory, and not by way of all tensors."""

    @property
    def supports_low_memory_dcp_load(self) -> bool:
        return True


@case
def bases_of_codes(context: Context) -> None:
    """F4: a rank's rows end inside of blocks, whose scales AutoModel cuts."""
    hub = context.folder / "codes"
    said = {"quant_method": "fp8", "weight_block_size": [8, 8]}
    generator = torch.Generator().manual_seed(9)
    stored, wanted = {}, {}
    for name, value in llama(7, shard=False).state_dict().items():
        stored[name] = wanted[name] = value
        if name.endswith("_proj.weight"):
            codes = scaled_bases.float8(value.shape, torch.float8_e4m3fn, generator)
            grid = scaled_bases.scales(
                tuple(-(-size // 8) for size in value.shape), torch.float32, generator
            )
            stored |= {name: codes, f"{name}_scale_inv": grid}
            wanted[name] = scaled_bases.numbers(codes, grid, (8, 8))
    if context.rank == 0:
        scaled_bases.base(hub, stored, quantization_config=said)
    dist.barrier()
    with install():
        recipe = Recipe(context.folder / "run", 3, loader=False)
        for adapter in (OfCodes(), OfCodesInPlace(), None):
            model = llama(8)
            model.config.quantization_config = said
            if adapter is not None:
                model.state_dict_adapter = adapter
            recipe.checkpointer.load_model(model, str(hub), is_init_step=True)
            same_state(whole_state(model), wanted)
        mixed = llama(8, shard=False)  # the first of its parameters is of another dtype
        mixed.config.quantization_config = said
        mixed.model.embed_tokens.to(torch.bfloat16)
        embedded = "model.embed_tokens.weight"
        recipe.checkpointer.load_model(mixed, str(hub), is_init_step=True)
        same_state(mixed.state_dict(), wanted | {embedded: wanted[embedded].bfloat16()})


def moe(**sizes: int) -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_experts_per_tok=2,
        **sizes,
    )


@case
def experts_of_transformers(context: Context) -> None:
    """One by one there, fused here, as numbers or as codes; fused there; and what is missing."""
    torch.manual_seed(1)
    model = Qwen3MoeForCausalLM(moe(intermediate_size=24, moe_intermediate_size=12, num_experts=3))
    hub, codes, fused = (context.folder / name for name in ("hub", "codes", "fused"))
    wanted = {name: value.detach().clone() for name, value in model.state_dict().items()}
    if context.rank == 0:
        model.save_pretrained(hub)
        said = {"quant_method": "fp8", "weight_block_size": [8, 8]}
        stored = {}
        for name, value in load_file(hub / "model.safetensors").items():
            stored[name] = value
            if ".experts." in name:
                stored[name] = value.to(torch.float8_e4m3fn)
                stored[f"{name}_scale_inv"] = torch.ones([-(-size // 8) for size in value.shape])
        scaled_bases.base(codes, stored, quantization_config=said)
        fused.mkdir()
        save_file(wanted, fused / "model.safetensors", {"format": "pt"})
        model.config.save_pretrained(fused)
    dist.barrier()
    rounded = {
        name: value.to(torch.float8_e4m3fn).float() if ".experts." in name else value
        for name, value in wanted.items()
    }
    with install():
        recipe = Recipe(context.folder / "run", 3, loader=False)
        for base, of_base in ((hub, wanted), (codes, rounded), (fused, wanted)):
            for parameter in model.parameters():
                parameter.data.fill_(7)
            sharded = copy.deepcopy(model)
            fully_shard(sharded, mesh=init_device_mesh("cpu", (context.world,)))
            recipe.checkpointer.load_model(sharded, str(base), is_init_step=True)
            same_state(whole_state(sharded), of_base)
        if context.rank == 0:
            left = load_file(hub / "model.safetensors")
            del left["model.norm.weight"]
            save_file(left, hub / "model.safetensors", {"format": "pt"})
        dist.barrier()
        sharded = copy.deepcopy(model)
        raised(
            lambda: recipe.checkpointer.load_model(sharded, str(hub), is_init_step=True),
            "model.norm.weight",
        )


def experts(seed: int, context: Context) -> tuple[torch.nn.Module, Any]:
    """AutoModel's own Qwen3-MoE, with each rank's experts, and their mesh."""
    from nemo_automodel.components.models.common.utils import BackendConfig
    from nemo_automodel.components.models.qwen3_moe import model as qwen

    config = moe(moe_intermediate_size=8, num_experts=4)
    config.torch_dtype = torch.float32
    backend = BackendConfig(
        attn="sdpa",
        linear="torch",
        rms_norm="torch",
        experts="torch",
        dispatcher="torch",
        rope_fusion=False,
    )
    with pytest.MonkeyPatch.context() as patch:  # it wants a device for one buffer
        of_device = qwen.RotaryEmbedding
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        on_cpu = {"device": torch.device("cpu")}
        patch.setattr(qwen, "RotaryEmbedding", lambda **words: of_device(**{**words, **on_cpu}))
        model = qwen.Qwen3MoeForCausalLM(config, backend=backend).to(torch.float32)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data.copy_(torch.rand(parameter.shape, generator=generator))
    mesh = init_device_mesh("cpu", (context.world,), mesh_dim_names=("ep",))
    for layer in model.model.layers.values():
        fully_shard(layer.mlp.experts, mesh=mesh)
    fully_shard(model, mesh=init_device_mesh("cpu", (context.world,)))
    return model, mesh


@case
def experts_of_their_own_on_each_rank(context: Context) -> None:
    """By AutoModel's adapter: names that other ranks have not, read into views of the model."""
    hub = context.folder / "hub"
    with install():
        model, mesh = experts(1, context)
        if context.rank == 0:
            words = {**model.config.to_dict(), "torch_dtype": "float32"}
            Qwen3MoeForCausalLM(Qwen3MoeConfig.from_dict(words)).save_pretrained(
                hub, max_shard_size="8KB"
            )
        dist.barrier()
        options = {"model_repo_id": str(hub), "save_consolidated": "every"}
        recipe = Recipe(context.folder / "run", 1, model=model, loader=False, **options)
        recipe.checkpointer.moe_mesh = mesh
        recipe.checkpointer.load_base_model(model, torch.device("cpu"), str(hub), str(hub))
        step = recipe.save()
        base, out = torch_ckpt.open(hub), torch_ckpt.open(f"{step}/model/consolidated")
        assert set(base) == set(out)
        assert all(torch.equal(base[name][...], out[name][...]) for name in base)
        index = "model.safetensors.index.json"
        of_base, of_out = (
            json.loads(Path(place, index).read_text())["weight_map"]
            for place in (hub, f"{step}/model/consolidated")
        )
        assert of_base == of_out
        other, mesh = experts(2, context)
        recipe = Recipe(context.folder / "run", 2, model=other, loader=False, **options)
        recipe.checkpointer.moe_mesh = mesh
        recipe.load_checkpoint()
        same_state(whole_state(other), whole_state(model))
