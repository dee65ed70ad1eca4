"""torch-ckpt clean: what has to stay, whatever else is in the directory or happens meanwhile."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from test_cli_clean import (
    SHARD,
    STATE,
    age,
    clean,
    everything,
    killed_conversion,
    killed_save,
    run,
)

import torch_ckpt
from torch_ckpt.errors import ConflictError, UnsupportedError
from torch_ckpt.native.sessions import SaveSession
from torch_ckpt.runs import leftovers as module
from torch_ckpt.runs.leftovers import leftovers
from torch_ckpt.runs.place import newest_first, remove_tree
from torch_ckpt.runs.retention import Deletions


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "run"
    for step in (1, 2, 3):
        torch_ckpt.save(STATE, root / f"step-{step}", no_dist=True)
    return root


def test_links_are_not_counted_and_what_they_lead_to_stays(root: Path) -> None:
    (root / "step-9").symlink_to("step-3")
    (root / "best").symlink_to(root / "step-1")
    linked = ("keep", "a link leads to it")
    wanted = {"step-1": linked, "step-2": ("remove", None)}
    assert clean(root, "--keep-last", "1", "--yes") == wanted
    assert sorted(os.listdir(root)) == ["best", "step-1", "step-3", "step-9"]
    (root / "step-1" / SHARD).unlink()
    age(root / "step-1")
    assert clean(root, "--yes") == {"step-1": linked}


def test_links_when_a_directory_of_checkpoints_deletes(root: Path) -> None:
    (root / "step-9").symlink_to("step-3")
    (root / "best").symlink_to("step-1")
    with torch_ckpt.CheckpointDirectory(root, keep_last=2) as directory:
        directory.save(STATE, 10)
    assert {each.name for each in root.glob("step-*")} == {"step-1", "step-3", "step-9", "step-10"}


def test_a_newest_whose_shard_is_another_file_does_not_count(root: Path) -> None:
    shard = root / "step-3" / SHARD
    shard.write_bytes(bytes(shard.stat().st_size))
    assert clean(root, "--keep-last", "1", "--yes") == {"step-1": ("remove", None)}
    assert (root / "step-2").exists()


def test_later_ones_that_break_meanwhile(root: Path) -> None:
    found = {os.path.basename(each.path): each for each in leftovers(root, keep_last=1)}
    (root / "step-3" / SHARD).unlink()
    with pytest.raises(ConflictError, match="fewer later"):
        found["step-2"].remove()
    assert found["step-1"].remove() is None
    assert not (root / "step-1").exists()


def test_a_link_that_is_made_meanwhile(root: Path) -> None:
    found = leftovers(root, keep_last=2)
    (root / "best").symlink_to("step-1")
    with pytest.raises(ConflictError, match="link"):
        found[0].remove()
    assert (root / "step-1").exists()


def test_one_that_changes_or_becomes_whole_meanwhile(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "step-1" / SHARD).rename(root / "shard")
    age(root / "step-1")
    (found,) = leftovers(root)
    (root / "step-1" / "more").touch()
    with pytest.raises(ConflictError, match="changed"):
        found.remove()
    (root / "shard").rename(root / "step-1" / SHARD)
    monkeypatch.setattr(module, "_QUIET_S", -1.0)
    with pytest.raises(ConflictError, match="whole"):
        found.remove()
    torch_ckpt.Checkpoint(root / "step-1").verify()


def test_saves_of_other_nodes_whose_locks_are_not_seen(root: Path) -> None:
    killed_save(root / "step-4")
    staged = root / ".step-4.torch_ckpt-stage"
    conversion = killed_conversion(root / "a.pt")
    age(conversion)
    found = {each.path: each for each in leftovers(root)}
    assert {each.kept for each in found.values()} == {None}
    os.utime(staged)
    os.utime(conversion)
    for each in found.values():
        with pytest.raises(ConflictError, match="changed"):
            each.remove()
    assert {action for action, _ in clean(root, "--yes").values()} == {"keep"}
    assert staged.exists() and conversion.exists()


def test_shards_that_are_a_link(root: Path) -> None:
    killed_save(root.parent / "other")
    (root.parent / ".other.torch_ckpt-stage").rename(root.parent / ".real.torch_ckpt-stage")
    (root.parent / "real").mkdir()
    shutil.move(root.parent / ".real.torch_ckpt-stage", root.parent / "real" / ".torch_ckpt-stage")
    age(root.parent / "real")
    (root / "step-1" / "sharded").symlink_to(root.parent / "real")
    assert clean(root, "--yes") == {}
    session = SaveSession(str(root.parent / "real"), overwrite=True)
    try:
        assert clean(root, "--keep-last", "2", "--yes") == {"step-1": ("remove", None)}
    finally:
        session.end()


@pytest.mark.parametrize("there", [False, True])
def test_a_save_inside_of_an_old_checkpoint(root: Path, there: bool) -> None:
    found = leftovers(root, keep_last=2)
    if there:
        (root / "step-1" / "export").mkdir()
    session = SaveSession(str(root / "step-1" / "export"), overwrite=True)
    try:
        before = everything(root)
        deletions = Deletions(str(root), 2)
        with pytest.warns(UserWarning, match="could not be deleted"):
            deletions.begin(3)
            deletions.wait()
        with pytest.raises(ConflictError):
            deletions.close()
        with pytest.raises(ConflictError, match="export in it"):
            found[0].remove()
        kept = clean(root, "--keep-last", "2", "--yes")["step-1"]
        assert kept == ("keep", "export in it: the save goes on")
        assert everything(root) == before
    finally:
        session.end()
    assert clean(root, "--keep-last", "2", "--yes")["step-1"] == ("remove", None)


def test_shards_whose_storage_is_not_mounted(root: Path) -> None:
    shard = root / "step-1" / SHARD
    shard.rename(root.parent / "shard")
    shard.symlink_to(root.parent / "shard")
    assert clean(root) == {}
    (root.parent / "shard").rename(root.parent / "away")
    age(root / "step-1")
    action, reason = clean(root, "--yes")["step-1"]
    assert action == "keep" and "mounted" in str(reason)
    (root.parent / "away").rename(root.parent / "shard")
    torch_ckpt.Checkpoint(root / "step-1").verify()


def test_awkward_names_do_not_stop_the_rest(root: Path) -> None:
    os.mkdir(os.fsencode(root) + b"/step-\xff")
    os.mkfifo(root / "fifo")
    (root / "step-0").symlink_to("step-0")
    (root / "step-4" / ".torch_ckpt-stage").mkdir(parents=True)
    os.mkfifo(root / "step-4" / ".torch_ckpt-stage" / ".lock")
    killed_save(root / "step-5")
    found = clean(root, "--yes", "--keep-last", "2")
    assert found["step-1"] == found[".step-5.torch_ckpt-stage"] == ("remove", None)
    assert found["step-4"][0] == "keep" and ".lock" in str(found["step-4"][1])
    assert found["step-\udcff"][0] == "keep" and "UTF-8" in str(found["step-\udcff"][1])
    assert "step-?" in run("clean", root).stdout


def test_a_name_that_cannot_be_read(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listdir = os.listdir

    def refused(path: str) -> list[str]:
        if str(path).endswith("step-2"):
            raise PermissionError(13, "Permission denied", path)
        if str(path).endswith("gone"):
            raise FileNotFoundError(2, "No such file or directory", path)
        return listdir(path)

    (root / "gone").mkdir()
    monkeypatch.setattr(os, "listdir", refused)
    found = clean(root)
    assert list(found) == ["step-2"] and found["step-2"][0] == "keep"
    assert "Permission denied" in str(found["step-2"][1])


def test_a_latest_that_is_no_file(root: Path) -> None:
    latest = root / "LATEST"
    for make in (os.mkfifo, os.mkdir, lambda path: os.symlink("LATEST", path)):
        make(latest)
        descriptors = len(os.listdir("/proc/self/fd"))
        assert list(newest_first(str(root))) == [3, 2, 1]
        assert len(os.listdir("/proc/self/fd")) == descriptors
        latest.rmdir() if latest.is_dir() else latest.unlink()


def test_one_json_object_even_where_something_fails(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(path: str) -> None:
        if path.endswith("step-1"):
            raise OSError(5, "Input/output error", path)
        (root / "step-2" / SHARD).unlink()
        raise OSError(5, "Input/output error", path)

    monkeypatch.setattr(module, "delete_child", failing)
    done = run("clean", root, "--keep-last", "1", "--yes", "--json")
    assert done.exit_code == 1
    report = json.loads(done.stdout)
    assert report["error"]["kind"] == "io" and report["error"]["file"] == str(root / "step-1")
    assert [each["action"] for each in report["items"]] == ["keep", "remove"]
    assert report["bytes"] == report["items"][1]["bytes"] > 0
    assert "not all of it" in report["items"][1]["reason"]
    (line,) = done.stderr.splitlines()
    assert line.startswith("torch-ckpt: io: ")


def test_children_with_zeros_are_listed_once(tmp_path: Path) -> None:
    for step in range(1, 30):
        (tmp_path / f"step-{step:08}").mkdir()
    counted = 0

    def listed(path: str) -> list[str]:
        nonlocal counted
        counted += path == str(tmp_path)
        return listdir(path)

    listdir = os.listdir
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "listdir", listed)
        assert list(newest_first(str(tmp_path))) == []
    assert counted == 1


def test_a_very_deep_tree_is_one_line(root: Path) -> None:
    gone = root / ".step-0.torch_ckpt-removed-0123456789abcdef"
    gone.mkdir()
    at = os.open(gone, os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("d", dir_fd=at)
        inner = os.open("d", os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = inner
    os.close(at)
    try:
        done = run("clean", root, "--yes")
        assert done.exit_code in (0, 1)  # later Pythons remove it
        assert isinstance(done.exception, SystemExit | None)
        if gone.exists():
            with pytest.raises(UnsupportedError, match="rm -r"):
                remove_tree(str(gone))
            assert len(done.stderr.splitlines()) == 1
    finally:
        os.system(f"rm -rf '{gone}'")
