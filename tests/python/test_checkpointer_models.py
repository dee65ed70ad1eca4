"""Models under a Checkpointer: their names, ties, extra states, parts, and adapters."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from training_loop import Net

import torch_ckpt
from torch_ckpt import (
    Checkpointer,
    IncompleteError,
    InvalidArgumentError,
    UnsupportedError,
)


def test_a_model_without_memory(tmp_path: Path) -> None:
    with torch.device("meta"):
        bare = Net()
    for save in (
        lambda: Checkpointer(tmp_path, bare, background=False).save(1),
        lambda: torch_ckpt.save_model(bare, tmp_path / "a"),
    ):
        with pytest.raises(InvalidArgumentError, match="meta device"):
            save()
    torch_ckpt.save_model(Net(), tmp_path / "b")
    with pytest.raises(InvalidArgumentError, match="meta device"):
        torch_ckpt.load_model(bare, tmp_path / "b")


def test_wrappers_leave_no_trace(tmp_path: Path) -> None:
    plain = Net()
    checkpointer = Checkpointer(tmp_path, plain, torch.optim.Adam(plain.parameters()))
    checkpointer.save(1)
    checkpointer.close()
    wrapped = Net()
    wrapped.layers[0] = checkpoint_wrapper(wrapped.layers[0])
    wrapped.layers[1] = torch.compile(wrapped.layers[1])  # type: ignore[assignment]
    for model in (wrapped, torch.compile(wrapped)):
        optimizer = torch.optim.Adam(model.parameters())
        with Checkpointer(tmp_path, model, optimizer) as checkpointer:
            assert checkpointer.load(1) == 1
            for a, b in zip(plain.parameters(), model.parameters(), strict=True):
                assert torch.equal(a, b)
            checkpointer.save(2).result()
        names = set(torch_ckpt.open(tmp_path / "step-2/model"))
        assert names == set(plain.state_dict())


def test_tied_tensors_fill_an_untied_model(tmp_path: Path) -> None:
    model = Net()
    with Checkpointer(tmp_path, model) as checkpointer:
        checkpointer.save(1)
    untied = Net()
    untied.head.weight = nn.Parameter(torch.zeros_like(untied.head.weight))
    Checkpointer(tmp_path, untied).load()
    assert torch.equal(untied.head.weight, model.embed.weight)
    assert untied.head.weight is not untied.embed.weight
    again = Net()
    Checkpointer(tmp_path, again).load()
    assert again.head.weight is again.embed.weight


class Extra(nn.Module):
    """With what `get_extra_state` gives, buffers that are kept and that are not."""

    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.register_buffer("kept", torch.randn(2))
        self.register_buffer("dropped", torch.randn(2), persistent=False)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


EXTRAS = [{"a": {"b": [1, 2]}}, [1, {"x": 2.5}], "text", (1, 2), None, {}, {"$": 3}, torch.ones(3)]


@pytest.mark.parametrize("live", [*EXTRAS, torch.zeros(0, dtype=torch.uint8)])
@pytest.mark.parametrize("extra", EXTRAS)
def test_extra_states_and_buffers(tmp_path: Path, extra: Any, live: Any) -> None:
    model = nn.Sequential(Extra(extra), Extra(copy.deepcopy(extra)))
    with Checkpointer(tmp_path, model) as checkpointer:
        checkpointer.save(1)
    other = nn.Sequential(Extra(live), Extra(live))
    dropped = [part.dropped.clone() for part in other]
    Checkpointer(tmp_path, other).load()
    for a, b, kept in zip(model, other, dropped, strict=True):
        assert type(b.extra) is type(extra)
        if isinstance(extra, torch.Tensor):
            assert torch.equal(b.extra, extra)
        else:
            assert b.extra == extra
        assert torch.equal(a.kept, b.kept) and torch.equal(b.dropped, kept)


def test_parts_of_a_model(tmp_path: Path) -> None:
    whole = Net()
    parts = [nn.ModuleDict({"layers": whole.layers}), nn.ModuleDict({"norm": nn.LayerNorm(4)})]
    with Checkpointer(tmp_path, parts) as checkpointer:
        checkpointer.save(1)
    assert {name.partition(".")[0] for name in torch_ckpt.open(tmp_path / "step-1/model")} == {
        "layers",
        "norm",
    }
    with pytest.raises(InvalidArgumentError, match="two parts") as error:
        Checkpointer(tmp_path, [parts[0], parts[0]]).save(2).result()
    assert error.value.tensor is not None


def test_a_model_that_is_another_one(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, Net()) as checkpointer:
        checkpointer.save(1)
    more = Net()
    more.add_module("more", nn.Linear(2, 2))
    with pytest.raises(IncompleteError, match=r"lacks what the model has: more\.bias, more\.w"):
        Checkpointer(tmp_path, more).load()
    less = Net()
    del less.layers[1]
    with pytest.raises(InvalidArgumentError, match=r"has what the model lacks.*layers\.1\.bias"):
        Checkpointer(tmp_path, less).load()
    wider = Net()
    wider.layers[0] = nn.Linear(5, 4)
    with pytest.raises(InvalidArgumentError, match=r"layers\.0\.weight"):
        Checkpointer(tmp_path, wider).load()


def test_names_that_meet(tmp_path: Path) -> None:
    model = nn.Module()
    model.optimizer = nn.Linear(2, 2)
    with pytest.raises(InvalidArgumentError, match="give the state, or the module") as error:
        Checkpointer(tmp_path, model, background=False).save(1)
    assert error.value.tensor == "optimizer.weight"
    net = Net()
    for name in ("model", "rng", "a.b", "", 3):
        with pytest.raises(InvalidArgumentError, match="no name for a state"):
            Checkpointer(tmp_path, net, states={name: net})
    for wrong in ({"states": {"a": 3}}, {"scheduler": 3}, {"dataloader": object()}):
        with pytest.raises(InvalidArgumentError, match="no state_dict"):
            Checkpointer(tmp_path, net, **wrong)
    with pytest.raises(InvalidArgumentError, match="no torch.optim"):
        Checkpointer(tmp_path, net, 3)
    with pytest.raises(InvalidArgumentError, match="model is a"):
        Checkpointer(tmp_path, {"a": net})
    with pytest.raises(TypeError):
        Checkpointer(tmp_path, net, keep_lst=3)
    other = nn.Linear(2, 2)
    with pytest.raises(InvalidArgumentError, match="does not have"):
        Checkpointer(
            tmp_path, net, torch.optim.SGD(other.parameters(), 0.1), background=False
        ).save(1)


def test_a_hugging_face_model(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters())
    note = tmp_path / "README.md"
    note.write_text("mine")
    with Checkpointer(tmp_path / "run", model, optimizer, extras=str(note)) as checkpointer:
        checkpointer.save(5)
    step = tmp_path / "run/step-5/model"
    assert {path.name for path in step.iterdir()} >= {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "README.md",
    }
    loaded = transformers.LlamaForCausalLM.from_pretrained(step)
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    fresh = transformers.LlamaForCausalLM(config)
    report = torch_ckpt.load_model(fresh, step)
    assert (report.missing, report.unexpected) == ([], [])
    assert torch.equal(fresh.lm_head.weight, model.lm_head.weight)


@pytest.mark.parametrize("saved", ["plain", "wrapped", "compiled"])
def test_an_adapter_inside_wrappers(tmp_path: Path, saved: str) -> None:
    peft = pytest.importorskip("peft")

    def made(how: str) -> Any:
        torch.manual_seed(3)
        block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        model = peft.get_peft_model(
            nn.Sequential(block, nn.Linear(4, 2)),
            peft.LoraConfig(
                target_modules=["0.0"], modules_to_save=["0.1", "1"], r=2, init_lora_weights=False
            ),
        )
        layers = model.base_model.model
        if how == "wrapped":
            layers[0] = checkpoint_wrapper(layers[0])
        elif how == "compiled":
            layers[0] = torch.compile(layers[0])
        return model

    model = made(saved)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    with Checkpointer(tmp_path, model, background=False) as checkpointer:
        checkpointer.save(1)
    tensors = load_file(tmp_path / "step-1/model/adapter_model.safetensors")
    wanted = peft.get_peft_model_state_dict(made("plain"))
    assert tensors.keys() == wanted.keys() and len(tensors) > 6
    for how in ("plain", "wrapped", "compiled"):
        other = made(how)
        assert Checkpointer(tmp_path, other).load() == 1
        for (name, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
            if a.requires_grad:
                assert torch.equal(a, b), name


def test_an_adapter(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def made(**options: Any) -> Any:
        torch.manual_seed(3)
        base = nn.Sequential()
        base.add_module("first", nn.Linear(4, 4))
        base.add_module("head", nn.Linear(4, 2))
        return peft.get_peft_model(base, peft.LoraConfig(target_modules=["first"], r=2, **options))

    model = made(modules_to_save=["head"])
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 0.1)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    with Checkpointer(tmp_path / "run", model, optimizer) as checkpointer:
        checkpointer.save(1)
    step = tmp_path / "run/step-1/model"
    tensors = load_file(step / "adapter_model.safetensors")
    assert tensors and not any("base_layer" in name for name in tensors)
    assert json.loads((step / "adapter_config.json").read_text())["r"] == 2
    other = made(modules_to_save=["head"])
    fresh = torch.optim.AdamW([p for p in other.parameters() if p.requires_grad], 0.1)
    Checkpointer(tmp_path / "run", other, fresh).load()
    for (name, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name
    base = made().unload()
    again = peft.PeftModel.from_pretrained(base, step)
    state = peft.get_peft_model_state_dict(again)
    assert state.keys() == tensors.keys()
    beside = made()
    beside.base_model.model.head.weight.requires_grad_(True)
    renamed = peft.get_peft_model(
        nn.Sequential(nn.Linear(4, 4)),
        peft.LoraConfig(target_modules=["0"], r=2),
        adapter_name="mine",
    )
    with Checkpointer(tmp_path / "renamed", renamed, background=False) as checkpointer:
        checkpointer.save(1)
        assert checkpointer.load() == 1
    with pytest.raises(UnsupportedError, match="is trained, and is no part") as error:
        Checkpointer(tmp_path / "beside", beside, background=False).save(1)
    assert "head.weight" in str(error.value.tensor)
