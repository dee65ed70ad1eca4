"""A process that was forked from one which has saved is told what to do instead."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.staging import StagingOptions

import torch_ckpt
from torch_ckpt import PinnedMemoryStager
from torch_ckpt.native.sessions import SaveSession


@pytest.mark.parametrize("what", ["save", "load", "consolidate"])
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_is_refused(tmp_path: Path, what: str) -> None:
    path = tmp_path / "c"
    state: dict[str, Any] = {"w": torch.ones(3)}
    torch_ckpt.save(state, checkpoint_id=path, no_dist=True)
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        said = "nothing was raised"
        try:
            if what == "save":
                torch_ckpt.save(state, checkpoint_id=tmp_path / "d", no_dist=True)
            elif what == "load":
                torch_ckpt.load(state, checkpoint_id=path, no_dist=True)
            else:
                torch_ckpt.consolidate_safetensors_files(path, tmp_path / "d", None)
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writes, said.encode())
        os._exit(0)
    os.close(writes)
    os.waitpid(child, 0)
    said = os.read(reads, 65536).decode()
    os.close(reads)
    assert said.startswith("UnsupportedError") and "'spawn'" in said, said
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]


def test_a_child_of_a_process_that_has_only_imported_saves(tmp_path: Path) -> None:
    code = f"""
import os, sys, torch, torch_ckpt
torch.ops.dcp_ext.save  # loaded, and not used
if os.fork() == 0:
    torch_ckpt.save({{"w": torch.ones(3)}}, {str(tmp_path / "c")!r}, no_dist=True)
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert torch_ckpt.load(path=tmp_path / "c")["w"].tolist() == [1, 1, 1]


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_leaves_alone_what_is_its_parents(tmp_path: Path) -> None:
    staged: Any = PinnedMemoryStager(StagingOptions(False, False, False, False)).stage(
        {"w": torch.arange(10)}
    )
    session = SaveSession(str(tmp_path / "c"), overwrite=True)
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        said: list[str] = []
        sys.unraisablehook = lambda raised: said.append(repr(raised.exc_value))
        del staged, session
        gc.collect()
        os.write(writes, repr(said).encode())
        os._exit(0)
    os.close(writes)
    os.waitpid(child, 0)
    assert os.read(reads, 65536).decode() == "[]"
    os.close(reads)
    assert staged["w"].tolist() == list(range(10))
    assert Path(session.staging).is_dir()
    session.end()
    assert list(tmp_path.iterdir()) == []
