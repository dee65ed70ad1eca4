"""The process that AsyncCheckpointerType.PROCESS saves in: one for each process group, kept."""

from __future__ import annotations

import functools
import multiprocessing
import os
import select
import socket
import threading
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata

from torch_ckpt.dcp.save.save import Save
from torch_ckpt.dcp.stage import crossing
from torch_ckpt.errors import CheckpointError, InvalidArgumentError
from torch_ckpt.ranks import Ranks

# By process group: this rank's.
_known: weakref.WeakKeyDictionary[Any, SavingProcess] = weakref.WeakKeyDictionary()


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
        except Exception as error:
            outcome = error
        with self._mutex:
            try:
                self._send((save, outcome))
            except CheckpointError:
                raise
            except Exception as error:  # of pickling, of which the other ranks hear there
                self._refuse(save, error)
            del outcome
            metadata: Metadata = self._answer()
        return metadata

    def _refuse(self, save: Save, error: Exception) -> None:
        """Let the save fail because what was to be saved cannot be sent."""
        text = f"cannot be sent to the process that saves: {type(error).__name__}: {error}"
        try:
            self._send((save, CheckpointError(text)))
        except CheckpointError:
            raise
        except Exception:  # nor can the save itself
            self.end()  # closes the connections: the others hear of that
            raise error from None

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
        # A process that is killed closes its end of the pipe before it can be waited for.
        ends = select.poll()
        ends.register(self._pipe.fileno(), 0)
        hung_up = any(event & select.POLLHUP for _, event in ends.poll(0))
        return self._process.is_alive() and not hung_up

    def end(self) -> None:
        self._process.kill()  # it may wait for one that is dead
        self._process.join()
        self._pipe.close()


def saving_process(
    group: dist.ProcessGroup | None, ranks: Ranks, wait: Callable[[], None]
) -> SavingProcess:
    """That of this rank for `group`: a collective call. Where some rank has none, or a dead one,
    all make new ones when `wait` has returned, which waits for the saves that are running."""
    if not dist.is_initialized():
        raise InvalidArgumentError("AsyncCheckpointerType.PROCESS needs a process group")
    crossing.expect()
    made: Any = group if group is not None else dist.group.WORLD
    process = _known.get(made)
    lives = process is not None and process.is_alive()
    if not all(ranks.together("process that saves", lambda: lives)):
        wait()
        if process is not None:
            process.end()
        new: list[SavingProcess] = []
        try:
            address = ranks.gather(
                "start of the process that saves",
                lambda: new.append(SavingProcess(ranks.rank)),
                lambda _: new[0].address(),
            )
            ranks.together("its connections", lambda: new[0].connect(address, ranks.size))
        except BaseException:
            for started in new:
                started.end()
            raise
        (process,) = new
        _known[made] = process
    assert process is not None
    return process


def _serve(pipe: Connection, rank: int) -> None:
    """What the process does until the trainer is gone."""
    store: dist.TCPStore | None = None
    ranks: Ranks | None = None
    while True:
        try:
            asked = pipe.recv()
        except EOFError:
            break
        except BaseException as error:
            _tell(pipe, False, error)
            continue
        try:
            if asked == _LISTEN:
                store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
                answer: Any = store.port
            elif isinstance(asked[0], Save):
                save, *outcome = asked
                del asked
                assert ranks is not None
                save.ranks = ranks
                answer = save.run(functools.partial(_state, outcome))
                del save
            else:
                address, size = asked
                store = store or dist.TCPStore(address[0], address[1], is_master=False)
                dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
                ranks, answer = Ranks.of(None), None
        except BaseException as error:
            _tell(pipe, False, error)
        else:
            _tell(pipe, True, answer)
    os._exit(0)  # a save that others still wait for is given up


_LISTEN = "listen"


def _state(outcome: list[Any]) -> dict[str, Any]:
    """What has come of the state, which the caller has alone."""
    state = outcome.pop()
    if isinstance(state, Exception):
        raise state
    return state  # type: ignore[no-any-return]


def _tell(pipe: Connection, good: bool, value: Any) -> None:
    try:
        pipe.send((good, value))
    except OSError:
        pass  # the trainer is gone, which the next look at the pipe says
    except Exception as error:  # of pickling
        text = f"{type(value).__name__}: {value}" if not good else f"its answer: {error}"
        pipe.send((False, CheckpointError(text)))


def _host() -> str:
    """By which other nodes know this one."""
    first = dist.get_rank() == 0
    return (os.environ.get("MASTER_ADDR") if first else None) or socket.getfqdn()
