"""Environments that hold one torch each, and go when they have been used."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER = REPOSITORY / "build" / "torches"
INSTALL_SECONDS = 1800
# Kernels for GPUs, and what a program calls by itself: `import torch` does without.
LEFT_OUT = ("triton", "cuda-bindings")
# Of the tests: what the dev extra has of it. None of these brings another torch.
WITH_IT = (
    *("pytest>=8", "pytest-timeout", "pytest-xdist", "hypothesis>=6", "numpy", "safetensors>=0.5"),
    "setuptools>=77",  # torch.compile asks for it
    *("click>=8.1", "rich>=13", "tqdm>=4.60", "transformers>=4.57", "accelerate>=1.14", "peft"),
)
# What a torch says of itself, as JSON.
ASK = """
import importlib.metadata, json, platform, sys, torch
print(json.dumps({"torch": torch.__version__, "python": platform.python_version()}))
"""
REQUIRES = (
    "import importlib.metadata, json; print(json.dumps(importlib.metadata.requires('torch')))"
)


# What pip leaves of an editable install, without a build: the libraries are those of the checkout.
METADATA = "Metadata-Version: 2.1\nName: torch_ckpt\nVersion: {version}\n"


class NotHad(Exception):
    """What this machine, or its package index, does not have."""


@dataclasses.dataclass(frozen=True)
class Made:
    """An environment: its interpreter, the versions in it, and its size in bytes."""

    interpreter: Path
    torch: str
    python: str
    bytes: int


def interpreter(python: str) -> Path:
    """An interpreter of this version ("3.12"): this one, one that is on PATH, or pyenv's newest."""
    if python == f"{sys.version_info.major}.{sys.version_info.minor}":
        return Path(sys.executable)
    found = [found for found in [shutil.which(f"python{python}")] if found]
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    found += sorted(map(str, root.glob(f"versions/{python}.*/bin/python{python}")), reverse=True)
    for path in found:  # pyenv leaves names on PATH that start nothing
        done = subprocess.run([path, "-c", "import venv"], capture_output=True, check=False)
        if done.returncode == 0:
            return Path(path)
    raise NotHad(f"no Python {python} on PATH or of pyenv")


def last_words(text: str) -> str:
    """The line in which pip says what is wrong."""
    lines = [line for line in text.splitlines() if line.startswith("ERROR: ")]
    # Versions for other Pythons come first, all of them.
    lines = [line for line in lines if not line.startswith("ERROR: Ignored ")] or lines
    lines = [re.sub(r" \(from versions: .*\)", "", line[len("ERROR: ") :]) for line in lines]
    return lines[0] if lines else "pip failed"


def install(into: Path, *words: str) -> None:
    """Raises NotHad."""
    # This environment's pip, so that the other one needs none.
    command = [sys.executable, "-m", "pip", "--python", str(into), "install", "-q", *words]
    # A constraint that this machine's pip is given would name another torch.
    environment = {**os.environ, "PIP_CONSTRAINT": os.devnull}
    try:
        done = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            timeout=INSTALL_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise NotHad(f"not installed after {INSTALL_SECONDS} s") from None
    if done.returncode != 0:
        raise NotHad(last_words(done.stderr))


def said(python: Path, code: str) -> str:
    """Raises NotHad: where torch does not start, for one."""
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NotHad((done.stderr.strip().splitlines() or ["it does not start"])[-1])
    return done.stdout


def needed(requirements: list[str]) -> list[str]:
    """Of what a torch asks for, what it takes to import it."""
    return [
        each
        for each in requirements
        if "extra ==" not in each and re.split(r"[^\w-]", each)[0].lower() not in LEFT_OUT
    ]


def name_package(inside: Path) -> None:
    """The checkout's package is on the path of this interpreter, and its version is known there."""
    site = Path(said(inside, "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    version = importlib.metadata.version("torch_ckpt")
    told = site / f"torch_ckpt-{version}.dist-info" / "METADATA"
    told.parent.mkdir()
    told.write_text(METADATA.format(version=version))
    (site / "torch_ckpt.pth").write_text(f"{REPOSITORY}\n")


def size_of(folder: Path) -> int:
    return sum(file.lstat().st_size for file in folder.rglob("*") if not file.is_symlink())


@contextlib.contextmanager
def environment(torch: str, python: str) -> Iterator[Made]:
    """One with this torch and what the tests need, removed afterwards. Raises NotHad."""
    folder = FOLDER / f"torch-{torch}-python-{python}"
    shutil.rmtree(folder, ignore_errors=True)
    start = interpreter(python)
    try:
        made = [str(start), "-m", "venv", "--without-pip", str(folder)]
        subprocess.run(made, check=True, stdout=subprocess.DEVNULL)
        inside = folder / "bin" / "python"
        # By itself first: what it asks for is read in its metadata.
        install(inside, "--no-deps", f"torch=={torch}")
        install(inside, *needed(json.loads(said(inside, REQUIRES))), *WITH_IT)
        name_package(inside)
        versions = json.loads(said(inside, ASK))
        yield Made(inside, versions["torch"], versions["python"], size_of(folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
