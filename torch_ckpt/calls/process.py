"""The process that AsyncCheckpointerType.PROCESS saves in: one for each process group, kept."""

from __future__ import annotations

import functools
import multiprocessing
import os
import select
import signal
import socket
import sys
import threading
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata

from torch_ckpt.calls.save import Save
from torch_ckpt.errors import CheckpointError, InvalidArgumentError
from torch_ckpt.ranks import Ranks, portable
from torch_ckpt.staging import crossing

# This rank's, by process group, and by who saves: with no_dist that is one rank alone.
_known: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], SavingProcess]]
_known = weakref.WeakKeyDictionary()


class SavingProcess:
    """A process of this trainer's that saves for one rank, with those of the other ranks."""

    def __init__(self, rank: int) -> None:
        """Start it. It saves once it is told, by `connect`, where the others are."""
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        # Ends with the trainer, which waits for its saves before.
        self._process = context.Process(
            target=_serve, args=(theirs, rank), name="torch_ckpt-save", daemon=True
        )
        self._process.start()
        theirs.close()  # or a child that is gone would not close the pipe
        self._mutex = threading.Lock()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def address(self) -> tuple[str, int]:
        """Of rank 0's: where it waits for the others."""
        self._send(_LISTEN)
        return _host(), self._answer()

    def connect(self, address: tuple[str, int], size: int) -> None:
        """Until it is connected to the processes of all ranks, which call this at the same time."""
        self._send((address, size))
        self._answer()

    def run(self, save: Save, state: Callable[[], dict[str, Any]]) -> Metadata:
        """What `save.run` returns there; what `state` returns crosses: see crossing.py."""
        outcome: Any = None
        try:
            outcome = state()
        except BaseException as error:
            outcome = portable(error, save.ranks.rank)
        with self._mutex:
            try:
                self._send(save)
            except CheckpointError:
                raise
            except Exception:  # of pickling: what it has of the caller's cannot be sent
                self.end()  # closes the connections: the other ranks hear of that
                raise
            try:
                self._send(outcome)
            except CheckpointError:
                raise
            except Exception as error:  # of pickling, of which the other ranks hear there
                text = f"cannot be sent to the process that saves: {type(error).__name__}: {error}"
                self._send(CheckpointError(text))
            del outcome
            metadata: Metadata = self._answer()
        return metadata

    def _send(self, what: Any) -> None:
        try:
            self._pipe.send(what)
        except OSError as error:
            raise self._gone() from error

    def _answer(self) -> Any:
        try:
            good, value = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise self._gone() from error
        if not good:
            raise value
        return value

    def _gone(self) -> CheckpointError:
        self._process.join(1)
        return CheckpointError(f"the process that saves is gone (exit {self._process.exitcode})")

    def is_alive(self) -> bool:
        if self._pipe.closed:
            return False
        # A process that is killed closes its end of the pipe before it can be waited for.
        ends = select.poll()
        ends.register(self._pipe.fileno(), 0)
        hung_up = any(event & select.POLLHUP for _, event in ends.poll(0))
        return self._process.is_alive() and not hung_up

    def end(self) -> None:
        self._process.kill()  # it may wait for one that is dead
        self._process.join()
        self._pipe.close()


def expect_process() -> None:
    """Before a state is staged that is to be saved in another process."""
    if not dist.is_initialized():
        raise InvalidArgumentError("AsyncCheckpointerType.PROCESS needs a process group")
    crossing.expect()


def saving_process(group: dist.ProcessGroup | None, ranks: Ranks) -> SavingProcess:
    """That of this rank for `group`: a collective call, while none of them saves. Where some rank
    has none, or a dead one, all make new ones."""
    made: Any = group if group is not None else dist.group.WORLD
    known = _known.setdefault(made, {})
    process = known.get(ranks.members)
    lives = process is not None and process.is_alive()
    if not all(ranks.together("process that saves", lambda: lives)):
        new: list[SavingProcess] = []

        def start() -> None:
            if process is not None:
                process.end()
            new.append(SavingProcess(ranks.rank))

        try:
            address = ranks.gather(
                "start of the process that saves", start, lambda _: new[0].address()
            )
            ranks.together("its connections", lambda: new[0].connect(address, ranks.size))
        except BaseException:
            for started in new:
                started.end()
            raise
        (process,) = new
        known[ranks.members] = process
    assert process is not None
    return process


_LISTEN = "listen"


def _serve(pipe: Connection, rank: int) -> None:
    """What the process does until the trainer is gone."""
    # A terminal sends Ctrl-C to all processes. What becomes of a save then the trainer says.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ranks = _connected(pipe, rank)
    while ranks is not None and _serve_save(pipe, ranks):
        pass
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a save that others still wait for is given up


def _connected(pipe: Connection, rank: int) -> Ranks | None:
    """The ranks whose processes the trainer names; None where that fails, of which it hears."""
    try:
        store: dist.TCPStore | None = None
        asked = pipe.recv()
        if asked == _LISTEN:
            store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
            _tell(pipe, True, store.port)
            asked = pipe.recv()
        address, size = asked
        store = store or dist.TCPStore(address[0], address[1], is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        ranks = Ranks.of(None)
    except Exception as error:
        _tell(pipe, False, error)
        return None
    _tell(pipe, True, None)
    return ranks


def _serve_save(pipe: Connection, ranks: Ranks) -> bool:
    """Take a save, and a state or why there is none, and save it. Whether more may come."""
    try:
        save = pipe.recv()
    except EOFError:  # the trainer is gone
        return False
    except Exception as error:  # it cannot be made again here: without it no part can be taken
        _tell(pipe, False, error)
        return False
    try:
        outcome = [pipe.recv()]
    except Exception as error:
        outcome = [portable(error, ranks.rank)]
    save.ranks = ranks
    try:
        metadata = save.run(functools.partial(_state, outcome))
    except BaseException as error:
        _tell(pipe, False, error)
    else:
        _tell(pipe, True, metadata)
    return True


def _state(outcome: list[Any]) -> dict[str, Any]:
    """What has come of the state, which the caller has alone."""
    state = outcome.pop()
    if isinstance(state, Exception):
        raise state
    return state  # type: ignore[no-any-return]


def _tell(pipe: Connection, good: bool, value: Any) -> None:
    try:
        pipe.send((good, value if good else portable(value, None)))
    except OSError:
        pass  # the trainer is gone, which the next look at the pipe says
    except Exception as error:  # of pickling an answer
        pipe.send((False, portable(error, None)))


def _host() -> str:
    """By which other nodes know this one."""
    first = dist.get_rank() == 0
    return (os.environ.get("MASTER_ADDR") if first else None) or socket.getfqdn()
