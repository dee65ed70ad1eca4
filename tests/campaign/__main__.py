"""python -m tests.campaign [PART ...] [--minutes MINUTES] [--targets TARGET ...]

Runs what is too long for CI: `faults` (a fault at every system call), `tests` (the long Python
tests), `megatron` (tests with other releases of Megatron Core), `optional` and `frameworks` (tests with packages
that CI does not install), `orders` (commits in every order, and of 8,192 files), `gcc11` (a build
by the oldest compiler) and `fuzz` (every fuzz target, or those named, for MINUTES each); all of
them, if none is named. What came of each is kept in docs/campaign_results.json, and
docs/campaign_results.md is written of all that is there, after each: the parts may be run on
different days. Logs are in build/campaign.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.environment import commit
from tests.campaign import optional

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER = REPOSITORY / "build" / "campaign"
PAGE = REPOSITORY / "docs" / "campaign_results.md"
RECORDS = PAGE.with_suffix(".json")
# Files with tests that only run here, or that try more here.
LONG = (
    *("parser_differential", "package", "ranks", "simulated_ranks", "benchmarks", "bench_async"),
    *("matrix", "final_layout", "demo", "stock_faults", "megatron_training", "dist_kills"),
    "training_kills",
    *("dist_checkpointing", "megatron", "megatron_zarr", "example_megatron"),
)
Record = dict[str, Any]
Row = tuple[str, str]
HEAD = """# Results of the last campaign

Written by `./dev campaign`; nothing here is typed by hand.

A fault is a kill, an error, an interrupt or a short count at one system call of a save,
a consolidation or a removal of tensors (*succeeded*: it got over that, or made fewer calls).
Tested after each: the checkpoint is the old one or the new one, whole (a first save: none or
the new one), and the next save leaves nothing behind; the next removal finishes.
*Stricter*: refused for a reason in `docs/format.md`, where the crate accepts. Fuzz targets run
under the address and undefined-behaviour sanitizers, with inputs of up to 1 MB.

| what | outcome | of |
|---|---|---|
"""


def targets() -> list[str]:
    """The fuzz targets that CMake knows."""
    listed = (REPOSITORY / "cmake" / "Fuzz.cmake").read_text()
    return sorted(re.findall(r"tests/fuzz/(\w+_fuzz)\.cc", listed))


def tried(output: str) -> list[Row]:
    """What the tests print of the faults and headers that they tried, and pytest's last line."""
    found: list[Row] = re.findall(r"^tried: ([^:]*): (.*)", output, re.MULTILINE)
    last = re.findall(r"^=* ?(\d.* in [\d.]+s.*?) ?=*$", output, re.MULTILINE)
    return [*found, *(("pytest", words) for words in last[-1:])]


def other_megatron(output: str) -> list[Row]:
    """What pytest says of other releases of Megatron Core."""
    _, *parts = re.split(r"^== megatron-core (\S+)$", output, flags=re.MULTILINE)
    return [
        (f"tests that meet Megatron Core, with {version}", words)
        for version, of_version in zip(parts[::2], parts[1::2], strict=True)
        for _, words in tried(of_version)
    ]


def of_packages(group: str, what: str) -> Callable[[str], list[Row]]:
    """What pytest says of a group of packages that CI does not install."""

    def rows(output: str) -> list[Row]:
        named = f"tests of {what} {' and '.join(optional.GROUPS[group].packages())}"
        return [(named, words) for _, words in tried(output)]

    return rows


def optional_words(group: str) -> list[str | Path]:
    return [sys.executable, "-m", "tests.campaign.optional", group]


def orders(output: str) -> list[Row]:
    """How many orders the interleaver tried, and what commits of many files took."""
    count = sum(int(number) for number in re.findall(r"^ORDERS (\d+)", output, re.MULTILINE))
    what = "orders of savers, removers, recoverers and readers of one directory"
    rows = [(what, f"{count} tried")] if count else []
    return [*rows, *re.findall(r"^COMMIT (.*): (.*)", output, re.MULTILINE)]


def cpp(output: str) -> list[Row]:
    """The C++ tests that passed."""
    count = sum(map(int, re.findall(r"^\[  PASSED  \] (\d+) test", output, re.MULTILINE)))
    return [("C++ tests, all built by g++-11", f"{count} passed")] if count else []


def executions(output: str) -> dict[str, Row]:
    """By fuzz target: for how long, and how many inputs, in what `./dev fuzz` prints."""
    found: dict[str, Row] = {}
    name, seconds = "", 0
    for line in output.splitlines():
        if began := re.match(r"== (\w+_fuzz) for (\d+) s", line):
            name, seconds = began[1], int(began[2])
        elif count := re.match(r"stat::number_of_executed_units:\s*(\d+)", line):
            found[name] = (f"{name} for {seconds / 60:g} min", f"{count[1]} inputs")
    return found


def failures(output: str) -> list[str]:
    """The fuzz targets that `./dev fuzz` says have failed, in its last line."""
    last = re.search(r"^dev: failed: (.*)\Z", output.rstrip(), re.MULTILINE)
    return last[1].split(",") if last else []


BUILT = commit()  # what runs was built of, whatever is committed meanwhile


def run(part: str, command: Sequence[str | Path]) -> tuple[str, bool]:
    """What the command said, which goes into a file as it comes, and whether it ended well."""
    log = FOLDER / f"{part}.log"
    print(f"== {part} (log: {log.relative_to(REPOSITORY)})", file=sys.stderr, flush=True)
    environment = {**os.environ, "TORCH_CKPT_FULL": "1"}
    with log.open("w") as file:
        done = subprocess.run(
            command,
            cwd=REPOSITORY,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            check=False,
        )
    return log.read_text(errors="replace"), done.returncode == 0


def keep(part: str, rows: Sequence[Row], good: bool) -> None:
    """Keeps what came of a part, and writes the page anew."""
    if not good:
        rows = [*rows, (part, "FAILED")]
    date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    record = {"commit": BUILT, "date": date, "rows": rows}
    records = {**recorded(), part: record}
    RECORDS.write_text(json.dumps(records, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    PAGE.write_text(page(records), encoding="utf-8")


def recorded() -> dict[str, Record]:
    """What came of each part, and of each fuzz target, when it was run last."""
    found: dict[str, Record] = json.loads(RECORDS.read_text()) if RECORDS.exists() else {}
    return found


def page(records: Mapping[str, Record]) -> str:
    """Markdown. A part that has not been run says so."""
    lines = []
    for part in (*PARTS, *targets()):
        if part == "fuzz":
            continue
        if part not in records:
            lines.append(f"| {part} | not run yet | |\n")
            continue
        of = records[part]
        at = f"{of['commit']}, {of['date']}"
        lines += [f"| {what} | {outcome} | {at} |\n" for what, outcome in of["rows"]]
    return HEAD + "".join(lines)


def pytest_words(*words: str) -> list[str | Path]:
    return [sys.executable, "-m", "pytest", "-q", "-rP", "-n", "auto", *words]


def tests_words() -> list[str | Path]:
    # A worker runs all of a file: some tests follow from those before them.
    return pytest_words("--dist", "loadfile", *(f"tests/python/test_{name}.py" for name in LONG))


def orders_words() -> list[str | Path]:
    return [REPOSITORY / "build/dev/core_tests", "--gtest_filter=*Interleaved*:*MillisecondACall"]


def fuzz(minutes: float, names: Sequence[str]) -> bool:
    words: list[str | Path] = ["./dev", "fuzz", str(round(minutes * 60)), *names]
    output, good = run("fuzz", words)
    found = executions(output)
    failed = failures(output)
    for name in names:
        rows = [found[name]] if name in found else []
        keep(name, rows, good=name in found and name not in failed)
    return good


PARTS: dict[str, tuple[Callable[[], list[str | Path]], Callable[[str], list[Row]]] | None] = {
    "faults": (lambda: pytest_words("tests/faults"), tried),
    "tests": (tests_words, tried),
    "megatron": (lambda: [sys.executable, "-m", "tests.campaign.megatron"], other_megatron),
    "optional": (lambda: optional_words("optional"), of_packages("optional", "tensors of")),
    "frameworks": (lambda: optional_words("frameworks"), of_packages("frameworks", "runs of")),
    "orders": (orders_words, orders),
    "gcc11": (lambda: ["./dev", "gcc11"], cpp),
    "fuzz": None,  # a record for each target
}


def main() -> int:
    description = (__doc__ or "").partition("\n\n")[2]
    parser = argparse.ArgumentParser(prog="./dev campaign", description=description)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument(
        "--minutes", type=float, default=60, help="of each fuzz target, default %(default)s"
    )
    parser.add_argument("--targets", nargs="*", metavar="TARGET", help=f"of {', '.join(targets())}")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"there is no part {', '.join(sorted(unknown))}")
    if unknown := set(options.targets or ()) - set(targets()):
        parser.error(f"there is no fuzz target {', '.join(sorted(unknown))}")
    FOLDER.mkdir(parents=True, exist_ok=True)
    good = True
    for part in options.parts or PARTS:
        of = PARTS[part]
        if of is None:
            good &= fuzz(options.minutes, options.targets or targets())
            continue
        words, rows = of
        output, well = run(part, words())
        keep(part, rows(output), well)
        good &= well
    print(PAGE.read_text())
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
