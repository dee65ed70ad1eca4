"""Every model that a table of torch_ckpt's names: as transformers reads and writes it."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

import torch_ckpt
from torch_ckpt.tensor_mapping import mapping

MODELS = [
    (model, name)
    for name in mapping.table_names()
    for model in json.loads(mapping._table(name).read_text()).get("models", ())
]
# What each configuration has of these; all sizes that may differ do.
SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "ffn_hidden_size": 24,
    "moe_intermediate_size": 12,
    "expert_ffn_hidden_size": 12,
    "shared_expert_intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 3,
    "num_local_experts": 3,
    "n_routed_experts": 3,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 0,
    "decoder_sparse_step": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def made(model_type: str) -> Any:
    config = AutoConfig.for_model(model_type)
    for name, size in SIZES.items():
        if hasattr(config, name):
            with contextlib.suppress(AttributeError):  # one that follows from others
                setattr(config, name, size)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:2]
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        parameter.data.normal_()
    return model


@pytest.mark.parametrize(("model_type", "table"), MODELS)
def test_a_model_of_a_table(tmp_path: Path, model_type: str, table: str) -> None:
    model = made(model_type)
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    assert any(name.endswith("experts.gate_up_proj") for name in wanted)
    model.save_pretrained(tmp_path / "theirs")
    torch_ckpt.save_model(model, tmp_path / "ours", tensor_mapping=table)
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name
    for parameter in model.parameters():
        parameter.data.zero_()
    report = torch_ckpt.load_model(model, tmp_path / "theirs", tensor_mapping=table)
    assert (report.missing, report.unexpected) == ([], [])
    for name, value in model.state_dict().items():
        assert torch.equal(value, wanted[name]), name


def test_the_table_of_a_model() -> None:
    assert mapping.table_of("qwen3_moe") == "qwen3_moe"
    assert mapping.table_of("minimax") == "mixtral"
    assert mapping.table_of("llama") is None
