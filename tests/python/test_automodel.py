"""NeMo AutoModel's real Checkpointer, lifecycle and BaseRecipe: the cases are in ranks/automodel*.py.
Its package is not installed in CI; ./dev campaign frameworks runs these."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launch import HERE, PACKAGE, assert_ok, run_worlds

pytest.importorskip("nemo_automodel", reason="nemo_automodel is not installed")

# In this order: what two ranks have saved, others load.
WORLDS = (2, 1, 4)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_worlds("automodel,automodel_models", WORLDS, tmp_path_factory.mktemp("automodel"))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("world", WORLDS)
def test_cases(world: int, outcome: dict[int, dict[str, str]]) -> None:
    assert_ok(outcome[world])


def output(*words: str | Path, folder: Path, **environment: str) -> str:
    """What a Python of its own prints."""
    path = os.pathsep.join([str(PACKAGE), str(HERE), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        timeout=600,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


PROGRAM = """
import sys
from nemo_automodel.components.checkpoint import checkpointing
from nemo_automodel.components.checkpoint.checkpointing import Checkpointer, load_torch_ckpt
from nemo_automodel.components.checkpoint.config import CheckpointingConfig

def say():
    made = CheckpointingConfig(checkpoint_dir="runs").build(0, 0, 0)
    print(type(made).__module__, isinstance(made, Checkpointer), load_torch_ckpt.__module__)
    assert Checkpointer is checkpointing.Checkpointer

say()
if "undo" in sys.argv:
    from torch_ckpt.integrations import automodel as ours
    with ours.install() as patch:
        say()
        ours.install().undo()
        say()
    say()
    try:
        ours.Checkpointer(CheckpointingConfig(), 0, 0, 0)
    except ValueError as error:
        print(error)
"""
_ROOM = "torch_ckpt.integrations.automodel"
OURS = f"{_ROOM}_checkpointer True {_ROOM}_states"
_THEIRS = "nemo_automodel.components.checkpoint.checkpointing"
THEIRS = f"{_THEIRS} True {_THEIRS}"


@pytest.mark.slow
def test_a_program_runs_with_ours(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    assert output("-m", "torch_ckpt", "run", "program.py", folder=tmp_path) == f"{OURS}\n"


@pytest.mark.slow
def test_install_is_undone(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    said = output("program.py", "undo", folder=tmp_path).splitlines()
    assert said == [THEIRS, OURS, OURS, THEIRS, f"call {_ROOM}.install() first"]


RECIPES = """
from torch_ckpt.integrations import automodel
for name in ("NoRecipe", "_private"):
    try:
        getattr(automodel, name)
    except AttributeError as error:
        print(error)
from nemo_automodel.components.checkpoint import checkpointing
from nemo_automodel.components.launcher.interactive import resolve_recipe_cls
recipe = resolve_recipe_cls("torch_ckpt.integrations.automodel.PretrainRecipeForMultimodal")
print(recipe.__module__, repr(checkpointing.Checkpointer))
"""


@pytest.mark.slow
def test_a_yaml_names_a_recipe(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(RECIPES)
    unknown, private, said = output("program.py", folder=tmp_path).splitlines()
    assert "'NoRecipe'" in unknown and "TrainFinetuneRecipeForNextTokenPrediction" in unknown
    assert "'_private'" in private and "recipe" not in private
    assert (
        said
        == f"nemo_automodel.recipes.multimodal.pretrain <stand-in of torch_ckpt for {_THEIRS}.Checkpointer>"
    )


APP = """
import sys
import nemo_automodel.cli.app as app

def main():
    print(sys.argv[1:], any(path.endswith("integrations") for path in sys.path))

app.main = main
import runpy
sys.argv = [sys.argv[1], "-c", "config.yaml", "--model.name", "tiny"]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
def test_the_file_that_automodels_launcher_runs(tmp_path: Path) -> None:
    """On each rank it runs the file of the module that the YAML names, with -c and the YAML."""
    (tmp_path / "program.py").write_text(APP)
    file = PACKAGE / "torch_ckpt" / "integrations" / "automodel.py"
    said = output("program.py", file, folder=tmp_path)
    assert said == "['config.yaml', '--model.name', 'tiny'] False\n"


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_a_run_that_is_killed_goes_on(tmp_path: Path) -> None:
    said = output(HERE / "automodel_killed.py", tmp_path, "1", "9", folder=tmp_path)
    assert int(said.splitlines()[-1]) > 20
