"""The connections between ranks: a Gloo group of their own, and who is missed when it breaks."""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from torch_ckpt.errors import CheckpointError

T = TypeVar("T")

_MOMENT_S = 2.0  # that ranks have to say that they are here, when one is missed


class LostError(Exception):
    """A connection is closed, or a rank has not answered in time."""


class Links:
    """Connections of `size` ranks that find each other below `key` in `store`.

    Used by one thread at a time. What ranks exchange is a collective, which raises LostError.
    """

    def __init__(self, store: Any, key: str, rank: int, size: int, timeout: float) -> None:
        """Raises CheckpointError where not all ranks come within `timeout` seconds."""
        self.rank, self.size = rank, size
        # A client of its own where there can be one: others wait in theirs, with all who share it.
        self._store = store.clone() if hasattr(store, "clone") else store
        self._key = key
        self._gloo: Any = None
        try:
            self._say("come")
            self._gloo = dist.ProcessGroupGloo(
                dist.PrefixStore(key, self._store), rank, size, datetime.timedelta(seconds=timeout)
            )
        except RuntimeError as error:
            raise self._without("come", "connecting", error) from error

    @property
    def are_broken(self) -> bool:
        return self._gloo is None

    def close(self) -> None:
        """The other ranks hear of it at once."""
        self._gloo = None

    # What is shorter than `length` is padded with zeros: a pickle says where it ends.

    def all_gather(self, own: bytes, length: int) -> list[bytes]:
        """The bytes of every rank, on every rank."""
        given = _tensor(own, length)
        out = [torch.empty_like(given) for _ in range(self.size)]
        _whole(lambda: self._gloo.allgather([out], [given]).wait())
        return [each.numpy().tobytes() for each in out]

    def gather(self, own: bytes, length: int) -> list[bytes]:
        """On rank 0 the bytes of every rank, else nothing."""
        options = dist.GatherOptions()
        options.rootRank = 0
        given = _tensor(own, length)
        out = [torch.empty_like(given) for _ in range(self.size)] if self.rank == 0 else []
        _whole(lambda: self._gloo.gather([out] if out else [], [given], options).wait())
        return [each.numpy().tobytes() for each in out]

    def broadcast(self, own: bytes, length: int) -> bytes:
        """Rank 0's bytes."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        held = _tensor(own, length)
        _whole(lambda: self._gloo.broadcast([held], options).wait())
        return held.numpy().tobytes()

    def scatter(self, given: list[bytes], length: int) -> bytes:
        """Of rank 0's `given`, which others leave empty, the bytes for this rank."""
        options = dist.ScatterOptions()
        options.rootRank = 0
        out = _tensor(b"", length)
        tensors = [_tensor(each, length) for each in given]
        _whole(lambda: self._gloo.scatter([out], [tensors] if tensors else [], options).wait())
        return out.numpy().tobytes()

    def give_up(self, what: str, error: LostError, steps: list[Future[Any]]) -> CheckpointError:
        """What `error` says, with the ranks that are missed in `what`, once `steps` have ended."""
        self.close()
        with contextlib.suppress(RuntimeError):  # of the store, whose host may be gone as well
            self._say("here")  # before the wait, which may be long
        until = time.monotonic() + _MOMENT_S
        wait(steps)
        time.sleep(max(0.0, until - time.monotonic()))
        return self._without("here", what, error)

    def _say(self, word: str) -> None:
        self._store.set(f"{self._key}/{word}/{self.rank}", "")

    def _without(self, word: str, what: str, error: Exception) -> CheckpointError:
        """The error for `error` that names the ranks that have not said `word`."""
        noticed = f"noticed by rank {self.rank} during '{what}': {error}"
        try:
            gone = [
                rank
                for rank in range(self.size)
                if not self._store.check([f"{self._key}/{word}/{rank}"])
            ]
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


def _whole(call: Callable[[], T]) -> T:
    try:
        return call()
    except RuntimeError as error:  # all that Gloo raises
        raise LostError(str(error)) from error


def _tensor(content: bytes, length: int) -> torch.Tensor:
    held = bytearray(max(length, 1))
    held[: len(content)] = content
    return torch.frombuffer(held, dtype=torch.uint8)
