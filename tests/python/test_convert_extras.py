"""convert: what stands beside the weights of a Hugging Face directory."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from click.testing import CliRunner
from foreign_samples import same

import torch_ckpt
from torch_ckpt.cli import cli


def adapter(path: Path, *, safe: bool) -> Any:
    """A directory that PEFT wrote, and its model."""
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        vocab_size=64,
    )
    torch.manual_seed(0)
    model = peft.get_peft_model(
        transformers.LlamaForCausalLM(config), peft.LoraConfig(r=4, target_modules=["q_proj"])
    )
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.ones_(parameter)
    model.save_pretrained(path, safe_serialization=safe)
    return model


@pytest.mark.parametrize("safe", [True, False])
def test_an_adapter_stays_an_adapter(tmp_path: Path, safe: bool) -> None:
    model = adapter(tmp_path / "a", safe=safe)
    assert torch_ckpt.open(tmp_path / "a").format == ("hf" if safe else "torch")
    torch_ckpt.convert(tmp_path / "a", tmp_path / "b", "hf")
    assert {"adapter_model.safetensors", "adapter_config.json"} <= set(os.listdir(tmp_path / "b"))
    torch.manual_seed(0)
    base = transformers.LlamaForCausalLM(model.base_model.model.config)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "b")
    assert same(dict(loaded.state_dict()), dict(model.state_dict()))


def test_what_stands_beside_the_weights_goes_along(tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    torch.save({"w": torch.ones(3), "n": 1}, source / "pytorch_model.bin")
    (source / "config.json").write_text("{}")
    (source / "optimizer.pt").write_bytes(b"x")
    torch_ckpt.convert(source, tmp_path / "a", "hf")
    ours = {"torch_ckpt.json", "torch_ckpt.catalog", "model.safetensors", "objects-00001.json"}
    assert set(os.listdir(tmp_path / "a")) == {*ours, "config.json"}
    torch_ckpt.convert(tmp_path / "a", tmp_path / "b", "hf")  # its objects are no extra
    assert set(os.listdir(tmp_path / "b")) == {*ours, "config.json"}
    torch_ckpt.convert(source, tmp_path / "c", "hf", extras=(), objects=False)
    assert set(os.listdir(tmp_path / "c")) == ours - {"objects-00001.json"}
    (tmp_path / "other.json").write_text("{}")
    extra = ["--extra", str(tmp_path / "other.json"), "--naming", "diffusers", "--no-objects"]
    result = CliRunner().invoke(
        cli, ["convert", str(source), str(tmp_path / "d"), "--to", "hf", *extra]
    )
    assert result.exit_code == 0, result.output
    found = set(os.listdir(tmp_path / "d"))
    assert {"diffusion_pytorch_model.safetensors", "other.json"} <= found
    assert "config.json" not in found


def test_files_and_shards_bring_nothing_along(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "a.pt")
    torch_ckpt.save({"w": torch.ones(3)}, tmp_path / "shards")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "shards" / "config.json").write_text("{}")
    for source in ("a.pt", "shards"):
        torch_ckpt.convert(tmp_path / source, tmp_path / f"{source}-hf", "hf")
        assert not (tmp_path / f"{source}-hf" / "config.json").exists()


def of_the_hub(path: Path) -> Path:
    path.mkdir()
    torch.save({"w": torch.ones(3)}, path / "pytorch_model.bin")
    return path


OURS = {"torch_ckpt.json", "torch_ckpt.catalog", "model.safetensors"}


def test_what_is_neither_configuration_nor_tokenizer_stays_behind(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = of_the_hub(tmp_path / "in")
    for name in ("tokenizer.model", "merges.txt", "modeling.py", "chat_template.jinja"):
        (source / name).write_text("x")
    (source / "vocab.json").symlink_to("merges.txt")
    for name in ("a.onnx_data", "a.ot", "a.tflite", "a.npz", "a.pkl", "a.log", "__0_0.distcp"):
        (source / name).write_bytes(b"x")
    (source / "dangling.json").symlink_to("nowhere")
    os.mkfifo(source / "fifo.json")
    Path(os.fsdecode(os.fsencode(source) + b"/\xff.json")).write_text("{}")
    with caplog.at_level("INFO"):
        torch_ckpt.convert(source, tmp_path / "out", "hf")
    names = {"tokenizer.model", "merges.txt", "modeling.py", "chat_template.jinja", "vocab.json"}
    assert set(os.listdir(tmp_path / "out")) == OURS | names
    for name in ("dangling.json", "fifo.json", "a.pkl", "udcff.json"):
        assert name in caplog.text


def test_files_of_others_in_the_target_are_not_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = of_the_hub(tmp_path / "in")
    (source / "README.md").write_text("theirs")
    (source / "config.json").write_text('{"a": 1}')
    out = tmp_path / "out"
    out.mkdir()
    (out / "README.md").write_text("mine")
    torch_ckpt.convert(source, out, "hf")
    assert (out / "README.md").read_text() == "mine"
    (said,) = (text for text in map(str, caplog.messages) if "README.md" in text)
    assert "left out" in said and "config.json" not in said
    assert json.loads((out / "config.json").read_text()) == {"a": 1}
    (source / "config.json").write_text('{"a": 2}')
    torch_ckpt.convert(source, out, "hf", overwrite=True)  # what an earlier one has written
    assert json.loads((out / "config.json").read_text()) == {"a": 2}
    assert (out / "README.md").read_text() == "mine"


def test_the_configuration_says_what_the_tensors_are_cast_to(tmp_path: Path) -> None:
    source = of_the_hub(tmp_path / "in")
    config = {"torch_dtype": "float32", "text_config": {"dtype": "float32"}, "name": "\u00e9"}
    (source / "config.json").write_text(json.dumps(config))
    torch_ckpt.convert(source, tmp_path / "a", "hf", dtype="bf16")
    assert json.loads((tmp_path / "a" / "config.json").read_text()) == {
        "torch_dtype": "bfloat16",
        "text_config": {"dtype": "bfloat16"},
        "name": "\u00e9",
    }
    torch_ckpt.convert(source, tmp_path / "b", "hf")
    assert (tmp_path / "b" / "config.json").read_text() == json.dumps(config)
    for wrong in ("[1]", "{", "{}", '{"torch_dtype": null}'):
        (source / "config.json").write_text(wrong)
        torch_ckpt.convert(source, tmp_path / "c", "hf", dtype="bf16", overwrite=True)
        assert (tmp_path / "c" / "config.json").read_text() == wrong


@pytest.mark.parametrize("given", [{"extras": ["x"]}, {"naming": "peft"}])
def test_only_hugging_face_directories_have_extras(tmp_path: Path, given: Any) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "a.pt")
    with pytest.raises(torch_ckpt.InvalidArgumentError, match=f"{next(iter(given))}.*not of dcp"):
        torch_ckpt.convert(tmp_path / "a.pt", tmp_path / "out", "dcp", **given)
