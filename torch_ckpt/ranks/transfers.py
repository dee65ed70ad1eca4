"""Bytes that ranks send each other, each two over a connection of their own."""

from __future__ import annotations

import collections
import contextlib
import select
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import NamedTuple

from torch_ckpt.errors import CancelledError, CheckpointError
from torch_ckpt.native.jobs import Job
from torch_ckpt.ranks.listener import Address, listener
from torch_ckpt.ranks.ranks import TIMEOUT_S, Ranks

MOST_QUEUED = 64 << 20  # bytes that are waiting to be sent, beyond which no more are made
_MOST_WAITING = 1024  # connections that have not been accepted yet
_PIECE = 4 << 20
_ROUND_S = 0.2  # how often a rank looks whether another one has failed


class Outgoing(NamedTuple):
    """What is sent to each of `ranks`."""

    ranks: Collection[int]
    data: memoryview


class Incoming(NamedTuple):
    """Where what comes next goes; `done` is called when all of it is there."""

    into: memoryview
    done: Callable[[], None]


@contextlib.contextmanager
def connected(
    ranks: Ranks, what: str, peers: Collection[int]
) -> Iterator[dict[int, socket.socket]]:
    """This rank's connections to `peers`, each of which names this one. A collective call of all
    `ranks`, with an error on one as that of all."""
    below = {peer for peer in peers if peer < ranks.rank}
    heard: list[tuple[socket.socket, Address]] = []
    sockets: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as stack:

        def listen() -> Address | None:
            if not below:
                return None
            made = stack.enter_context(listener())
            made.listen(_MOST_WAITING)
            heard.append((made, Address.of(made)))
            return heard[0][1]

        def connect() -> None:
            for peer in sorted(set(peers) - below):
                address = addresses[peer]
                assert address is not None
                sockets[peer] = stack.enter_context(address.connect(ranks.rank, TIMEOUT_S))
            for made, address in heard:
                for peer, connection in _accepted(made, address, below):
                    sockets[peer] = stack.enter_context(connection)

        addresses = ranks.together(f"addresses for {what}", listen)
        ranks.together(f"connections for {what}", connect)
        yield sockets


def _accepted(
    heard: socket.socket, address: Address, ranks: Collection[int]
) -> Iterator[tuple[int, socket.socket]]:
    missing = set(ranks)
    until = time.monotonic() + TIMEOUT_S
    poll = select.poll()
    poll.register(heard, select.POLLIN)
    with Job() as job:
        while missing:
            if poll.poll(1000 * _ROUND_S):
                known = address.accept(heard, missing)
                if known is not None:
                    missing.remove(known[0])
                    yield known
            _check(job, until, missing)


def _check(job: Job, until: float, missing: Collection[int]) -> None:
    if job.is_cancelled():
        raise CancelledError("another rank has failed")
    if time.monotonic() > until:
        raise CheckpointError(
            f"ranks {sorted(missing)} have sent nothing for {TIMEOUT_S:g} seconds"
        )


def transfer(
    sockets: Mapping[int, socket.socket],
    outgoing: Iterator[Outgoing],
    incoming: Mapping[int, Iterator[Incoming]],
) -> None:
    """Send all of `outgoing`, and fill all of `incoming`, by the rank that it comes from: what a
    rank sends to another one is, in this order, what that one expects of it, in pieces of the same
    sizes.

    Takes one of `outgoing` after the other, as memory of them all is bounded by MOST_QUEUED. Raises
    CheckpointError where a rank closes its connection early or says nothing for ten minutes.
    """
    with Job() as job:
        _Transfer(sockets, outgoing, incoming, job).run()


class _Transfer:
    def __init__(
        self,
        sockets: Mapping[int, socket.socket],
        outgoing: Iterator[Outgoing],
        incoming: Mapping[int, Iterator[Incoming]],
        job: Job,
    ) -> None:
        self._sockets = sockets
        self._outgoing = outgoing
        self._incoming = incoming
        self._job = job
        self._queues: dict[int, collections.deque[memoryview]] = {
            rank: collections.deque() for rank in sockets
        }
        self._queued = 0
        self._more = True  # that `outgoing` has
        self._due: dict[int, Incoming] = {}  # what is left of what comes next
        self._poll = select.poll()
        self._rank_of = {}
        for rank, connection in sockets.items():
            connection.setblocking(False)
            self._rank_of[connection.fileno()] = rank
        for rank in incoming:
            self._expect(rank)

    def run(self) -> None:
        heard_at = time.monotonic()
        while True:
            self._fill_queues()
            waiting = [rank for rank, queue in self._queues.items() if queue]
            if not waiting and not self._due:
                return
            for rank, connection in self._sockets.items():
                events = select.POLLIN if rank in self._due else 0
                self._poll.register(connection, events | (select.POLLOUT if rank in waiting else 0))
            ready = self._poll.poll(1000 * _ROUND_S)
            for number, events in ready:
                rank = self._rank_of[number]
                try:
                    if rank in self._due and events & (select.POLLIN | select.POLLHUP):
                        self._receive(rank)
                    elif self._queues[rank]:
                        self._send(rank)
                    elif events & (select.POLLHUP | select.POLLERR):
                        self._poll.unregister(number)  # it has all, and is gone
                        self._sockets = {r: s for r, s in self._sockets.items() if r != rank}
                except OSError as error:
                    raise CheckpointError(
                        f"the connection to rank {rank} broke: {error}"
                    ) from error
            if ready:
                heard_at = time.monotonic()
            _check(self._job, heard_at + TIMEOUT_S, {*waiting, *self._due})

    def _fill_queues(self) -> None:
        while self._more and self._queued < MOST_QUEUED:
            piece = next(self._outgoing, None)
            if piece is None:
                self._more = False
            elif piece.data:
                for rank in piece.ranks:
                    self._queues[rank].append(piece.data)
                    self._queued += len(piece.data)

    def _expect(self, rank: int) -> None:
        for piece in self._incoming[rank]:
            if piece.into:
                self._due[rank] = piece
                return
            piece.done()
        self._due.pop(rank, None)

    def _receive(self, rank: int) -> None:
        into, done = self._due[rank]
        count = self._sockets[rank].recv_into(into[:_PIECE])
        if count == 0:
            raise ConnectionError("it has been closed")
        self._due[rank] = Incoming(into[count:], done)
        if count == len(into):
            done()
            self._expect(rank)

    def _send(self, rank: int) -> None:
        queue = self._queues[rank]
        count = self._sockets[rank].send(queue[0][:_PIECE])
        self._queued -= count
        queue[0] = queue[0][count:]
        if not queue[0]:
            queue.popleft()
