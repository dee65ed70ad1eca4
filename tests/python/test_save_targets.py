"""Where a save goes: directories that are there, paths of all kinds, a trainer that moves on."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import torch

import torch_ckpt
from torch_ckpt import HuggingFaceStorageWriter

STATE = {"w": torch.arange(6.0), "step": 3}


def check(path: Path | str) -> None:
    target = {"w": torch.zeros(6), "step": 0}
    torch_ckpt.load(target, checkpoint_id=path)
    assert torch.equal(target["w"], STATE["w"]) and target["step"] == 3


def test_an_empty_directory_is_kept(tmp_path: Path) -> None:
    """Its mode, group and inode are somebody's choice."""
    path = tmp_path / "c"
    path.mkdir()
    path.chmod(0o2750)
    before = path.stat()
    torch_ckpt.save(STATE, checkpoint_id=path)
    after = path.stat()
    assert stat.S_IMODE(after.st_mode) == 0o2750
    assert (after.st_ino, after.st_uid, after.st_gid) == (
        before.st_ino,
        before.st_uid,
        before.st_gid,
    )
    check(path)


def test_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run"
    path.mkdir()
    monkeypatch.chdir(path)
    torch_ckpt.save(STATE, checkpoint_id=".")
    assert Path.cwd() == path and (path / "torch_ckpt.json").exists()
    check(".")


@pytest.mark.parametrize("given", ["checkpoint_id", "storage_writer"])
def test_an_async_save_goes_where_it_was_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    weights = {"w": STATE["w"]}
    if given == "checkpoint_id":
        saved = torch_ckpt.async_save(weights, checkpoint_id="out")
    else:
        writer = HuggingFaceStorageWriter("out", save_distributed=True, enable_consolidation=True)
        saved = torch_ckpt.async_save(weights, storage_writer=writer)
    monkeypatch.chdir(tmp_path / "b")
    saved.result(timeout=60)
    assert list((tmp_path / "b").iterdir()) == []
    assert torch_ckpt.Checkpoint(tmp_path / "a" / "out").verify().bytes > 0


def test_a_path_that_is_not_utf_8(tmp_path: Path) -> None:
    path = os.fsdecode(os.fsencode(tmp_path) + b"/\xff")
    with pytest.raises(torch_ckpt.InvalidArgumentError, match=r"not UTF-8.*udcff"):
        torch_ckpt.save(STATE, checkpoint_id=path)
    with pytest.raises(torch_ckpt.InvalidArgumentError, match=r"not UTF-8.*udcff"):
        torch_ckpt.load(dict(STATE), checkpoint_id=path)


def test_a_name_as_long_as_it_may_be(tmp_path: Path) -> None:
    path = tmp_path / ("c" * 255)
    for _ in range(2):
        torch_ckpt.save(STATE, checkpoint_id=path)
    check(path)
    assert os.listdir(tmp_path) == ["c" * 255]


def test_a_link_to_nothing(tmp_path: Path) -> None:
    (tmp_path / "c").symlink_to(tmp_path / "nowhere")
    with pytest.raises(torch_ckpt.InvalidArgumentError, match="symbolic link to nothing"):
        torch_ckpt.save(STATE, checkpoint_id=tmp_path / "c")
