"""convert: every format that is read, to each that is written."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from foreign_samples import same, state
from safetensors.torch import load_file, save_file

import torch_ckpt
from torch_ckpt.cli import cli


def of_ours(path: Path) -> Path:
    torch_ckpt.save(state(), path)
    return path


def of_dcp(path: Path) -> Path:
    dcp.save(state(), storage_writer=dcp.FileSystemWriter(path))
    return path


def of_torch(path: Path) -> Path:
    torch.save(state(), path)
    return path


def of_hub(path: Path) -> Path:
    path.mkdir()
    torch.save(state()["model"], path / "pytorch_model.bin")
    return path


def of_safetensors(path: Path) -> Path:
    path.mkdir()
    tensors = {name: tensor.detach().contiguous() for name, tensor in state()["model"].items()}
    save_file(tensors, path / "a.safetensors")
    return path


SOURCES = {
    "torch_ckpt": of_ours,
    "dcp": of_dcp,
    "torch": of_torch,
    "hub": of_hub,
    "safetensors": of_safetensors,
}


def plain(value: Any) -> Any:
    """Parameters come back as tensors."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    return value


@pytest.mark.parametrize("to", ["torch_ckpt", "hf"])
@pytest.mark.parametrize("kind", SOURCES)
def test_everything_comes_back_and_again(tmp_path: Path, kind: str, to: Any) -> None:
    source = SOURCES[kind](tmp_path / "c")
    wanted = torch_ckpt.load(path=source)
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    answer = torch_ckpt.convert(source, tmp_path / "out", to)
    assert answer["bytes"] > 0
    assert all(path.read_bytes() == content for path, content in files.items())
    assert torch_ckpt.open(tmp_path / "out").format == to
    assert same(torch_ckpt.load(path=tmp_path / "out"), wanted)
    torch_ckpt.Checkpoint(tmp_path / "out").verify()
    other = "hf" if to == "torch_ckpt" else "torch_ckpt"
    torch_ckpt.convert(tmp_path / "out", tmp_path / "back", other)
    assert same(torch_ckpt.load(path=tmp_path / "back"), wanted)
    assert same(plain(wanted.get("model", wanted)), plain(state()["model"]))


def test_what_others_read_of_it(tmp_path: Path) -> None:
    torch_ckpt.convert(of_torch(tmp_path / "a.pt"), tmp_path / "hf", "hf")
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    assert {f"model.{name}" for name in state()["model"]} == set(tensors)
    what = state()
    del what["model"]["fp4"]  # which stock's reader does not know
    torch.save(what, tmp_path / "b.pt")
    torch_ckpt.convert(tmp_path / "b.pt", tmp_path / "ours", "torch_ckpt", max_shard_size=2000)
    assert len(list((tmp_path / "ours").glob("shard-00001-model-0000*.safetensors"))) > 1
    target = {"model": {"weight": torch.zeros(37, 19)}}
    dcp.load(target, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path / "ours")))
    assert same(target["model"]["weight"], state()["model"]["weight"])


def test_dtypes_names_and_leaves(tmp_path: Path) -> None:
    what = {"w": torch.ones(3), "norm": torch.ones(2), "args": argparse.Namespace(a=1), "n": 1}
    torch.save(what, tmp_path / "a.pt")
    with pytest.raises(torch_ckpt.UnsupportedError, match=r"'args'.*argparse\.Namespace"):
        torch_ckpt.convert(tmp_path / "a.pt", tmp_path / "out", "hf")
    assert not (tmp_path / "out").exists()
    torch_ckpt.convert(
        tmp_path / "a.pt",
        tmp_path / "out",
        "hf",
        dtype="bf16",
        keep_fp32=["norm"],
        key_mapping=[("^", "model.")],
        objects=False,
    )
    loaded = torch_ckpt.load(path=tmp_path / "out")
    assert same(loaded, {"model.w": torch.ones(3).bfloat16(), "model.norm": torch.ones(2)})


def test_the_format_stays_where_none_is_said(tmp_path: Path) -> None:
    ours = of_ours(tmp_path / "ours")
    torch_ckpt.convert(ours, tmp_path / "a")
    assert torch_ckpt.open(tmp_path / "a").format == "torch_ckpt"
    torch_ckpt.convert(of_safetensors(tmp_path / "plain"), tmp_path / "b")
    assert (tmp_path / "b" / "model.safetensors").exists()
    with pytest.raises(torch_ckpt.UnsupportedError, match="format dcp, which is read and not"):
        torch_ckpt.convert(of_dcp(tmp_path / "dcp"), tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_the_source_is_not_written_to(tmp_path: Path) -> None:
    path = of_safetensors(tmp_path / "c")
    link = tmp_path / "link"
    link.symlink_to(path)
    for source, target in ((path, link), (path / "a.safetensors", path)):
        with pytest.raises(torch_ckpt.InvalidArgumentError, match="directory of the source"):
            torch_ckpt.convert(source, target, "hf")
    assert os.listdir(path) == ["a.safetensors"]
    with pytest.raises(torch_ckpt.InvalidArgumentError, match="'zip'"):
        torch_ckpt.convert(path, tmp_path / "out", "zip")  # type: ignore[arg-type]


def test_a_directory_of_two_formats(tmp_path: Path) -> None:
    path = of_dcp(tmp_path / "c")
    save_file({"other": torch.ones(1)}, path / "model.safetensors")
    torch_ckpt.convert(path, tmp_path / "out", "hf", format="hf")
    assert list(torch_ckpt.open(tmp_path / "out")) == ["other"]


def test_leaves_of_stock_go_along_when_it_is_consolidated(tmp_path: Path) -> None:
    torch_ckpt.consolidate_safetensors_files(of_dcp(tmp_path / "c"), tmp_path / "out")
    loaded, wanted = torch_ckpt.load(path=tmp_path / "out"), state()
    assert all(same(loaded[key], wanted[key]) for key in wanted if key != "model")


def test_the_command(tmp_path: Path) -> None:
    source = of_torch(tmp_path / "a.pt")
    arguments = ["convert", str(source), str(tmp_path / "out"), "--to", "hf", "--json"]
    done = CliRunner().invoke(cli, arguments)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["output"] == str(tmp_path / "out")
    assert same(torch_ckpt.load(path=tmp_path / "out"), torch_ckpt.load(path=source))
    done = CliRunner().invoke(cli, ["convert", str(source), str(tmp_path / "two")])
    assert done.exit_code == 1 and "format torch, which is read and not written" in done.stderr
    done = CliRunner().invoke(cli, ["convert", str(tmp_path / "gone"), "x", "--to", "hf"])
    assert done.exit_code == 3
