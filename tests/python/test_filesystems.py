"""The campaign on real file systems (`./dev filesystems`) starts, and works on one of them, where
this machine lets it: root, namespaces and loop devices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "tests.filesystems"]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, **environment},
    )


def test_it_says_what_it_knows() -> None:
    done = run("--help")
    assert done.returncode == 0, done.stderr
    for name in ("ext4", "xfs-16k", "btrfs", "tmpfs", "glusterfs", "sshfs", "moosefs"):
        assert name in done.stdout
    done = run("no-such-file-system")
    assert done.returncode == 2
    assert "no file system 'no-such-file-system'" in done.stderr


def test_ext4_and_nothing_is_left(tmp_path: Path) -> None:
    sys.path.insert(0, str(REPOSITORY))
    try:
        from tests.filesystems import sandbox
    finally:
        sys.path.remove(str(REPOSITORY))
    if reason := sandbox.why_not():
        pytest.skip(f"./dev filesystems {reason}")
    before = mounted()
    page = tmp_path / "page.md"
    done = run("ext4", "--only", "met", "--results", str(tmp_path), "--page", str(page))
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "ext4.json").read_text())
    assert record["results"]["met"] == {"holds": True, "text": "refused by name"}
    assert record["facts"]["fsync of a directory"] == "yes"
    assert "| a save that is in progress elsewhere is met | yes |" in page.read_text()
    assert mounted() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ext4.json", "page.md"]


def mounted() -> tuple[str, set[str]]:
    """Mounts and the images behind loop devices."""
    images = {file.read_text() for file in Path("/sys/block").glob("loop*/loop/backing_file")}
    return Path("/proc/self/mounts").read_text(), images
