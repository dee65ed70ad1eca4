"""python -m tests.torches [TORCH[@PYTHON] ...] [-k EXPRESSION]

Runs the tests that meet torch on each torch and Python that is named (all of ALL, if none is), with
the libraries that the build of this checkout made: one build serves them all. Each gets a virtual
environment of its own, of up to 5 GB, which is removed before the next one is made. What came of it
is kept in docs/versions.json, and docs/versions.md is written of all that is there, after each.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.environment import commit, version

from .environments import FOLDER, REPOSITORY, NotHad, environment

HERE = f"{sys.version_info.major}.{sys.version_info.minor}"
# The newest of each minor release that is promised, with the Pythons that are promised among them.
ALL = (
    *("2.10.0@3.10", f"2.11.0@{HERE}", "2.12.1@3.12"),
    *(f"2.13.0@{HERE}", f"2.14.1@{HERE}", "2.15.0@3.13"),
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
RECORDS = PAGE.with_suffix(".json")
Record = dict[str, Any]
HEAD = """# Versions of torch and Python

Written by `./dev torches`; nothing here is typed by hand. The tests that meet
torch run on each torch below, in an environment of its own that is removed afterwards. One build
of the two libraries, made with torch {built}, serves them all. What differs between these torches,
`torch_ckpt/native/torch_private.py` knows. A build with "+cu" in its name ran without a GPU.

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


def recorded() -> dict[str, Record]:
    """What was tried last under each name."""
    found: dict[str, Record] = json.loads(RECORDS.read_text()) if RECORDS.exists() else {}
    return found


def failures(output: str) -> list[str]:
    """The tests that failed."""
    return re.findall(r"^(?:FAILED|ERROR) (?:tests/python/)?(.+?)(?: - .*)?$", output, re.MULTILINE)


def try_one(torch: str, python: str, only: str) -> Record:
    """What came of it."""
    log = FOLDER / f"torch-{torch}-python-{python}.log"
    at = {"date": datetime.datetime.now(datetime.timezone.utc).date().isoformat()}
    record: Record = {**at, "commit": commit(), "torch": torch, "python": python, "gb": 0.0}
    try:
        with environment(torch, python) as made:
            words = [str(made.interpreter), "-m", "pytest", "-q", "-n", "3", "--dist", "loadfile"]
            words += ["-p", "no:cacheprovider", *(["-k", only] if only else []), *tests()]
            record |= {"torch": made.torch, "python": made.python, "gb": made.bytes / 1e9}
            done = subprocess.run(
                words,
                cwd=REPOSITORY,
                env={**os.environ, "PATH": path_with(made.interpreter)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=TESTS_SECONDS,
                check=False,
            )
    except subprocess.TimeoutExpired:
        return {**record, "outcome": f"not done after {TESTS_SECONDS} s"}
    except NotHad as error:
        return {**record, "outcome": f"could not be had: {error}"}
    log.write_text(done.stdout)
    found = counts(done.stdout)
    outcome = ", ".join(f"{number} {what}" for what, number in found.items())
    if done.returncode == 0:
        outcome = f"passed: {found['passed']} tests"
    outcome = outcome or f"pytest ended with {done.returncode}"
    return {**record, "outcome": outcome, "failed": failures(done.stdout)}


def path_with(interpreter: Path) -> str:
    return os.pathsep.join([str(interpreter.parent), os.environ["PATH"]])


def page(records: Mapping[str, Record]) -> str:
    """Markdown. `records` by names as in ALL."""
    lines = [["torch", "Python", "environment", "outcome", "of"], ["---"] * 5]
    after = []
    for name in [*ALL, *sorted(set(records) - set(ALL))]:
        torch, _, python = name.partition("@")
        of = records.get(name)
        if of is None:
            lines.append([torch, python, "", "not tried yet", ""])
            continue
        size = f"{of['gb']:.1f} GB" if of["gb"] else ""
        at = f"{of['commit']}, {of['date']}"
        lines.append([of["torch"], of["python"], size, of["outcome"], at])
        after += [
            f"- {of['torch']}, Python {of['python']}: `{test}`" for test in of.get("failed", ())
        ]
    table = "".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines
    )
    failed = "".join(f"\n{line}" for line in after) + "\n" if after else ""
    return HEAD.format(built=version("torch")) + table + failed


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
    good = True
    for name in options.which or ALL:
        torch, _, python = name.partition("@")
        python = python or HERE
        print(f"== torch {torch}, Python {python}", file=sys.stderr, flush=True)
        record = try_one(torch, python, options.only)
        print("  ", record["outcome"], *record.get("failed", ()), sep="\n   ", file=sys.stderr)
        good &= record["outcome"].startswith(("passed", "could not be had"))
        if not options.only:  # at once: all of them take hours
            records = {**recorded(), f"{torch}@{python}": record}
            RECORDS.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
            PAGE.write_text(page(records), encoding="utf-8")
            print(f"wrote {PAGE.relative_to(REPOSITORY)}", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
