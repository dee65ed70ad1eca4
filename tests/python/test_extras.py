"""Files beside the tensors, in one commit with them."""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from sample_states import FAILED
from test_extras_of_adapters import tiny_llama

import torch_ckpt
from torch_ckpt import Checkpoint, InvalidArgumentError, consolidate_safetensors_files
from torch_ckpt.cli import cli
from torch_ckpt.export.dtype_policy import DtypePolicy
from torch_ckpt.export.extras import extra_files

STATE = {"w": torch.arange(6.0)}

OWN_MODEL = """
import torch
from transformers import PretrainedConfig, PreTrainedModel


class OwnConfig(PretrainedConfig):
    model_type = "own"

    def __init__(self, width=2, **kwargs):
        self.width = width
        super().__init__(**kwargs)


class OwnModel(PreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.layer = torch.nn.Linear(config.width, config.width)
        self.post_init()

    def forward(self, x):
        return self.layer(x)
"""


@pytest.fixture
def reference(tmp_path: Path) -> Path:
    """A model's directory, weights and all."""
    folder = tmp_path / "reference"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "modeling.py").write_text("# code\n")
    (folder / "tokenizer.json").write_bytes(bytes(range(256)) * 9000)  # some segments
    (folder / "empty.txt").touch()
    for weights in ("model.safetensors", "pytorch_model.bin", "model.safetensors.index.json"):
        (folder / weights).write_text("weights")
    (folder / ".hidden").touch()
    return folder


NAMES = ["config.json", "empty.txt", "modeling.py", "tokenizer.json"]


def extras_of(path: Path) -> list[str]:
    return sorted(f.name for f in Checkpoint(path).describe().files if f.role == "extra")


@pytest.mark.parametrize("layout", ["final", "sharded"])
def test_a_directory(tmp_path: Path, reference: Path, layout: Any) -> None:
    path = tmp_path / "c"
    for _ in range(2):  # over what is there, too
        torch_ckpt.save(STATE, checkpoint_id=path, layout=layout, extras=reference)
        assert extras_of(path) == NAMES
        for name in NAMES:
            assert (path / name).read_bytes() == (reference / name).read_bytes()
        Checkpoint(path).verify()
    (path / "mine.txt").touch()
    torch_ckpt.save(STATE, checkpoint_id=path, layout=layout, extras=[reference / "config.json"])
    assert extras_of(path) == ["config.json"]
    assert not (path / "tokenizer.json").exists()  # of the save that this one has replaced
    assert (path / "mine.txt").exists()
    (path / "config.json").write_text("other")
    with pytest.raises(torch_ckpt.CheckpointError, match="config.json"):
        Checkpoint(path).verify()


def test_with_a_consolidation(tmp_path: Path, reference: Path) -> None:
    torch_ckpt.save(STATE, checkpoint_id=tmp_path / "in")
    consolidate_safetensors_files(tmp_path / "in", tmp_path / "out", None, extras=reference)
    assert extras_of(tmp_path / "out") == NAMES
    words = ["consolidate", str(tmp_path / "in"), str(tmp_path / "cli"), "--extra", str(reference)]
    assert CliRunner().invoke(cli, words).exit_code == 0
    assert extras_of(tmp_path / "cli") == NAMES
    torch_ckpt.save(
        STATE,
        checkpoint_id=tmp_path / "both",
        save_distributed=True,
        enable_consolidation=True,
        extras=reference,
    )
    assert extras_of(tmp_path / "both") == NAMES
    assert extras_of(tmp_path / "both" / "sharded") == []


def test_the_dtype_that_a_configuration_says(tmp_path: Path) -> None:
    """That of all floats: of one dtype for all, or of a reference directory that has one."""
    tensors = {"w": torch.ones(2, dtype=torch.bfloat16), "step": torch.ones(2, dtype=torch.int64)}
    torch_ckpt.save(tensors, checkpoint_id=tmp_path / "one")
    torch_ckpt.save({**tensors, "v": torch.ones(2)}, checkpoint_id=tmp_path / "two")
    assert DtypePolicy(tmp_path / "one").torch_name == DtypePolicy("bf16").torch_name == "bfloat16"
    for policy in (DtypePolicy(tmp_path / "two"), DtypePolicy({"w": "bf16"}), DtypePolicy()):
        assert policy.torch_name is None


def test_no_directory_is_made_where_there_are_no_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "TemporaryDirectory", None)
    for none in (None, [], ()):
        with extra_files(none) as files:
            assert files == []


def test_what_cannot_be_an_extra(tmp_path: Path, reference: Path) -> None:
    (tmp_path / "config.json").touch()
    (reference / "x.safetensors.index.json").touch()
    model = torch.nn.Linear(1, 1)
    model.config = {"of": "somebody else's"}
    for extras, words in (
        ([reference / "nothing"], "no such file"),
        ([reference / "config.json", tmp_path / "config.json"], "two files of this name"),
        ([reference / "model.safetensors"], "cannot stand beside a checkpoint"),
        ([reference / "x.safetensors.index.json"], "cannot stand beside a checkpoint"),
        (7, "objects with save_pretrained"),
        (model, "objects with save_pretrained; Linear is none"),
    ):
        with pytest.raises(FAILED, match=words):
            torch_ckpt.save(STATE, checkpoint_id=tmp_path / "c", layout="final", extras=extras)
        assert not (tmp_path / "c").exists()
        assert not (tmp_path / ".c.torch_ckpt-stage").exists()
    with pytest.raises(InvalidArgumentError, match="extras"):
        torch_ckpt.save(
            STATE, checkpoint_id=tmp_path / "c", use_collectives=False, extras=reference
        )


@pytest.mark.slow
def test_objects_of_transformers(tmp_path: Path) -> None:
    from transformers import (
        AutoModelForCausalLM,
        LlamaConfig,
        LlamaForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    torch.manual_seed(0)
    tiny: dict[str, Any] = {
        **{"vocab_size": 50, "hidden_size": 16, "intermediate_size": 32},
        **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
    }
    models = [
        LlamaForCausalLM(LlamaConfig(**tiny)),
        LlamaForCausalLM(LlamaConfig(**tiny, tie_word_embeddings=True)),
        Qwen3MoeForCausalLM(
            Qwen3MoeConfig(
                **tiny, head_dim=4, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8
            )
        ),
    ]
    for number, model in enumerate(models):
        path = tmp_path / str(number)
        model.eval()
        torch_ckpt.save(
            model.state_dict(),
            checkpoint_id=path,
            layout="final",
            naming="hf",
            max_shard_size="20KB",
            extras=[model],
        )
        assert "config.json" in extras_of(path) and "generation_config.json" in extras_of(path)
        saved = json.loads((path / "config.json").read_text())
        assert saved["hidden_size"] == 16
        # As the model's own save_pretrained says.
        assert saved["architectures"] == [type(model).__name__]
        assert saved["dtype"] == "float32"
        assert model.config.architectures is None  # it is the caller's
        loaded = AutoModelForCausalLM.from_pretrained(path)
        loaded.eval()
        tokens = torch.tensor([[1, 2, 3, 4]])
        with torch.no_grad():
            assert torch.equal(loaded(tokens).logits, model(tokens).logits)
        for name, value in model.state_dict().items():
            assert torch.equal(loaded.state_dict()[name], value), name
        tied = model.config.tie_word_embeddings
        assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
        files = {
            name: file for file in path.glob("*.safetensors") for name in load_file(file).keys()
        }
        assert ("lm_head.weight" in files) != tied
        torch_ckpt.save(
            model.state_dict(), checkpoint_id=path, layout="final", dtype="bf16", extras=model
        )
        assert AutoModelForCausalLM.from_pretrained(path).dtype is torch.bfloat16
        torch_ckpt.save(model.state_dict(), checkpoint_id=tmp_path / "shards")
        torch_ckpt.consolidate_safetensors_files(
            tmp_path / "shards", path, None, dtype="fp16", extras=model, overwrite=True
        )
        assert AutoModelForCausalLM.from_pretrained(path).dtype is torch.float16


@pytest.mark.slow
def test_code_of_a_model(tmp_path: Path) -> None:
    """Of a class that is not transformers' own: its file comes along, and is loaded."""
    source = tmp_path / "own_model.py"
    source.write_text(OWN_MODEL)
    sys.path.insert(0, str(tmp_path))
    try:
        own_model = importlib.import_module("own_model")
    finally:
        sys.path.remove(str(tmp_path))
    from transformers import AutoModel

    own_model.OwnConfig.register_for_auto_class()
    own_model.OwnModel.register_for_auto_class("AutoModel")
    model = own_model.OwnModel(own_model.OwnConfig(width=3))
    path = tmp_path / "c"
    torch_ckpt.save(model.state_dict(), checkpoint_id=path, layout="final", extras=model)
    assert (path / "own_model.py").read_text() == OWN_MODEL
    loaded = AutoModel.from_pretrained(path, trust_remote_code=True)
    assert torch.equal(loaded.layer.weight, model.layer.weight)


@pytest.mark.slow
def test_an_adapter_of_peft(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    model = get_peft_model(tiny_llama(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    path = tmp_path / "adapter"
    torch_ckpt.save(
        get_peft_model_state_dict(model),
        checkpoint_id=path,
        layout="final",
        naming="peft",
        extras=model.peft_config["default"],
    )
    assert {f.name for f in path.iterdir() if not f.name.startswith("torch_ckpt.")} == {
        "adapter_model.safetensors",
        "adapter_config.json",
    }
    for adapter in ("default", "second"):
        if adapter != "default":
            model.add_adapter(adapter, LoraConfig(r=2, target_modules=["q_proj"]))
            model.set_adapter(adapter)
        of_model = tmp_path / adapter
        torch_ckpt.save(
            get_peft_model_state_dict(model, adapter_name=adapter),
            checkpoint_id=of_model,
            layout="final",
            naming="peft",
            extras=model,
        )
        adapter_config = json.loads((of_model / "adapter_config.json").read_text())
        assert adapter_config["r"] == {"default": 4, "second": 2}[adapter]
        assert adapter_config["inference_mode"]
        assert not (of_model / "config.json").exists()
