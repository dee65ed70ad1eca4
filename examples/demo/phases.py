"""The three training runs: unbroken, with a rank lost in the middle of a save, resumed."""

from __future__ import annotations

import dataclasses
import shutil
import time
from pathlib import Path
from typing import Any

import checkpoints
from launch import DemoError, Job
from report import Report
from settings import Settings

_ATTEMPTS = 3


@dataclasses.dataclass(frozen=True)
class Loss:
    """What was found on disk when a rank was lost, and after that."""

    step: int  # of the interrupted save
    trained: int  # last step that had been trained
    files: int  # files in the staging directory
    size: int  # their bytes
    expected: int  # bytes of the checkpoint before it, which is as large
    committed: bool  # whether the interrupted checkpoint counts as whole; must be False
    attempts: int
    ended: float  # seconds until the other ranks had ended
    resume_from: Path


def steps_of(job: Job) -> dict[int, dict[str, Any]]:
    """Returns the training steps a job has reported, by step number."""
    return {event["step"]: event for event in job.find("step")}


def follow(job: Job, report: Report, steps: int) -> None:
    """Waits for the job's end and shows its steps meanwhile."""
    with report.progress(job.name, job.world, steps) as show:
        ended = False
        while not ended:
            ended = job.ended()
            for event in job.poll():
                show(event)
            time.sleep(0.02)


def unbroken(settings: Settings, work: Path, report: Report) -> Job:
    """Trains from the start to the end without saving anything."""
    with Job("unbroken", "train.py", settings.world_before, work, []) as job:
        follow(job, report, settings.steps)
    return job


def resumed(settings: Settings, work: Path, root: Path, report: Report) -> Job:
    """Goes on from the newest whole checkpoint with half of the processes."""
    with Job("resumed", "train.py", settings.world_after, work, [f"--root={root}"]) as job:
        follow(job, report, settings.steps)
    return job


def lost(settings: Settings, work: Path, root: Path, report: Report) -> tuple[Job, Loss]:
    """Trains with saves and loses a rank in the middle of one.

    A save takes a fraction of a second, so the directory is watched every half millisecond. When
    enough of a save is in its staging directory, all processes are stopped (SIGSTOP) to look
    closely: if the save is not committed, the last rank is killed where it stands (SIGKILL), and
    the others go on, until they notice. If it was just committed, all go on and the next save is
    tried.
    """
    for attempt in range(1, _ATTEMPTS + 1):
        if attempt > 1:
            report.note("No save could be caught in the middle; starting this run again.")
            shutil.rmtree(root)
        with Job("lost", "train.py", settings.world_before, work, [f"--root={root}"]) as job:
            loss = _lose_in_a_save(job, settings, root, report, attempt)
        if loss is not None:
            return job, loss
    raise DemoError(
        f"no save of {_ATTEMPTS} runs lasted long enough to be caught in the middle; "
        "a larger model (settings.py) makes saves longer"
    )


def _lose_in_a_save(
    job: Job, settings: Settings, root: Path, report: Report, attempt: int
) -> Loss | None:
    targets = list(range(settings.kill_at, settings.steps + 1, settings.save_every))
    # A loss with a quarter of the bytes written says more than one at the first file; the last
    # saves of a run are taken as they come.
    shares = {step: 0.0 if step in targets[-2:] else 0.25 for step in targets}
    with report.progress(job.name, job.world, settings.steps) as show:
        while not job.ended():
            for event in job.poll():
                show(event)
            for step, share in shares.items():
                if not _in_progress(root, step, share):
                    continue
                job.freeze()
                if not _in_progress(root, step, share):
                    job.thaw()  # committed meanwhile: this save was too fast
                    continue
                files, size = _staged(root, step)
                seconds = job.lose(settings.world_before - 1)
                if checkpoints.is_whole(checkpoints.directory_of(root, step)):
                    return None  # it had done its part, and the others could end the save
                return _examine(job, root, step, attempt, files, size, seconds)
            time.sleep(0.0005)
        job.poll()
    return None


def _in_progress(root: Path, step: int, share: float) -> bool:
    """Whether the save of ``step`` has files in staging, ``share`` of its bytes, and no commit.

    There must be a whole checkpoint before it, which is what the resume needs.
    """
    target = checkpoints.directory_of(root, step)
    staging = checkpoints.staging_of(target)
    if staging is None or checkpoints.is_whole(target):
        return False
    before = checkpoints.latest_whole(root)
    if before is None or (staging / checkpoints.COMMIT_MARK).exists():
        return False
    files, size = checkpoints.files_in(staging)
    return files > 0 and size >= share * checkpoints.files_in(before)[1]


def _staged(root: Path, step: int) -> tuple[int, int]:
    """Files and bytes that the save of ``step`` has in staging."""
    staging = checkpoints.staging_of(checkpoints.directory_of(root, step))
    return checkpoints.files_in(staging) if staging is not None else (0, 0)


def _examine(
    job: Job, root: Path, step: int, attempt: int, files: int, size: int, seconds: float
) -> Loss:
    newest = checkpoints.latest_whole(root)
    if newest is None:
        raise DemoError(f"there is no whole checkpoint below {root} after the loss")
    return Loss(
        step=step,
        trained=max(steps_of(job)),
        files=files,
        size=size,
        expected=checkpoints.files_in(newest)[1],
        committed=checkpoints.is_whole(checkpoints.directory_of(root, step)),
        attempts=attempt,
        ended=seconds,
        resume_from=newest,
    )
