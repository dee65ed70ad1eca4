"""dcp.async_save and ours with stock's stagers: in threads, in a process, failing."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import Future as ConcurrentFuture
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from sample_states import FAILED, assert_same, load_ours
from torch.distributed.checkpoint.staging import (
    BlockingAsyncStager,
    DefaultStager,
    StagingOptions,
)

import torch_ckpt
from torch_ckpt import HuggingFaceStorageWriter

STATE = {"w": torch.arange(12.0).reshape(3, 4), "b": torch.ones(3, dtype=torch.bfloat16)}


# Those of torch 2.11 and 2.12 close themselves at the end of stage().
SPENT_BY_A_SAVE = torch.__version__.startswith(("2.11.", "2.12."))
STAGERS: dict[str, Any] = {
    "the writer": lambda: None,
    "blocking": BlockingAsyncStager,
    "blocking, cached": lambda: BlockingAsyncStager(cache_staged_state_dict=False, type_check=True),
    "default": lambda: DefaultStager(StagingOptions(False, False, False, False)),
    "default, shared": lambda: DefaultStager(StagingOptions(False, True, False, False)),
    "default, in a thread": lambda: DefaultStager(StagingOptions(False, False, True, False)),
}


def upload(handle: Any) -> Any:
    return handle if isinstance(handle, ConcurrentFuture) else handle.upload_completion


@pytest.mark.parametrize("stager", STAGERS)
def test_async_save_in_threads(tmp_path: Path, group: Any, stager: str) -> None:
    made = STAGERS[stager]()
    writer = HuggingFaceStorageWriter(tmp_path / "c", save_distributed=True)
    for number in range(3):
        if isinstance(made, DefaultStager) and number and SPENT_BY_A_SAVE:
            made = STAGERS[stager]()
        state = {
            "w": torch.full((100, 7), float(number)),
            "t": torch.randn(5, 6).t(),
            "nested": {"n": number, "s": torch.tensor(number)},
        }
        wanted = {**state, "w": state["w"].clone(), "nested": {**state["nested"]}}
        handle = dcp.async_save(state, storage_writer=writer, async_stager=made)
        if not isinstance(handle, ConcurrentFuture):
            handle.staging_completion.result()
        state["w"].fill_(-1)  # the trainer goes on
        upload(handle).result()
        assert_same(load_ours(tmp_path / "c", wanted), wanted)
    if made is not None:
        made.close()


@pytest.mark.parametrize("call", [dcp.async_save, torch_ckpt.async_save], ids=["stock", "ours"])
def test_async_save_reports_its_failure(tmp_path: Path, group: Any, call: Any) -> None:
    (tmp_path / "file").write_text("")
    writer = HuggingFaceStorageWriter(tmp_path / "file" / "below")
    future = call(dict(STATE), storage_writer=writer)
    with pytest.raises(FAILED, match="file"):
        future.result()
    future = call(dict(STATE), storage_writer=writer, checkpoint_id=str(tmp_path / "good"))
    future.result()
    assert_same(load_ours(tmp_path / "good", STATE), STATE)


PROCESS_SAVE = """
import sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp, torch_ckpt
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

def main():
    path = sys.argv[1]
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    writer = torch_ckpt.HuggingFaceStorageWriter(path, save_distributed=True)
    kinds = [
        (dcp.async_save, None, None),
        (dcp.async_save, DefaultStager(StagingOptions(False, True, False, False)), None),
        (torch_ckpt.async_save, None, torch_ckpt.SavePlanner()),
    ]
    for number, (call, stager, planner) in enumerate(kinds):
        state = {"w": torch.full((1000,), float(number)), "n": number}
        handle = call(
            state, storage_writer=writer, async_stager=stager, planner=planner,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )
        future = getattr(handle, "upload_completion", handle)
        state["w"].fill_(-1)
        future.result(timeout=100)
        target = {"w": torch.zeros(1000), "n": -1}
        dcp.load(target, storage_reader=torch_ckpt.HuggingFaceStorageReader(path))
        assert target["n"] == number and (target["w"] == number).all(), target
    bad = torch_ckpt.HuggingFaceStorageWriter(__file__ + "/below")
    try:
        call(state, storage_writer=bad, async_checkpointer_type=AsyncCheckpointerType.PROCESS).result()
        raise SystemExit("a save into a file did not fail")
    except Exception as error:
        assert "rank 0" in str(error) and __file__ in str(error), error
    call(state, storage_writer=writer, async_checkpointer_type=AsyncCheckpointerType.PROCESS).result()
    print("all well")
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
"""


def test_async_save_in_a_process(tmp_path: Path) -> None:
    # With the spawn method the child imports the main module again, so it must be a file.
    program = tmp_path / "program.py"
    program.write_text(PROCESS_SAVE)
    package = str(Path(torch_ckpt.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(program), str(tmp_path / "c")],
        capture_output=True,
        text=True,
        timeout=180,
        env={**os.environ, "PYTHONPATH": package, "OMP_NUM_THREADS": "1"},
    )
    assert "all well" in done.stdout, done.stdout[-2000:] + done.stderr[-4000:]
