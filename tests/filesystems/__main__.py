"""python -m tests.filesystems [NAME ...] [--only SCENARIO ...] [--results FOLDER] [--page FILE]

Tries the product on the file systems that are named (all, if none is), each made anew and mounted
on one or two nodes in namespaces of this command, and keeps what it saw in build/filesystems, one
JSON file each. Then it writes the page of all of them, which is that of docs/ where none is missing,
else one beside them. `ranks` as a scenario is what torchrun launches.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import json
import pathlib
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.environment import commit

from . import mounts, nodes, report, sandbox, servers
from .launch import torchrun
from .locks import lock_facts
from .outages import refusal
from .scenarios import SCENARIOS
from .trial import Trial

RESULTS = sandbox.REPOSITORY / "build" / "filesystems"
PAGE = sandbox.REPOSITORY / "docs" / "filesystems.md"
ALL = {kind.name: kind for kind in (*mounts.LOCAL, *servers.SHARED, *servers.OTHERS)}
START_SECONDS, RANKS_SECONDS = 180, 600


class TooLong(Exception):
    """A scenario is over its time."""


@contextlib.contextmanager
def time_box(seconds: int) -> Iterator[None]:
    def ring(number: int, frame: object) -> None:
        raise TooLong(f"not done after {seconds} s")

    signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


class Running:
    """A file system with its server and nodes, up or to be started; its files are in `folder`."""

    def __init__(self, kind: mounts.FileSystem, folder: pathlib.Path) -> None:
        self.kind, self.folder = kind, folder
        self.site: mounts.Site | None = None

    def up(self) -> mounts.Site:
        if self.site is None:
            folder = pathlib.Path(tempfile.mkdtemp(prefix=f"{self.kind.name}-", dir=self.folder))
            server = nodes.Node("server", 1, folder, torch=False)
            some = [nodes.Node(f"node{i}", i + 1, folder) for i in range(1, self.kind.nodes + 1)]
            self.site = mounts.Site(folder, folder / "mnt", server, some)
            if self.kind.nodes > 1:
                server.start()
                self.kind.start(self.site)
            for node in some:
                node.start()
                self.kind.mount(self.site, node)
        return self.site

    def down(self) -> None:
        if self.site is not None:
            for node in (*self.site.nodes, self.site.server):
                node.stop()
            shutil.rmtree(self.site.folder, ignore_errors=True)
        self.site = None


def try_one(kind: mounts.FileSystem, only: list[str], folder: pathlib.Path) -> dict[str, Any]:
    """All scenarios on one file system. After one that fails everything is made anew."""
    running = Running(kind, folder)
    record: dict[str, Any] = {
        "name": kind.name,
        "nodes": kind.nodes,
        "commit": commit(),
        "kernel": platform.release(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "results": {},
    }
    try:
        with time_box(START_SECONDS):
            site = running.up()
            record["version"] = kind.version(site)
            record["facts"] = site.nodes[0].call("ask", path=str(site.mount / "facts"))
            if kind.nodes > 1:
                record["facts"] |= lock_facts(site)
        if kind.refused:
            attempt(record, running, "refusal", lambda: refusal(Trial(site, kind, "refusal")), 60)
            return record
        if not only or "ranks" in only:
            ranks(record, running)
        for scenario in SCENARIOS.values():
            if scenario.shared_only and kind.nodes == 1 or only and scenario.name not in only:
                continue
            name, run = scenario.name, scenario.run
            attempt(
                record,
                running,
                name,
                lambda name=name, run=run: run(Trial(running.up(), kind, name)),
                scenario.limit,
            )
    finally:
        running.down()
    return record


def ranks(record: dict[str, Any], running: Running) -> None:
    def launch() -> str:
        outcome, record["speed"] = torchrun(running.up())
        for case, said in outcome.items():
            keep(record, case, said == "ok", "" if said == "ok" else said)
        if not all(said == "ok" for said in outcome.values()):
            raise AssertionError("a case failed")
        return ""

    attempt(record, running, "ranks", launch, RANKS_SECONDS)
    record["results"].pop("ranks")


def attempt(record: dict[str, Any], running: Running, name: str, run: Any, limit: int) -> None:
    begin = time.monotonic()
    try:
        with time_box(limit):
            keep(record, name, True, run())
    except (AssertionError, nodes.NodeError, TooLong, OSError) as error:
        keep(record, name, False, f"{type(error).__name__}: {error}")
        with contextlib.suppress(Exception):
            running.down()
    print(f"   ({time.monotonic() - begin:.0f} s)", file=sys.stderr, flush=True)


def keep(record: dict[str, Any], name: str, holds: bool, text: str) -> None:
    record["results"][name] = {"holds": holds, "text": text}
    mark = "ok  " if holds else "FAIL"
    print(f"{mark} {record['name']}: {name}: {text}", file=sys.stderr, flush=True)


def store(record: dict[str, Any], only: list[str], results: pathlib.Path) -> None:
    """A part of the scenarios replaces that part of what an earlier run has kept."""
    file = results / f"{record['name']}.json"
    if only and file.exists():
        old = json.loads(file.read_text())
        record["results"] = {**old["results"], **record["results"]}
        record.setdefault("speed", old.get("speed", {}))
        if old["commit"] != record["commit"]:
            record["commit"] = f"{old['commit']}, partly {record['commit']}"
    file.write_text(json.dumps(record, indent=1))


def install(kinds: list[mounts.FileSystem]) -> None:
    """The Debian packages that are missing; before the sandbox, which has no network."""
    wanted = sorted({package for kind in kinds for package in kind.packages} | {"iproute2"})
    asked = subprocess.run(
        ["dpkg-query", "-W", "-f", "${Package} ${Status}\n", *wanted],
        capture_output=True,
        text=True,
    )
    there = {line.split()[0] for line in asked.stdout.splitlines() if line.endswith(" installed")}
    missing = [package for package in wanted if package not in there]
    if not missing:
        return
    print(f"== apt-get install {' '.join(missing)}", file=sys.stderr)
    subprocess.run(["apt-get", "update", "-q"], stdout=subprocess.DEVNULL, check=True)
    subprocess.run(
        [
            "env",
            "DEBIAN_FRONTEND=noninteractive",
            "RUNLEVEL=1",
            "apt-get",
            "install",
            "-y",
            "-q",
            "--no-install-recommends",
            *missing,
        ],
        stdout=subprocess.DEVNULL,
        check=True,
    )


@dataclasses.dataclass
class Options:
    names: list[str]
    only: list[str]
    results: pathlib.Path
    page: pathlib.Path | None


def parse(arguments: list[str]) -> Options:
    parser = argparse.ArgumentParser(prog="./dev filesystems", description=__doc__.split("\n\n")[1])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(ALL))
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="SCENARIO", help=", ".join(["ranks", *SCENARIOS])
    )
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS, help="a folder")
    parser.add_argument("--page", type=pathlib.Path, help="the page to write")
    given = parser.parse_args(arguments)
    for name in given.names:
        if name not in ALL:
            parser.error(f"no file system {name!r}; there are {', '.join(ALL)}")
    return Options(given.names or list(ALL), given.only, given.results.absolute(), given.page)


def main() -> int:
    options = parse(sys.argv[1:])
    kinds = [ALL[name] for name in options.names]
    options.results.mkdir(parents=True, exist_ok=True)
    folder = sandbox.folder()
    if folder is None:
        if reason := sandbox.why_not():
            print(f"./dev filesystems {reason}", file=sys.stderr)
            return 1
        install(kinds)
        return sandbox.enter(sys.argv[1:], options.results)
    nodes.make_switch()
    for kind in kinds:
        print(f"== {kind.name}", file=sys.stderr, flush=True)
        record = try_one(kind, options.only, folder)
        store(record, options.only, options.results)
    files = (options.results / f"{name}.json" for name in ALL)
    records = [json.loads(file.read_text()) for file in files if file.exists()]
    page = options.page or (PAGE if len(records) == len(ALL) else options.results / "page.md")
    page.write_text(report.page(records))
    failed = sum(not result["holds"] for record in records for result in record["results"].values())
    print(f"{failed} do not hold; see {page}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
