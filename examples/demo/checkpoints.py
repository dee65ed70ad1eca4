"""Where the demo keeps its checkpoints and which of them are whole, as seen from outside.

The training script uses a Checkpointer; this is the view of the process that kills a rank. The
checkpoint of step 20 is the directory ``step-20`` below the root. torch_ckpt writes it under a
staging name and puts ``torch_ckpt.json`` in last, so the file says that the save is whole.
"""

from __future__ import annotations

from pathlib import Path

COMMIT_MARK = "torch_ckpt.json"
_STAGE_SUFFIX = ".torch_ckpt-stage"


def directory_of(root: Path, step: int) -> Path:
    return root / f"step-{step}"


def step_of(directory: Path) -> int:
    return int(directory.name.removeprefix("step-"))


def is_whole(directory: Path) -> bool:
    return (directory / COMMIT_MARK).is_file()


def whole(root: Path) -> list[Path]:
    """Returns the committed checkpoints below ``root``, oldest first."""
    return sorted((d for d in root.glob("step-*") if is_whole(d)), key=step_of)


def latest_whole(root: Path) -> Path | None:
    """Returns the newest committed checkpoint, or None if there is none."""
    found = whole(root)
    return found[-1] if found else None


def staging_of(directory: Path) -> Path | None:
    """Returns where a save to ``directory`` is now in progress (or was, when it died)."""
    beside = directory.with_name(f".{directory.name}{_STAGE_SUFFIX}")
    for candidate in (beside, directory / _STAGE_SUFFIX):
        if candidate.is_dir():
            return candidate
    return None


def left_behind(root: Path) -> list[Path]:
    """Returns all staging directories below ``root``."""
    return [p for p in root.rglob(f"*{_STAGE_SUFFIX}") if p.is_dir()]


def files_in(directory: Path) -> tuple[int, int]:
    """Returns how many files ``directory`` holds and their bytes; files may vanish meanwhile."""
    count = size = 0
    for path in directory.rglob("*"):
        try:
            if path.is_file():
                size += path.stat().st_size
                count += 1
        except FileNotFoundError:
            continue
    return count, size
