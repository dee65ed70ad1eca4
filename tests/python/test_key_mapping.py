"""key_mapping at saves, loads and consolidation. What several ranks do is in ranks/final.py."""

from __future__ import annotations

import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from sample_states import assert_same

import torch_ckpt
from torch_ckpt import (
    Checkpoint,
    InvalidArgumentError,
    LoadPlanner,
    PerRank,
    SavePlanner,
    consolidate_safetensors_files,
)
from torch_ckpt.cli import cli
from torch_ckpt.export.renames import renamed

TO_HF = [(r"^blocks\.(\d+)\.wq$", r"model.layers.\1.self_attn.q_proj"), (r"^blocks\.", "model.")]
TO_OURS = [(r"^model\.layers\.(\d+)\.self_attn\.q_proj$", r"blocks.\1.wq"), ("^model", "blocks")]


def blocks() -> dict[str, Any]:
    return {
        "blocks": {
            "0": {"wq": torch.arange(12.0).reshape(3, 4), "norm": torch.ones(4)},
            "1": {"wq": torch.arange(12.0).reshape(3, 4) + 50, "norm": torch.zeros(4)},
        },
        "step": 7,
        "seeds": PerRank(torch.tensor([4, 5])),
    }


HF_NAMES = {
    "model.layers.0.self_attn.q_proj",
    "model.layers.1.self_attn.q_proj",
    "model.0.norm",
    "model.1.norm",
}


def stored(path: Path) -> set[str]:
    return {tensor.name for tensor in Checkpoint(path).describe().tensors}


def test_the_first_pattern_that_is_found_is_applied() -> None:
    names = ["a.b", "a.c", "d"]
    assert renamed([("a", "x"), ("b", "y")], names) == {"a.b": "x.b", "a.c": "x.c"}
    assert renamed({"b": "y", "^a": "x"}, names) == {"a.b": "a.y", "a.c": "x.c"}
    assert renamed(str.upper, names) == {"a.b": "A.B", "a.c": "A.C", "d": "D"}
    assert renamed(None, names) == renamed([], names) == {}
    assert renamed([("a", "b"), ("^b$", "a")], ["a", "b"]) == {"a": "b", "b": "a"}


@given(st.lists(st.text(max_size=6), max_size=8, unique=True), st.randoms())
def test_any_permutation_is_a_mapping(names: list[str], random: Any) -> None:
    new = random.sample(names, len(names))
    mapping = dict(zip(names, new, strict=True))
    assert renamed(mapping.__getitem__, names) == {a: b for a, b in mapping.items() if a != b}


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        (lambda name: "same", "'b': key_mapping gives it the name 'same', which is that of 'a'"),
        ([("^b$", "a")], "'b': key_mapping gives it the name 'a', which is that of 'a'"),
        (lambda name: None, "'a': key_mapping gives None"),
        ([("(", "")], "key_mapping is a function, or pairs"),
        (["abc"], "key_mapping is a function, or pairs"),
        (7, "key_mapping is a function, or pairs"),
        ([("a", r"\1")], "'a': key_mapping: replacement"),
    ],
)
def test_what_is_no_mapping(tmp_path: Path, mapping: Any, message: str) -> None:
    state = {"a": torch.ones(2), "b": torch.ones(3)}
    with pytest.raises(InvalidArgumentError, match=re.escape(message)):
        torch_ckpt.save(state, checkpoint_id=tmp_path / "c", key_mapping=mapping)
    assert not (tmp_path / "c").exists()
    torch_ckpt.save(state, checkpoint_id=tmp_path / "c")
    with pytest.raises(InvalidArgumentError, match=re.escape(message)):
        torch_ckpt.load(state, checkpoint_id=tmp_path / "c", key_mapping=mapping)
    with pytest.raises(InvalidArgumentError, match=re.escape(message)):
        consolidate_safetensors_files(tmp_path / "c", tmp_path / "d", None, key_mapping=mapping)
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize("layout", ["sharded", "final"])
def test_saved_under_other_names_and_loaded_back(tmp_path: Path, layout: Any) -> None:
    path = tmp_path / "c"
    torch_ckpt.save(blocks(), checkpoint_id=path, layout=layout, key_mapping=TO_HF)
    assert stored(path) == HF_NAMES | {"seeds.__rank_0_of_1__"}
    target = blocks()
    for block in target["blocks"].values():
        block["wq"].fill_(-1)
        block["norm"].fill_(-1)
    target["step"] = 0
    target["seeds"].value.zero_()
    torch_ckpt.load(target, checkpoint_id=path, key_mapping=TO_OURS)
    assert_same(target["blocks"], blocks()["blocks"])
    assert target["step"] == 7 and target["seeds"].value.tolist() == [4, 5]
    # What is renamed stands outermost.
    whole: dict[str, Any] = {}
    torch_ckpt.load(whole, checkpoint_id=path, planner=LoadPlanner(rebuild=True))
    assert whole.keys() == HF_NAMES | {"step", "seeds"}
    back: dict[str, Any] = {}
    planner = LoadPlanner(rebuild=True, key_mapping=TO_OURS)
    torch_ckpt.load(back, checkpoint_id=path, planner=planner)
    assert torch.equal(back["blocks.1.wq"], blocks()["blocks"]["1"]["wq"])


def test_a_foreign_directory_is_loaded_under_our_names(tmp_path: Path) -> None:
    save_file({"model.w": torch.arange(6), "head": torch.ones(2)}, tmp_path / "model.safetensors")
    target = {"w": torch.zeros(6, dtype=torch.int64), "head": torch.zeros(2)}
    torch_ckpt.load(target, checkpoint_id=tmp_path, key_mapping={"^model[.]": ""})
    assert target["w"].tolist() == list(range(6)) and target["head"].tolist() == [1, 1]
    with pytest.raises(torch_ckpt.IncompleteError, match="Missing key.*'?w"):
        torch_ckpt.load(target, checkpoint_id=tmp_path)


def test_names_of_objects_are_kept_and_not_taken(tmp_path: Path) -> None:
    state = OrderedDict(a=torch.ones(2), step=3, other=PerRank(torch.ones(1)))
    for taken in ("step", "other.__rank_0_of_1__", "torch_ckpt.structure"):
        with pytest.raises(InvalidArgumentError, match="'a'.*that of something else"):
            torch_ckpt.save(state, checkpoint_id=tmp_path / "c", key_mapping={"^a$": taken})
    torch_ckpt.save(state, checkpoint_id=tmp_path / "c", key_mapping=lambda name: f"x.{name}")
    target = OrderedDict({"x.a": torch.zeros(2), "step": 0, "other": PerRank(torch.zeros(1))})
    torch_ckpt.load(target, checkpoint_id=tmp_path / "c")
    assert target["x.a"].tolist() == [1, 1] and target["step"] == 3


def test_without_flattening(tmp_path: Path) -> None:
    state = {"a": torch.ones(2), "b": torch.zeros(3)}
    planner = SavePlanner(flatten_state_dict=False, key_mapping={"^a$": "c"})
    torch_ckpt.save(state, checkpoint_id=tmp_path / "c", planner=planner)
    assert stored(tmp_path / "c") == {"b", "c"} and state.keys() == {"a", "b"}
    target = {"a": torch.zeros(2), "b": torch.ones(3)}
    planner = LoadPlanner(flatten_state_dict=False, key_mapping={"^c$": "a"})
    torch_ckpt.load(target, checkpoint_id=tmp_path / "c", planner=planner)
    assert_same(target, state)


def test_ties_and_options_mean_the_new_names(tmp_path: Path) -> None:
    weight = torch.arange(6.0)
    state = {"emb": weight, "head": weight, "norm": torch.ones(2)}
    torch_ckpt.save(
        state,
        checkpoint_id=tmp_path / "c",
        layout="final",
        key_mapping=lambda name: f"model.{name}",
        fqn_to_index_mapping={"model.head": 1, "model.norm": 2},
        dtype="bf16",
        keep_fp32=["model.norm"],
    )
    one = load_file(tmp_path / "c/model-00001-of-00002.safetensors")
    two = load_file(tmp_path / "c/model-00002-of-00002.safetensors")
    assert one.keys() == {"model.head"} and one["model.head"].dtype is torch.bfloat16
    assert two["model.norm"].dtype is torch.float32
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    torch_ckpt.load(target, checkpoint_id=tmp_path / "c", key_mapping={"^model.": ""})
    assert_same(target, state)


def test_an_async_save(tmp_path: Path) -> None:
    save = torch_ckpt.async_save(blocks(), checkpoint_id=tmp_path / "c", key_mapping=TO_HF)
    save.result(60)
    assert stored(tmp_path / "c") >= HF_NAMES


def test_a_planner_that_is_given_has_its_own(tmp_path: Path) -> None:
    state = {"a": torch.ones(2)}
    with pytest.raises(InvalidArgumentError, match="give it to the planner"):
        torch_ckpt.save(
            state, checkpoint_id=tmp_path / "c", planner=SavePlanner(), key_mapping=TO_HF
        )
    with pytest.raises(InvalidArgumentError, match="give it to the planner"):
        torch_ckpt.load(
            state, checkpoint_id=tmp_path / "c", planner=LoadPlanner(), key_mapping=TO_HF
        )


def test_consolidation(tmp_path: Path) -> None:
    torch_ckpt.save(blocks(), checkpoint_id=tmp_path / "in")
    consolidate_safetensors_files(
        tmp_path / "in",
        tmp_path / "out",
        {**dict.fromkeys(HF_NAMES, 1), "model.1.norm": 2, "seeds.__rank_0_of_1__": 2},
        dtype="bf16",
        keep_fp32=[r"^model\.\d\.norm"],
        key_mapping=TO_HF,
    )
    second = load_file(tmp_path / "out/model-00002-of-00002.safetensors")
    assert second.keys() == {"model.1.norm", "seeds.__rank_0_of_1__"}
    assert second["model.1.norm"].dtype is torch.float32
    target = blocks()
    torch_ckpt.load(target, checkpoint_id=tmp_path / "out", key_mapping=TO_OURS)
    assert_same(target["blocks"], blocks()["blocks"])
    # Objects keep their names, and nobody takes them.
    with pytest.raises(InvalidArgumentError, match="'step': two .* would have this name"):
        consolidate_safetensors_files(
            tmp_path / "in", tmp_path / "no", None, key_mapping={"^blocks.0.wq$": "step"}
        )
    assert not (tmp_path / "no").exists()


def test_consolidation_of_aliases_in_place(tmp_path: Path) -> None:
    weight = torch.arange(6.0)
    torch_ckpt.save(
        {"emb": weight, "head": weight}, checkpoint_id=tmp_path / "c", layout="final", naming="hf"
    )
    consolidate_safetensors_files(tmp_path / "c", tmp_path / "d", None, key_mapping={"^": "model."})
    assert stored(tmp_path / "d") == {"model.emb", "model.head"}
    (file,) = (tmp_path / "d").glob("*.safetensors")
    assert load_file(file).keys() == {"model.emb"}
    target = {"model.head": torch.zeros(6)}
    torch_ckpt.load(target, checkpoint_id=tmp_path / "d")
    assert torch.equal(target["model.head"], weight)


def test_command(tmp_path: Path) -> None:
    torch_ckpt.save(blocks(), checkpoint_id=tmp_path / "in")
    rules = [word for pair in TO_HF for word in ("--rename", *pair)]
    command = ["consolidate", str(tmp_path / "in"), str(tmp_path / "out"), *rules]
    done = CliRunner().invoke(cli, command)
    assert done.exit_code == 0, done.output
    assert stored(tmp_path / "out") >= HF_NAMES
