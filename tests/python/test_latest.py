"""LATEST survives a power failure: what is deleted afterwards is deleted for its sake. And it is
seen where a listing is old."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

import torch_ckpt
from torch_ckpt.runs.place import newest_first, write_pointer


def test_the_file_and_then_its_name_are_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[str, int]] = []
    fsync, replace = os.fsync, os.replace

    def watched_fsync(fd: int) -> None:
        fsync(fd)
        done.append(("fsync", os.fstat(fd).st_ino))

    def watched_replace(old: str, new: str) -> None:
        replace(old, new)
        done.append(("replace", os.stat(new).st_ino))

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "replace", watched_replace)
    write_pointer(str(tmp_path), "LATEST", 7)
    latest = (tmp_path / "LATEST").stat().st_ino
    assert done == [("fsync", latest), ("replace", latest), ("fsync", tmp_path.stat().st_ino)]


@pytest.mark.parametrize("failing", [1, 2])
def test_a_sync_that_fails_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    count = 0

    def fsync(fd: int) -> None:
        nonlocal count
        count += 1
        if count == failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        write_pointer(str(tmp_path), "LATEST", 7)
    assert [name for name in os.listdir(tmp_path) if name != "LATEST"] == []


def test_a_listing_that_is_old_does_not_hide_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = torch_ckpt.CheckpointDirectory(tmp_path)
    directory.save({"w": torch.ones(1)}, 1)
    listed = os.listdir(tmp_path)
    directory.save({"w": torch.ones(1)}, 2)
    monkeypatch.setattr(os, "listdir", lambda path: listed)
    assert directory.latest() == str(tmp_path / "step-2")
    assert directory.steps() == [1, 2]


@pytest.mark.parametrize(
    "said", ["", "step-9\n", "../step-1\n", "step-1", "step-\xff\n", "x" * 999]
)
def test_what_latest_says_counts_only_if_it_is_there(tmp_path: Path, said: str) -> None:
    torch_ckpt.CheckpointDirectory(tmp_path).save({"w": torch.ones(1)}, 1)
    (tmp_path / "LATEST").write_bytes(said.encode("latin-1"))
    assert list(newest_first(str(tmp_path))) == [1]
    (tmp_path / "LATEST").unlink()
    (tmp_path / "LATEST").mkdir()
    assert list(newest_first(str(tmp_path))) == [1]
