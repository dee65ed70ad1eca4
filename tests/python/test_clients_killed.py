"""A run of the transformers Trainer that is killed while it saves, and goes on."""

from __future__ import annotations

import pickle
import shutil
import signal
from pathlib import Path

import pytest
from launch import run_scripts

import torch_ckpt

pytest.importorskip("transformers")


def test_a_trainer_that_is_killed_in_a_save_resumes(tmp_path: Path) -> None:
    run = tmp_path / "run"

    def ranks(what: str, path: Path, result: str = "none") -> list[tuple[int, str]]:
        return run_scripts("clients_killed.py", 2, [what, str(path), str(tmp_path / result)])

    (first, said), (second, _) = ranks("killed", run)
    assert first == 1, said
    assert second == -signal.SIGKILL
    saved = run / "checkpoint-6"
    torch_ckpt.Checkpoint(saved / "pytorch_model_fsdp_0").verify()
    assert not torch_ckpt.Checkpoint(saved / "optimizer_0").is_committed()
    with pytest.raises(torch_ckpt.IncompleteError, match="optimizer_0"):
        torch_ckpt.open(saved / "optimizer_0")
    # The Trainer takes the newest, and sees that a part of it is not there.
    for status, said in ranks("resumed", run):
        assert status == 1 and "checkpoint-6" in said, said
    shutil.rmtree(saved)
    for what, path, result in (("resumed", run, "resumed"), ("whole", tmp_path / "whole", "whole")):
        assert [status for status, _ in ranks(what, path, result)] == [0, 0]
    for rank in range(2):
        resumed, whole = (
            pickle.loads((tmp_path / f"{name}.{rank}").read_bytes())
            for name in ("resumed", "whole")
        )
        assert resumed == whole
