"""The connections between ranks, a tree of sockets, and who is missed when one of them breaks."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import struct
import time
import weakref
from collections.abc import Iterable
from concurrent.futures import Future, wait
from typing import Any

from torch_ckpt.errors import CheckpointError
from torch_ckpt.ranks import tree
from torch_ckpt.ranks.listener import Address, exactly, listener

_MOMENT_S = 2.0  # that ranks have to say that they are here, when one is missed
_LENGTH = struct.Struct("<Q")
_PIECE = 1 << 20
_FAILURE = "/failure"  # why a rank cannot connect, in the store
_LOOK_S = 2.0  # how often who waits for another looks for that
_MOST_PAUSE_S = 0.1  # between two looks whether it has come


class LostError(Exception):
    """A connection is closed, or a rank has not answered in time."""


class Links:
    """Connections of `size` ranks that find each other below `key` in `store`: of this one to the
    rank above it in the tree and to those below.

    Used by one thread at a time. What ranks tell each other goes up and then down; a rank that is
    waited for while it has nothing to say, and yet does, has closed its connection. That, and who
    has not answered for `timeout` seconds, is a LostError.
    """

    def __init__(self, store: Any, key: str, rank: int, size: int, timeout: float) -> None:
        """Raises CheckpointError where not all ranks come within `timeout` seconds."""
        self._sockets: dict[int, socket.socket] = {}  # by rank
        self._is_broken = False
        _all.add(self)
        self.rank, self.size = rank, size
        self.above = tree.above(rank)
        self.below = tree.below(rank, size)
        self._store = store
        self._key = key
        self._timeout = timeout
        try:
            # A client of its own where there can be one: others wait in theirs, and so does all
            # that shares it.
            if hasattr(store, "clone"):
                self._store = store.clone()
            self._say("come")
            self._connect(time.monotonic() + timeout)
        except (OSError, RuntimeError, LostError) as error:  # RuntimeError: of the store
            failure = self._failure(error)
            self.close()
            raise failure from error
        except BaseException:
            self.close()
            raise

    def __del__(self) -> None:
        self._close()

    @property
    def are_broken(self) -> bool:
        return self._is_broken

    def close(self, why: str = "") -> None:
        """The other ranks hear of it at once, and of `why`."""
        if why:
            with contextlib.suppress(RuntimeError):  # of the store, whose host may be gone
                self._say("why", why)
        self._close()

    def _close(self) -> None:
        self._is_broken = True
        for connection in self._sockets.values():
            connection.close()
        self._sockets.clear()

    def from_below(self) -> dict[int, bytes]:
        """What each rank below has sent up."""
        messages: dict[int, bytes] = {}
        while len(messages) < len(self.below):
            for rank in self._ready(rank for rank in self.below if rank not in messages):
                messages[rank] = self._receive(rank)
        return messages

    def from_above(self) -> bytes:
        assert self.above is not None
        self._ready([self.above])
        return self._receive(self.above)

    def send(self, rank: int, message: bytes) -> None:
        """To `rank`, which is the one above or one below."""
        try:
            connection = self._sockets[rank]
            if len(message) < _PIECE:
                connection.sendall(_LENGTH.pack(len(message)) + message)
            else:
                connection.sendall(_LENGTH.pack(len(message)))
                connection.sendall(message)
        except OSError as error:
            raise LostError(f"sending to rank {rank}: {error}") from error

    def _ready(self, expected: Iterable[int]) -> list[int]:
        """Wait; which of the `expected` ranks have sent something."""
        wanted = set(expected)
        poll = select.poll()
        rank_of = {}
        for rank, connection in self._sockets.items():
            # Those below may have said already what is asked of them next.
            if rank in wanted or (rank == self.above) or self.above in wanted:
                poll.register(connection, select.POLLIN)
                rank_of[connection.fileno()] = rank
        ready = {rank_of[number] for number, _ in poll.poll(1000 * self._timeout)}
        if not ready:
            raise LostError(
                f"ranks {sorted(wanted)} have said nothing for {self._timeout:g} seconds"
            )
        if ready - wanted:
            raise LostError(f"rank {min(ready - wanted)} has closed its connection")
        return sorted(ready)

    def _receive(self, rank: int) -> bytes:
        try:
            connection = self._sockets[rank]
            (length,) = _LENGTH.unpack(exactly(connection, _LENGTH.size))
            return exactly(connection, length)
        except OSError as error:
            raise LostError(f"receiving from rank {rank}: {error}") from error

    def _connect(self, until: float) -> None:
        """To the rank above and to those below, and until all ranks have come."""
        with contextlib.ExitStack() as stack:
            if self.below:
                heard = stack.enter_context(listener())
                at = Address.of(heard)
                self._store.set(f"{self._key}/at/{self.rank}", json.dumps(at))
            if self.above is not None:
                self._wait_for(self._at(self.above), until)
                theirs = Address(*json.loads(self._store.get(self._at(self.above))))
                try:
                    self._keep(self.above, theirs.connect(self.rank, _left(until)))
                except OSError as error:
                    raise LostError(f"connecting to rank {self.above}: {error}") from error
            while len(self._sockets) < len(self.below) + (self.above is not None):
                self._accept(heard, at, until)
        # All below are there when each has said so, and all others when rank 0 has.
        self.from_below()
        if self.above is not None:
            self.send(self.above, b"")
            self.from_above()
        for rank in self.below:
            self.send(rank, b"")

    def _wait_for(self, key: str, until: float) -> None:
        """Until somebody has set `key`. Raises LostError where a rank cannot connect."""
        # Not by waits of the store that end, of which TCPStore tells the log.
        pause, look = 0.001, time.monotonic() + _LOOK_S
        while not self._store.check([key]):
            now = time.monotonic()
            if now >= until:
                raise LostError("not all ranks have come in time")
            if now >= look:
                self._look_for_failure()
                look = now + _LOOK_S
            time.sleep(pause)
            pause = min(2 * pause, _MOST_PAUSE_S)

    def _look_for_failure(self) -> None:
        if self._store.check([self._key + _FAILURE]):
            raise LostError("a rank cannot connect")

    def _failure(self, error: Exception) -> CheckpointError:
        """Why the ranks do not connect, which those hear that still wait for this one: what a rank
        has said first."""
        key = self._key + _FAILURE
        with contextlib.suppress(RuntimeError):  # of the store
            if self._store.check([key]):
                message, rank = json.loads(self._store.get(key))
                return CheckpointError(message, rank=rank)
        if isinstance(error, OSError):
            failure = CheckpointError(f"cannot connect: {error}", rank=self.rank)
        else:
            failure = self._without("come", "connecting", error)
        with contextlib.suppress(RuntimeError):
            self._store.set(key, json.dumps([failure.message, failure.rank]))
        return failure

    def _at(self, rank: int) -> str:
        return f"{self._key}/at/{rank}"

    def _accept(self, heard: socket.socket, at: Address, until: float) -> None:
        """Who comes next, if it is one of those below."""
        poll = select.poll()
        poll.register(heard, select.POLLIN)
        for connection in self._sockets.values():
            poll.register(connection, select.POLLHUP)  # who has come may have gone
        events = poll.poll(1000 * min(_LOOK_S, _left(until)))
        if not events:
            self._look_for_failure()
            if time.monotonic() >= until:
                raise LostError("not all ranks have come in time")
            return
        if all(number != heard.fileno() for number, _ in events):
            raise LostError("a rank has closed its connection")
        known = at.accept(heard, self.below)
        if known is not None:
            self._keep(*known)

    def _keep(self, rank: int, connection: socket.socket) -> None:
        self._sockets[rank] = connection
        connection.settimeout(self._timeout)

    def give_up(self, what: str, error: LostError, steps: list[Future[Any]]) -> CheckpointError:
        """What `error` says, with the ranks that are missed in `what`, once `steps` have ended."""
        self.close()
        with contextlib.suppress(RuntimeError):  # of the store, whose host may be gone as well
            self._say("here")  # before the wait, which may be long
        until = time.monotonic() + _MOMENT_S
        wait(steps)
        time.sleep(max(0.0, until - time.monotonic()))
        return self._without("here", what, error)

    def _say(self, word: str, text: str = "") -> None:
        self._store.set(f"{self._key}/{word}/{self.rank}", text)

    def _silent(self, word: str, first: int, end: int) -> list[int]:
        """Of the ranks from `first` to `end` those that have not said `word`."""
        if self._store.check([f"{self._key}/{word}/{rank}" for rank in range(first, end)]):
            return []
        if end - first == 1:
            return [first]
        middle = (first + end) // 2
        return self._silent(word, first, middle) + self._silent(word, middle, end)

    def _without(self, word: str, what: str, error: Exception) -> CheckpointError:
        """The error for `error` that names the rank that said why it has closed its connections, or
        else those that have not said `word`."""
        noticed = f"noticed by rank {self.rank} during '{what}': {error}"
        try:
            gone = self._silent(word, 0, self.size)
            for rank in gone:
                if self._store.check([f"{self._key}/why/{rank}"]):
                    why = self._store.get(f"{self._key}/why/{rank}").decode(errors="replace")
                    return CheckpointError(f"{why}; {noticed}", rank=rank)
        except RuntimeError:  # of the store
            return CheckpointError(
                "a rank is gone, or has not answered in time; which one cannot be said without the "
                f"process group's store, which does not answer either; {noticed}"
            )
        if not gone:  # it was stopped, and goes on
            return CheckpointError(f"a rank has not answered in time; {noticed}")
        others = f", nor have ranks {gone[1:]}" if gone[1:] else ""
        return CheckpointError(
            f"is gone, or has not answered in time{others}; {noticed}", rank=gone[0]
        )


def _left(until: float) -> float:
    return max(0.001, until - time.monotonic())


_all: weakref.WeakSet[Links] = weakref.WeakSet()


def _close_parents() -> None:
    """In a forked child: what it holds open would hide the end of its parent."""
    for links in list(_all):
        links._close()


os.register_at_fork(after_in_child=_close_parents)
