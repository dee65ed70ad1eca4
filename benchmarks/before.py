"""An earlier commit of ours, built beside this tree, whose contenders take part as rivals."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from benchmarks import environment

# As ./dev builds the tree that it is compared with.
BUILD_FLAGS = "-DTORCH_CKPT_FAULTS=ON"


class BeforeError(Exception):
    """The earlier commit is not known here, or does not build."""


def build(commit: str) -> Path:
    """A directory with torch_ckpt of ``commit``, and the benchmarks of this tree.

    A process that is started in it measures that commit. It lies in build/before/, and one that
    is there is used again.

    Raises:
        BeforeError: git does not know the commit, or it does not build.
    """
    short = _git("rev-parse", "--short=12", "--verify", f"{commit}^{{commit}}").strip()
    tree = environment.REPOSITORY / "build" / "before" / short
    if not (tree / "torch_ckpt").exists():
        with tempfile.TemporaryDirectory(prefix="before-") as made:
            source, installed = Path(made, "source"), Path(made, "installed")
            archive = Path(made, "archive.tar")
            _git("archive", "-o", str(archive), short)
            with tarfile.open(archive) as packed:
                packed.extractall(source, filter="data")
            words = ["install", "-q", "--no-deps", "--no-build-isolation", "--target"]
            done = subprocess.run(
                [sys.executable, "-m", "pip", *words, str(installed), str(source)],
                env={**os.environ, "TORCH_CKPT_CMAKE_ARGS": BUILD_FLAGS},
                capture_output=True,
                text=True,
            )
            if done.returncode != 0:
                raise BeforeError(f"{short} does not build: {done.stderr.strip()[-2000:]}")
            tree.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(installed, tree)
    # Those of now, so that both do the same.
    shutil.rmtree(tree / "benchmarks", ignore_errors=True)
    shutil.copytree(environment.REPOSITORY / "benchmarks", tree / "benchmarks")
    return tree


def _git(*words: str) -> str:
    done = subprocess.run(
        ["git", *words], cwd=environment.REPOSITORY, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise BeforeError(f"git {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout
