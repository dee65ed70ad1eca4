"""How trainers end while they save: exit, Ctrl-C, groups that go, ranks and processes that die."""

from __future__ import annotations

import os
import signal
import subprocess
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import warm

import torch_ckpt

# A trainer: rank `rank` of `world`, in the Gloo group of `folder`; `save` is slow.
PRELUDE = """
import os, signal, sys, threading, time, warnings
import torch, torch.distributed as dist
import torch_ckpt
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
folder, rank, world = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)

def say(word):  # print writes the end of the line apart, and other threads between
    os.write(1, f"{word}\\n".encode())

class SlowWriter(torch_ckpt.HuggingFaceStorageWriter):
    def write_data(self, plan, planner):
        say("writing")
        time.sleep(1)
        return super().write_data(plan, planner)

class GatedWriter(torch_ckpt.HuggingFaceStorageWriter):
    # Until the trainer says so.
    gate = threading.Event()
    def write_data(self, plan, planner):
        assert self.gate.wait(60)
        return super().write_data(plan, planner)

class HeldWriter(torch_ckpt.HuggingFaceStorageWriter):
    # Until it is killed, on the last rank.
    def write_data(self, plan, planner):
        if rank == world - 1:
            open(f"{folder}/writing-{rank}", "w").close()
            time.sleep(120)
        return super().write_data(plan, planner)

def until_there(path):
    while not os.path.exists(path):
        time.sleep(0.005)

class FailingWriter(torch_ckpt.HuggingFaceStorageWriter):
    def write_data(self, plan, planner):
        raise OSError(5, "broken disk", "the file")

def weights(value):
    return {"w": torch.full((1000,), float(value)), "step": value}

def save(number, kind=SlowWriter, **options):
    writer = kind(f"{folder}/{number}", save_distributed=True)
    return torch_ckpt.async_save(weights(number), storage_writer=writer, **options)

def group():
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank,
                            world_size=world)
"""


class Trainer:
    """One rank of a program that follows the prelude."""

    def __init__(self, folder: Path, program: str, rank: int = 0, world: int = 1) -> None:
        path = folder / f"program-{rank}.py"
        # A process that saves imports the main module again.
        body = textwrap.indent(textwrap.dedent(program), "    ")
        path.write_text(f"{PRELUDE}\ndef main():\n{body}\nif __name__ == '__main__':\n    main()\n")
        self.files = [folder / f"{name}-{rank}" for name in ("output", "errors")]
        words = [str(path), str(folder), str(rank), str(world)]
        self.pid = warm().start(words, {"MASTER_ADDR": "127.0.0.1"}, *self.files)
        self.heard = 0

    def wait_for(self, line: str, meanwhile: Callable[[], None] = lambda: None) -> None:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            meanwhile()
            said = self.files[0].read_text() if self.files[0].exists() else ""
            found = said.find(f"{line}\n", self.heard)
            if found >= 0:
                self.heard = found + len(line)
                return
            time.sleep(0.005)
        status, said = self.end(0)
        raise AssertionError(f"it ended with {status} and never said {line!r}:\n{said}")

    def end(self, limit: float = 60) -> tuple[int, str]:
        """Exit status and output."""
        status = warm().wait(self.pid, limit)
        said = "".join(file.read_text() for file in self.files)
        assert status is not None, f"it hung:\n{said}"
        return status, said


def loads(path: Path, value: int) -> bool:
    target: dict[str, Any] = {"w": torch.zeros(1000), "step": -1}
    torch_ckpt.load(target, checkpoint_id=path, no_dist=True)
    return bool((target["w"] == value).all()) and target["step"] == value


def test_a_save_that_is_running_at_the_end_is_committed(tmp_path: Path) -> None:
    status, said = Trainer(tmp_path, "save(1)").end()
    assert status == 0, said
    assert loads(tmp_path / "1", 1)
    assert "the save into" not in said


def test_a_failure_that_nobody_heard_of_is_named_at_the_end(tmp_path: Path) -> None:
    program = "torch_ckpt.async_save(weights(1), storage_writer=FailingWriter(folder + '/1'))"
    _, said = Trainer(tmp_path, program).end()
    assert f"torch_ckpt: the save into {tmp_path}/1 failed: " in said and "broken disk" in said
    _, said = Trainer(tmp_path, program.replace("'/1')", "'/1')) .exception()#")).end()
    assert "the save into" not in said


def test_a_trainer_that_dies_of_an_exception_commits(tmp_path: Path) -> None:
    status, said = Trainer(tmp_path, "save(1)\nraise ValueError('the loss is nan')").end()
    assert status == 1 and "nan" in said
    assert loads(tmp_path / "1", 1)


def test_ctrl_c(tmp_path: Path) -> None:
    program = """
    at_call = False
    def interrupt(*_):
        nonlocal at_call
        if at_call:
            at_call = False  # it is sent again until it is heard
            raise KeyboardInterrupt
    signal.signal(signal.SIGINT, interrupt)
    def interrupted(call):
        nonlocal at_call
        try:
            at_call = True
            say("waiting")
            call()
        except KeyboardInterrupt:
            say("interrupted")
    began = save(1, GatedWriter)
    interrupted(began.result)
    assert not began.done()
    GatedWriter.gate.set()
    began.result()
    GatedWriter.gate.clear()
    save(2, GatedWriter)
    interrupted(lambda: save(3))  # which waits for its turn
    GatedWriter.gate.set()
    save(4).result()
    """
    trainer = Trainer(tmp_path, program)
    for _ in range(2):
        trainer.wait_for("waiting")
        # Python does not hear one that arrives between its last look and its wait.
        trainer.wait_for("interrupted", lambda: os.kill(trainer.pid, signal.SIGINT))
    status, said = trainer.end()
    assert status == 0, said
    for number in (1, 2, 4):
        assert loads(tmp_path / str(number), number)
    assert not (tmp_path / "3").exists()


@pytest.mark.parametrize("destroys", [[1], [0, 1]])
def test_a_process_group_that_is_destroyed_before_the_end(
    tmp_path: Path, destroys: list[int]
) -> None:
    """Nobody hangs; every rank knows whether the save is there."""
    program = f"""
    group()
    began = save(1)
    time.sleep(0.2)  # it is writing
    if rank in {destroys}:
        dist.destroy_process_group()
    error = began.exception()
    print("failed" if error else "committed", flush=True)
    """
    trainers = [Trainer(tmp_path, program, rank, 2) for rank in range(2)]
    outcomes = []
    for trainer in trainers:
        status, said = trainer.end()
        assert status == 0, said
        outcomes.append("committed" in said)
    if outcomes[0]:
        assert loads(tmp_path / "1", 1)
    assert outcomes[1] <= outcomes[0], "rank 1 believes what rank 0 has not done"


def test_a_rank_that_is_killed(tmp_path: Path) -> None:
    program = """
    group()
    save(1).result()
    began = save(2)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    error = began.exception()
    assert isinstance(error, (torch_ckpt.CheckpointError, OSError)), error
    print(error, flush=True)
    os._exit(0)  # what the group's destructor does now is not ours
    """
    trainers = [Trainer(tmp_path, program, rank, 2) for rank in range(2)]
    status, said = trainers[0].end()
    assert status == 0, said
    assert "rank 1: is gone" in said and "save into 2" in said
    assert trainers[1].end()[0] == -signal.SIGKILL
    assert loads(tmp_path / "1", 1)
    assert not (tmp_path / "2").exists()


def test_a_process_that_saves_and_is_killed_is_replaced(tmp_path: Path) -> None:
    program = """
    from torch_ckpt.calls.process import _known
    group()
    def child():
        return _known[dist.group.WORLD][(0, 1)]
    def gone(process):
        while process.is_alive():
            time.sleep(0.01)
    process = dict(async_checkpointer_type=AsyncCheckpointerType.PROCESS)
    def begin(number):
        return torch_ckpt.async_save(
            weights(number), checkpoint_id=f"{folder}/{number}", **process)
    begin(1).result()
    first = child()
    if rank == 1:
        os.kill(first.pid, signal.SIGKILL)
        gone(first)
    begin(2).result()   # noticed before it is used
    second = child()
    assert second.pid != first.pid
    began = save(3, HeldWriter, **process)
    if rank == 1:
        until_there(f"{folder}/writing-1")
        os.kill(second.pid, signal.SIGKILL)   # while it saves
    error = began.exception()
    assert isinstance(error, torch_ckpt.CheckpointError), repr(error)
    assert "the process that saves is gone" in str(error) or "save into 3" in str(error), error
    begin(4).result()
    other = dist.new_group(ranks=[0], backend="gloo")
    if rank == 0:
        # A group of one rank has a process of its own.
        torch_ckpt.async_save(
            weights(5), checkpoint_id=folder + "/5", process_group=other, **process).result()
        assert child() not in _known[other].values()
    begin(6).result()
    if rank == 0:
        os.kill(child().pid, signal.SIGKILL)
        gone(child())
    begin(7).result()
    state = weights(8)
    if rank == 1:
        state["call"] = lambda: 0   # can be copied, but not sent
    unsent = "local object 'main.<locals>.<lambda>'"
    began = time.monotonic()
    try:
        error = torch_ckpt.async_save(
            state, checkpoint_id=folder + "/8", **process).exception()
    except torch_ckpt.CheckpointError as raised:
        error = raised
    except Exception as raised:
        assert rank == 1 and unsent in str(raised), repr(raised)
        error = None
    assert time.monotonic() - began < 60, "somebody waited for the group's timeout"
    assert rank == 1 or "rank 1" in str(error) and unsent in str(error), repr(error)
    begin(9).result()
    print("all well", flush=True)
    dist.destroy_process_group()
    """
    trainers = [Trainer(tmp_path, program, rank, 2) for rank in range(2)]
    for trainer in trainers:
        status, said = trainer.end(120)
        assert status == 0 and "all well" in said, said
    for number in (1, 2, 4, 5, 6, 7, 9):
        assert loads(tmp_path / str(number), number)
    assert not (tmp_path / "3").exists() and not (tmp_path / "8").exists()


def test_process_needs_a_group(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    with pytest.raises(torch_ckpt.InvalidArgumentError, match="needs a process group"):
        torch_ckpt.async_save(
            {"w": torch.zeros(3)},
            checkpoint_id=tmp_path,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )


def test_a_full_disk(tmp_path: Path) -> None:
    """Every rank hears of it, the old checkpoint stays, and the next save works."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    program = """
    group()
    path = folder + "/disk/c"
    torch_ckpt.async_save(weights(1), checkpoint_id=path).result()
    state = weights(2)
    if rank == 1:
        state["large"] = torch.zeros(2 << 20)
    error = torch_ckpt.async_save(state, checkpoint_id=path).exception()
    assert isinstance(error, OSError) and error.errno == 28, repr(error)
    # Of the lowest rank that met the full disk; it may have been full for rank 0 as well.
    assert "rank " in str(error) and path in error.filename, error
    target = weights(-1)
    torch_ckpt.load(target, checkpoint_id=path)
    assert target["step"] == 1 and (target["w"] == 1).all()
    torch_ckpt.async_save(weights(3), checkpoint_id=path).result()
    print("all well", os.listdir(folder + "/disk"), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    """
    try:
        for trainer in [Trainer(tmp_path, program, rank, 2) for rank in range(2)]:
            status, said = trainer.end()
            assert status == 0 and "all well ['c']" in said, said
        assert loads(disk / "c", 3)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_save_of_one_rank_and_one_of_all_have_processes_of_their_own(tmp_path: Path) -> None:
    program = """
    group()
    process = dict(async_checkpointer_type=AsyncCheckpointerType.PROCESS)
    torch_ckpt.async_save(
        weights(rank), f"{folder}/own-{rank}", no_dist=True, **process).result()
    state = {**weights(3), f"r{rank}": torch.ones(2)}
    torch_ckpt.async_save(state, f"{folder}/all", **process).result()

    class Interrupted(torch_ckpt.PinnedMemoryStager):
        def stage(self, state_dict, **options):
            if rank == 1:
                raise KeyboardInterrupt
            return super().stage(state_dict, **options)

    began = time.monotonic()
    try:
        error = torch_ckpt.async_save(
            state, f"{folder}/none", async_stager=Interrupted(), **process).exception()
        assert rank == 0 and "rank 1" in str(error) and "interrupted" in str(error), error
    except KeyboardInterrupt:
        assert rank == 1
    assert time.monotonic() - began < 60, "somebody waited for the timeout"
    torch_ckpt.async_save(state, f"{folder}/again", **process).result()
    print("all well", flush=True)
    dist.destroy_process_group()
    """
    trainers = [Trainer(tmp_path, program, rank, 2) for rank in range(2)]
    for trainer in trainers:
        status, said = trainer.end(120)
        assert status == 0 and "all well" in said, said
    for rank in range(2):
        assert loads(tmp_path / f"own-{rank}", rank)
    for name in ("all", "again"):
        assert {"r0", "r1", "w", "step"} <= torch_ckpt.load(path=tmp_path / name).keys()
    assert not (tmp_path / "none").exists()
