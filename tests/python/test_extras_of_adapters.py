"""What stands beside the weights of an adapter is what PEFT's own save_pretrained writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_ckpt
from torch_ckpt.export.extras import extra_files

pytestmark = pytest.mark.slow


def tiny_llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=50,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
        )
    )


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"modules_to_save": ["lm_head"]},
        {"modules_to_save": ["embed_tokens"], "task_type": "CAUSAL_LM"},
        {"trainable_token_indices": [0, 1]},
    ],
    ids=str,
)
def test_of_a_lora(tmp_path: Path, arguments: dict[str, Any]) -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(
        tiny_llama(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], **arguments)
    )
    model.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"], **arguments))
    for adapter, folder in (("default", "theirs"), ("second", "theirs/second")):
        model.set_adapter(adapter)
        with extra_files(model) as files:
            ours = {Path(file).name: Path(file).read_text() for file in files}
        model.save_pretrained(tmp_path / "theirs", selected_adapters=[adapter])
        theirs = tmp_path / folder / "adapter_config.json"
        assert json.loads(ours["adapter_config.json"]) == json.loads(theirs.read_text())
        assert set(ours) == {"adapter_config.json", "README.md"}
        assert not model.peft_config[adapter].inference_mode  # it is the caller's


def test_of_learned_prompts(tmp_path: Path) -> None:
    from peft import PromptTuningConfig, get_peft_model

    model = get_peft_model(
        tiny_llama(), PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    )
    with extra_files(model) as files:
        ours = {Path(file).name: Path(file).read_text() for file in files}
    model.save_pretrained(tmp_path)
    theirs = (tmp_path / "adapter_config.json").read_text()
    assert json.loads(ours["adapter_config.json"]) == json.loads(theirs)


def test_an_adapter_with_whole_modules_loads(tmp_path: Path) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict

    base = tiny_llama()
    weights = {name: value.clone() for name, value in base.state_dict().items()}
    model = get_peft_model(
        base, LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"])
    )
    for name, parameter in model.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            torch.nn.init.normal_(parameter)
    model.eval()
    torch_ckpt.save(
        get_peft_model_state_dict(model),
        checkpoint_id=tmp_path / "adapter",
        layout="final",
        naming="peft",
        extras=model,
    )
    other = tiny_llama()
    other.load_state_dict(weights)
    loaded = PeftModel.from_pretrained(other, tmp_path / "adapter")
    loaded.eval()
    tokens = torch.tensor([[1, 2, 3, 4]])
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)
