"""torch-ckpt run: an unedited program, with this engine in the place of stock."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from launch import PACKAGE

from torch_ckpt.integrations.frameworks import install_when_imported
from torch_ckpt.patching.on_import import when_imported

PROGRAM = """
import os, sys
import torch, torch.distributed.checkpoint as dcp

if __name__ == "__main__":
    print(sys.argv[1:], os.path.basename(__file__), sys.path[0])
    dcp.save({"w": torch.ones(3)}, checkpoint_id="saved", no_dist=True)
    loaded = {"w": torch.zeros(3)}
    dcp.load(loaded, checkpoint_id="saved", no_dist=True)
    print(loaded["w"].tolist(), os.path.exists("saved/torch_ckpt.json"))
    if "raise" in sys.argv:
        raise EOFError("no more data")
    if "exit" in sys.argv:
        sys.exit(7)
"""


def ran(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "programs").mkdir(exist_ok=True)
    (folder / "programs" / "train.py").write_text(PROGRAM)
    return subprocess.run(
        [sys.executable, "-m", "torch_ckpt", "run", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(PACKAGE)},
        capture_output=True,
        timeout=240,
        check=False,
        text=True,
    )


def test_a_program_and_its_arguments(tmp_path: Path) -> None:
    done = ran(tmp_path, "programs/train.py", "--lr", "0.1", "-m", "x")
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == f"['--lr', '0.1', '-m', 'x'] train.py {tmp_path / 'programs'}"
    assert second == "[1.0, 1.0, 1.0] True"
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("torch_ckpt: ")]
    assert line.startswith("torch_ckpt: patched torch.distributed.checkpoint")


def test_a_module(tmp_path: Path) -> None:
    done = ran(tmp_path, "-m", "programs.train", "--lr")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == f"['--lr'] train.py {tmp_path}"
    assert (tmp_path / "saved" / "torch_ckpt.json").exists()


def test_what_a_program_raises_and_its_status_are_its_own(tmp_path: Path) -> None:
    done = ran(tmp_path, "programs/train.py", "raise")
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("EOFError: no more data") and "Traceback" in done.stderr
    assert ran(tmp_path, "programs/train.py", "exit").returncode == 7


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    done = ran(tmp_path, "trian.py")
    assert done.returncode == 2
    assert "there is no file trian.py; a module needs -m before its name" in done.stderr
    done = ran(tmp_path)
    assert done.returncode == 2 and "PROGRAM" in done.stderr


def test_one_rank_says_what_is_patched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    done = ran(tmp_path, "programs/train.py")
    assert done.returncode == 0 and "torch_ckpt: " not in done.stderr


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package, not imported, with a module `inside`."""
    folder = tmp_path / "found_by_test"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "inside.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "found_by_test"
    for name in [name for name in sys.modules if name.partition(".")[0] == "found_by_test"]:
        del sys.modules[name]


def test_a_call_when_a_module_is_imported(package: str) -> None:
    calls: list[object] = []
    finders = list(sys.meta_path)
    when_imported(f"{package}.inside", lambda: calls.append(sys.modules[f"{package}.inside"].value))
    importlib.import_module(package)
    assert calls == []
    inside = importlib.import_module(f"{package}.inside")
    assert calls == [1] and sys.meta_path == finders
    # It is as it would have been.
    assert type(inside.__spec__.loader).__name__ == type(inside.__loader__).__name__
    assert type(inside.__loader__).__name__ == "SourceFileLoader"
    importlib.reload(inside)
    assert calls == [1]
    when_imported(f"{package}.inside", lambda: calls.append("at once"))
    assert calls == [1, "at once"] and sys.meta_path == finders


def test_what_the_call_raises_is_the_imports(package: str) -> None:
    finders = list(sys.meta_path)
    when_imported(f"{package}.inside", lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        importlib.import_module(f"{package}.inside")
    assert f"{package}.inside" not in sys.modules and sys.meta_path == finders
    when_imported(f"{package}.not_there", lambda: None)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(f"{package}.not_there")
    assert sys.meta_path == finders


def test_a_framework_is_waited_for_where_it_is_installed() -> None:
    finders = list(sys.meta_path)
    found = install_when_imported()
    assert found == [
        name for name in ("torchtitan", "nemo_automodel") if importlib.util.find_spec(name)
    ]
    sys.meta_path[:] = finders
