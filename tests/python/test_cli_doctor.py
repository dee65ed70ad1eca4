"""torch-ckpt doctor: what it finds on real file systems, on full and read-only ones, and when
single calls fail."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import torch_ckpt
from torch_ckpt.cli import cli
from torch_ckpt.cli.checks import checks_of
from torch_ckpt.native import core

PACKAGE = str(Path(torch_ckpt.__file__).parents[1])


def run(*arguments: Any) -> Result:
    return CliRunner().invoke(cli, ["doctor", *(str(each) for each in arguments)])


def states(fields: dict[str, Any]) -> dict[str, str]:
    return {check["name"]: check["state"] for check in fields["checks"]}


def stopped(directory: Path) -> subprocess.Popen[str]:
    """In a process of its own, which has written a part of its file and waits for SIGCONT."""
    process = subprocess.Popen(
        [sys.executable, "-m", "torch_ckpt", "doctor", str(directory), "--mib", "64"],
        env={**os.environ, "PYTHONPATH": PACKAGE, "TORCH_CKPT_FAULTS": "pwrite:20:stop"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's & has it ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])
    return process


def started(
    *arguments: Any, faults: str = "", before: str = ""
) -> subprocess.CompletedProcess[str]:
    """In a process of its own, which may have faults, or a command of a shell before it."""
    words = [sys.executable, "-m", "torch_ckpt", "doctor", *(str(each) for each in arguments)]
    if before:
        words = [*("unshare", "-rm", "sh", "-c", f'{before} && exec "$@"', "sh"), *words]
    environment = {**os.environ, "PYTHONPATH": PACKAGE, "TORCH_CKPT_FAULTS": faults}
    if not faults:
        del environment["TORCH_CKPT_FAULTS"]
    return subprocess.run(words, capture_output=True, text=True, env=environment, check=False)


def test_a_directory_that_saves_work_in(tmp_path: Path) -> None:
    done = run(tmp_path, "--mib", 8)
    assert done.exit_code == 0, done.output
    assert list(tmp_path.iterdir()) == []
    lines = done.stdout.splitlines()
    assert lines[0] == f"directory {tmp_path}" and lines[-1] == "saves work here"
    rows = [line for line in lines if line.startswith("  ")]
    # States stand in one column.
    assert len({re.search(r"  (ok|slow|missing)(  |$)", row).start() for row in rows}) == 1  # type: ignore[union-attr]
    assert "\x1b" not in done.stdout
    names = [row[2:].split("  ")[0] for row in rows]
    for name in (
        *("file system", "free space", "write and rename", "direct I/O", "fallocate"),
        *("rename, no replace", "locks", "fsync", "write", "read"),
        *("CPUs", "CRC-32C", "huge pages", "shared huge pages", "/dev/shm", "locked memory"),
        *("open files", "CUDA driver", "torch_ckpt", "Python", "Linux", "torch"),
    ):
        assert names.count(name) == 1, name
    assert run(tmp_path, "--mib", 0, "-q").output == ""


def test_facts_are_those_of_the_system(tmp_path: Path) -> None:
    fields = json.loads(run(tmp_path, "--mib", 8, "--json").stdout)
    assert fields["works"] is True and fields["path"] == str(tmp_path)
    directory, machine = fields["facts"]["directory"], fields["facts"]["machine"]
    of_system = os.statvfs(tmp_path)
    assert directory["space"]["total"] == of_system.f_blocks * of_system.f_frsize
    assert directory["speed"]["bytes"] == 8 << 20
    assert directory["speed"]["write_s"] > 0 and directory["speed"]["read_s"] > 0
    assert directory["lock"] == {"excludes": True, "by_file": False}
    assert machine["cpus"] == len(os.sched_getaffinity(0))
    assert machine["open_files"] > 0
    assert machine["crc32c"] == core.call({"op": "arena"})["crc32c"]


def test_no_speed_is_measured_where_none_is_asked_for(tmp_path: Path) -> None:
    fields = json.loads(run(tmp_path, "--mib", 0, "--json").stdout)
    assert fields["works"] is True and fields["facts"]["directory"]["speed"] is None
    assert not {"write", "read", "speed"} & set(states(fields))


@pytest.mark.parametrize("mib", [1, 2, 3, 4, 5])
def test_a_little_is_measured_too(tmp_path: Path, mib: int) -> None:
    fields = json.loads(run(tmp_path, "--mib", mib, "--json").stdout)
    assert fields["works"] is True
    assert fields["facts"]["directory"]["speed"]["bytes"] == 4 << 20


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="there is no /dev/shm")
def test_memory_is_said_to_be_memory() -> None:
    done = run("/dev/shm", "--mib", 4)
    assert done.exit_code == 0 and "tmpfs, local" in done.stdout
    assert "nothing of it survives a reboot" in done.stdout
    assert not [name for name in os.listdir("/dev/shm") if "doctor" in name]


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    """What is to be made is tried in the nearest directory that is there."""
    done = run(tmp_path / "not" / "yet", "--mib", "0", "--json")
    assert done.exit_code == 0 and json.loads(done.stdout)["path"] == str(tmp_path)
    assert os.listdir(tmp_path) == []
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        done = run(path)
        assert done.exit_code == 1 and done.stdout == ""
        (line,) = done.stderr.splitlines()
        assert str(tmp_path / "file") in line and line.endswith("(check the path)")
    assert run("s3://bucket/x").exit_code == 2


def test_a_file_system_that_takes_no_files() -> None:
    done = run("/proc", "--json")
    assert done.exit_code == 1
    fields = json.loads(done.stdout)
    assert fields["works"] is False and states(fields)["write and rename"] == "missing"
    assert run("/proc").stdout.splitlines()[-1] == "saves cannot work here: write and rename"


def tmpfs(options: str, path: Path) -> str:
    """A command that mounts one; skips the test where this process may not."""
    mount = f"mount -t tmpfs -o {options} none {path}"
    done = subprocess.run(["unshare", "-rm", "sh", "-c", mount], capture_output=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"no mount here: {done.stderr.decode()}")
    return mount


def test_a_full_file_system(tmp_path: Path) -> None:
    fill = f"{tmpfs('size=1m', tmp_path)} && (cat /dev/zero > {tmp_path}/full 2> /dev/null || true)"
    done = started(tmp_path, "--json", before=fill)
    assert done.returncode == 1, done.stderr
    fields = json.loads(done.stdout)
    found = states(fields)
    assert found["free space"] == found["write and rename"] == found["speed"] == "missing"
    assert "No space left on device" in done.stdout


def test_a_small_file_system_is_measured_with_less(tmp_path: Path) -> None:
    done = started(tmp_path, "--json", before=tmpfs("size=34m", tmp_path))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["facts"]["directory"]["speed"]["bytes"] == 16 << 20


def test_no_room_to_measure_is_room_for_saves(tmp_path: Path) -> None:
    done = started(tmp_path, before=tmpfs("size=6m", tmp_path))
    assert done.returncode == 0, done.stdout
    assert "not measured" in done.stdout and done.stdout.endswith("saves work here\n")


def test_a_read_only_file_system(tmp_path: Path) -> None:
    done = started(tmp_path, before=f"{tmpfs('ro', tmp_path)}")
    assert done.returncode == 1
    assert "Read-only file system" in done.stdout


@pytest.mark.parametrize(
    ("faults", "name", "state", "works"),
    [
        ("mkdirat:1:EACCES", "write and rename", "missing", False),
        ("renameat:1:EOPNOTSUPP", "write and rename", "missing", False),
        ("fallocate:1:EOPNOTSUPP", "fallocate", "slow", True),
        ("renameat2:1:EINVAL", "rename, no replace", "slow", True),
        ("direct:1:EINVAL", "direct I/O", "slow", True),
        ("fsync:1:EIO", "fsync", "missing", False),
        ("flock:1:EIO", "locks", "missing", False),
        ("pwrite:20:ENOSPC", "speed", "missing", False),
        ("fstatvfs:1:EIO", "free space", "missing", False),
    ],
)
def test_what_fails_is_found_and_leaves_nothing(
    fault_points: None, tmp_path: Path, faults: str, name: str, state: str, works: bool
) -> None:
    done = started(tmp_path, "--mib", 64, "--json", faults=faults)
    assert done.returncode == (0 if works else 1), done.stderr
    assert states(json.loads(done.stdout))[name] == state
    assert list(tmp_path.iterdir()) == []
    assert done.stderr == ""


# Before its file has a size, and while it is written.
@pytest.mark.parametrize("fault", ["fallocate:2:kill", "pwrite:20:kill"])
def test_a_kill_leaves_no_large_file_and_the_next_one_removes_the_rest(
    fault_points: None, tmp_path: Path, fault: str
) -> None:
    done = started(tmp_path, "--mib", 64, faults=fault)
    assert done.returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert re.fullmatch(r"\.torch_ckpt-doctor-[0-9a-f]{16}", left.name)
    assert sum(path.stat().st_size for path in left.iterdir()) < 1 << 20
    assert run(tmp_path, "--mib", 0).exit_code == 0
    assert list(tmp_path.iterdir()) == []


def test_one_that_still_runs_keeps_its_directory(fault_points: None, tmp_path: Path) -> None:
    with stopped(tmp_path) as process:
        there = list(tmp_path.iterdir())
        assert run(tmp_path, "--mib", 0).exit_code == 0
        assert list(tmp_path.iterdir()) == there != []
        process.terminate()
        process.send_signal(signal.SIGCONT)
        process.communicate(timeout=60)
    assert run(tmp_path, "--mib", 0).exit_code == 0
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_ends_it_and_leaves_nothing(fault_points: None, tmp_path: Path) -> None:
    with stopped(tmp_path) as process:
        assert list(tmp_path.iterdir()) != []
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGCONT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130 and said.splitlines() == ["torch-ckpt: interrupted"]
    assert list(tmp_path.iterdir()) == []


def test_a_cancelled_probe_raises(tmp_path: Path) -> None:
    job = core.call({"op": "job_create"})["job"]
    core.call({"op": "job_cancel", "job": job})
    with pytest.raises(torch_ckpt.CancelledError):
        core.call({"op": "probe", "path": str(tmp_path), "bytes": 64 << 20, "job": job})
    core.call({"op": "job_free", "job": job})
    assert list(tmp_path.iterdir()) == []


def test_torch_is_not_imported(tmp_path: Path) -> None:
    code = (
        "import sys\nsys.argv[1:] = ['doctor', sys.argv[1], '--mib', '0']\n"
        "from torch_ckpt.cli import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
        "assert 'torch' not in sys.modules\n"
    )
    environment = {**os.environ, "PYTHONPATH": PACKAGE}
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# --- what findings mean -----------------------------------------------------------

GOOD: dict[str, Any] = {
    "directory": {
        "file_system": "nfs",
        "shared": True,
        "space": {"total": 1 << 40, "available": 1 << 39},
        "writes": {"works": True},
        "direct_io": {"works": True, "offset_unit": 512, "memory_unit": 4},
        "allocate": {"works": True},
        "no_replace": {"works": True},
        "lock": {"excludes": True, "by_file": False},
        "sync": {"seconds": 0.001},
        "speed": {"bytes": 10**9, "write_s": 0.5, "read_s": 0.25},
    },
    "machine": {
        "cpus": 8,
        "crc32c": "sse4.2",
        "huge_pages": "always",
        "shared_huge_pages": "advise",
        "shared_memory": {"total": 1 << 30, "available": 1 << 29},
        "locked_memory": None,
        "open_files": None,
        "cuda": {},
    },
}


def test_nothing_is_slow_where_all_is_good() -> None:
    checks = checks_of(GOOD, measured=True)
    assert {check.state for check in checks} == {"ok"}
    found = {check.name: (check.found, check.means) for check in checks}
    assert found["write"] == ("2 GB/s (953.7 MiB)", "100 GB are written by one rank in 50 s")
    assert found["locked memory"][0] == found["open files"][0] == "no limit"


@pytest.mark.parametrize(
    ("part", "key", "fact", "name", "found", "state"),
    [
        ("directory", "space", {"total": 0, "available": 0}, "free space", "not told", "ok"),
        ("directory", "space", {"total": 9, "available": 0}, "free space", "0 B of 9 B", "missing"),
        ("directory", "lock", {"excludes": True, "by_file": True}, "locks", "by a file", "slow"),
        ("directory", "lock", {"excludes": False, "by_file": False}, "locks", "do not", "slow"),
        ("directory", "sync", {"seconds": 0.25}, "fsync", "250 ms", "slow"),
        (
            *("directory", "speed", {"bytes": 10**8, "write_s": 1.0, "read_s": 0.01}),
            *("write", "0.1 GB/s", "slow"),
        ),
        ("directory", "speed", None, "speed", "not measured", "missing"),
        ("machine", "huge_pages", "never", "huge pages", "never", "slow"),
        ("machine", "shared_huge_pages", "", "shared huge pages", "none", "slow"),
        ("machine", "crc32c", "portable", "CRC-32C", "portable", "slow"),
        ("machine", "open_files", 256, "open files", "256", "slow"),
        ("machine", "cuda", {"error": {"message": "no"}}, "CUDA driver", "none", "missing"),
    ],
)
def test_what_is_not_good(
    part: str, key: str, fact: Any, name: str, found: str, state: str
) -> None:
    facts = {**GOOD, part: {**GOOD[part], key: fact}}
    (check,) = [each for each in checks_of(facts, measured=True) if each.name == name]
    assert check.found.startswith(found) and check.state == state
    assert check.means
    assert check.needed == (state == "missing" and name == "free space")
    others = [each for each in checks_of(facts, measured=True) if each.name != name]
    assert all(each.state == "ok" for each in others)
