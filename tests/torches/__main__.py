"""python -m tests.torches [TORCH[@PYTHON] ...] [-k EXPRESSION]

Runs the tests that meet torch on each torch and Python that is named (all of ALL, if none is), with
the libraries that the build of this checkout made: one build serves them all. Each gets a virtual
environment of its own, of up to 5 GB, which is removed before the next one is made. Then it writes
docs/versions.md where none of ALL is missing, else a page beside it in build/torches.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.environment import commit, version

from .environments import FOLDER, REPOSITORY, NotHad, environment

HERE = f"{sys.version_info.major}.{sys.version_info.minor}"
# The newest of each minor release that is promised, here; the oldest and the newest Python.
ALL = (
    *(f"{torch}@{HERE}" for torch in ("2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")),
    *("2.10.0@3.10", "2.14.1@3.12", "2.15.0@3.13"),
)
TESTS_SECONDS = 3600
# Files of tests/python that hardly meet torch, take other packages along, or measure; and
# libtorch: its example is built by CMake, which wants the CUDA toolkit for a CUDA build of torch.
LEFT_OUT = (
    *("test_cli", "test_bench", "test_package", "test_demo", "test_filesystems", "test_libtorch"),
    *("test_readme", "test_reference", "test_structure", "test_layering", "test_fuzz_seeds"),
    *("test_parser_differential", "test_direct_io", "test_directory_kills", "test_host_memory"),
    *("test_others", "test_megatron", "test_clients_killed", "test_extras", "test_torches"),
)
PAGE = REPOSITORY / "docs" / "versions.md"
HEAD = """# Versions of torch and Python

Written by `./dev torches`{which}; nothing here is typed by hand. The tests of `dcp/`, `patching/`
and the operators ran on each torch below, in an environment of its own, {date} at commit {commit}.
One build of the two libraries, made with torch {built}, served them all. What differs
between these torches, `torch_ckpt/torch_private.py` knows. A build "+cu" ran without a GPU.

"""


def tests() -> list[str]:
    """The files that are run."""
    found = sorted((REPOSITORY / "tests/python").glob("test_*.py"))
    return [
        str(file.relative_to(REPOSITORY)) for file in found if not file.stem.startswith(LEFT_OUT)
    ]


def counts(output: str) -> dict[str, int]:
    """Of pytest's last line: {"passed": 12, "failed": 1}."""
    lines = [line for line in output.splitlines() if re.search(r" in \d+\.\d+s", line)]
    found = re.findall(r"(\d+) (passed|failed|skipped|errors?)", lines[-1]) if lines else []
    return {what.rstrip("s"): int(number) for number, what in found}


def failures(output: str) -> list[str]:
    """The tests that failed."""
    return re.findall(r"^(?:FAILED|ERROR) (?:tests/python/)?(\S+)", output, re.MULTILINE)


def try_one(torch: str, python: str, only: str) -> list[str]:
    """A row of the table, and the tests that failed after it."""
    log = FOLDER / f"torch-{torch}-python-{python}.log"
    try:
        with environment(torch, python) as made:
            words = [str(made.interpreter), "-m", "pytest", "-q", "-n", "3", "--dist", "loadfile"]
            words += ["-p", "no:cacheprovider", *(["-k", only] if only else []), *tests()]
            path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
            settings = {**os.environ, "PYTHONPATH": path, "PATH": path_with(made.interpreter)}
            try:
                done = subprocess.run(
                    words,
                    cwd=REPOSITORY,
                    env=settings,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    timeout=TESTS_SECONDS,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                return [torch, python, "", f"not done after {TESTS_SECONDS} s"]
            log.write_text(done.stdout)
            found = counts(done.stdout)
            outcome = ", ".join(f"{number} {what}" for what, number in found.items())
            if done.returncode == 0:
                outcome = f"passed: {found['passed']} tests"
            size = f"{made.bytes / 1e9:.1f} GB"
            row = [made.torch, made.python, size, outcome or f"pytest ended with {done.returncode}"]
            return [*row, *failures(done.stdout)]
    except NotHad as error:
        return [torch, python, "", f"could not be had: {error}"]


def path_with(interpreter: Path) -> str:
    return os.pathsep.join([str(interpreter.parent), os.environ["PATH"]])


def page(rows: Sequence[Sequence[str]], which: str = "") -> str:
    """Markdown."""
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    built = version("torch")
    lines = [["torch", "Python", "environment", "outcome"], ["---"] * 4]
    lines += [[cell.replace("|", "\\|") for cell in row[:4]] for row in rows]
    text = HEAD.format(which=which, date=today, commit=commit(), built=built)
    text += "".join(f"| {' | '.join(line)} |\n" for line in lines)
    for row in rows:
        text += "".join(f"\n- {row[0]}, Python {row[1]}: `{name}`" for name in row[4:])
    return text.rstrip("\n") + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="./dev torches", description=(__doc__ or "").split("\n")[2]
    )
    parser.add_argument("which", nargs="*", metavar="TORCH[@PYTHON]", help=f"of {', '.join(ALL)}")
    parser.add_argument(
        "-k", dest="only", default="", help="only tests that match, as pytest has it"
    )
    options = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    rows = []
    for name in options.which or ALL:
        torch, _, python = name.partition("@")
        print(f"== torch {torch}, Python {python or HERE}", file=sys.stderr, flush=True)
        rows.append(try_one(torch, python or HERE, options.only))
        print(f"   {rows[-1][3]}", *rows[-1][4:], sep="\n   ", file=sys.stderr, flush=True)
    whole = not options.only and set(ALL) <= set(options.which or ALL)
    to = PAGE if whole else FOLDER / PAGE.name
    which = "" if whole else f" {' '.join(sys.argv[1:])}"
    to.write_text(page(rows, which), encoding="utf-8")
    print(f"wrote {to.relative_to(REPOSITORY)}")
    return 0 if all(row[3].startswith(("passed", "could not be had")) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
