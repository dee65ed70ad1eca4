"""CheckpointDirectory in one process: what counts, LATEST and keep_last."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from directory_checks import hidden, latest_file, loaded, visible
from directory_saver import state
from launch import HERE, PACKAGE
from safetensors.torch import save_file
from test_checkpoint import kill_in_replay, kill_in_save

import torch_ckpt
from torch_ckpt import (
    Checkpoint,
    CheckpointDirectory,
    CheckpointError,
    ConflictError,
    CorruptError,
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
    IncompleteError,
    InvalidArgumentError,
    UnsupportedError,
)
from torch_ckpt.dcp.write import directory_save
from torch_ckpt.native.sessions import SaveSession

SHARD = "shard-00001-model-00001-of-00001.safetensors"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run" / "checkpoints"


def test_saves_and_loads_by_step(root: Path) -> None:
    with CheckpointDirectory(root) as directory:
        assert root.is_dir()
        assert directory.steps() == [] and directory.latest() is None
        for step in (0, 9, 10, 2**70):
            directory.save(state(step), step)
            assert latest_file(root) == step
        assert directory.steps() == visible(root) == [0, 9, 10, 2**70]
        assert directory.latest() == str(root / f"step-{2**70}") == directory.path(2**70)
        assert loaded(directory) == 2**70
        assert loaded(directory, 9) == 9
        with pytest.raises(IncompleteError, match="step-7"):
            directory.load(state(7), 7)
    assert hidden(root) == []


def test_options_are_those_of_save_and_load(root: Path) -> None:
    directory = CheckpointDirectory(root)
    writer = HuggingFaceStorageWriter("unused", thread_count=2, save_distributed=True)
    for step in (1, 2):
        directory.save(state(step), step, storage_writer=writer, no_dist=True)
    assert loaded(directory) == 2
    target = {"w": torch.zeros(300, 7, dtype=torch.float64), "text": "", "step": 0}
    reader = HuggingFaceStorageReader("unused", strict_dtype=True)
    with pytest.raises(CheckpointError, match="strict_dtype"):
        directory.load(target, storage_reader=reader)
    stock = dcp.FileSystemWriter(root / "unused")
    with pytest.raises(InvalidArgumentError, match="HuggingFaceStorageWriter"):
        directory.save(state(3), 3, storage_writer=stock)
    assert directory.steps() == [1, 2]
    assert not (root.parent / "unused").exists() and not Path("unused").exists()


@pytest.mark.parametrize("step", [-1, True, 1.0, "1", None])
def test_a_step_is_a_number(root: Path, step: Any) -> None:
    directory = CheckpointDirectory(root)
    for call in (directory.path, lambda step: directory.save(state(1), step)):
        with pytest.raises(InvalidArgumentError, match=re.escape(repr(step))):
            call(step)
    assert list(root.iterdir()) == []


@pytest.mark.parametrize("keep_last", [0, -1, True, 1.5, "2"])
def test_keep_last_is_a_number(root: Path, keep_last: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="keep_last"):
        CheckpointDirectory(root, keep_last=keep_last)
    assert not root.exists()


def test_root_is_a_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for root in (tmp_path / "file", tmp_path / "file/below"):
        with pytest.raises(InvalidArgumentError, match="file: is not a directory"):
            CheckpointDirectory(root)


# --- what counts ------------------------------------------------------------


def plain_file(path: Path) -> None:
    path.write_text("")


def link_to_nothing(path: Path) -> None:
    path.symlink_to(path.parent / "nowhere")


def only_the_staging_of_a_save(path: Path) -> None:
    session = SaveSession(str(path), overwrite=True)
    shutil.copytree(session.staging, path / ".torch_ckpt-stage")
    session.end()


def of_somebody_else(path: Path) -> None:
    path.mkdir()
    save_file(
        {"w": torch.ones(3)}, path / "model-00001-of-00001.safetensors", metadata={"format": "pt"}
    )
    assert Checkpoint(path).describe().source == "headers"


def some_ranks_parts(path: Path) -> None:
    writer = HuggingFaceStorageWriter(path, save_distributed=True, world_size=2)
    dcp.save(state(5), storage_writer=writer, use_collectives=False)
    assert (path / "torch_ckpt-00001-of-00002.json").exists()


def only_shards_of_a_consolidating_save(path: Path) -> None:
    torch_ckpt.save(state(5), checkpoint_id=path / "sharded")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    "make",
    [
        Path.mkdir,
        *(plain_file, link_to_nothing, only_the_staging_of_a_save),
        *(of_somebody_else, some_ranks_parts, only_shards_of_a_consolidating_save),
    ],
    ids=lambda make: make.__name__,
)
def test_a_child_that_is_not_committed_does_not_count(
    root: Path, make: Callable[[Path], None]
) -> None:
    with CheckpointDirectory(root, keep_last=1) as directory:
        make(root / "step-5")
        assert directory.steps() == [] and directory.latest() is None
        with pytest.raises(IncompleteError, match="holds no committed checkpoint"):
            directory.load(state(5))
        directory.save(state(4), 4)
        assert directory.steps() == [4] and loaded(directory) == 4 == latest_file(root)
        # Deletions leave it alone too: it may be of a save that is going on.
        directory.save(state(6), 6)
    assert directory.steps() == [6]
    assert os.path.lexists(root / "step-5")


@pytest.mark.usefixtures("fault_points")
def test_a_commit_that_was_interrupted_counts(root: Path) -> None:
    directory = CheckpointDirectory(root)
    directory.save(state(1), 1)
    (root / "step-2").mkdir()
    kill_in_replay(root / "step-2")
    assert not (root / "step-2/torch_ckpt.json").exists()
    assert directory.steps() == [1, 2]


def test_parts_count_when_all_are_there(root: Path) -> None:
    directory = CheckpointDirectory(root)
    directory.save(state(1), 1, use_collectives=False)
    assert list((root / "step-1").glob("torch_ckpt-00001-of-00001.json"))
    assert directory.steps() == [1] and latest_file(root) == 1


@pytest.mark.parametrize("file", [SHARD, "torch_ckpt.json", "torch_ckpt.catalog"])
def test_a_damaged_checkpoint_is_not_passed_over(root: Path, file: str) -> None:
    directory = CheckpointDirectory(root)
    for step in (1, 2):
        directory.save(state(step), step)
    with (root / "step-2" / file).open("ab") as damaged:
        damaged.write(b"x")
    assert directory.latest() == directory.path(2)
    with pytest.raises(CorruptError):
        directory.load(state(0))


@pytest.mark.parametrize(
    ("file", "collectives"),
    [
        *((SHARD, True), ("torch_ckpt.catalog", True), ("torch_ckpt.json", True)),
        *((SHARD, False), ("torch_ckpt-00001-of-00001.catalog", False)),
        ("torch_ckpt-00001-of-00001.json", False),
    ],
)
def test_a_checkpoint_that_lost_a_file_is_not_passed_over(
    root: Path, file: str, collectives: bool
) -> None:
    directory = CheckpointDirectory(root, keep_last=2)
    for step in (1, 2):
        directory.save(state(step), step, use_collectives=collectives)
    (root / "step-2" / file).unlink()
    assert directory.latest() == directory.path(2)
    said = "whose torch_ckpt.json is not there" if file.endswith("of-00001.json") else file
    with pytest.raises(IncompleteError, match=f"step-2/.*{said}"):
        directory.load(state(0))
    directory.save(state(3), 3)
    directory.close()
    # It is none of those that are kept, nor one to delete.
    assert visible(root) == [1, 2, 3] and loaded(directory) == 3


def test_a_step_of_bare_shards_is_not_passed_over(root: Path) -> None:
    directory = CheckpointDirectory(root)
    for step in (1, 2):
        directory.save(state(step), step)
    for file in (root / "step-2").iterdir():
        if file.is_file() and file.name != SHARD:
            file.unlink()
    with pytest.raises(IncompleteError, match=f"{SHARD}.*whose torch_ckpt.json is not there"):
        directory.load(state(0))


@pytest.mark.usefixtures("fault_points")
def test_a_removal_that_was_killed_leaves_no_committed_step(root: Path) -> None:
    directory = CheckpointDirectory(root)
    for step in (1, 2):
        directory.save(state(step), step)
    code = "import sys; from torch_ckpt import Checkpoint as C; C(sys.argv[1]).remove()"
    done = subprocess.run(
        [sys.executable, "-c", code, str(root / "step-2")],
        # The third rename commits it, the fourth takes a file away.
        env={**os.environ, "PYTHONPATH": str(PACKAGE), "TORCH_CKPT_FAULTS": "renameat:5:kill"},
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    assert (root / "step-2/torch_ckpt.json").exists() and not (root / "step-2" / SHARD).exists()
    assert directory.steps() == [1] and loaded(directory) == 1
    Checkpoint(root / "step-2").remove()
    assert not (root / "step-2").exists()


def test_a_consolidating_save_counts_with_its_final_files(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = HuggingFaceStorageWriter("unused", save_distributed=True, enable_consolidation=True)
    weights = {"w": torch.ones(4, 5)}
    with CheckpointDirectory(root, keep_last=1) as directory:
        directory.save(weights, 1, storage_writer=writer)
        with monkeypatch.context() as patch:

            def fails(*args: Any, **options: Any) -> None:
                raise OSError(28, "No space left on device")

            patch.setattr(directory_save, "merge", fails)
            with pytest.raises(OSError, match="No space"):
                directory.save(weights, 2, storage_writer=writer)
        assert Checkpoint(root / "step-2/sharded").is_committed()
        assert directory.steps() == [1] and latest_file(root) == 1
        directory.save(weights, 2, storage_writer=writer)
        assert (root / "step-2/model-00001-of-00001.safetensors").exists()
    assert visible(root) == directory.steps() == [2]


# --- LATEST and keep_last ---------------------------------------------------


def test_only_the_last_are_kept(root: Path) -> None:
    with CheckpointDirectory(root, keep_last=2) as directory:
        for step in range(10, 60, 10):
            directory.save(state(step), step)
    assert visible(root) == directory.steps() == [40, 50]
    assert hidden(root) == []
    with CheckpointDirectory(root, keep_last=3) as directory:
        directory.save(state(60), 60)
    assert visible(root) == [40, 50, 60]
    with CheckpointDirectory(root, keep_last=1) as directory:
        directory.save(state(60), 60)  # over itself
    assert visible(root) == [60]


def test_going_back_to_an_older_step(root: Path) -> None:
    with CheckpointDirectory(root) as directory:
        for step in (10, 20, 90, 100):
            directory.save(state(step), step)
    with CheckpointDirectory(root, keep_last=2) as directory:
        for step in (21, 22, 23):
            with pytest.warns(UserWarning, match="below step-100"):
                directory.save(state(step), step)
        assert latest_file(root) == 100 and loaded(directory) == 100
        directory.close()
        # Neither the new branch nor the abandoned one has lost what was to be kept.
        assert directory.steps() == [22, 23, 90, 100]
        for step in (90, 100):
            Checkpoint(directory.path(step)).remove()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            directory.save(state(24), 24)
    assert directory.steps() == [23, 24] and latest_file(root) == 24


def test_a_failed_save_deletes_nothing_and_leaves_latest(root: Path) -> None:
    with CheckpointDirectory(root, keep_last=1) as directory:
        directory.save(state(1), 1)
        with pytest.raises(CheckpointError, match="bad"):
            directory.save({**state(2), "bad": object()}, 2)
        directory.close()
        assert visible(root) == directory.steps() == [1] and latest_file(root) == 1


def test_latest_cannot_be_written(root: Path) -> None:
    with CheckpointDirectory(root, keep_last=1) as directory:
        directory.save(state(1), 1)
        (root / "LATEST").unlink()
        (root / "LATEST").mkdir()
        with pytest.raises(torch_ckpt.InvalidArgumentError, match="LATEST: is a directory"):
            directory.save(state(2), 2)
        directory.close()
        assert directory.steps() == [1]
        assert hidden(root) == []
        (root / "LATEST").rmdir()
        (root / ".LATEST.torch_ckpt-new-0123").write_text("")  # of a kill
        directory.save(state(3), 3)
    assert latest_file(root) == 3 and visible(root) == [3] and hidden(root) == []


def test_a_linked_child_is_read_and_never_deleted(root: Path, tmp_path: Path) -> None:
    torch_ckpt.save(state(1), checkpoint_id=tmp_path / "elsewhere")
    with CheckpointDirectory(root, keep_last=1) as directory:
        (root / "step-1").symlink_to(tmp_path / "elsewhere")
        assert loaded(directory) == 1
        directory.save(state(2), 2)
    assert (root / "step-1").is_symlink() and loaded(directory, 1) == 1


@pytest.mark.parametrize("place", [".", "sharded"])
def test_a_child_that_is_being_saved_over_stays(root: Path, place: str) -> None:
    directory = CheckpointDirectory(root, keep_last=1)
    directory.save(state(1), 1)
    (root / "step-1" / place).mkdir(exist_ok=True)
    session = SaveSession(os.path.normpath(root / "step-1" / place), overwrite=True)
    try:
        with pytest.warns(UserWarning, match="could not be deleted.*another save"):
            directory.save(state(2), 2)
            directory._deletions.wait()
        assert directory.steps() == [1, 2]
        with pytest.raises(ConflictError, match="another save"):
            directory.close()
        directory.close()  # said once
    finally:
        session.end()
    assert loaded(directory, 1) == 1
    directory.save(state(3), 3)
    directory.close()
    assert visible(root) == [3]


def test_a_deletion_that_fails_is_heard_and_made_up_for(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove = shutil.rmtree
    broken = True

    def rmtree(path: str) -> None:
        if broken and "step-1." in path:
            raise OSError(5, "Input/output error", path)
        remove(path)

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    directory = CheckpointDirectory(root, keep_last=1)
    for step in (1, 2, 3):
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            directory.save(state(step), step)
            directory._deletions.wait()
        assert bool(heard) == (step > 1), heard
    # One that cannot be deleted does not hold up the others.
    assert visible(root) == directory.steps() == [3]
    assert [name.split("-removed-")[0] for name in hidden(root)] == [".step-1.torch_ckpt"]
    with pytest.raises(OSError, match="Input/output error"):
        directory.close()
    directory.save(state(4), 4)
    broken = False
    directory.save(state(5), 5)
    directory.close()
    assert visible(root) == [5] and hidden(root) == []


@pytest.mark.parametrize("keep_last", [None, 2])
def test_what_dead_saves_have_staged_goes(root: Path, keep_last: int | None) -> None:
    """No later save may come to their steps."""
    with CheckpointDirectory(root, keep_last=keep_last) as directory:
        directory.save(state(1), 1)
        for step, call in ((2, "renameat:2"), (3, "rmdir:1"), (9, "renameat:2")):
            kill_in_save(root / f"step-{step}", call)
        assert [name.split(".")[1] for name in hidden(root)] == ["step-2", "step-3", "step-9"]
        assert directory.steps() == [1, 3]  # 3 was killed after its commit
        going_on = SaveSession(str(root / "step-4"), overwrite=True)
        directory.save(state(5), 5)
        directory._deletions.wait()
        assert [name.split(".")[1] for name in hidden(root)] == ["step-4", "step-9"]
        going_on.end()
    assert directory.steps() == ([1, 3, 5] if keep_last is None else [3, 5])


def test_a_save_over_a_child_that_is_being_deleted(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits, instead of meeting the deletion's lock."""
    rename, locked = os.rename, threading.Event()

    def slow(*args: Any) -> None:
        locked.set()
        time.sleep(0.3)
        rename(*args)

    monkeypatch.setattr(os, "rename", slow)
    with CheckpointDirectory(root, keep_last=1) as directory:
        directory.save(state(1), 1)
        directory.save(state(2), 2)
        assert locked.wait(10)
        with pytest.warns(UserWarning, match="below step-2"):
            directory.save(state(1), 1)
        assert loaded(directory, 1) == 1


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_leaves_the_deletions_to_its_parent(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename, go_on = os.rename, threading.Event()
    parent = os.getpid()

    def waiting(*args: Any) -> None:
        if os.getpid() != parent:
            os._exit(9)
        assert go_on.wait(30)
        rename(*args)

    monkeypatch.setattr(os, "rename", waiting)
    directory = CheckpointDirectory(root, keep_last=1)
    for step in (1, 2, 3):  # one deletion goes on, another has not begun
        directory.save(state(step), step)
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # for one that waits for the parent's thread
        try:
            directory.save(state(3), 3)
        except UnsupportedError:
            directory.close()
            os._exit(0)
        except BaseException:
            os._exit(1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert directory.steps() == [1, 2, 3]
    go_on.set()
    directory.close()
    assert directory.steps() == [3]


def test_async_saves(root: Path, group: None) -> None:
    heard: list[int] = []
    with CheckpointDirectory(root, keep_last=2) as directory:
        for step in range(1, 6):
            future = directory.async_save(
                state(step), step, on_commit=lambda: heard.append(latest_file(root))
            )
            future.result()
            assert latest_file(root) == step and loaded(directory) == step
        future = directory.async_save({**state(6), "bad": object()}, 6)
        with pytest.raises(CheckpointError, match="bad"):
            future.result()
    assert heard == [1, 2, 3, 4, 5]
    assert visible(root) == directory.steps() == [4, 5]


AT_EXIT = """
import sys, torch, torch.distributed as dist
from directory_checks import hidden, latest_file, loaded, visible
from directory_saver import state
from torch_ckpt import CheckpointDirectory
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
directory = CheckpointDirectory(sys.argv[1], keep_last=1)
for step in (1, 2):
    future = directory.async_save(state(step), step)
    future.result()
future = directory.async_save({**state(3), "more": torch.ones(4_000_000)}, 3)
future.add_done_callback(lambda done: print("the last:", done.exception(), flush=True))
"""


def test_a_program_that_ends_during_a_save(root: Path) -> None:
    """No thread can be made any more then."""
    path = os.pathsep.join([str(PACKAGE), str(HERE)])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", AT_EXIT, str(root)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )
    assert "the last: None" in done.stdout, done.stdout + done.stderr
    assert visible(root) == [3] and latest_file(root) == 3


@pytest.mark.parametrize("beside", [True, False])
def test_two_jobs_in_one_directory(tmp_path: Path, beside: bool) -> None:
    def save(directory: CheckpointDirectory, step: int) -> None:
        if beside:
            directory.async_save({"x": step}, step).result()
        else:
            directory.save({"x": step}, step)

    one = CheckpointDirectory(tmp_path)
    save(one, 1)
    save(one, 2)
    other = CheckpointDirectory(tmp_path)  # which goes on, or so it seems
    save(other, 3)
    with pytest.raises(ConflictError, match="another job has saved step 3 here"):
        save(one, 3)
    save(other, 4)
    assert other.steps() == [1, 2, 3, 4]
    (tmp_path / "LATEST").unlink()  # as who goes back by hand
    save(other, 5)
