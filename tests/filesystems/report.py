"""The page: what holds on which file system, what was refused, how fast it was."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from .sandbox import REPOSITORY
from .scenarios import SCENARIOS

Record = dict[str, Any]

# The cases of tests/python/ranks/filesystem.py, which torchrun runs.
CASES = {
    "save_and_overwrite": "save, and save over it",
    "async_save": "async save",
    "final_layout": "save into final files",
    "rows_over_nodes": "final files: rows over the nodes, a ring on each",
    "columns_over_nodes": "final files: columns over the nodes, assembled",
    "consolidation": "consolidation on every rank, also in place",
    "load_resharded": "load by other shardings than saved",
    "verify_on_every_rank": "verify, on every rank",
    "directory_of_a_run": "CheckpointDirectory with keep_last",
    "torchrun": "torchrun ends well",
}
HEAD = """# Real file systems

Written by `./dev filesystems`; nothing here is typed by hand. Each file system is made anew, from
Debian's packages, and mounted on one node, or shared by two: processes with network, mounts,
process numbers, host name and boot id of their own, joined by a switch, beside a server of the same
kind. torchrun launches four ranks with Gloo, two on each of two nodes. "Another node" is another
process where there is only one. NFS is not among them: it needs a client in the kernel, and the
kernel of the machines that this ran on has none (`/proc/filesystems`).

"""


def page(records: Sequence[Record]) -> str:
    """Markdown."""
    tried = [record for record in records if "refusal" not in record["results"]]
    parts = [HEAD, "## What holds\n\n", holds(tried), failures(tried)]
    if refused := [record for record in records if "refusal" in record["results"]]:
        parts += ["\n## What is refused\n\n", refusals(refused)]
    parts += ["\n## What was seen\n\n", seen(tried)]
    parts += ["\n## How fast it was\n\n", speeds(tried)]
    parts += ["\n## What the file systems say of themselves\n\n", facts(records)]
    parts += ["\n## What was tried\n\n", versions(records)]
    return "".join(parts)


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "".join("| " + " | ".join(row) + " |\n" for row in rows)


def one_line(text: str, limit: int) -> str:
    """For a table's cell."""
    if "Traceback" in text:  # of a rank: what was raised
        lines = [line for line in text.splitlines() if re.match(r"[\w.]+(Error|Timeout)\b", line)]
        text = lines[-1] if lines else text
    text = re.sub(r"/[^ '\"]*?/mnt/", ".../", text).replace(f"{REPOSITORY}/", "")
    flat = " ".join(text.split()).replace("|", "\\|")
    return flat if len(flat) <= limit else flat[: limit - 3] + "..."


def titles() -> dict[str, str]:
    return {**CASES, **{name: scenario.title for name, scenario in SCENARIOS.items()}}


def mark(record: Record, name: str) -> str:
    result = record["results"].get(name)
    if result is None:
        shared_only = name in SCENARIOS and SCENARIOS[name].shared_only
        return "-" if shared_only and record["nodes"] == 1 or name == "torchrun" else "not run"
    return "yes" if result["holds"] else "**no**"


def holds(records: Sequence[Record]) -> str:
    lines = [
        [title, *(mark(record, name) for record in records)]
        for name, title in titles().items()
        if any(name in record["results"] for record in records)
    ]
    return table(["", *(record["name"] for record in records)], lines)


def failures(records: Sequence[Record]) -> str:
    lines = [
        f"- **{record['name']}**, {titles().get(name, name)}: {one_line(result['text'], 700)}\n"
        for record in records
        for name, result in record["results"].items()
        if not result["holds"]
    ]
    return "\nWhat does not hold:\n\n" + "".join(lines) if lines else "\nAll of it holds.\n"


def refusals(records: Sequence[Record]) -> str:
    lines = [
        [
            record["name"],
            mark(record, "refusal"),
            one_line(record["results"]["refusal"]["text"], 500),
        ]
        for record in records
    ]
    return table(["file system", "refused before any byte", "the error"], lines)


def seen(records: Sequence[Record]) -> str:
    parts = []
    for name, scenario in SCENARIOS.items():
        lines = [
            f"- {record['name']}: {one_line(record['results'][name]['text'], 400)}\n"
            for record in records
            if name in record["results"] and record["results"][name]["holds"]
        ]
        if lines:
            title = scenario.title[0].upper() + scenario.title[1:]
            parts.append(f"**{title}.**\n\n{''.join(lines)}\n")
    return "".join(parts).rstrip() + "\n"


def speeds(records: Sequence[Record]) -> str:
    def rate(record: Record, what: str) -> str:
        speed = record.get("speed") or {}
        return f"{speed['bytes'] / speed[what] / 1e9:.2f}" if what in speed else "-"

    kinds = ("first save", "save", "load")
    lines = [[record["name"], *(rate(record, what) for what in kinds)] for record in records]
    note = (
        "GB/s of 268 MB by four ranks, once each and with whatever else the machine did, servers "
        "and both nodes on its two cores: indicative, no benchmark. A load finds in memory what "
        "the file system has kept there.\n\n"
    )
    return note + table(["", "first save", "save over it", "load"], lines)


def facts(records: Sequence[Record]) -> str:
    names = list(dict.fromkeys(name for record in records for name in record["facts"]))
    lines = [[name, *(record["facts"].get(name, "-") for record in records)] for name in names]
    return table(["", *(record["name"] for record in records)], lines)


def versions(records: Sequence[Record]) -> str:
    lines = [
        [record["name"], record["version"], record["kernel"], record["commit"], record["date"]]
        for record in records
    ]
    return table(["", "version", "kernel", "commit", "date"], lines)
