"""Saves with AsyncCheckpointerType.PROCESS: a trainer, and the process that saves."""

from __future__ import annotations

import multiprocessing
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_async_ends import Trainer

from torch_ckpt.calls.process import SavingProcess

# A trainer that saves in another process, and looks at what that has.
PROGRAM = r"""
import os, re
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import _async_process_executor as stock
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch_ckpt import PinnedMemoryStager
from torch_ckpt.native import core
from torch_ckpt.calls.process import _known
group()

def arena():
    return core.call({"op": "arena", "snapshots": True})

def child():
    ours = list(_known.get(dist.group.WORLD, {}).values())
    return ours[0].pid if ours else stock._CHECKPOINT_PROCESS._save_process.pid

def counts(process):
    maps = open(f"/proc/{process}/maps").read()
    return (len(os.listdir(f"/proc/{process}/fd")), len(os.listdir(f"/proc/{process}/task")),
            maps.count("memfd:torch_ckpt"), maps.count("/dev/shm/torch_"))

w = torch.zeros(1000)
mesh = init_device_mesh("cpu", (1,))
state = {"w": w, "tied": w, "step": 0, "many": {f"t{n}": torch.zeros(9) for n in range(1000)},
         "d": distribute_tensor(torch.zeros(700, 900), mesh, [Shard(0)])}

def fill(value):
    for tensor in (w, *state["many"].values(), state["d"].to_local()):
        tensor.fill_(value)
    state["step"] = value

def save(value, call=torch_ckpt.async_save, **options):
    fill(value)
    answer = call(state, checkpoint_id=f"{folder}/{value}",
                  async_checkpointer_type=AsyncCheckpointerType.PROCESS, **options)
    if not isinstance(answer, torch_ckpt.AsyncSave) and hasattr(answer, "upload_completion"):
        answer.staging_completion.result()
        answer = answer.upload_completion
    fill(-1)
    answer.result()

def holds(value):
    target = {"w": torch.zeros(1000), "tied": torch.zeros(1000), "step": -1,
              "many": {f"t{n}": torch.zeros(9) for n in range(1000)},
              "d": distribute_tensor(torch.zeros(700, 900), mesh, [Shard(0)])}
    torch_ckpt.load(target, checkpoint_id=f"{folder}/{value}")
    tensors = (target["w"], target["tied"], *target["many"].values(), target["d"].to_local())
    return all((t == value).all() for t in tensors) and target["step"] == value
"""


def run(tmp_path: Path, program: str) -> None:
    text = (
        textwrap.dedent(program) + "\nprint('all well', flush=True)\ndist.destroy_process_group()"
    )
    status, said = Trainer(tmp_path, PROGRAM + text).end(120)
    assert status == 0 and "all well" in said, said


def test_training_does_not_wait_for_the_process_to_start(tmp_path: Path) -> None:
    run(
        tmp_path,
        """
        import threading
        from torch_ckpt.calls.process import SavingProcess
        may_start = threading.Event()
        start = SavingProcess.__init__

        def when_told(self, rank):
            assert may_start.wait(60)
            start(self, rank)

        SavingProcess.__init__ = when_told
        fill(1)
        future = torch_ckpt.async_save(
            state, f"{folder}/1", async_checkpointer_type=AsyncCheckpointerType.PROCESS
        )
        assert not future.done()
        fill(-1)  # the state is staged
        may_start.set()
        future.result()
        assert holds(1)
        """,
    )


def test_saves_in_another_process_grow_nothing(tmp_path: Path) -> None:
    run(
        tmp_path,
        """
        for value in range(1, 6):
            save(value)
        def counted():
            return *counts("self"), *counts(child())
        before = counted()
        # The child has mapped one region.
        assert before[2] == before[6] == 1, before
        for value in range(6, 26):
            save(value)
            assert arena()["leased"] == 0
        deadline = time.monotonic() + 10  # stock's threads end by themselves
        while any(now > then for now, then in zip(counted(), before)):
            assert time.monotonic() < deadline, (before, counted())
            time.sleep(0.01)
        assert all(holds(value) for value in range(1, 26))
        """,
    )


@pytest.mark.parametrize("says", [True, False])
def test_stocks_async_save(tmp_path: Path, says: bool) -> None:
    run(
        tmp_path,
        """
        says = SAYS
        kind = AsyncCheckpointerType.PROCESS if says else AsyncCheckpointerType.THREAD
        stager = PinnedMemoryStager(async_checkpointer_type=kind)
        for value in (1, 2, 3):
            writer = torch_ckpt.HuggingFaceStorageWriter(
                f"{folder}/{value}", save_distributed=True)
            save(value, dcp.async_save, storage_writer=writer, async_stager=stager)
            # Or nobody said before the first that it would cross. There may be more regions than
            # one: a lease ends when stock's thread has let its state go.
            assert (counts(child())[2] > 0) == (says or value > 1), counts(child())
        # Stock's writer reads the same memory.
        save(4, dcp.async_save, storage_writer=dcp.FileSystemWriter(f"{folder}/4"),
             async_stager=stager)
        target = {"w": torch.zeros(1000), "step": -1}
        dcp.load(target, checkpoint_id=f"{folder}/4")
        assert target["w"].unique().tolist() == [4] and target["step"] == 4
        assert all(holds(value) for value in (1, 2, 3))
        """.replace("SAYS", str(says)),
    )


def test_a_system_that_refuses_shared_memory(tmp_path: Path) -> None:
    run(
        tmp_path,
        """
        import resource
        # Less than a memory file of a useful size.
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, 1 << 30))
        for value in (1, 2, 3):
            save(value)
            assert counts("self")[2] == counts(child())[2] == 0
        assert all(holds(value) for value in (1, 2, 3))
        """,
    )


def test_a_process_that_is_killed_while_it_saves(tmp_path: Path) -> None:
    run(
        tmp_path,
        """
        save(1)
        fill(2)
        began = torch_ckpt.async_save(
            state, storage_writer=HeldWriter(f"{folder}/2", save_distributed=True),
            async_checkpointer_type=AsyncCheckpointerType.PROCESS)
        until_there(f"{folder}/writing-0")
        os.kill(child(), signal.SIGKILL)
        assert isinstance(began.exception(), torch_ckpt.CheckpointError)
        assert arena()["leased"] == 0
        save(3)
        assert holds(1) and holds(3) and not os.path.exists(f"{folder}/2")
        """,
    )


def test_a_process_that_is_dead_and_not_yet_waited_for() -> None:
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs:
        process = SavingProcess.__new__(SavingProcess)
        process._pipe = ours
        process._process = SimpleNamespace(is_alive=lambda: True)  # type: ignore[assignment]
        assert process.is_alive()
        theirs.close()
        assert not process.is_alive()


def test_a_model_whose_files_go_along_stays_where_it_is(tmp_path: Path) -> None:
    run(
        tmp_path,
        """
        class Model(torch.nn.Linear):
            def save_pretrained(self, folder, **_):
                with open(f"{folder}/config.json", "w") as file:
                    file.write("{}")
        model = Model(3, 3)
        began = torch_ckpt.async_save(
            model.state_dict(), f"{folder}/1", layout="final", naming="hf", extras=[model],
            async_checkpointer_type=AsyncCheckpointerType.PROCESS)
        began.result()
        assert sorted(os.listdir(f"{folder}/1"))[:2] == ["config.json", "model.safetensors"]
        assert not any(p.is_shared() for p in model.parameters())
        error = torch_ckpt.async_save(
            model.state_dict(), f"{folder}/2", layout="final", extras=[f"{folder}/none"],
            async_checkpointer_type=AsyncCheckpointerType.PROCESS).exception()
        assert "extras have no such file" in str(error), error
        save(3)
        assert holds(3) and not os.path.exists(f"{folder}/2")
        """,
    )


def test_ctrl_c_in_a_terminal_reaches_all_processes(tmp_path: Path) -> None:
    """The one that saves leaves it to the trainer what becomes of a save."""
    run(
        tmp_path,
        """
        save(1)
        os.kill(child(), signal.SIGINT)
        time.sleep(0.2)
        save(2)
        began = torch_ckpt.async_save(
            state, storage_writer=SlowWriter(f"{folder}/3", save_distributed=True),
            async_checkpointer_type=AsyncCheckpointerType.PROCESS)
        time.sleep(0.2)
        os.kill(child(), signal.SIGINT)
        began.result()
        assert all(holds(value) for value in (1, 2))
        """,
    )
