"""Namespaces that the whole command runs in, so that nothing it does outlives it.

Mounts, loop devices (they are released with their mount), servers and network links belong to
namespaces whose first process is this command: whatever ends it, the kernel ends them."""

from __future__ import annotations

import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile

MARK = "TORCH_CKPT_FILESYSTEMS_FOLDER"
UNSHARE = (
    *("unshare", "--mount", "--propagation", "private", "--net", "--uts", "--ipc"),
    *("--pid", "--fork", "--kill-child", "--mount-proc"),
)
TESTS = pathlib.Path(__file__).resolve().parents[1]
REPOSITORY = TESTS.parent


def why_not() -> str | None:
    """Why namespaces, mounts and loop devices cannot be had here; None where they can."""
    if os.geteuid() != 0:
        return "needs root, for mounts and namespaces"
    for tool in ("unshare", "setpriv", "mount", "losetup", "ip"):
        if shutil.which(tool) is None:
            return f"needs the command {tool}"
    tried = subprocess.run(
        [*UNSHARE, "sh", "-c", "mount -t tmpfs none /mnt && losetup -f"], capture_output=True
    )
    if tried.returncode != 0:
        return f"needs mounts, namespaces and loop devices: {tried.stderr.decode().strip()}"
    return None


def folder() -> pathlib.Path | None:
    """Inside: for all files of this run, and gone when it ends."""
    return pathlib.Path(os.environ[MARK]) if MARK in os.environ else None


def environment() -> dict[str, str]:
    """With which a Python process finds the package, and the modules beside this one."""
    path = [REPOSITORY, TESTS / "filesystems", TESTS / "faults"]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "OMP_NUM_THREADS": "1",
    }


def enter(arguments: list[str], results: pathlib.Path) -> int:
    """Run this command again inside; its exit status. Whatever ends this process ends it and all
    that it made."""
    command = [sys.executable, "-m", "tests.filesystems", *arguments]
    with tempfile.TemporaryDirectory(dir=results, prefix="run-") as made:
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *UNSHARE, *command],
            cwd=REPOSITORY,
            env={**environment(), MARK: made},
        )

        def stop(number: int, frame: object) -> None:
            process.kill()  # and, by --kill-child, all inside

        signal.signal(signal.SIGINT, stop)
        signal.signal(signal.SIGTERM, stop)
        status = process.wait()
    return status if status >= 0 else 128 - status
