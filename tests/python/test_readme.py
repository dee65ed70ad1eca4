"""What the README shows works when pasted."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FENCES = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
PYTHON = [text for language, text in FENCES if language == "python"]


def run(arguments: list[str], folder: Path) -> str:
    done = subprocess.run(arguments, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("number", range(len(PYTHON)))
def test_every_example_runs(number: int, tmp_path: Path) -> None:
    """Alone, in an empty folder."""
    said = run([sys.executable, "-W", "error::DeprecationWarning", "-c", PYTHON[number]], tmp_path)
    for line in re.findall(r"^print\(.*\)  # (.*)$", PYTHON[number], re.MULTILINE):
        assert line in said.splitlines()


def test_the_commands_run(tmp_path: Path) -> None:
    """On the checkpoints that the first example saves."""
    (commands,) = [text for _, text in FENCES if text.startswith("torch-ckpt ")]
    assert "VerifyReport(files=" in run([sys.executable, "-c", PYTHON[0]], tmp_path)
    for line in commands.splitlines():
        program, *arguments = line.split()
        assert program == "torch-ckpt"
        assert run([sys.executable, "-m", "torch_ckpt", *arguments], tmp_path)
    assert (tmp_path / "model" / "model-00001-of-00001.safetensors").exists()


def test_links_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            if link.startswith("http"):
                continue
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_design_names_files_that_exist() -> None:
    text = (ROOT / "docs/design.md").read_text(encoding="utf-8")
    names = set(re.findall(r"\b((?:\w+/)?\w+\.(?:cc|py))\b", text))
    assert len(names) > 25
    present = [
        path.as_posix()
        for top in ("csrc", "torch_ckpt", "tests")
        for path in (ROOT / top).rglob("*.*")
    ]
    for name in names:
        assert any(path.endswith(f"/{name}") for path in present), name
