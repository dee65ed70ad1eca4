"""One exchange between ranks: a step of each, rank 0's answers, the error of one as that of all.

The steps run in the thread that calls; another one talks to the other ranks meanwhile, so that each
hears within a moment that a step has failed elsewhere, and nobody meets a timeout while somebody
else is still at work.
"""

from __future__ import annotations

import contextlib
import pickle
import threading
import zlib
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

from torch_ckpt.errors import CancelledError, CheckpointError, InvalidArgumentError, with_rank
from torch_ckpt.jobs import Jobs, apart, in_thread
from torch_ckpt.progress import Progress
from torch_ckpt.ranks.links import Links, LostError

_ROUND_S = 0.2  # how often ranks hear of each other


class Exchange:
    """See Ranks.gather, which says what the arguments are. Used once."""

    def __init__(
        self,
        links: Links,
        what: str,
        progress: Progress | None,
        cancel: threading.Event | None,
    ) -> None:
        self._links = links
        self._what = what
        self._progress = progress
        self._cancel = cancel
        self._jobs = Jobs()
        self._own: Future[Any] = Future()  # what this rank's step returns
        self._values: Future[list[Any]] = Future()  # on rank 0 what all steps have returned
        self._answers: Future[list[Any]] = Future()  # on rank 0
        self._stopped: BaseException | None = None  # why this rank ends its step
        self._raised: BaseException | None = None  # what the others hear of this rank
        self._first: list[int] = []  # the ranks whose steps failed first

    def run(self, own: Callable[[], Any], answers: Callable[[list[Any]], list[Any]]) -> Any:
        """`answers` returns one answer for all ranks, or one for each."""
        talk: Future[Any] | None = None
        try:
            talk = in_thread(self._talk, "torch_ckpt-ranks")
            with self._jobs:
                _settle(self._own, own)
            if self._links.rank == 0:
                # Ctrl-C cancels the jobs of this step, and is raised when all have heard how it
                # ended: what is committed does not become a failure.
                apart(lambda: self._answer(answers), self._jobs.cancel, lambda _: None)
            wait([talk])
        except BaseException as error:  # Ctrl-C, at any line
            self._stop(error)
            for future in (self._own, self._answers):
                if not future.done():
                    future.set_exception(error)
            while talk is not None and not talk.done():
                with contextlib.suppress(BaseException):
                    wait([talk])
            raise
        try:
            return talk.result()
        except BaseException as error:
            interrupt = self._own.exception()
            if interrupt is not None and not isinstance(interrupt, Exception):
                raise interrupt from error
            raise

    def _stop(self, error: BaseException) -> None:
        self._stopped = self._stopped or error
        self._jobs.cancel()

    def _answer(self, answers: Callable[[list[Any]], list[Any]]) -> None:
        with self._jobs:
            _settle(self._answers, lambda: answers(self._values.result()))

    def _talk(self) -> Any:
        rank_0 = self._links.rank == 0
        try:
            calls_differ = self._until_all_have_ended()
            text = pickle.dumps((False, self._what)) if calls_differ else self._outcome()
            longest = max(size for (size,) in self._links.all_numbers((len(text),)))
            texts = self._links.gather(text, longest)
            if rank_0:
                _settle(self._values, lambda: self._taken(texts, calls_differ))
            return self._answered()
        except LostError as error:
            self._jobs.cancel()
            steps: list[Future[Any]] = [self._own]
            if rank_0:
                if not self._values.done():
                    self._values.set_exception(error)
                steps.append(self._answers)
            raise self._links.give_up(self._what, error, steps) from error
        finally:
            if rank_0 and not self._values.done():  # or its caller would wait for ever
                self._values.set_exception(CancelledError("was given up"))

    def _until_all_have_ended(self) -> bool:
        """Until the steps of all ranks have ended. Returns whether they make different calls."""
        call = zlib.crc32(self._what.encode())
        while True:
            wait([self._own], _ROUND_S)
            ended = self._own.done()
            if not ended and self._cancel is not None and self._cancel.is_set():
                self._stop(CancelledError("was cancelled"))
            failed = self._stopped is not None or (ended and self._own.exception() is not None)
            all_ranks = self._links.all_numbers((call, ended, failed, *self._jobs.progress()))
            calls_differ = any(other != call for other, *_ in all_ranks)
            failed_ranks = [rank for rank, (_, _, failed, *_) in enumerate(all_ranks) if failed]
            self._first = self._first or failed_ranks
            if calls_differ or failed_ranks:
                self._jobs.cancel()
            self._tell([numbers[3:] for numbers in all_ranks])
            if all(ended for _, ended, *_ in all_ranks):
                return calls_differ

    def _tell(self, counts: list[list[int]]) -> None:
        if self._progress is None or self._stopped is not None:
            return
        try:
            self._progress(sum(done for done, _ in counts), sum(total for _, total in counts))
        except BaseException as error:
            self._stop(error)

    def _outcome(self) -> bytes:
        """(True, what this rank's step returned) or (False, why it has not), pickled."""
        rank = self._links.rank
        error = self._stopped or self._own.exception()
        if error is None:
            try:
                return pickle.dumps((True, self._own.result()), pickle.HIGHEST_PROTOCOL)
            except Exception as unpicklable:
                error = self._stopped = unpicklable
        return pickle.dumps((False, self._heard(error, rank)))

    def _heard(self, error: BaseException, rank: int) -> BaseException:
        """What others hear of this rank's `error`: one that can be pickled and says the rank."""
        if not isinstance(error, Exception):
            self._raised = error
            return CancelledError("was interrupted", rank=rank)
        self._raised = with_rank(error, rank)
        if self._raised is not error:
            self._raised.__cause__ = error
        if not isinstance(error, CheckpointError | OSError) or not _is_portable(self._raised):
            return CheckpointError(f"{type(error).__name__}: {error}", rank=rank)
        return self._raised

    def _taken(self, texts: list[bytes], calls_differ: bool) -> list[Any]:
        """On rank 0: what all steps have returned, or raises why one has not."""
        outcomes = [pickle.loads(text) for text in texts]
        if calls_differ:
            calls = ", ".join(f"rank {rank} '{what}'" for rank, (_, what) in enumerate(outcomes))
            raise _Failed(None, InvalidArgumentError(f"ranks make different calls: {calls}"))
        failed = [rank for rank, (good, _) in enumerate(outcomes) if not good]
        if failed:
            # Those that failed later may have been cancelled because of the first.
            first = [rank for rank in self._first if rank in failed] or failed
            rank = min(first, key=lambda rank: isinstance(outcomes[rank][1], CancelledError))
            raise _Failed(rank, outcomes[rank][1])
        return [self._own.result(), *(value for _, value in outcomes[1:])]

    def _answered(self) -> Any:
        """Until rank 0 has answered: this rank's answer. Raises the error of all."""
        texts: list[bytes] = []
        count = longest = 0
        while count == 0:
            if self._links.rank == 0:
                wait([self._answers], _ROUND_S)
                if self._answers.done():
                    texts = self._answer_texts()
            longest = max(map(len, texts), default=0)
            all_ranks = self._links.all_numbers((len(texts), longest, *self._jobs.progress()))
            count, longest = all_ranks[0][:2]
            self._tell([numbers[2:] for numbers in all_ranks])
        if count == 1:
            text = self._links.broadcast(texts[0] if texts else b"", longest)
        else:
            text = self._links.scatter(texts, longest)
        good, value, rank = pickle.loads(text)
        if not good:
            own = self._raised if rank == self._links.rank else None
            raise own or value
        if self._stopped is not None:  # by what `progress` raised, too late to end anything
            raise self._stopped
        return self._answers.result()[0] if self._links.rank == 0 else value

    def _answer_texts(self) -> list[bytes]:
        """On rank 0: (True, an answer, None) each, or (False, the error, the rank that has it)."""
        error = self._answers.exception()
        if error is None:
            try:
                return [
                    pickle.dumps((True, answer, None), pickle.HIGHEST_PROTOCOL)
                    for answer in self._answers.result()
                ]
            except Exception as unpicklable:
                error = unpicklable
        if isinstance(error, _Failed):
            return [pickle.dumps((False, error.error, error.rank))]
        return [pickle.dumps((False, self._heard(self._stopped or error, 0), 0))]


def _is_portable(error: BaseException) -> bool:
    """Whether it can be pickled and made again."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return False
    return True


class _Failed(Exception):
    """The error of some rank's step, from the thread that talks to the one that answers."""

    def __init__(self, rank: int | None, error: BaseException) -> None:
        super().__init__(rank, error)
        self.rank = rank
        self.error = error


def _settle(future: Future[Any], step: Callable[[], Any]) -> None:
    try:
        value = step()
    except BaseException as error:
        with contextlib.suppress(Exception):  # it may be settled, by Ctrl-C
            future.set_exception(error)
    else:
        with contextlib.suppress(Exception):
            future.set_result(value)
