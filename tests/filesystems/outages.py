"""Disks that are full, servers that stall or die."""

from __future__ import annotations

import errno
import signal
import time

from .busy import after, busy, come_to
from .nodes import told
from .trial import Trial, scenario


@scenario("a full disk", limit=240)
def full_disk(trial: Trial) -> str:
    """A save that does not fit is an error that says so; the old checkpoint stays, and when there
    is room again the next save succeeds."""
    filler = f"{trial.folder}/filler"
    trial.one.call("save_large", path=trial.path, number=1, mib=16)
    trial.one.call("fill", path=filler, leave_mib=64, limit=200)
    texts = set()
    for background in (False, True):
        outcome = trial.other.outcome(
            "save_large", path=trial.path, number=2, mib=192, background=background
        )
        assert "error" in outcome, "a save that does not fit has succeeded"
        text = told(outcome)
        texts.add(text)
        assert f"[errno {trial.kind.full}]" in text, text
        for node in trial.site.nodes:
            node.call("load_large", path=trial.path, numbers=[1], mib=16)
        trial.nothing_left()
    trial.one.sh(f"rm {filler} && sync -f {trial.folder}")
    until = time.monotonic() + 120
    while True:  # some give blocks back in the background
        outcome = trial.other.outcome("save_large", path=trial.path, number=3, mib=192)
        if "ok" in outcome or time.monotonic() > until:
            break
        time.sleep(1)
    assert "ok" in outcome, f"with room again: {told(outcome)}"
    come_to(trial, [3], 192)
    trial.one.sh(f"rm -r {trial.path}")
    word = errno.errorcode[trial.kind.full]
    return f"{word}, the old one stays, the next save succeeds"


def signal_servers(trial: Trial, number: int) -> None:
    for name in trial.kind.servers:
        pids = trial.site.server.ask("signal", name=name, signal=number)["pids"]
        assert pids, f"no server process is called {name}"


@scenario("a server stalls for 4 s", limit=240, shared_only=True)
def server_stalls(trial: Trial) -> str:
    with busy(trial) as seen:
        signal_servers(trial, signal.SIGSTOP)
        try:
            time.sleep(4)
        finally:
            signal_servers(trial, signal.SIGCONT)
        time.sleep(1.5)
    return after(trial, seen)


@scenario("a server is killed and comes back", limit=300, shared_only=True)
def server_dies(trial: Trial) -> str:
    with busy(trial) as seen:
        signal_servers(trial, signal.SIGKILL)
        time.sleep(1)
        trial.kind.restart(trial.site)
        time.sleep(4)
    return after(trial, seen, "OSError", "FileNotFoundError", "ConflictError")


def refusal(trial: Trial) -> str:
    """Of a file system that cannot do what a save needs."""
    outcome = trial.one.outcome("save", path=trial.path, number=1)
    assert "error" in outcome, "a save has succeeded"
    assert "UnsupportedError" in outcome["error"]["types"], told(outcome)
    trial.nothing_left()
    text: str = outcome["error"]["text"].replace(str(trial.site.mount), "...")
    return text
