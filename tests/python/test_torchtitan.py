"""torchtitan's real checkpoint manager: the cases are in ranks/torchtitan.py. Its package is not
installed in CI; ./dev campaign optional runs these."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launch import PACKAGE, assert_ok, run_worlds

pytest.importorskip("torchtitan", reason="torchtitan is not installed")

# In this order: what two ranks have saved, others load.
WORLDS = (2, 1, 4)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_worlds("torchtitan", WORLDS, tmp_path_factory.mktemp("titan"))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("world", WORLDS)
def test_cases(world: int, outcome: dict[int, dict[str, str]]) -> None:
    assert_ok(outcome[world])


PROGRAM = """
import sys
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.components.checkpoint import CheckpointManager
import torchtitan.components.checkpointer.dcp as dcp
owner = type(llama3_debugmodel().checkpoint)._owner
print(owner.__module__, owner is CheckpointManager is dcp.CheckpointManager)
if "undo" in sys.argv:
    from torch_ckpt.integrations import torchtitan as ours
    from torch_ckpt.integrations.torchtitan import CheckpointManager as kept
    with ours.install() as patch:
        config = llama3_debugmodel().checkpoint
        owner = type(config)._owner
        print(owner.__module__, issubclass(dcp.CheckpointManager, kept))
        assert type(ours.use_torch_ckpt(config)) is ours.CheckpointManager.Config
    owner = type(llama3_debugmodel().checkpoint)._owner
    print(owner.__module__, kept is ours.CheckpointManager)
"""


def outputs(*words: str, folder: Path) -> list[str]:
    (folder / "program.py").write_text(PROGRAM)
    path = os.pathsep.join([str(PACKAGE), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "LOCAL_RANK": "0"},
        stdout=subprocess.PIPE,
        timeout=240,
        check=True,
        text=True,
    )
    return done.stdout.splitlines()


OURS, THEIRS = "torch_ckpt.integrations.torchtitan", "torchtitan.components.checkpointer.dcp"


def test_a_program_runs_with_ours(tmp_path: Path) -> None:
    said = outputs("-m", "torch_ckpt", "run", "program.py", folder=tmp_path)
    assert said == [f"{OURS} True"]


def test_install_is_undone(tmp_path: Path) -> None:
    said = outputs("program.py", "undo", folder=tmp_path)
    assert said == [f"{THEIRS} True", f"{OURS} True", f"{THEIRS} True"]
