"""tensor_mapping of save, async_save and load, and of the planners under stock's calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import scaled_bases
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tensor_mapping import drawn_parts, numbered
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

import torch_ckpt

PAIRS = [("e.{e}.up", "n.up[{e}].T"), ("e.{e}.down", "n.down[{e}]")]


def native() -> dict[str, Any]:
    return {
        "n": {"up": numbered(3, 4, 6), "down": numbered(3, 4, 6) + 100},
        "b": numbered(2),
        "step": 7,
    }


def stored() -> dict[str, torch.Tensor]:
    n = native()["n"]
    ups = {f"e.{e}.up": n["up"][e].T for e in range(3)}
    return ups | {f"e.{e}.down": n["down"][e] for e in range(3)} | {"b": numbered(2)}


def same(found: Any, wanted: Any) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        if isinstance(value, dict):
            same(found[name], value)
        elif isinstance(value, torch.Tensor):
            assert torch.equal(found[name], value), name
        else:
            assert found[name] == value, name


def emptied(state: dict[str, Any]) -> dict[str, Any]:
    return {
        name: emptied(value)
        if isinstance(value, dict)
        else torch.full_like(value, -7)
        if isinstance(value, torch.Tensor)
        else None
        for name, value in state.items()
    }


def check_stored(path: Path) -> None:
    opened = torch_ckpt.open(path)
    same({name: opened[name][...] for name in opened}, stored())
    assert opened.objects["step"] == 7


def test_there_and_back(tmp_path: Path) -> None:
    torch_ckpt.save(native(), tmp_path / "c", tensor_mapping=PAIRS)
    check_stored(tmp_path / "c")
    target = emptied(native())
    assert torch_ckpt.load(target, tmp_path / "c", tensor_mapping=PAIRS) is target
    same(target, native())


def test_in_the_background(tmp_path: Path) -> None:
    torch_ckpt.async_save(native(), tmp_path / "c", tensor_mapping=PAIRS).result()
    check_stored(tmp_path / "c")


def test_planners_with_the_readers_and_writers_of_stock(tmp_path: Path) -> None:
    dcp.save(
        native(),
        storage_writer=FileSystemWriter(tmp_path / "c"),
        planner=torch_ckpt.SavePlanner(tensor_mapping=PAIRS),
    )
    check_stored(tmp_path / "c")
    target = emptied(native())
    dcp.load(
        target,
        storage_reader=FileSystemReader(tmp_path / "c"),
        planner=torch_ckpt.LoadPlanner(tensor_mapping=PAIRS),
    )
    same(target, native())


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_parts(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    whole, leaves = drawn_parts(data)
    parts = {f"p.{n}": leaf[1].contiguous() for n, leaf in enumerate(leaves)}
    sides = [({"w": whole}, parts, [(f"p.{n}", leaf[0]) for n, leaf in enumerate(leaves)])]
    sides.append((parts, {"w": whole}, [(leaf[0], f"p.{n}") for n, leaf in enumerate(leaves)]))
    folder = tmp_path_factory.mktemp("m")
    for number, (own, wanted, pairs) in enumerate(sides):
        torch_ckpt.save(own, folder / str(number), tensor_mapping=pairs)
        same(torch_ckpt.load(None, folder / str(number)), wanted)
        target = emptied(own)
        torch_ckpt.load(target, folder / str(number), tensor_mapping=pairs)
        same(target, own)


def test_padding_of_a_target_is_zeros(tmp_path: Path) -> None:
    torch_ckpt.save({"v": numbered(5, 2)}, tmp_path / "c")
    target = {"m": torch.full((8, 2), -7.0)}
    pairs = [("v", "m[: 5]"), ("0", "m[5 :]")]
    torch_ckpt.load(target, tmp_path / "c", tensor_mapping=pairs)
    assert torch.equal(target["m"], torch.cat([numbered(5, 2), torch.zeros(3, 2)]))


def test_meta_tensors_and_casts(tmp_path: Path) -> None:
    torch_ckpt.save(stored(), tmp_path / "c")
    target = {"n": {name: torch.empty(3, 4, 6, device="meta") for name in ("up", "down")}}
    torch_ckpt.load(target, tmp_path / "c", tensor_mapping=PAIRS)
    same(target, {"n": native()["n"]})
    narrow = {"n": {name: torch.empty(3, 4, 6).bfloat16() for name in ("up", "down")}}
    torch_ckpt.load(narrow, tmp_path / "c", tensor_mapping=PAIRS)
    same(narrow, {"n": {name: value.bfloat16() for name, value in native()["n"].items()}})


def test_numbers_of_codes(tmp_path: Path) -> None:
    kinds = scaled_bases.kinds(torch.Generator().manual_seed(2))
    codes, whole = kinds["float8_e4m3fn float32 m.weight_scale_inv"]
    path = scaled_bases.base(tmp_path / "base", codes)
    rows = whole.shape[0] // 2
    target = {"a": torch.zeros(whole.shape[1], rows), "b": torch.zeros(rows, whole.shape[1])}
    pairs = [("m.weight[0/2]", "a.T"), ("m.weight[1/2]", "b")]
    torch_ckpt.load(target, path, tensor_mapping=pairs)
    same(target, {"a": whole[:rows].T, "b": whole[rows:]})


def test_numbers_of_the_configuration(tmp_path: Path) -> None:
    torch_ckpt.save({"q": numbered(6, 2), "v": numbered(2, 2)}, tmp_path / "c")
    (tmp_path / "c/config.json").write_text(json.dumps({"heads": 3}))
    table = {"numbers": {"d": 2}, "pairs": [["q", "m[: heads * d]"], ["v", "m[heads * d :]"]]}
    target = {"m": torch.zeros(8, 2)}
    torch_ckpt.load(target, tmp_path / "c", tensor_mapping=table)
    assert torch.equal(target["m"], torch.cat([numbered(6, 2), numbered(2, 2)]))
    with pytest.raises(ValueError, match="heads"):
        torch_ckpt.save(target, tmp_path / "d", tensor_mapping=table)
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize(
    ("pairs", "words"),
    [
        ([("a", "w[: 2]"), ("c", "w[2 :]")], ["('c', 'w[2 :]')", "'c'"]),
        ([("a", "w[: 2]")], ["w", "once"]),
        ([("a", "w[: 2]"), ("a", "w[2 :]")], ["a", "twice"]),
        ([("b[: 4]", "w")], ["b", "24 of 36 elements"]),
        ([("a", "v")], ["('a', 'v')", "no tensor"]),
        ([("a.", "w["), ("a", "w")], ["w["]),
    ],
)
def test_what_is_no_mapping(tmp_path: Path, pairs: Any, words: list[str]) -> None:
    saved = {"a": numbered(2, 6), "b": numbered(6, 6), "w": numbered(4, 6)}
    torch_ckpt.save(saved, tmp_path / "c")
    target = {"w": torch.full((4, 6), -7.0)}
    with pytest.raises(ValueError) as caught:
        torch_ckpt.load(target, tmp_path / "c", tensor_mapping=pairs)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert (target["w"] == -7).all()


def test_arguments_that_do_not_go_together(tmp_path: Path) -> None:
    torch_ckpt.save(stored(), tmp_path / "c")
    for options, words in [
        ({"key_mapping": {"a": "b"}}, "exclude"),
        ({"planner": torch_ckpt.LoadPlanner()}, "planner"),
    ]:
        with pytest.raises(torch_ckpt.InvalidArgumentError, match=words):
            torch_ckpt.load({}, tmp_path / "c", tensor_mapping=PAIRS, **options)
    with pytest.raises(torch_ckpt.InvalidArgumentError, match="state_dict"):
        torch_ckpt.load(None, tmp_path / "c", tensor_mapping=PAIRS)
    with pytest.raises(torch_ckpt.InvalidArgumentError, match="flatten_state_dict"):
        torch_ckpt.SavePlanner(flatten_state_dict=False, tensor_mapping=PAIRS)
