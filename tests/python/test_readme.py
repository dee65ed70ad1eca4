"""What the README, the guide and the page of operators show works when pasted."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from launch import warm

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")),
    *(ROOT / "docs").glob("*.md"),
]


def fences(page: str, language: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [code for marked, code in found if marked == language]


README = fences("README.md", "python")
EXAMPLES = [
    *README,
    *fences("docs/guide.md", "python"),
    *fences("docs/training.md", "python"),
    *fences("docs/tensor_mapping.md", "python"),
]
OPERATORS = fences("docs/operators.md", "python")


def run(arguments: list[str], folder: Path) -> str:
    done = subprocess.run(arguments, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_example(code: str, folder: Path) -> None:
    """As a file, in an empty folder, and in a process that has imported torch already."""
    file, output, errors = (
        folder.parent / f"{folder.name}{end}" for end in (".py", ".out", ".err")
    )
    file.write_text(code, encoding="utf-8")
    pid = warm().start([str(file)], {}, output, errors, folder)
    status = warm().wait(pid, 120)
    assert status == 0, f"{status}: {errors.read_text()}"
    for line in re.findall(r"^print\(.*\)  # (.*)$", code, re.MULTILINE):
        assert line in output.read_text().splitlines()


NOTHING_DEPRECATED = "import warnings; warnings.simplefilter('error', DeprecationWarning)\n"


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_every_example_runs(number: int, tmp_path: Path) -> None:
    run_example(NOTHING_DEPRECATED + EXAMPLES[number], tmp_path)


@pytest.mark.parametrize("number", range(len(OPERATORS)))
def test_every_example_of_the_operators_runs(number: int, tmp_path: Path) -> None:
    """Inductor uses what torch deprecates."""
    run_example(OPERATORS[number], tmp_path)


def test_the_commands_run(tmp_path: Path) -> None:
    """On the checkpoint that the first example saves."""
    (commands,) = [code for code in fences("README.md", "") if code.startswith("torch-ckpt ")]
    run([sys.executable, "-W", "error::DeprecationWarning", "-c", README[0]], tmp_path)
    for line in commands.splitlines():
        program, *arguments = shlex.split(line, comments=True)
        assert program == "torch-ckpt"
        assert run([sys.executable, "-m", "torch_ckpt", *arguments], tmp_path)
    assert (tmp_path / "consolidated" / "model-00001-of-00001.safetensors").exists()


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 160


FIGURES = [
    line
    for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and "](docs/benchmark_results_" in line
]


@pytest.mark.parametrize("line", FIGURES, ids=lambda line: line.split("|")[1].strip()[:40])
def test_figures_are_those_of_the_pages(line: str) -> None:
    """Each number of a row is on the page that it names, in the same unit or in milliseconds."""
    *cells, link = line.strip("| ").split(" | ")
    (page,) = re.findall(r"\((docs/[^)]*)\)", link)
    measured = (ROOT / page).read_text(encoding="utf-8")
    there = {float(word) for word in re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?![\w.])", measured)}
    shown = [cell for cell in cells[1:] if cell.strip()]
    assert len(shown) >= 3
    for number in re.findall(r"\d+\.\d+", " ".join(shown)):
        digits = len(number.partition(".")[2])
        in_ms = {round(value / 1000, digits) for value in there}
        assert float(number) in there | in_ms, f"{number} is not on {page}"


def anchors(page: Path) -> set[str]:
    """What GitHub makes of the headings of `page`."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(
        r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
    )
    for link, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", text):
        if link.startswith("http"):
            continue
        target = page.parent / link if link else page
        assert target.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link}#{anchor}"


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
