"""What the findings of `torch-ckpt doctor` mean for saves."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from torch_ckpt.cli.output import format_bytes
from torch_ckpt.native import core

State = Literal["ok", "slow", "missing"]

_SLOW_SYNC_S = 0.05
_SLOW_BYTES_S = 200e6  # a tenth of what a local disk of today does
_FEW_FILES = 1024
_BYTES_SHOWN = 100e9


@dataclass(frozen=True, slots=True)
class Check:
    """A finding, and in one phrase what it means for saves.

    needed: whether saves fail where it is missing.
    """

    group: str
    name: str
    found: str
    state: State
    means: str
    needed: bool = False


def checks_of(facts: dict[str, Any], *, measured: bool) -> list[Check]:
    """`facts`: the answer of the core's request "probe". `measured`: whether it was to measure the
    speeds."""
    return [
        *_of_directory(facts["directory"], measured),
        *_of_machine(facts["machine"]),
        *_of_versions(),
    ]


def _ok(name: str, found: str, means: str) -> Check:
    return Check("directory", name, found, "ok", means)


def _slow(name: str, found: str, means: str) -> Check:
    return Check("directory", name, found, "slow", means)


def _missing(name: str, found: str, means: str) -> Check:
    return Check("directory", name, found, "missing", means, needed=True)


def _of_directory(facts: dict[str, Any], measured: bool) -> Iterator[Check]:
    yield _of_file_system(facts)
    rows: list[tuple[str, str, Any]] = [
        ("space", "free space", _of_space),
        ("writes", "write and rename", _of_writes),
        ("direct_io", "direct I/O", _of_direct_io),
        ("allocate", "fallocate", _of_allocate),
        ("no_replace", "rename, no replace", _of_no_replace),
        ("lock", "locks", _of_lock),
        ("sync", "fsync", _of_sync),
    ]
    for key, name, check in rows:
        if key in facts:  # nothing is tried where nothing can be written
            yield _failed(name, facts[key]) if "error" in facts[key] else check(name, facts[key])
    if measured and "speed" in facts:
        yield from _of_speed(facts["speed"])


def _failed(name: str, fact: dict[str, Any]) -> Check:
    return _missing(name, "fails", fact["error"]["message"])


def _of_file_system(facts: dict[str, Any]) -> Check:
    kind = facts["file_system"]
    means = "other nodes do not see it"
    if facts["shared"]:
        means = "other nodes may change it, so nothing is called missing at first sight"
    elif kind in ("tmpfs", "ramfs"):
        means = "in memory: nothing of it survives a reboot"
    return _ok("file system", f"{kind}, {'shared' if facts['shared'] else 'local'}", means)


def _of_space(name: str, fact: dict[str, Any]) -> Check:
    if fact["total"] == 0:
        return _ok(name, "not told", "a full disk is an error of the save")
    found = f"{format_bytes(fact['available'])} of {format_bytes(fact['total'])}"
    if fact["available"] == 0:
        return _missing(name, found, "there is no room for a checkpoint")
    return _ok(name, found, "a save needs room for the new checkpoint beside the old one")


def _of_writes(name: str, _: dict[str, Any]) -> Check:
    return _ok(name, "work", "files are written out of order, and renamed to commit")


def _of_direct_io(name: str, fact: dict[str, Any]) -> Check:
    if not fact["works"]:
        means = "all goes through the page cache: more CPU, and memory that others had"
        return _slow(name, "refused", means)
    units = f"by {fact['offset_unit']} B, memory by {fact['memory_unit']} B"
    return _ok(name, units, "large files go past the page cache")


def _of_allocate(name: str, fact: dict[str, Any]) -> Check:
    if not fact["works"]:
        return _slow(name, "lacks", "a full disk is met in the middle of a save")
    return _ok(name, "works", "a full disk is known before a byte is written")


def _of_no_replace(name: str, fact: dict[str, Any]) -> Check:
    if not fact["works"]:
        means = "a look before each rename takes its place, and is not as safe"
        return _slow(name, "lacks", means)
    return _ok(name, "works", "a first save never replaces what another has just made")


def _of_lock(name: str, fact: dict[str, Any]) -> Check:
    if not fact["excludes"]:
        means = "two saves into one directory are told apart when they commit, not before"
        return _slow(name, "do not exclude", means)
    if fact["by_file"]:
        means = "after the crash of a node its lock file may have to be removed by hand"
        return _slow(name, "by a file", means)
    return _ok(name, "by the kernel", "of two saves into one directory the second is refused")


def _of_sync(name: str, fact: dict[str, Any]) -> Check:
    seconds = fact["seconds"]
    means = "a commit waits for several, one after the other"
    make = _slow if seconds > _SLOW_SYNC_S else _ok
    return make(name, f"{seconds * 1e3:.3g} ms", means)


def _of_speed(fact: dict[str, Any] | None) -> Iterator[Check]:
    if fact is None:  # what that means for saves, the free space says
        means = "there is no room for a file to measure with"
        yield Check("directory", "speed", "not measured", "missing", means)
        return
    if "error" in fact:
        yield _failed("speed", fact)
        return
    for name, done, key in (("write", "written", "write_s"), ("read", "read", "read_s")):
        speed = fact["bytes"] / max(fact[key], 1e-9)
        make = _slow if speed < _SLOW_BYTES_S else _ok
        found = f"{speed / 1e9:.3g} GB/s ({format_bytes(fact['bytes'])})"
        took = _duration(_BYTES_SHOWN / speed)
        yield make(name, found, f"100 GB are {done} by one rank in {took}")


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _of_machine(facts: dict[str, Any]) -> Iterator[Check]:
    def check(name: str, found: str, means: str, state: State = "ok") -> Check:
        return Check("machine", name, found, state, means)

    yield check("CPUs", str(facts["cpus"]), "a rank writes and reads with four threads or more")
    if facts["crc32c"] == "portable":
        yield check("CRC-32C", "portable", "without an instruction digests are slow", "slow")
    else:
        yield check("CRC-32C", facts["crc32c"], "digests cost less than copying")
    for key, name, what in (
        ("huge_pages", "huge pages", "buffers and copies of states"),
        ("shared_huge_pages", "shared huge pages", "states that another process saves"),
    ):
        if (setting := facts[key]) in ("", "never", "deny"):
            yield check(name, setting or "none", f"pages of 4 KiB for {what}", "slow")
        else:
            yield check(name, setting, f"for {what}")
    space = facts["shared_memory"]
    found = "none"
    if "error" not in space:
        found = f"{format_bytes(space['available'])} of {format_bytes(space['total'])}"
    yield check("/dev/shm", found, "saves do not use it: they share memory by memfd")
    locked = facts["locked_memory"]
    found = "no limit" if locked is None else format_bytes(locked)
    yield check("locked memory", found, "saves lock memory through the CUDA driver alone")
    files = facts["open_files"]
    if files is not None and files < _FEW_FILES:
        means = "large checkpoints have more files: raise the limit (ulimit -n)"
        yield check("open files", f"{files:,}", means, "slow")
    else:
        found = "no limit" if files is None else f"{files:,}"
        yield check("open files", found, "files stay open while they are read")
    if "error" in facts["cuda"]:
        yield check(
            "CUDA driver", "none", "CUDA tensors cannot be saved; CPU tensors can", "missing"
        )
    else:
        yield check("CUDA driver", "loads", "CUDA tensors are copied by it")


def _of_versions() -> Iterator[Check]:
    versions = {
        "torch_ckpt": core.version(),
        "Python": platform.python_version(),
        "Linux": platform.release(),
    }
    for name, version in versions.items():
        yield Check("versions", name, version, "ok", "")
    from importlib import metadata  # as long as `--help` takes for all the rest of this file

    try:
        yield Check("versions", "torch", metadata.version("torch"), "ok", "")
    except metadata.PackageNotFoundError:
        yield Check("versions", "torch", "none", "missing", "saves and loads need it", needed=True)
