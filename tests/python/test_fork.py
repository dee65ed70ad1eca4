"""A process that was forked from one which has saved is told what to do instead."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_ckpt


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
