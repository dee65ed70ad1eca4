"""convert: every format that is read, to each that is written."""

from __future__ import annotations

import argparse
import collections
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from foreign_samples import same, state
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

import torch_ckpt
from torch_ckpt.cli import cli


class Options(argparse.Namespace):
    pass


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


FORMATS = ["torch_ckpt", "hf", "dcp", "torch"]


@pytest.mark.parametrize("to", FORMATS)
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
    for other in FORMATS:
        torch_ckpt.convert(tmp_path / "out", tmp_path / other, other)  # type: ignore[arg-type]
        assert same(torch_ckpt.load(path=tmp_path / other), wanted)
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
    what = {"w": torch.ones(3), "norm": torch.ones(2), "args": Options(a=1), "n": 1}
    torch.save(what, tmp_path / "a.pt")
    with pytest.raises(
        torch_ckpt.UnsupportedError, match=r"'args'.*test_\w+\.Options.*--no-objects"
    ):
        torch_ckpt.convert(tmp_path / "a.pt", tmp_path / "out", "hf")
    with pytest.raises(torch_ckpt.UnsupportedError, match=r"'args'.*--no-objects"):
        torch_ckpt.convert(tmp_path / "a.pt", tmp_path / "out.pt", "torch")
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
    for make, name in ((of_dcp, "dcp"), (of_torch, "torch")):
        torch_ckpt.convert(make(tmp_path / f"{name}-in"), tmp_path / f"{name}-out")
        assert torch_ckpt.open(tmp_path / f"{name}-out").format == name


def test_the_source_is_not_written_to(tmp_path: Path) -> None:
    path = of_safetensors(tmp_path / "c")
    link = tmp_path / "link"
    link.symlink_to(path)
    for source, target in ((path, link), (path / "a.safetensors", path)):
        with pytest.raises(torch_ckpt.InvalidArgumentError, match="source, or its directory"):
            torch_ckpt.convert(source, target, "hf")
    # Through links too, and over a file of it.
    (tmp_path / "alone.safetensors").symlink_to(path / "a.safetensors")
    ours = of_ours(tmp_path / "ours")
    (shard,) = ours.glob("shard-*.safetensors")
    (tmp_path / "apart").mkdir()
    (tmp_path / "apart" / "model.safetensors").symlink_to(path / "a.safetensors")
    for source, target, to in (
        (tmp_path / "alone.safetensors", path, "hf"),
        (ours, shard, "torch"),
        (ours, ours / "new.pt", "torch"),
        (tmp_path / "apart", path / "a.safetensors", "torch"),
    ):
        with pytest.raises(torch_ckpt.InvalidArgumentError, match="source, or its directory"):
            torch_ckpt.convert(source, target, to)
    torch_ckpt.Checkpoint(ours).verify()
    assert os.listdir(path) == ["a.safetensors"]
    file = of_torch(tmp_path / "a.pt")
    with pytest.raises(torch_ckpt.InvalidArgumentError, match="source, or its directory"):
        torch_ckpt.convert(file, file, "torch")
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
    assert done.exit_code == 0 and torch_ckpt.open(tmp_path / "two").format == "torch"
    done = CliRunner().invoke(cli, ["convert", str(tmp_path / "gone"), "x", "--to", "hf"])
    assert done.exit_code == 3


def test_torch_reads_what_is_written_as_torch_and_dcp(tmp_path: Path) -> None:
    what = state()
    tied = torch.randn(5, 3)
    what.update(tied=tied, tied_too=tied, numbers={1: torch.ones(2), 2: {}}, rows=[torch.zeros(2)])
    source = tmp_path / "a.pt"
    torch.save(what, source)  # which keeps ties
    torch_ckpt.convert(source, tmp_path / "b.pt")
    loaded = torch.load(tmp_path / "b.pt", weights_only=False)
    assert same(loaded, plain(what))
    assert loaded["tied"].data_ptr() == loaded["tied_too"].data_ptr()
    with zipfile.ZipFile(tmp_path / "b.pt") as archive:
        assert archive.testzip() is None  # every CRC-32
        assert all(each.CRC or not each.file_size for each in archive.infolist())
    mapped = torch.load(tmp_path / "b.pt", weights_only=False, mmap=True)
    assert same(mapped, plain(what))

    torch_ckpt.convert(source, tmp_path / "dcp", "dcp")
    target = {
        "model": {name: torch.zeros_like(value) for name, value in what["model"].items()},
        "tied": torch.zeros(5, 3),
        "step": 0,
    }
    dcp.load(target, storage_reader=dcp.FileSystemReader(tmp_path / "dcp"))
    assert same(plain(target), {name: plain(what[name]) for name in target})
    whole: dict[str, Any] = {}
    _load_state_dict(
        whole,
        storage_reader=dcp.FileSystemReader(tmp_path / "dcp"),
        planner=_EmptyStateDictLoadPlanner(),
        no_dist=True,
    )
    assert same(whole["numbers"]["1"], torch.ones(2))


def test_casts_and_names_in_files_of_torch(tmp_path: Path) -> None:
    torch.save({"w": torch.tensor([1.0, 2.5]), "n": 1}, tmp_path / "a.pt")
    for to in ("torch", "dcp"):
        torch_ckpt.convert(
            tmp_path / "a.pt",
            tmp_path / to,
            to,  # type: ignore[arg-type]
            dtype="bf16",
            key_mapping=[("^", "model.")],
            objects=False,
        )
        loaded = torch_ckpt.load(path=tmp_path / to)
        assert same(loaded, {"model.w": torch.tensor([1.0, 2.5]).bfloat16()})
    torch.save({"w": torch.tensor([1e30])}, tmp_path / "b.pt")
    with pytest.raises(torch_ckpt.InvalidArgumentError, match="'w'"):
        torch_ckpt.convert(
            tmp_path / "b.pt", tmp_path / "torch", "torch", dtype="fp16", overwrite=True
        )
    assert same(torch_ckpt.load(path=tmp_path / "torch"), loaded)  # as it was
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


def test_targets_that_stand_in_the_way(tmp_path: Path) -> None:
    source = of_torch(tmp_path / "a.pt")
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(torch_ckpt.ConflictError, match="folder.*no file of torch.save"):
        torch_ckpt.convert(source, folder, "torch")
    torch_ckpt.convert(source, folder, "dcp")  # it is empty
    with pytest.raises(torch_ckpt.ConflictError, match="folder.*there already"):
        torch_ckpt.convert(source, folder, "dcp")
    with pytest.raises(torch_ckpt.InvalidArgumentError, match="no shards"):
        torch_ckpt.convert(source, tmp_path / "x", "dcp", max_shard_size=100)


def test_damage_in_the_source_leaves_nothing(tmp_path: Path) -> None:
    source = of_ours(tmp_path / "c")
    (file,) = source.glob("shard-*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    for to in ("torch", "dcp"):
        with pytest.raises(torch_ckpt.CorruptError, match=file.name):
            torch_ckpt.convert(source, tmp_path / "out", to)  # type: ignore[arg-type]
    assert sorted(os.listdir(tmp_path)) == ["c"]


def test_only_a_file_of_torch_save_is_replaced(tmp_path: Path) -> None:
    source = of_torch(tmp_path / "a.pt")
    text, pipe, folder = tmp_path / "notes.txt", tmp_path / "pipe", tmp_path / "folder"
    text.write_text("mine")
    os.mkfifo(pipe)
    folder.mkdir()
    for target in (text, pipe, folder, Path("/dev/null")):
        with pytest.raises(torch_ckpt.ConflictError, match="no file of torch.save"):
            torch_ckpt.convert(source, target, "torch")
    assert text.read_text() == "mine" and pipe.is_fifo() and Path("/dev/null").is_char_device()
    torch.save({}, tmp_path / "old.pt")
    torch_ckpt.convert(source, tmp_path / "old.pt", "torch", overwrite=True)
    assert same(torch.load(tmp_path / "old.pt", weights_only=False), state())


def test_an_empty_path_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = of_torch(tmp_path / "a.pt")
    monkeypatch.chdir(tmp_path)
    for call in (
        lambda: torch_ckpt.convert(source, "", "hf"),
        lambda: torch_ckpt.save(state(), ""),
        lambda: torch_ckpt.open(""),
        lambda: torch_ckpt.Checkpoint("").remove(),
    ):
        with pytest.raises(torch_ckpt.InvalidArgumentError, match="the path is empty"):
            call()
    assert CliRunner().invoke(cli, ["clean", "", "--yes"]).exit_code == 2
    assert os.listdir(tmp_path) == ["a.pt"]


def test_a_large_checkpoint_takes_little_memory(tmp_path: Path) -> None:
    tensors = {f"w{number}": torch.ones(32 << 20, dtype=torch.uint8) for number in range(12)}
    torch.save(tensors, tmp_path / "a.pt")
    program = (
        "import resource, torch, sys, torch_ckpt, torch_ckpt.conversion.archives\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "before = peak()\n"
        "torch_ckpt.convert(*sys.argv[1:], memory_budget='64MiB')\n"
        "assert peak() - before < 160 << 10, (before, peak())\n"
    )
    for to in FORMATS:
        arguments = [str(tmp_path / "a.pt"), str(tmp_path / to), to]
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("to", FORMATS)
def test_what_is_written_is_not_read_again(tmp_path: Path, to: Any) -> None:
    def bytes_read() -> int:
        return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])

    sizes = (1 << 20, 3 << 20, (4 << 20) + 4)
    tensors = {f"w{n}": torch.arange(n, dtype=torch.int32).view(-1, 4) for n in sizes}
    save_file(tensors, tmp_path / "a.safetensors")
    torch_ckpt.convert(tmp_path / "a.safetensors", tmp_path / "warm", to=to)
    before = bytes_read()
    torch_ckpt.convert(tmp_path / "a.safetensors", tmp_path / "out", to=to)
    assert bytes_read() - before < 1.25 * sum(4 * n for n in sizes)
    if to == "torch":
        with zipfile.ZipFile(tmp_path / "out") as archive:
            assert archive.testzip() is None
    assert same(torch_ckpt.load(path=tmp_path / "out"), tensors)


@pytest.mark.parametrize("to", FORMATS)
def test_tensors_inside_of_other_leaves(tmp_path: Path, to: Any) -> None:
    what = {
        "w": torch.ones(2),
        "pair": (1, torch.arange(3.0), [torch.tensor(7)]),
        "odd": {1: torch.ones(1), (1, 2): torch.zeros(2, 2) + 5},
        "v": torch.arange(4),
    }
    for make in (of_torch_of, of_ours_of, of_dcp_of):
        source = make(tmp_path / make.__name__, what)
        target = tmp_path / f"{make.__name__}-out"
        torch_ckpt.convert(source, target, to)
        wanted = torch_ckpt.load(path=source)
        assert same(torch_ckpt.load(path=target), wanted)
        if to == "torch":
            assert same(torch.load(target, weights_only=False)["pair"], what["pair"])
            torch_ckpt.Checkpoint(target).verify()


def of_torch_of(path: Path, what: Any) -> Path:
    torch.save(what, path)
    return path


def of_ours_of(path: Path, what: Any) -> Path:
    torch_ckpt.save(what, path)
    return path


def of_dcp_of(path: Path, what: Any) -> Path:
    dcp.save(what, storage_writer=dcp.FileSystemWriter(path))
    return path


@pytest.mark.parametrize("to", ["torch", "dcp", "megatron"])
def test_named_tuples_whose_class_is_not_imported(tmp_path: Path, to: Any) -> None:
    """Who reads the pickle would import whatever class the file names, and run its `__new__`."""
    gone = collections.namedtuple("Gone", "x y")
    gone.__module__ = f"not_imported_{to}"  # of each class is warned once
    source, holder = tmp_path / "a", tmp_path / "b"
    torch_ckpt.save({"w": torch.ones(2), "pair": gone(1, 2)}, source)
    with pytest.raises(
        torch_ckpt.UnsupportedError,
        match=f"{source}: .*'pair'.*not_imported_{to}:Gone.*--no-objects",
    ):
        torch_ckpt.convert(source, tmp_path / "out", to)
    assert not (tmp_path / "out").exists()
    torch_ckpt.convert(source, tmp_path / "out", to, objects=False)
    torch_ckpt.convert(source, tmp_path / "same", "torch_ckpt")
    with pytest.warns(UserWarning, match=f"not_imported_{to}:Gone"):
        assert torch_ckpt.open(tmp_path / "same").objects["pair"] == (1, 2)
    torch_ckpt.save({"w": torch.ones(2), "pair": gone(1, torch.ones(1))}, holder)
    with pytest.raises(torch_ckpt.UnsupportedError, match="'pair'.*holds one"):
        torch_ckpt.convert(holder, tmp_path / "none", to, objects=False)


def test_leaves_of_one_rank_and_lists_with_holes(tmp_path: Path) -> None:
    source = tmp_path / "c"
    one = torch.ones(2)
    torch_ckpt.save({"l": [1, one, one * 2], "r": torch_ckpt.PerRank({"x": one * 3})}, source)
    torch_ckpt.convert(source, tmp_path / "a.pt", "torch")
    loaded = torch.load(tmp_path / "a.pt", weights_only=False)
    assert same(loaded["l"], [1, one, one * 2])
    assert same(loaded["r"], {"__rank_0_of_1__": {"x": one * 3}})
    torch_ckpt.convert(source, tmp_path / "b.pt", "torch", objects=False)
    assert same(torch.load(tmp_path / "b.pt"), {"l": [one, one * 2]})


def test_renamed_leaves_stay_in_their_containers(tmp_path: Path) -> None:
    torch.save({"model": {"weight": torch.ones(1), "bias": torch.zeros(1)}}, tmp_path / "a.pt")
    torch_ckpt.convert(tmp_path / "a.pt", tmp_path / "b.pt", key_mapping=[("weight$", "kernel")])
    wanted = {"model": {"kernel": torch.ones(1), "bias": torch.zeros(1)}}
    assert same(torch.load(tmp_path / "b.pt"), wanted)


def test_a_link_is_followed(tmp_path: Path) -> None:
    source = of_torch(tmp_path / "a.pt")
    (tmp_path / "link.pt").symlink_to(tmp_path / "real.pt")
    torch_ckpt.convert(source, tmp_path / "link.pt")
    assert (tmp_path / "link.pt").is_symlink() and (tmp_path / "real.pt").is_file()
    torch_ckpt.convert(source, tmp_path / ".hidden")
    assert same(torch_ckpt.load(path=tmp_path / ".hidden"), torch_ckpt.load(path=source))
