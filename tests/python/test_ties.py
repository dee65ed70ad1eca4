"""Tied tensors in final files: stored once, found under all their names."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from safetensors.torch import load_file
from sample_states import FAILED, assert_same, blank
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

import torch_ckpt
from torch_ckpt import Checkpoint, HuggingFaceStorageReader, consolidate_safetensors_files
from torch_ckpt.cli import cli
from torch_ckpt.dcp.plan.ties import find_ties


def tied_state() -> dict[str, Any]:
    embedding = torch.arange(40.0).reshape(8, 5)
    return {
        "embed": {"weight": embedding},
        "layer": torch.ones(3),
        "head": {"weight": embedding},
        "same_values": embedding.clone(),
        "part": embedding[:4],
        "turned": embedding.t(),
        "no_bytes": torch.empty(0),
        "none_either": torch.empty(0),
    }


def saved(path: Path) -> set[str]:
    names: set[str] = set()
    for file in path.glob("*.safetensors"):
        names |= load_file(file).keys()
    return names


ALL = {"embed.weight", "layer", "head.weight", "same_values", "part", "turned"} | {
    "no_bytes",
    "none_either",
}


def test_stored_once_and_loaded_under_both_names(tmp_path: Path) -> None:
    state = tied_state()
    torch_ckpt.save(state, checkpoint_id=tmp_path / "c", layout="final")
    assert saved(tmp_path / "c") == ALL - {"head.weight"}
    for load in (
        lambda target: torch_ckpt.load(target, checkpoint_id=tmp_path / "c"),
        lambda target: dcp.load(
            target, storage_reader=HuggingFaceStorageReader(tmp_path / "c"), no_dist=True
        ),
    ):
        target = blank(state)
        load(target)
        assert_same(target, state)
    tensors = {tensor.name: tensor for tensor in Checkpoint(tmp_path / "c").describe().tensors}
    assert tensors.keys() == ALL
    assert tensors["head.weight"].alias_of == "embed.weight"
    assert tensors["head.weight"].path == ("head", "weight")
    assert [name for name, tensor in tensors.items() if tensor.alias_of] == ["head.weight"]
    assert tensors["head.weight"].shape == (8, 5)
    index = json.loads((tmp_path / "c" / "model.safetensors.index.json").read_text())
    assert "head.weight" not in index["weight_map"]
    shown = CliRunner().invoke(cli, ["inspect", str(tmp_path / "c"), "--tensors"])
    assert re.search(r"head\.weight +F32 +\[8, 5\] .*is embed\.weight", shown.output)
    Checkpoint(tmp_path / "c").verify()


def test_sharded_saves_store_every_name(tmp_path: Path) -> None:
    """Since stock readers know no aliases."""
    torch_ckpt.save(tied_state(), checkpoint_id=tmp_path / "c")
    assert saved(tmp_path / "c") == ALL


def mapping(*names: str) -> dict[str, int]:
    return {name: 1 for name in ALL - {"embed.weight", "head.weight"}} | dict.fromkeys(names, 2)


@pytest.mark.parametrize(
    ("names", "stored"),
    [
        (["embed.weight"], ["embed.weight"]),
        (["head.weight"], ["head.weight"]),
        (["head.weight", "embed.weight"], ["embed.weight", "head.weight"]),
    ],
)
def test_a_mapping_says_under_which_name(
    tmp_path: Path, names: list[str], stored: list[str]
) -> None:
    state = tied_state()
    torch_ckpt.save(
        state,
        checkpoint_id=tmp_path / "c",
        layout="final",
        fqn_to_index_mapping=mapping(*names),
    )
    assert sorted(load_file(tmp_path / "c" / "model-00002-of-00002.safetensors")) == stored
    target = blank(state)
    torch_ckpt.load(target, checkpoint_id=tmp_path / "c")
    assert_same(target, state)


def test_a_mapping_that_names_neither_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FAILED, match="'embed.weight': is not in fqn_to_index_mapping"):
        torch_ckpt.save(
            tied_state(),
            checkpoint_id=tmp_path / "c",
            layout="final",
            fqn_to_index_mapping=mapping(),
        )
    assert not (tmp_path / "c").exists()


def test_a_merge_keeps_aliases(tmp_path: Path) -> None:
    state = tied_state()
    torch_ckpt.save(state, checkpoint_id=tmp_path / "c", layout="final")
    consolidate_safetensors_files(tmp_path / "c", tmp_path / "out", None, dtype="bf16")
    assert saved(tmp_path / "out") == ALL - {"head.weight"}
    target = {
        name: torch.zeros(8, 5, dtype=torch.bfloat16) for name in ("embed.weight", "head.weight")
    }
    torch_ckpt.load(target, checkpoint_id=tmp_path / "out")
    for value in target.values():
        assert torch.equal(value, state["embed"]["weight"].bfloat16())
    both = mapping("embed.weight", "head.weight")
    consolidate_safetensors_files(tmp_path / "c", tmp_path / "both", both)
    assert saved(tmp_path / "both") == ALL
    again = blank(state)
    torch_ckpt.load(again, checkpoint_id=tmp_path / "both")
    assert_same(again, state)
    others = {"layer": 1}
    consolidate_safetensors_files(tmp_path / "c", tmp_path / "some", others, strict=False)
    assert saved(tmp_path / "some") == {"layer"}
    assert len(Checkpoint(tmp_path / "some").describe().tensors) == 1


def test_in_the_background(tmp_path: Path) -> None:
    state = tied_state()
    torch_ckpt.async_save(state, checkpoint_id=tmp_path / "c", layout="final").result()
    assert saved(tmp_path / "c") == ALL - {"head.weight"}


def test_what_is_tied() -> None:
    base = torch.randn(4, 4)
    names = {"a": base, "b": base.view(4, 4), "c": torch.nn.Parameter(base), "d": base[:], "e": 1}
    assert find_ties(names, ()) == {"b": "a", "c": "a", "d": "a"}
    assert find_ties(names, {"c"}) == {"a": "c", "b": "c", "d": "c"}
    assert find_ties(names, {"c", "d"}) == {"a": "c", "b": "c"}
    unlike = {
        "a": base,
        "other dtype": base.view(torch.int32),
        "other shape": base.view(16),
        "conjugated": torch.randn(2, dtype=torch.complex64).conj(),
        "sparse": base.to_sparse(),
    }
    assert find_ties(unlike, ()) == {}


@pytest.mark.usefixtures("group")
def test_what_is_tied_of_dtensors() -> None:
    """One local tensor is not one tensor where ranks put it in other places."""
    mesh = init_device_mesh("cpu", (1,))
    local = torch.randn(4, 4)

    def placed(*placements: Placement) -> DTensor:
        return DTensor.from_local(local, mesh, placements)

    state = {"rows": placed(Shard(0)), "again": placed(Shard(0)), "columns": placed(Shard(1))}
    assert find_ties({**state, "local": local}, ()) == {"again": "rows"}
