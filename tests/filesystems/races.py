"""Savers, loaders and lookers on two nodes at once."""

from __future__ import annotations

import collections
import contextlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from .busy import after, busy
from .launch import run_ranks
from .nodes import Node, told
from .trial import Trial, scenario

LOOKS = 10_000


@scenario("two savers to one path, from two nodes", limit=240)
def two_savers(trial: Trial) -> str:
    """One wins, or both one after the other; who loses is told, and nothing is torn."""
    ends: collections.Counter[str] = collections.Counter()
    wrong, lost = [], ""
    for number in range(16):
        path, size = f"{trial.folder}/{number // 8}", (0, 16)[number % 2]
        at, late = time.time() + 0.4, 0.03 * (number % 4)
        numbers = (10 * number + 1, 10 * number + 2)
        if number < 4:
            path = f"{trial.folder}/fresh{number}"
        children = [
            node.start_action("save_at", path=path, number=which, at=at + late * i, mib=size)
            for i, (node, which) in enumerate(zip((trial.one, trial.other), numbers, strict=True))
        ]
        outcomes = [
            node.wait(child) for node, child in zip((trial.one, trial.other), children, strict=True)
        ]
        won = [which for which, end in zip(numbers, outcomes, strict=True) if "ok" in end]
        for end in outcomes:
            if "ok" not in end and "ConflictError" not in end["error"]["types"]:
                wrong.append(f"round {number}: a saver is told {told(end)}")
        if not won:
            ends["none won"] += 1
            lost = f"round {number}: " + " and ".join(told(end) for end in outcomes)
            continue
        ends["one won" if len(won) == 1 else "one after the other"] += 1
        for node in (trial.one, trial.other):
            found = trial.sooner_or_later(node, "load_any", path=path, numbers=won, mib=size)
            if "ok" not in found:
                wrong.append(f"round {number}, acknowledged {won}: {node.name}: {told(found)}")
        try:
            trial.nothing_left(path)
        except AssertionError as error:
            wrong.append(f"round {number}: {error}")
    assert not wrong, f"{len(wrong)} things wrong; {dict(ends)}; {wrong[0]}"
    assert ends["none won"] < 4, f"{dict(ends)}; {lost}"
    return ", ".join(f"{count} x {what}" for what, count in ends.items())


@scenario("a save that is in progress elsewhere is met", limit=60)
def met(trial: Trial) -> str:
    """The second saver is refused before any byte, whether the path is new or not; or, where the
    file system carries no lock, supersedes the first one, which is told at its commit."""
    seen: list[str] = []
    for kind in ("fresh", "existing"):
        path = f"{trial.folder}/{kind}"
        if kind == "existing":
            trial.one.call("save", path=path, number=1)
        ready, release = trial.sign(f"{kind}-ready"), trial.sign(f"{kind}-release")
        holder = trial.one.start_action("hold", path=path, ready=ready, release=release, number=2)
        try:
            trial.await_sign(f"{kind}-ready")
            outcome = trial.other.outcome("save", path=path, number=3)
        finally:
            Path(release).touch()
        ended = trial.one.wait(holder)
        if "error" in outcome:
            assert "ConflictError" in outcome["error"]["types"], told(outcome)
            assert "ok" in ended, f"{kind}: the first saver: {told(ended)}"
            trial.holds(2, path)
            seen.append("refused by name")
            continue
        # No lock is carried from node to node.
        assert "error" in ended, f"{kind}: both nodes save at once"
        assert "ConflictError" in ended["error"]["types"], told(ended)
        trial.holds(3, path)
        seen.append("goes ahead, and the first saver is told")
    return " / ".join(dict.fromkeys(seen))


# Every lock is had at once: so it is where those of a mount are local to its node.
LOCAL_LOCKS = "flock:*:skip,ofd_lock:*:skip"


@scenario("a saver stands still in its commit while the other node saves", limit=480)
def stands_still(trial: Trial) -> str:
    return _stands_still(trial)


@scenario("the same where no lock crosses from node to node", limit=480, shared_only=True)
def without_locks(trial: Trial) -> str:
    return _stands_still(trial, LOCAL_LOCKS)


def _stands_still(trial: Trial, locks: str = "") -> str:
    """At each rename of its commit and replay, and where its staging is cleaned: the other node
    saves meanwhile, or dies at it, and then the first one goes on. What was acknowledged last is
    there, whole."""
    ends: collections.Counter[str] = collections.Counter()
    calls = [f"renameat:{nth}" for nth in range(2, 8)] + ["rmdir:1", "unlinkat:4"]
    for number, (call, dies) in enumerate((call, dies) for call in calls for dies in (False, True)):
        path = f"{trial.folder}/{number}"
        trial.one.call("save", path=path, number=1)
        first = trial.one.start_action(
            "save",
            environment={"TORCH_CKPT_FAULTS": _faults(f"{call}:stop", locks)},
            path=path,
            number=2,
        )
        time.sleep(1.5)  # it stands by then, or has ended
        faults = _faults("renameat:3:kill" if dies else "", locks)
        second = trial.other.outcome("save", faults=faults, path=path, number=3)
        trial.one.sh("kill -CONT -1")
        earlier = trial.one.wait(first)
        won = [which for which, end in ((2, earlier), (3, second)) if "ok" in end]
        for end in (earlier, second):
            known = "ok" in end or end.get("signal") == signal.SIGKILL
            assert known or "ConflictError" in end["error"]["types"], f"{call}: {told(end)}"
        # Where both were acknowledged the first one's commit was before the second one began; or it
        # stood in its begin, which it does once more.
        anew = call == "renameat:2" and "ok" in earlier
        numbers = [2] if anew else won[-1:] or [1, 2, 3]
        for node in (trial.one, trial.other):
            found = trial.sooner_or_later(node, "load_any", path=path, numbers=numbers, mib=0)
            assert "ok" in found, f"{call}, acknowledged {won}: {node.name}: {told(found)}"
        trial.other.call("save", path=path, number=4)
        trial.holds(4, path)
        trial.nothing_left(path)
        ends["both" if len(won) == 2 else f"{len(won)} acknowledged"] += 1
    return ", ".join(f"{count} x {what}" for what, count in sorted(ends.items()))


@scenario(
    "two savers stand still in their commits while a third node saves", limit=480, shared_only=True
)
def third_node(trial: Trial) -> str:
    return _third_node(trial)


@scenario("the same where no lock crosses, with three nodes", limit=480, shared_only=True)
def third_without_locks(trial: Trial) -> str:
    return _third_node(trial, LOCAL_LOCKS)


def _faults(*rules: str) -> str:
    return ",".join(filter(None, rules))


def _third_node(trial: Trial, locks: str = "") -> str:
    """The second one begins while the first one stands still, and stands still itself; they go on
    in either order once the third one has saved. One that was acknowledged is there, whole: all
    three are at it at once, so that any of them may have come last."""
    ends: collections.Counter[str] = collections.Counter()
    stops = [
        (a, b)
        for a in ("renameat:2", "renameat:4", "rmdir:1")
        for b in ("renameat:3", "unlinkat:4")
    ]
    with another_node(trial) as third:
        for number, (stop, other_stop) in enumerate(stops):
            path = f"{trial.folder}/{number}"
            trial.one.call("save", path=path, number=1)
            savers = []
            for node, which, at in ((trial.one, 2, stop), (trial.other, 3, other_stop)):
                faults = {"TORCH_CKPT_FAULTS": _faults(f"{at}:stop", locks)}
                child = node.start_action("save", environment=faults, path=path, number=which)
                savers.append((node, which, child))
                time.sleep(1.5)  # it stands by then, or has ended
            ended = [(4, third.outcome("save", faults=locks, path=path, number=4))]
            for node, which, child in savers[:: 1 if number % 2 else -1]:
                node.sh("kill -CONT -1")
                ended.append((which, node.wait(child)))
            for _, end in ended:
                known = "ok" in end or "ConflictError" in end["error"]["types"]
                assert known, f"{stop}, {other_stop}: {told(end)}"
            won = [which for which, end in ended if "ok" in end]
            for node in trial.site.nodes:
                found = trial.sooner_or_later(
                    node, "load_any", path=path, numbers=won or [1, 2, 3, 4], mib=0
                )
                assert "ok" in found, (
                    f"{stop}, {other_stop}, acknowledged {won}: {node.name}: {told(found)}"
                )
            trial.other.call("save", path=path, number=5)
            trial.holds(5, path)
            trial.nothing_left(path)
            ends[f"{len(won)} acknowledged"] += 1
    return ", ".join(f"{count} x {what}" for what, count in sorted(ends.items()))


@contextlib.contextmanager
def another_node(trial: Trial) -> Iterator[Node]:
    """A third node, for as long as this lasts."""
    node = Node("node3", 4, trial.site.folder)
    node.start()
    trial.site.nodes.append(node)
    try:
        trial.kind.mount(trial.site, node)
        yield node
    finally:
        node.stop()
        trial.site.nodes.remove(node)


@scenario("another node loads a checkpoint that is overwritten", limit=180)
def loads_beside_saves(trial: Trial) -> str:
    with busy(trial) as seen:
        time.sleep(6)
    return after(trial, seen)


@scenario("another node looks at a path that is overwritten", limit=420)
def second_view(trial: Trial) -> str:
    """Ten thousand looks, each of which sees it whole or as being replaced."""
    done = trial.sign("done")
    trial.one.call("save", path=trial.path, number=1)
    saver = trial.one.start_action("overwrite_until", path=trial.path, done=done)
    try:
        looks = trial.other.call("look", path=trial.path, times=LOOKS, seconds=350, limit=380)
    finally:
        Path(done).touch()
        saved = trial.one.wait(saver)
    assert "ok" in saved, f"the saver: {told(saved)}"
    seen: dict[str, int] = looks["seen"]
    wrong = {word: count for word, count in seen.items() if word not in ("whole", "being replaced")}
    total = sum(seen.values())
    assert not wrong, f"of {total} looks during {saved['ok']} saves: {wrong}"
    assert looks["saves"] > 1, "saw one save only"
    replaced = seen.get("being replaced", 0)
    short = "" if total == LOOKS else f" (of {LOOKS}; out of time)"
    return f"{total} looks{short}, {saved['ok']} saves: {replaced} x being replaced, else whole"


@scenario("another node sees new checkpoints appear", limit=180)
def fresh_view(trial: Trial) -> str:
    looker = trial.other.start_action(
        "look_at_fresh", folder=str(trial.folder), count=30, seconds=120
    )
    trial.one.call("save_fresh", folder=str(trial.folder), count=30)
    end = trial.other.wait(looker, limit=150)
    assert "ok" in end, told(end)
    seen: dict[str, int] = end["ok"]
    wrong = {word: count for word, count in seen.items() if word not in ("whole", "not there")}
    assert not wrong, f"{wrong} beside {seen}"
    assert seen["whole"] == 30, f"not all have appeared: {seen}"
    return f"{seen.get('not there', 0)} x not there, then 30 x whole"


@scenario("saves by two nodes in turn", limit=420)
def in_turn(trial: Trial) -> str:
    """As of a job that comes back on other nodes: what one node has committed, the other one
    overwrites, and both load what is there."""
    for number in range(1, 9):
        saver = trial.site.nodes[number % len(trial.site.nodes)]
        saver.call("save", path=trial.path, number=number)
        trial.holds(number)
        trial.nothing_left()
    if trial.shared:
        path = f"{trial.folder}/ranks"
        for number in range(1, 5):
            run_ranks(trial, path, number, turned=number % 2 == 0)
            trial.holds(number, path, load="load_ranks")
            trial.nothing_left(path)
    return f"each of them whole on every node{trial.lateness()}"


@scenario("a path that the nodes do not share is refused", limit=90, shared_only=True)
def not_shared(trial: Trial) -> str:
    own = trial.site.folder / "own"
    for node in trial.site.nodes:
        node.sh(f"mkdir -p {own} && mount -t tmpfs tmpfs {own}")
    try:
        run_ranks(trial, str(own / "c"), 1)
    except AssertionError as error:
        text = str(error)
        assert "file system" in text or "shared" in text, text
    else:
        raise AssertionError("a save to a path of each node's own has succeeded")
    for node in trial.site.nodes:
        node.sh(f"test ! -e {own}/c && umount {own}")
    return "refused, naming the rank"
