"""What proves that a directory holds a checkpoint of ours, and where two lie in one directory."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import torch_ckpt
from torch_ckpt.checkpoint.checkpoint import Checkpoint
from torch_ckpt.cli import cli as main
from torch_ckpt.cli.steps import find_steps
from torch_ckpt.dcp.read.reader import CheckpointReader

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

STATE = {"model": {"w": torch.arange(8.0)}, "step": 7, "note": "x"}
MANIFEST = "torch_ckpt.json"
LAYOUTS: Any = pytest.mark.parametrize("layout", ["sharded", "final"])


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(main, list(arguments))
    return done.exit_code, done.output


@LAYOUTS
def test_a_copy_without_its_manifest(layout: Any, tmp_path: Path) -> None:
    """As a copy that was stopped leaves it, or one with --exclude '*.json'."""
    path = tmp_path / "step-1"
    torch_ckpt.save(STATE, path, layout=layout)
    (path / MANIFEST).unlink()
    for _ in range(2):
        for use in (
            lambda: torch_ckpt.load(path=path),
            lambda: list(torch_ckpt.open(path)),
            lambda: torch_ckpt.convert(path, tmp_path / "out", "hf"),
            lambda: torch_ckpt.consolidate_safetensors_files(path, tmp_path / "out"),
            lambda: Checkpoint(path).describe(),
        ):
            with pytest.raises(torch_ckpt.IncompleteError, match=f'{MANIFEST}.*format="hf"'):
                use()
        status, output = run("inspect", str(path))
        assert status != 0 and "incomplete" in output and MANIFEST in output
        assert [each["state"] for each in find_steps(str(tmp_path))] == ["incomplete"]
        for left in path.glob("objects-*"):  # then by the catalog alone
            left.unlink()
    assert not (tmp_path / "out").exists()
    assert torch_ckpt.open(path, format="hf")["model.w"].read().tolist() == list(range(8))
    assert torch_ckpt.load(path=path, format="hf").keys() == {"model.w"}


def test_objects_alone_tell_too(tmp_path: Path) -> None:
    torch_ckpt.save(STATE, tmp_path / "c")
    (tmp_path / "c" / MANIFEST).unlink()
    (tmp_path / "c" / "torch_ckpt.catalog").unlink()
    objects = tmp_path / "c" / "objects-00001.json"
    for size in (objects.stat().st_size, 40, 3, 0):  # a copy may stop anywhere
        objects.write_bytes(objects.read_bytes()[:size])
        with pytest.raises(torch_ckpt.IncompleteError, match=r"objects-00001\.json"):
            torch_ckpt.load(path=tmp_path / "c")


def test_a_file_of_others_that_is_called_as_ours(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    for content in ('{"scene": [1, 2]}', "[]", None):
        name = tmp_path / "objects-00001.json"
        name.unlink(missing_ok=True)
        name.mkdir() if content is None else name.write_text(content)
        assert torch_ckpt.load(path=tmp_path)["w"].tolist() == [1, 1]
        status, output = run("inspect", str(tmp_path))
        assert status == 0, output


@pytest.mark.timeout(60)
def test_a_conflict_that_stays_is_said_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what is replaced while it is read is looked at again."""
    torch_ckpt.save({"w": torch.ones(2)}, tmp_path / "c")
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "c", no_dist=True)
    slept: list[float] = []
    monkeypatch.setattr("torch_ckpt.checkpoint.checkpoint.time.sleep", slept.append)
    with pytest.raises(torch_ckpt.ConflictError, match="two checkpoints"):
        Checkpoint(tmp_path / "c").verify()
    assert slept == []


def test_shards_alone_may_lack_others(tmp_path: Path) -> None:
    """Nothing but the manifest says how many ranks there were."""
    path = tmp_path / "c"
    torch_ckpt.save(STATE, path)
    for file in path.iterdir():
        if file.suffix != ".safetensors":
            file.unlink()
    for use in (lambda: torch_ckpt.load(path=path), lambda: list(torch_ckpt.open(path))):
        with pytest.raises(torch_ckpt.IncompleteError, match=f'{MANIFEST}.*format="hf"'):
            use()
    assert run("inspect", str(path))[0] != 0
    assert torch_ckpt.load(path=path, format="hf").keys() == {"model.w"}
    (shard,) = path.glob("shard-*")
    assert torch_ckpt.load(path=shard).keys() == {"model.w"}


@pytest.mark.parametrize("damage", ["empty", "cut", "flipped"])
def test_final_files_whose_manifest_is_damaged(damage: str, tmp_path: Path) -> None:
    """They go by their ids, with their index, and nothing else does."""
    path = tmp_path / "c"
    state = {"a": torch.arange(8.0), "b": torch.arange(8.0)}
    for remove in (False, True):
        torch_ckpt.save(state, path, layout="final")
        assert (path / "model.safetensors.index.json").exists()
        save_file({"z": torch.ones(1)}, path / "theirs.safetensors")
        (path / "copied.safetensors").write_bytes(
            next(path.glob("model*.safetensors")).read_bytes().replace(b"file_id", b"FILE_ID")
        )
        text = (path / MANIFEST).read_bytes()
        damaged = {"empty": b"", "cut": text[:100], "flipped": text.replace(b"raw", b"rav")}
        assert damaged[damage] != text
        (path / MANIFEST).write_bytes(damaged[damage])
        if remove:
            Checkpoint(path).remove()
            left = {"theirs.safetensors", "copied.safetensors"}
            assert {file.name for file in path.iterdir()} == left
            continue
        torch_ckpt.save({"a": torch.ones(2)}, path)
        assert torch_ckpt.load(path=path)["a"].tolist() == [1, 1]
        assert not list(path.glob("model*"))
        Checkpoint(path).remove()


def test_what_stands_where_ours_or_stocks_would(tmp_path: Path) -> None:
    path = tmp_path / "c"
    torch_ckpt.save(STATE, path)
    (tmp_path / "elsewhere").mkdir()
    (path / ".torch_ckpt-stage").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(torch_ckpt.CheckpointError, match=r"torch_ckpt-stage.*symbolic.*remove it"):
        torch_ckpt.load(path=path)
    (path / ".torch_ckpt-stage").unlink()
    for make in (Path.mkdir, os.mkfifo):
        make(path / ".metadata")
        with pytest.raises(torch_ckpt.ConflictError, match=r"\.metadata.*remove it"):
            torch_ckpt.save(STATE, path)
        if (path / ".metadata").is_dir():
            (path / ".metadata").rmdir()
    hub = tmp_path / "hub"
    hub.mkdir()
    save_file({"w": torch.ones(1)}, tmp_path / "elsewhere" / "w.safetensors")
    (hub / "sub").symlink_to(tmp_path / "elsewhere")
    (hub / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": {"w": "sub/w.safetensors"}})
    )
    with pytest.raises(torch_ckpt.CorruptError, match=r"sub/w\.safetensors.*symbolic link"):
        torch_ckpt.load(path=hub)


def test_files_that_were_copied_on_purpose(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "c"
    torch_ckpt.save(STATE, path, layout="final")
    for file in path.iterdir():
        if file.suffix != ".safetensors":
            file.unlink()
    for use in (
        lambda: torch_ckpt.load(path=path),
        lambda: torch_ckpt.open(path)["model.w"],
        lambda: torch_ckpt.convert(path, tmp_path / "out", "hf"),
    ):
        caplog.clear()
        use()
        said = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
        assert len(said) == 1 and "nothing of them is verified" in said[0]
    status, output = run("inspect", str(path))
    assert status == 0 and "nothing of them is verified" in output
    caplog.clear()
    torch_ckpt.load(path=tmp_path / "out")
    assert not caplog.records


def stock_save(state: Any, path: Path, *, collectives: bool = True) -> None:
    writer = dcp.FileSystemWriter(str(path))
    dcp.save(state, storage_writer=writer, use_collectives=collectives)


@pytest.mark.parametrize("collectives", [True, False])
@LAYOUTS
def test_a_save_over_stocks_checkpoint(layout: Any, collectives: bool, tmp_path: Path) -> None:
    path = tmp_path / "two"
    stock_save({"w": torch.zeros(4)}, path, collectives=collectives)
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    for overwrite in (True, False):
        with pytest.raises(torch_ckpt.ConflictError, match="stock DCP|holds a checkpoint"):
            torch_ckpt.save({"w": torch.ones(4)}, path, layout=layout, overwrite=overwrite)
    with pytest.raises(torch_ckpt.ConflictError, match="without a checkpoint"):
        torch_ckpt.save({"w": torch.ones(4)}, path, use_collectives=False)
    report = torch.zeros(8, dtype=torch.int64)
    with pytest.raises((torch_ckpt.ConflictError, RuntimeError), match="stock DCP"):
        torch.ops.dcp_ext.save([torch.ones(4)], torch_ckpt.plan(path, ["w"]), report)
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before
    torch_ckpt.save({"w": torch.ones(4)}, path, layout=layout, overwrite="all")
    assert not any(file.name.endswith(".metadata") for file in path.iterdir())
    assert torch_ckpt.load(path=path)["w"].tolist() == [1] * 4
    torch_ckpt.save({"w": torch.full((4,), 2.0)}, path, layout=layout)
    assert torch_ckpt.load(path=path)["w"].tolist() == [2] * 4
    assert Checkpoint(path).verify().files > 0


def test_a_merge_into_stocks_checkpoint(tmp_path: Path) -> None:
    torch_ckpt.save({"w": torch.ones(4)}, tmp_path / "ours")
    stock_save({"w": torch.zeros(4)}, tmp_path / "two")
    for overwrite in (True, False):
        with pytest.raises(torch_ckpt.ConflictError):
            torch_ckpt.convert(tmp_path / "ours", tmp_path / "two", "hf", overwrite=overwrite)
    assert torch_ckpt.load(path=tmp_path / "two")["w"].tolist() == [0] * 4


def test_an_interrupted_replacement_ends_with_one(tmp_path: Path) -> None:
    """The name of stock's goes with the journal that names the new files."""
    path = tmp_path / "two"
    stock_save({"w": torch.zeros(4)}, path)
    torch_ckpt.save({"w": torch.ones(4)}, path, overwrite="all")
    assert not (path / ".metadata").exists()
    assert not (path / ".torch_ckpt-stage").exists()


@pytest.mark.parametrize("collectives", [True, False])
def test_stock_saves_over_ours(collectives: bool, tmp_path: Path) -> None:
    path = tmp_path / "two"
    torch_ckpt.save({"w": torch.ones(4)}, path)
    stock_save({"w": torch.full((4,), 2.0)}, path, collectives=collectives)
    for use in (
        lambda: torch_ckpt.load(path=path),
        lambda: torch_ckpt.open(path)["w"],
        lambda: torch_ckpt.convert(path, tmp_path / "out", "hf"),
        lambda: torch_ckpt.consolidate_safetensors_files(path, tmp_path / "out"),
        lambda: Checkpoint(path).describe(),
        lambda: Checkpoint(path).verify(),
    ):
        with pytest.raises(torch_ckpt.ConflictError, match="holds two checkpoints.*format="):
            use()
    status, output = run("inspect", str(path))
    assert status != 0 and "two checkpoints" in output
    assert torch_ckpt.load(path=path, format="torch_ckpt")["w"].tolist() == [1] * 4
    reader = CheckpointReader(path, format="torch_ckpt")
    assert torch_ckpt.load(storage_reader=reader)["w"].tolist() == [1] * 4
    if collectives:
        assert torch_ckpt.load(path=path, format="dcp")["w"].tolist() == [2] * 4
        torch_ckpt.convert(path, tmp_path / "out", "hf", format="dcp")
        assert load_file(tmp_path / "out" / "model.safetensors")["w"].tolist() == [2] * 4


def test_programs_that_stock_began_go_on(tmp_path: Path) -> None:
    """With the patch a save replaces stock's, and leaves the text that programs look for."""
    path = tmp_path / "two"
    stock_save({"w": torch.zeros(4)}, path)
    with torch_ckpt.patch_torch(file_system=True):
        for value in (1.0, 2.0):
            state = {"w": torch.full((4,), value)}
            dcp.save(state, storage_writer=dcp.FileSystemWriter(path))
            assert (path / ".metadata").read_bytes().startswith(b"# torch_ckpt")
            target = {"w": torch.zeros(4)}
            dcp.load(target, storage_reader=dcp.FileSystemReader(path))
            assert target["w"].tolist() == [value] * 4
    assert torch_ckpt.load(path=path)["w"].tolist() == [2] * 4
    torch_ckpt.save({"w": torch.full((4,), 3.0)}, path)  # over our own text
    assert torch_ckpt.load(path=path)["w"].tolist() == [3] * 4
