"""The checkpoints in a directory, one for each step of a run: which there are, in what state."""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any

from torch_ckpt.checkpoint.metadata import decoded
from torch_ckpt.checkpoint.names import MARK, TORCH_FILES, staged_beside, step_in, target_of
from torch_ckpt.cli.leaves import values_of
from torch_ckpt.cli.output import count, format_bytes, printable
from torch_ckpt.cli.text import bold, columns, natural, red
from torch_ckpt.errors import CheckpointError, IncompleteError
from torch_ckpt.native import core
from torch_ckpt.native.opened import Listing, OpenedCheckpoint
from torch_ckpt.options import local_path

_LEAVES = ("step", "global_step", "iteration")

WHOLE, INCOMPLETE, WRITING, ABANDONED, UNREADABLE = (
    "whole",
    "incomplete",
    "being written",
    "abandoned",
    "unreadable",
)


def step_of(opened: OpenedCheckpoint, listing: Listing) -> int | None:
    """The step of a checkpoint: as a CheckpointDirectory has said it, else by its name, else by a
    leaf that is called so."""
    step = decoded(listing.metadata).get("step")
    if type(step) is int:
        return step
    step = step_in(os.path.basename(opened.path))
    if step is not None:
        return step
    names = set(_LEAVES).intersection(listing.objects())
    values = values_of(opened, listing, names)
    found = (values.get(name) for name in _LEAVES)
    return next((value for value in found if type(value) is int), None)


def find_steps(root: str) -> list[dict[str, Any]]:
    """The checkpoints right below `root` by their steps, then those without by their names: "name",
    "step", "state", "format", "bytes", "modified" (seconds since 1970) and "error", what is wrong.

    Other children are passed over; damage of one is its state. Raises OSError.
    """
    root = local_path(root)
    with os.scandir(root) as children:
        names = {child.name: os.path.isdir(child.path) for child in children}
    found = []
    for name, is_directory in names.items():
        target = target_of(name)
        if target is not None and target not in names:
            found.append(_staged(root, target))
        elif not name.startswith(".") and _may_be_one(root, name, is_directory):
            found.append(_look(os.path.join(root, name)))
    return sorted(
        found, key=lambda each: (each["step"] is None, each["step"], natural(each["name"]))
    )


def _may_be_one(root: str, name: str, is_directory: bool) -> bool:
    if step_in(name) is not None:
        return is_directory or name.endswith(TORCH_FILES)
    return is_directory and _has_marks(os.path.join(root, name))


def _has_marks(path: str) -> bool:
    """Whether directory `path` has files that are called as those of a checkpoint are."""
    with contextlib.suppress(OSError):
        return any(map(MARK.fullmatch, os.listdir(path)))
    return False


def _is_empty(path: str) -> bool:
    with contextlib.suppress(OSError):
        return not os.listdir(path)
    return False


def _entry(path: str) -> dict[str, Any]:
    name = os.path.basename(path)
    entry: dict[str, Any] = {"name": name, "step": step_in(name), "state": WHOLE}
    return {**entry, "format": None, "bytes": None, "modified": None, "error": None}


def _look(path: str) -> dict[str, Any]:
    entry = _entry(path)
    try:
        opened = OpenedCheckpoint(path)
        listing = opened.listing(tensors=False)
        entry["format"] = listing.format
        entry["bytes"] = sum(file.bytes for file in opened.files())
        # As inspecting it alone does.
        opened.listing(tensors=False, check_files=True)
    except (CheckpointError, OSError) as error:
        # What is there must be the beginning of a checkpoint, or nothing.
        begun = _has_marks(path) or _is_empty(path)
        state = INCOMPLETE if isinstance(error, IncompleteError) and begun else UNREADABLE
        entry.update(state=state, bytes=None, error=_short(error, path))
    with contextlib.suppress(OSError):
        entry["bytes"], entry["modified"] = _measured(path, entry["bytes"])
    if entry["state"] == INCOMPLETE and os.path.isdir(path) and _in_use(path):
        entry.update(state=WRITING, error=None)
    return entry


def _short(error: CheckpointError | OSError, path: str) -> str:
    """The error without `path`, which it is about."""
    said = str(error).replace(f"{path}/", "").removeprefix(f"{path}: ")
    return said if isinstance(error, CheckpointError) else f"cannot be read: {said}"


def _staged(root: str, name: str) -> dict[str, Any]:
    """Of a first save to `name`, which shows there when it is committed."""
    path = os.path.join(root, name)
    entry = _entry(path)
    entry["state"] = WRITING if _in_use(path) else ABANDONED
    if entry["state"] == ABANDONED:
        entry["error"] = "left by a save that died; 'torch-ckpt clean' removes it"
    with contextlib.suppress(OSError):
        entry["bytes"], entry["modified"] = _measured(f"{root}/{staged_beside(name)}", None)
    return entry


def _in_use(path: str) -> bool:
    try:
        places = core.call({"op": "staged_places", "path": path})["places"]
    except (CheckpointError, OSError):
        return False
    return any(place["in_use"] for place in places)


def _measured(path: str, size: int | None) -> tuple[int, float]:
    """Bytes of `path`, those of all that is in it unless `size` says them; and when it was changed
    last, or something right in it."""
    from torch_ckpt.runs.leftovers import tree_bytes  # imports as much as all else of a command

    latest = os.stat(path).st_mtime
    if os.path.isdir(path):
        with os.scandir(path) as children:
            for child in children:
                latest = max(latest, child.stat(follow_symlinks=False).st_mtime)
    return tree_bytes(path) if size is None else size, latest


def steps_text(fields: dict[str, Any]) -> str:
    rows = []
    for each in fields["steps"]:
        size = "" if each["bytes"] is None else format_bytes(each["bytes"])
        when = "" if each["modified"] is None else _time(each["modified"])
        wrong = printable(each["error"] or "")
        row = (printable(each["name"]), each["state"], each["format"] or "", size, when, wrong)
        rows.append(row)
    states = [each["state"] for each in fields["steps"]]
    said = [f"{states.count(state)} {state}" for state in dict.fromkeys(states)]
    head = f"{bold(printable(fields['path']))}: {count(len(rows), 'checkpoint')}, {', '.join(said)}"
    styles = {0: bold, 1: lambda state: state if state == WHOLE else red(state)}
    return "\n".join([head, *(f"  {line}" for line in columns(rows, right={3}, styles=styles))])


def _time(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):  # what a file system may say, and no calendar
        return "?"
