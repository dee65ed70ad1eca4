"""Directories of others that are not exact: what transformers and safetensors read is read, and
what is left unread is said."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import torch_ckpt
from torch_ckpt.checkpoint.checkpoint import Checkpoint
from torch_ckpt.cli import cli as main

ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
A, B = torch.ones(2), torch.zeros(3)


def hub(
    path: Path,
    weight_map: dict[str, str],
    files: tuple[str, str] = (ONE, TWO),
    total_size: Any = 20,
    before: str = "",
) -> Path:
    for name, state in zip(files, ({"a": A}, {"b": B}), strict=True):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        save_file(state, path / name)
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    (path / INDEX).write_text(before + json.dumps(index), encoding="utf-8")
    return path


def check(path: Path, out: Path) -> None:
    target = {"a": torch.full((2,), 5.0), "b": torch.full((3,), 5.0)}
    torch_ckpt.load(target, path)
    assert torch.equal(target["a"], A) and torch.equal(target["b"], B)
    assert torch_ckpt.load(path=path).keys() == {"a", "b"}
    torch_ckpt.convert(path, out, "hf")
    found = load_file(out / "model.safetensors")
    assert torch.equal(found["a"], A) and torch.equal(found["b"], B)


@pytest.mark.parametrize("sub", ["", "weights/", "a/b/"])
def test_torch_files_in_subdirectories(sub: str, tmp_path: Path) -> None:
    """Where all are, the index alone tells of them, as it does to transformers."""
    files = [f"{sub}pytorch_model-0000{n}-of-00002.bin" for n in (1, 2)]
    (tmp_path / "hub" / sub).mkdir(parents=True)
    for name, state in zip(files, ({"a": A}, {"b": B}), strict=True):
        torch.save(state, tmp_path / "hub" / name)
    index = tmp_path / "hub" / "pytorch_model.bin.index.json"
    weight_map = {"a": files[0], "b": files[1]}
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}), encoding="utf-8")
    check(tmp_path / "hub", tmp_path / "out")
    assert Checkpoint(tmp_path / "hub").format == "torch"
    with pytest.raises(torch_ckpt.ConflictError, match="overwrite is False"):
        torch_ckpt.save({"a": A}, tmp_path / "hub", overwrite=False)
    (tmp_path / "hub" / files[1]).unlink()
    with pytest.raises(torch_ckpt.IncompleteError, match="00002-of-00002"):
        torch_ckpt.load(path=tmp_path / "hub")
    (tmp_path / "hub" / files[0]).unlink()
    with pytest.raises(torch_ckpt.IncompleteError, match="pytorch_model"):
        torch_ckpt.load(path=tmp_path / "hub")


def test_an_index_that_names_too_much(tmp_path: Path, caplog: Any) -> None:
    path = hub(tmp_path / "hub", {"a": ONE, "b": TWO, "mtp": TWO})
    check(path, tmp_path / "out")
    caplog.clear()
    torch_ckpt.load({"a": torch.zeros(2)}, path)
    (said,) = (text for text in map(str, caplog.messages) if "mtp" in text)
    assert INDEX in said
    assert "mtp" in Checkpoint(path).describe().notes[0]
    with pytest.raises(torch_ckpt.MissingKeyError, match="mtp"):
        torch_ckpt.load({"mtp": torch.zeros(2)}, path)


@pytest.mark.parametrize(
    "weight_map",
    [{"a": TWO, "b": ONE}, {"a": ONE, "c": TWO}, {"a": f"./{ONE}", "b": f"./{TWO}"}],
    ids=["exchanged", "too few", "dots"],
)
def test_an_index_that_is_not_exact(weight_map: Any, tmp_path: Path) -> None:
    check(hub(tmp_path / "hub", weight_map), tmp_path / "out")


@pytest.mark.parametrize("total_size", ["20", None, [1], -1])
def test_a_size_that_is_no_number(total_size: Any, tmp_path: Path) -> None:
    check(hub(tmp_path / "hub", {"a": ONE, "b": TWO}, total_size=total_size), tmp_path / "out")


def test_a_byte_order_mark(tmp_path: Path) -> None:
    check(hub(tmp_path / "hub", {"a": ONE, "b": TWO}, before="\ufeff"), tmp_path / "out")


@pytest.mark.parametrize("files", [(f"w/{ONE}", f"w/{TWO}"), (f"w/x/{ONE}", TWO)])
def test_shards_in_subdirectories(files: tuple[str, str], tmp_path: Path) -> None:
    path = hub(tmp_path / "hub", {"a": files[0], "b": files[1]}, files)
    check(path, tmp_path / "out")


@pytest.mark.parametrize("place", ["../out.safetensors", "/etc/out.safetensors", "w/../../x"])
def test_never_outside_of_the_directory(place: str, tmp_path: Path) -> None:
    save_file({"a": A}, tmp_path / "out.safetensors")
    path = hub(tmp_path / "hub", {"a": place, "b": TWO})
    with pytest.raises(torch_ckpt.CorruptError, match=INDEX):
        torch_ckpt.load(path=path)


def test_never_outside_by_a_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    save_file({"a": A}, tmp_path / "elsewhere" / ONE)
    path = hub(tmp_path / "hub", {"a": f"w/{ONE}", "b": TWO})
    (path / "w").symlink_to(tmp_path / "elsewhere")
    with pytest.raises((torch_ckpt.CheckpointError, OSError)):
        torch_ckpt.load({"a": torch.zeros(2)}, path)


def test_further_keys_in_a_header(tmp_path: Path) -> None:
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], "foo": {"x": [1, None, 1.5]}}
    header = json.dumps({"a": {"bar": True, **entry}}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + struct.pack("<ff", 1, 2))
    assert load_file(path)["a"].tolist() == [1, 2]
    assert torch_ckpt.load(path=path)["a"].tolist() == [1, 2]


def test_one_model_beside_other_files(tmp_path: Path, caplog: Any) -> None:
    """As transformers: model.safetensors, whatever else is there."""
    save_file({"a": A}, tmp_path / "model.safetensors")
    save_file({"a": B, "c": torch.ones(1)}, tmp_path / "consolidated.safetensors")
    caplog.clear()
    found = torch_ckpt.load(path=tmp_path)
    assert found.keys() == {"a"} and torch.equal(found["a"], A)
    (said,) = (record.getMessage() for record in caplog.records)
    assert "consolidated.safetensors" in said
    assert torch_ckpt.load(path=tmp_path / "consolidated.safetensors").keys() == {"a", "c"}


@pytest.mark.parametrize("indexed", [True, False])
@pytest.mark.parametrize("name", ["adapter.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("does", ["load", "load all", "open", "convert", "convert as it is"])
def test_what_is_left_unread_is_said_once(
    does: str, name: str, indexed: bool, tmp_path: Path, caplog: Any
) -> None:
    path = tmp_path / "hub"
    if indexed:
        hub(path, {"a": ONE, "b": TWO})
    else:
        path.mkdir()
        save_file({"a": A}, path / "model.safetensors")
    if name.endswith(".bin"):
        torch.save({"x": B}, path / name)
    else:
        save_file({"x": B}, path / name)
    caplog.clear()
    if does == "load":
        torch_ckpt.load({"a": torch.zeros(2)}, path)
    elif does == "load all":
        torch_ckpt.load(path=path)
    elif does == "open":
        assert torch_ckpt.open(path)["a"][:].tolist() == A.tolist()
    else:
        torch_ckpt.convert(path, tmp_path / "out", "hf" if does == "convert" else None)
    (said,) = (text for text in map(str, caplog.messages) if name in text)
    assert str(path) in said and "not read" in said


def test_two_models_in_one_directory(tmp_path: Path) -> None:
    save_file({"a": A}, tmp_path / "model.safetensors")
    save_file({"b": B}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(torch_ckpt.ConflictError, match=r"adapter_model\.safetensors"):
        torch_ckpt.load(path=tmp_path)


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 12\n"
PAGE = "\n<!DOCTYPE html>\n<html><body>404</body></html>\n" + " " * 300


@pytest.mark.parametrize(
    ("text", "says"), [(POINTER, "Git LFS"), (PAGE, "HTML"), ("", "is empty"), ("<", "HTML")]
)
@pytest.mark.parametrize(
    "name",
    ["model.safetensors", "pytorch_model.bin", INDEX, "x.pt", "pytorch_model.bin.index.json"],
)
def test_what_stands_in_for_weights(text: str, says: str, name: str, tmp_path: Path) -> None:
    if name.endswith(".json"):
        torch.save({"a": A}, tmp_path / "pytorch_model.bin")
        save_file({"a": A}, tmp_path / ("y.safetensors" if "bin" not in name else "z"))
    (tmp_path / name).write_text(text)
    path = tmp_path / name if name == "x.pt" else tmp_path
    with pytest.raises((torch_ckpt.IncompleteError, torch_ckpt.CorruptError)) as caught:
        torch_ckpt.load(path=path)
    assert says in str(caught.value) and name in str(caught.value)


@pytest.mark.parametrize(("text", "says"), [(POINTER, "Git LFS"), (PAGE, "HTML"), ("", "is empty")])
@pytest.mark.parametrize("below", [True, False])
@pytest.mark.parametrize("format", [None, "hf"])
def test_what_stands_in_for_an_index_alone(
    text: str, says: str, below: bool, format: Any, tmp_path: Path
) -> None:
    if below:
        (tmp_path / "shards").mkdir()
        save_file({"a": A}, tmp_path / "shards" / "model-00001-of-00001.safetensors")
    (tmp_path / INDEX).write_text(text)
    with pytest.raises((torch_ckpt.IncompleteError, torch_ckpt.CorruptError)) as caught:
        torch_ckpt.load(path=tmp_path, format=format)
    assert says in str(caught.value) and INDEX in str(caught.value)


def test_an_index_alone_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text('{"weight_map": {"a": "y.safetensors"}}')
    with pytest.raises(torch_ckpt.IncompleteError, match=rf"y\.safetensors.*{INDEX}.*missing"):
        torch_ckpt.load(path=tmp_path)


def test_inspect_says_notes_as_sentences(tmp_path: Path) -> None:
    save_file({"a": A}, tmp_path / "model.safetensors")
    save_file({"c": B}, tmp_path / "consolidated.safetensors")
    output = CliRunner().invoke(main, ["inspect", str(tmp_path)]).output
    assert "note: it holds weights beside its own that are not read: consol" in output
    (tmp_path / "model.safetensors").rename(tmp_path / "y.safetensors")
    (tmp_path / INDEX).write_text('{"weight_map": {"a": "y.safetensors", "b": "y.safetensors"}}')
    output = CliRunner().invoke(main, ["inspect", str(tmp_path)]).output
    assert f"note: it has {INDEX}, which names what no file of it has: b" in output


def test_an_inexact_index_of_torch_files(tmp_path: Path, caplog: Any) -> None:
    one, two = "pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"
    torch.save({"a": A}, tmp_path / one)
    torch.save({"b": B}, tmp_path / two)
    weight_map = {"a": f"./{two}", "b": one, "mtp": two}
    index = {"metadata": {"total_size": "20"}, "weight_map": weight_map}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    found = torch_ckpt.load(path=tmp_path)
    assert found.keys() == {"a", "b"} and torch.equal(found["b"], B)
    assert any("mtp" in record.getMessage() for record in caplog.records)
