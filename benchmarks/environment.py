"""What a result depends on besides the code: the machine, its disk, the versions."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
TELLING_OPTIONS = ("discard", "data=", "barrier", "nobarrier", "sync", "compress")


RIVALS = ("torch_checkpointing", "fastsafetensors", "runai-model-streamer", "instanttensor")
IDLE = 0.5
"""The load average of a machine that does nothing else."""


def wait_until_idle(patience: float, look: float = 5.0) -> bool:
    """Waits until the load average of a minute is at most IDLE, ``patience`` seconds at most."""
    until = time.monotonic() + patience
    while os.getloadavg()[0] > IDLE:
        if time.monotonic() >= until:
            return False
        time.sleep(min(look, max(0.0, until - time.monotonic())))
    return True


def describe(directory: Path) -> dict[str, str]:
    """Facts to print above the results; no names of hosts, users or paths."""
    load = os.getloadavg()
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "CPU": f"{cpu_model()}, {os.cpu_count()} logical",
        "GPU": gpu(),
        "memory": f"{memory_field('MemTotal') / 1e9:.1f} GB",
        "kernel": f"{platform.system()} {platform.release()}",
        "file system": file_system(directory),
        "load average before": f"{load[0]:.2f} (1 min), {load[1]:.2f} (5 min)",
        "Python": platform.python_version(),
        "torch": version("torch"),
        "safetensors": version("safetensors"),
        **{name: version(name) for name in RIVALS},
        "torch_ckpt": f"{version('torch_ckpt')}, commit {commit()}",
    }


def cpu_model() -> str:
    """The model name of the first CPU; the architecture where the kernel names no model."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def gpu() -> str:
    """The devices of NVIDIA's and their driver; "none" where there are none."""
    asked = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "none"
    return "; ".join(done.stdout.splitlines()) if done.returncode == 0 else "none"


def memory_field(name: str) -> int:
    """A line of /proc/meminfo, in bytes."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        key, value = line.split(":", 1)
        if key == name:
            return int(value.split()[0]) * 1024
    raise KeyError(f"/proc/meminfo has no {name}")


def file_system(directory: Path) -> str:
    """Type of the file system that holds ``directory``, and the options that tell on speed."""
    wanted = directory.resolve()
    best = ("/", "unknown")
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, point, kind, options = line.split()[:4]
        point = point.encode().decode("unicode_escape")
        # Of mounts over each other at one point, the last line is the visible one.
        if wanted.is_relative_to(point) and len(point) >= len(best[0]):
            kept = [word for word in options.split(",") if word.startswith(TELLING_OPTIONS)]
            best = (point, " ".join([kind, *kept]))
    return best[1]


def version(package: str) -> str:
    """The installed version of a package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


# What benchmarks, the campaign and the trials of file systems and versions of torch write.
PAGES = (
    *("docs/benchmark_results_*.md", "docs/benchmarks.md", "docs/campaign_results.md"),
    *("docs/filesystems.md", "docs/versions.md"),
)


def commit() -> str:
    """The commit of this checkout, with a plus sign if tracked files differ from it, but for PAGES:
    one run after the other writes these."""

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", *words], cwd=REPOSITORY, capture_output=True, text=True)
        except FileNotFoundError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    head = git("rev-parse", "--short", "HEAD")
    if not head:
        return "unknown"
    others = [f":(exclude){page}" for page in PAGES]
    differing = git("status", "--porcelain", "--untracked-files=no", "--", ".", *others)
    return head + ("+" if differing else "")
