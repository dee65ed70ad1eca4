"""torch-ckpt clean: what killed saves have left goes, and nothing else does."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner, Result
from launch import HERE, PACKAGE

import torch_ckpt
from torch_ckpt.cli import cli
from torch_ckpt.native.sessions import ArchiveSession, SaveSession
from torch_ckpt.runs.leftovers import leftovers

SHARD = "shard-00001-model-00001-of-00001.safetensors"
STATE = {"w": torch.arange(100.0), "step": 3}


def run(*arguments: Any) -> Result:
    return CliRunner().invoke(cli, [str(each) for each in arguments])


def clean(path: Path, *arguments: Any) -> dict[str, tuple[str, str | None]]:
    """{name below `path`: (action, reason)} of the report."""
    done = run("clean", path, "--json", *arguments)
    assert done.exit_code == 0, done.output
    items = json.loads(done.stdout)["items"]
    return {os.path.relpath(each["path"], path): (each["action"], each["reason"]) for each in items}


def everything(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes() if path.is_file() else b""
        for path in root.rglob("*")
    }


def a_process(program: str, *arguments: Any, faults: str = "") -> int:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(PACKAGE), str(HERE)])}
    if faults:
        environment["TORCH_CKPT_FAULTS"] = faults
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(command, env=environment, check=False).returncode


def killed_save(path: Path) -> None:
    program = (
        "import os, sys\nfrom torch_ckpt.native.sessions import SaveSession\n"
        "session = SaveSession(sys.argv[1], overwrite=True)\n"
        "open(os.path.join(session.staging, 'x'), 'wb').write(b'x' * 5000)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    assert a_process(program, path) == -signal.SIGKILL
    for place in (path / ".torch_ckpt-stage", path.with_name(f".{path.name}.torch_ckpt-stage")):
        if place.exists():
            age(place)


def killed_conversion(path: Path) -> Path:
    """Where it has staged what was to become the file `path`."""
    program = (
        "import os, sys\nfrom torch_ckpt.native.sessions import ArchiveSession\n"
        "session = ArchiveSession(sys.argv[1], {'to': 'torch', 'overwrite': True})\n"
        "os.kill(os.getpid(), 9)\n"
    )
    assert a_process(program, path) == -signal.SIGKILL
    return path.with_name(f".{path.name}.torch_ckpt-stage")


def age(path: Path) -> None:
    """Make it look as if nobody had touched it for a day."""
    for each in (*path.rglob("*"), path):
        os.utime(each, (0, 0), follow_symlinks=False)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with torch_ckpt.CheckpointDirectory(tmp_path / "run") as directory:
        for step in (1, 2, 3):
            directory.save(STATE, step)
    return tmp_path / "run"


def test_nothing_is_left_by_saves_that_lived(root: Path) -> None:
    before = everything(root)
    for arguments in ((), ("--yes",)):
        assert clean(root, *arguments) == {}
        assert "nothing to remove" in run("clean", root).stdout
    assert everything(root) == before


def test_killed_saves(root: Path) -> None:
    killed_save(root / "step-4")
    killed_save(root / "step-2")
    # Of a first save of step 2, before the directory was made by others.
    shutil.copytree(root / "step-2/.torch_ckpt-stage", root / ".step-2.torch_ckpt-stage")
    before = everything(root)
    wanted = {
        ".step-4.torch_ckpt-stage": ("remove", None),
        "step-2/.torch_ckpt-stage": ("remove", None),
        ".step-2.torch_ckpt-stage": ("remove", None),
    }
    assert clean(root) == wanted
    done = run("clean", root)
    assert "would remove or finish 3 things, " in done.stdout and "--yes" in done.stdout
    assert everything(root) == before  # not even a lock was touched
    assert clean(root, "--yes") == wanted
    assert sorted(os.listdir(root)) == ["LATEST", "step-1", "step-2", "step-3"]
    for step in (1, 2, 3):
        torch_ckpt.Checkpoint(root / f"step-{step}").verify()
    assert clean(root, "--yes") == {}


def test_one_checkpoint_there_or_not(root: Path) -> None:
    killed_save(root / "step-2")
    killed_save(root / "step-4")
    assert clean(root / "step-2", "--yes") == {".torch_ckpt-stage": ("remove", None)}
    assert clean(root / "step-4", "--yes") == {"../.step-4.torch_ckpt-stage": ("remove", None)}
    assert clean(root) == {}
    assert run("clean", root / "step-4").exit_code == 3
    assert run("clean", root / "no" / "such").exit_code == 3
    done = run("clean", root / "LATEST")
    assert done.exit_code == 1 and len(done.stderr.splitlines()) == 1


def test_what_a_running_save_owns_stays(root: Path) -> None:
    sessions = [SaveSession(str(root / f"step-{step}"), overwrite=True) for step in (3, 4)]
    try:
        before = everything(root)
        for arguments in ((), ("--yes",), ("--yes", "--keep-last", "1")):
            found = clean(root, *arguments)
            assert found["step-3/.torch_ckpt-stage"] == ("keep", "the save goes on")
            assert found[".step-4.torch_ckpt-stage"] == ("keep", "the save goes on")
        assert not (root / "step-1").exists()
        kept = {
            name: content
            for name, content in before.items()
            if not name.startswith(("step-1", "step-2"))
        }
        assert everything(root) == kept
    finally:
        for session in sessions:
            session.end()


def test_a_save_that_begins_between_finding_and_removing(root: Path) -> None:
    killed_save(root / "step-2")
    found = leftovers(root) + leftovers(root, keep_last=2)
    assert [each.path for each in found] == [
        str(root / name)
        for name in ("step-2/.torch_ckpt-stage", "step-1", "step-2/.torch_ckpt-stage")
    ]
    program = (
        "import sys\nfrom torch_ckpt.native.sessions import SaveSession\n"
        "sessions = [SaveSession(path, overwrite=True) for path in sys.argv[1:]]\n"
        "print(flush=True)\nsys.stdin.read()\n"
    )
    saver = subprocess.Popen(
        [sys.executable, "-c", program, root / "step-1", root / "step-2"],
        env={**os.environ, "PYTHONPATH": str(PACKAGE)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert saver.stdin is not None and saver.stdout is not None
    saver.stdout.readline()
    try:
        before = everything(root)
        for each in found:
            with pytest.raises(torch_ckpt.ConflictError):
                each.remove()
        assert everything(root) == before
    finally:
        saver.stdin.close()
        assert saver.wait(60) == 0
    torch_ckpt.Checkpoint(root / "step-1").verify()


def test_old_checkpoints(root: Path) -> None:
    shutil.copytree(root / "step-1", root.parent / "elsewhere")
    os.symlink("../elsewhere", root / "step-0")
    dcp.save(STATE, storage_writer=dcp.FileSystemWriter(root / "step-9"), no_dist=True)
    (root / "step-2" / "of_others.txt").touch()
    before = everything(root)
    assert clean(root, "--keep-last", "3") == {}
    wanted = {"step-1": ("remove", None), "step-2": ("remove", None)}
    assert clean(root, "--keep-last", "1") == wanted
    assert everything(root) == before
    assert run("clean", root, "--keep-last", "0", "--yes").exit_code == 2
    assert clean(root, "--keep-last", "1", "--yes") == wanted
    assert sorted(os.listdir(root)) == ["LATEST", "step-0", "step-3", "step-9"]


def test_a_damaged_newest_does_not_count_as_kept(root: Path) -> None:
    manifest = root / "step-3" / "torch_ckpt.json"
    manifest.write_bytes(manifest.read_bytes()[:-5])
    assert clean(root, "--keep-last", "1", "--yes") == {"step-1": ("remove", None)}
    assert sorted(os.listdir(root)) == ["LATEST", "step-2", "step-3"]


def test_checkpoints_that_are_not_whole(root: Path) -> None:
    for step in (1, 3):
        (root / f"step-{step}" / SHARD).unlink()
    (root / "step-0").mkdir()  # what a killed removal leaves last
    recent = clean(root, "--yes")
    for name in ("step-0", "step-1"):
        assert recent[name][0] == "keep" and "minutes ago" in str(recent[name][1])
    age(root / "step-0")
    age(root / "step-1")
    age(root / "step-3")
    later = ("keep", "no whole checkpoint of a later step is there")
    wanted = {"step-0": ("remove", None), "step-1": ("remove", None), "step-3": later}
    assert clean(root) == wanted
    assert clean(root, "--yes") == wanted
    assert sorted(os.listdir(root)) == ["LATEST", "step-2", "step-3"]


def test_files_of_others_stay(root: Path) -> None:
    (root / "step-1" / SHARD).unlink()
    (root / "step-1" / "notes.txt").write_text("mine")
    age(root / "step-1")
    assert clean(root)["step-1"] == ("remove", None)
    done = run("clean", root, "--yes", "--json")
    report = json.loads(done.stdout)
    (item,) = report["items"]
    assert (item["action"], item["reason"]) == ("remove", "notes.txt of others stays")
    assert report["bytes"] == item["bytes"] > 100
    assert os.listdir(root / "step-1") == ["notes.txt"]
    assert clean(root, "--yes") == {}


def test_others_are_not_touched(root: Path) -> None:
    dcp.save(STATE, storage_writer=dcp.FileSystemWriter(root / "step-0"), no_dist=True)
    (root / "step-0" / ".metadata").unlink()
    for name in (".step-1.other-stage", "tmp", "torch_ckpt-stage"):
        (root / name).mkdir()
        (root / name / "file").write_text("mine")
    age(root)
    before = everything(root)
    found = clean(root, "--yes", "--keep-last", "3")
    assert {action for action, _ in found.values()} <= {"keep"}
    assert everything(root) == before


@pytest.mark.parametrize("ranks", [(0,), (1,)])
def test_parts_of_a_save_without_collectives(root: Path, ranks: tuple[int, ...]) -> None:
    for rank in ranks:
        program = (
            f"import sys, runpy; sys.argv = ['part_rank.py', '{rank}', {str(root / 'step-0')!r}]; "
        )
        program += f"runpy.run_path({str(HERE / 'part_rank.py')!r})"
        assert a_process(program) == 0
    assert clean(root)["step-0"][0] == "keep"  # the other rank may come yet
    age(root / "step-0")
    assert clean(root, "--yes") == {"step-0": ("remove", None)}
    assert not (root / "step-0").exists()


@pytest.mark.usefixtures("fault_points")
def test_a_part_that_was_killed(root: Path) -> None:
    program = f"import sys, runpy; sys.argv = ['part_rank.py', '0', {str(root / 'step-0')!r}]; "
    program += f"runpy.run_path({str(HERE / 'part_rank.py')!r})"
    assert a_process(program, faults="renameat2:2:kill") == -signal.SIGKILL
    assert ".torch_ckpt-stage-00001" in os.listdir(root / "step-0")
    age(root / "step-0")
    assert clean(root, "--yes")["step-0"] == ("remove", None)
    assert not (root / "step-0").exists()


@pytest.mark.usefixtures("fault_points")
def test_an_interrupted_commit_is_finished(root: Path) -> None:
    other = root.parent / "other"
    torch_ckpt.save({"new": torch.ones(3)}, other, no_dist=True)
    program = (
        "import sys; from torch_ckpt.export.merge import consolidate_safetensors_files as merge; "
        "merge(sys.argv[1], sys.argv[2], None, overwrite=True)"
    )
    path = root / "step-2"
    assert a_process(program, other, path, faults="renameat:4:kill") == -signal.SIGKILL
    age(path / ".torch_ckpt-stage")
    before = everything(root)
    assert clean(root) == {"step-2/.torch_ckpt-stage": ("finish", None)}
    assert everything(root) == before
    done = run("clean", root, "--yes")
    assert "finished  step-2/.torch_ckpt-stage" in done.stdout
    assert list(torch_ckpt.open(path)) == ["new"]
    torch_ckpt.Checkpoint(path).verify()
    assert not (path / ".torch_ckpt-stage").exists()


def test_deletions_and_conversions_that_were_killed(root: Path) -> None:
    gone = root / ".step-0.torch_ckpt-removed-0123456789abcdef"
    shutil.copytree(root / "step-1", gone)
    new = root / ".LATEST.torch_ckpt-new-0123456789abcdef"
    new.write_text("step-3\n")
    (root / "a.pt").write_bytes(b"PK\x03\x04")  # which it was to replace
    dead = killed_conversion(root / "a.pt")
    alive = ArchiveSession(str(root / "b"), {"to": "dcp"})
    try:
        found = clean(root)
        assert found[new.name][0] == "keep"  # it may be about to be renamed
        assert found[dead.name][0] == "keep"  # it may be of another node
        age(new)
        age(dead)
        assert clean(root / "a.pt") == {f"../{dead.name}": ("remove", None)}
        found = clean(root, "--yes")
        assert found[".b.torch_ckpt-stage"] == ("keep", "the save goes on")
        assert {found[each.name] for each in (gone, new, dead)} == {("remove", None)}
        left = {"LATEST", "a.pt", "step-1", "step-2", "step-3", ".b.torch_ckpt-stage"}
        assert set(os.listdir(root)) == left
    finally:
        alive.end()


def test_shards_of_a_save_that_consolidates(root: Path) -> None:
    killed_save(root / "step-2" / "sharded")
    assert clean(root, "--yes") == {"step-2/.sharded.torch_ckpt-stage": ("remove", None)}
    torch_ckpt.Checkpoint(root / "step-2").verify()


def test_what_cannot_be_removed_is_an_error_of_one_line(root: Path) -> None:
    killed_save(root / "step-1")
    killed_save(root / "step-2")
    os.rename(root / "step-1/.torch_ckpt-stage", root / "elsewhere")
    os.symlink("../elsewhere", root / "step-1/.torch_ckpt-stage")
    done = run("clean", root, "--yes")
    assert done.exit_code == 0  # a link is none of ours
    assert (root / "elsewhere").exists() and not (root / "step-2/.torch_ckpt-stage").exists()


def test_starts_without_torch(root: Path) -> None:
    killed_save(root / "step-4")
    program = (
        "import sys\nfrom torch_ckpt.cli import cli\n"
        "cli(['clean', sys.argv[1], '--keep-last', '1', '--yes'], standalone_mode=False)\n"
        "cli(['inspect', sys.argv[1]], standalone_mode=False)\n"
        "cli(['inspect', '--tree', sys.argv[1] + '/step-3'], standalone_mode=False)\n"
        "cli(['ls', sys.argv[1] + '/step-3'], standalone_mode=False)\n"
        "assert not {'torch', 'rich', 'tqdm', 'numpy'} & set(sys.modules)\n"
    )
    assert a_process(program, root) == 0
    assert sorted(os.listdir(root)) == ["LATEST", "step-3"]
