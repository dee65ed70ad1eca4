"""convert to what torch pickles: the engine stages it, proves it and puts it into place."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from foreign_samples import same
from launch import HERE, PACKAGE

import torch_ckpt
from torch_ckpt.native.sessions import ArchiveSession

FORMATS = ("dcp", "torch")
OLD = {"w": torch.zeros(3)}
PROGRAM = (
    "import sys, torch_ckpt, torch_ckpt.conversion.archives\n"
    "print(flush=True)\n"
    "torch_ckpt.convert(*sys.argv[1:], overwrite=True)\n"
)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    torch.save({"w": torch.arange(2_000_000)}, tmp_path / "a.pt")
    return tmp_path / "a.pt"


def begun(faults: str, *arguments: object) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(PACKAGE), str(HERE)]),
        "TORCH_CKPT_FAULTS": faults,
    }
    command = [sys.executable, "-c", PROGRAM, *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True)


def ended(faults: str, *arguments: object) -> tuple[int, str]:
    """The exit status of such a process, and what it said."""
    with begun(faults, *arguments) as process:
        said = process.communicate()[1]
    return process.returncode, said


def check_next(source: Path, target: Path, to: str) -> None:
    """After a kill the old is there or the new, and the next conversion leaves nothing else."""
    wanted = torch_ckpt.load(path=source)
    if target.exists() and not (target.is_dir() and not os.listdir(target)):
        loaded = torch_ckpt.load(path=target)
        assert same(loaded, wanted) or (to == "torch" and same(loaded, OLD))
    if to == "dcp" and target.exists():
        shutil.rmtree(target)  # it may be whole, and none is replaced
    torch_ckpt.convert(source, target, to, overwrite=True)  # type: ignore[arg-type]
    assert same(torch_ckpt.load(path=target), wanted)
    assert sorted(os.listdir(source.parent)) == ["a.pt", "out"]


@pytest.mark.parametrize("to", ["torch_ckpt", "hf", *FORMATS])
def test_a_kill_leaves_the_old_or_the_new(source: Path, to: str) -> None:
    target = source.parent / "out"
    if to == "torch":
        torch.save(OLD, target)
    for delay in (0.0, 0.01, 0.03):
        arguments = [sys.executable, "-c", PROGRAM, str(source), str(target), to]
        with subprocess.Popen(arguments, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()  # it has begun
            time.sleep(delay)
            process.kill()
    check_next(source, target, to)


# While it is filled, and right before and behind the rename.
@pytest.mark.usefixtures("fault_points")
@pytest.mark.parametrize(
    ("to", "at"),
    [
        ("torch", "pwrite:6"),
        ("torch", "renameat:3"),
        ("torch", "fsync:3"),
        ("dcp", "pwrite:6"),
        ("dcp", "renameat:4"),
        ("dcp", "fsync:4"),
    ],
)
def test_a_kill_at_a_point(source: Path, to: str, at: str) -> None:
    target = source.parent / "out"
    if to == "torch":
        torch.save(OLD, target)
    status, said = ended(f"{at}:kill", source, target, to)
    assert status == -signal.SIGKILL, said
    check_next(source, target, to)


@pytest.mark.usefixtures("fault_points")
@pytest.mark.parametrize("to", FORMATS)
def test_where_there_are_no_locks(source: Path, to: str) -> None:
    target = source.parent / "out" / "b"
    status, said = ended("flock:*:EBADF,ofd_lock:*:EBADF", source, target, to)
    assert status == 0, said
    assert os.listdir(target.parent) == ["b"]


@pytest.mark.parametrize("to", FORMATS)
def test_one_at_a_time(source: Path, to: str) -> None:
    target = source.parent / "out"
    with ThreadPoolExecutor(1) as thread:  # what this thread has left open would be over
        other = thread.submit(ArchiveSession, str(target), {"to": to, "overwrite": True}).result()
        with pytest.raises(torch_ckpt.ConflictError, match=r"out.*in progress"):
            torch_ckpt.convert(source, target, to)  # type: ignore[arg-type]
        with pytest.raises(torch_ckpt.ConflictError, match=r"out.*in progress"):
            torch_ckpt.save(OLD, target)
        assert os.path.isdir(other.staging)
        other.end()
    assert os.listdir(source.parent) == ["a.pt"]


@pytest.mark.usefixtures("fault_points")
@pytest.mark.parametrize("to", FORMATS)
def test_what_is_not_as_it_was_written_is_not_put_into_place(source: Path, to: str) -> None:
    crc = zlib.crc32(torch.arange(2_000_000).numpy().tobytes()).to_bytes(4, "little")
    with begun("fsync:1:stop", source, source.parent / "out", to) as process:
        os.waitpid(process.pid, os.WUNTRACED)
        name = "__0_0.distcp" if to == "dcp" else "archive.pt"
        (place,) = source.parent.glob(f".out.torch_ckpt-stage/*/{name}")
        content = bytearray(place.read_bytes())
        content[content.rindex(crc)] ^= 1  # in the archive's directory
        place.write_bytes(content)
        process.send_signal(signal.SIGCONT)
        said = process.communicate()[1]
    assert "CorruptError" in said and f"{name}: is not what was written to it" in said
    assert os.listdir(source.parent) == ["a.pt"]
