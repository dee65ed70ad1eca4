"""Checkpoints whose manifest names files in subdirectories: read, verified, replaced, removed."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch

import torch_ckpt
from torch_ckpt import Checkpoint

SHARD = "shard-00001-model-00001-of-00001.safetensors"
BELOW = f"weights/of it/{SHARD}"


def resealed(text: str) -> str:
    """A manifest with the right checksum in its last line."""
    at = text.rindex('"crc32c": "')
    report = torch.zeros(4, dtype=torch.int64)
    data = torch.frombuffer(bytearray(text[:at].encode()), dtype=torch.uint8)
    torch.ops.dcp_ext.crc32c(data, report)
    return f'{text[:at]}"crc32c": "{int(report[1]):08x}"\n}}\n'


def rename_in_manifest(path: Path, name: str) -> None:
    manifest = path / "torch_ckpt.json"
    text = manifest.read_text()
    assert text.count(f'"name": "{SHARD}"') == 1
    manifest.write_text(resealed(text.replace(f'"name": "{SHARD}"', f'"name": "{name}"')))


def state() -> dict[str, object]:
    return {"w": torch.arange(5000.0).reshape(50, 100), "step": 3}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "c"
    torch_ckpt.save(state(), checkpoint_id=path)
    (path / BELOW).parent.mkdir(parents=True)
    (path / SHARD).rename(path / BELOW)
    rename_in_manifest(path, BELOW)
    return path


def loads(path: Path) -> bool:
    into = {"w": torch.zeros(50, 100), "step": 0}
    torch_ckpt.load(into, checkpoint_id=path)
    return into["step"] == 3 and torch.equal(into["w"], state()["w"])


def test_it_is_read(path: Path, tmp_path: Path) -> None:
    assert loads(path)
    checkpoint = Checkpoint(path)
    assert checkpoint.is_committed()
    assert BELOW in [file.name for file in checkpoint.describe().files]
    checkpoint.verify()
    torch_ckpt.consolidate_safetensors_files(path, tmp_path / "out", None)
    into = {"w": torch.zeros(50, 100)}
    torch_ckpt.load(into, checkpoint_id=tmp_path / "out")
    assert torch.equal(into["w"], torch.arange(5000.0).reshape(50, 100))
    # The last name may be a link, as in the Hub's cache.
    (path / BELOW).rename(tmp_path / "blob")
    (path / BELOW).symlink_to(tmp_path / "blob")
    assert loads(path) and Checkpoint(path).is_committed()


def test_damage_there_is_found(path: Path) -> None:
    data = bytearray((path / BELOW).read_bytes())
    data[-1] ^= 1
    (path / BELOW).write_bytes(data)
    with pytest.raises(torch_ckpt.CorruptError, match=re.escape(BELOW)):
        Checkpoint(path).verify()
    (path / BELOW).unlink()
    assert not Checkpoint(path).is_committed()
    with pytest.raises(torch_ckpt.IncompleteError, match=re.escape(BELOW)):
        loads(path)


def test_no_link_leads_to_it(path: Path, tmp_path: Path) -> None:
    shutil.move(path / "weights", tmp_path / "elsewhere")
    (path / "weights").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match=re.escape(str(path / "weights"))):
        loads(path)
    with pytest.raises(torch_ckpt.ConflictError, match=re.escape(str(path / "weights"))):
        torch_ckpt.save(state(), checkpoint_id=path)
    report = Checkpoint(path).remove()
    assert report.left == ("weights",)
    assert (tmp_path / "elsewhere" / "of it" / SHARD).exists()


@pytest.mark.parametrize(
    "name", ["../c/" + SHARD, "/" + SHARD, "a/../" + SHARD, "./" + SHARD, ".a/" + SHARD, "a//b"]
)
def test_what_leads_out_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "c"
    torch_ckpt.save(state(), checkpoint_id=path)
    rename_in_manifest(path, name)
    with pytest.raises(torch_ckpt.CorruptError, match=r"torch_ckpt\.json"):
        loads(path)
    # A removal goes by what our saves call their files, and by no name of a damaged manifest.
    outside = tmp_path / SHARD
    outside.write_text("mine")
    Checkpoint(path).remove()
    assert outside.exists() and not (path / SHARD).exists()


def test_a_removal_that_was_killed_is_ended(path: Path) -> None:
    (path / BELOW).unlink()
    report = Checkpoint(path).remove()
    assert (report.left, report.directory_removed) == ((), True)


@pytest.mark.parametrize("kept", [False, True])
def test_a_save_replaces_it_and_remove_removes_it(path: Path, kept: bool) -> None:
    notes = path / "weights" / "notes"
    if kept:
        notes.write_text("mine")
    torch_ckpt.save(state(), checkpoint_id=path)
    assert loads(path)
    assert (path / "weights").exists() == kept
    assert not (path / "weights" / "of it").exists()

    (path / BELOW).parent.mkdir(parents=True)
    (path / SHARD).rename(path / BELOW)
    rename_in_manifest(path, BELOW)
    report = Checkpoint(path).remove()
    assert BELOW in report.removed
    assert report.left == (("weights",) if kept else ())
    assert path.exists() == notes.exists() == kept
