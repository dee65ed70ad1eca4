"""One exchange between ranks: a step of each, rank 0's answers, the error of one as that of all.

The steps run in the thread that calls; another one talks to the other ranks meanwhile, so that each
hears within a moment that a step has failed elsewhere, and nobody meets a timeout while somebody
else is still at work.
"""

from __future__ import annotations

import contextlib
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, NamedTuple

from torch_ckpt.errors import CancelledError, CheckpointError, InvalidArgumentError, with_rank
from torch_ckpt.native.jobs import Jobs, apart, in_thread
from torch_ckpt.native.progress import Progress
from torch_ckpt.ranks import tree
from torch_ckpt.ranks.links import Links, LostError

_ROUND_S = 0.2  # how often ranks hear of each other

BETWEEN = ""  # the call of a rank that has failed between two: it may meet any of the others'


class _Up(NamedTuple):
    """What a rank says in a round, for itself and for those below it in the tree."""

    call: str  # which it is
    differs: bool  # from that of some rank below
    failed: list[int]
    done: int  # bytes, of the native jobs of the step
    total: int
    ended: dict[int, bytes]  # of ranks whose step has ended since they said so last, how it did


class _Down(NamedTuple):
    """What rank 0 answers."""

    stops: bool  # a step has failed, or there is none that all can do
    done: int
    total: int
    ended: bool  # all steps have
    answer: bytes | dict[int, bytes] | None  # one for all, or by rank


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
        self._ended: dict[int, bytes] = {}  # on rank 0, how steps have
        self._values: Future[list[Any]] = Future()  # on rank 0 what all steps have returned
        self._answers: Future[list[Any]] = Future()  # on rank 0
        self._stopped: BaseException | None = None  # why this rank ends its step
        self._raised: BaseException | None = None  # what the others hear of this rank
        self._first: list[int] = []  # on rank 0, the ranks whose steps failed first
        self._others = (0, 0)  # bytes done and in all, as of the last round

    def run(self, own: Callable[[], Any], answers: Callable[[list[Any]], list[Any]]) -> Any:
        """`answers` returns one answer for all ranks, or one for each."""
        try:
            return self._run(own, answers)
        finally:
            # What is raised has frames that have this, and must not be found in it again: it would
            # live, with all that its frames hold, until the collector runs.
            vars(self).clear()

    def _run(self, own: Callable[[], Any], answers: Callable[[list[Any]], list[Any]]) -> Any:
        talk: Future[Any] | None = None
        try:
            try:
                talk = in_thread(self._talk, "torch_ckpt-ranks")
                with self._jobs:
                    _settle(self._own, own)
                if self._links.rank == 0:
                    # Ctrl-C cancels the jobs of this step, and is raised when all have heard how it
                    # ended: what is committed does not become a failure.
                    apart(lambda: self._answer(answers), self._interrupted, lambda _: None)
                wait([talk])
            except BaseException as error:  # Ctrl-C, at any line
                self._stop(error)
                self._end_with(error)
                if talk is None:  # no thread was to be had
                    self._links.close()
                while talk is not None and not talk.done():
                    with contextlib.suppress(BaseException):
                        wait([talk])
                raise
            try:
                return self._outcome_of(*talk.result())
            except BaseException as error:
                interrupt = self._own.exception()
                if interrupt is not None and not isinstance(interrupt, Exception):
                    raise interrupt from error
                raise
            finally:
                interrupt = None
        finally:
            del talk

    def _interrupted(self) -> None:
        """Ctrl-C on rank 0, whose own step has ended."""
        if self._values.done():
            self._jobs.cancel()
        else:
            self._stop(KeyboardInterrupt())

    def _end_with(self, error: BaseException) -> None:
        for future in (self._own, self._answers):
            if not future.done():
                future.set_exception(error)

    def _stop(self, error: BaseException) -> None:
        self._stopped = self._stopped or error
        self._jobs.cancel()

    def _answer(self, answers: Callable[[list[Any]], list[Any]]) -> None:
        with self._jobs:
            _settle(self._answers, lambda: answers(self._values.result()))

    def _talk(self) -> tuple[bool, Any, int]:
        """Whether all went well, the answer or the error, and the rank that has it."""
        rank_0 = self._links.rank == 0
        steps: list[Future[Any]] = [self._own, self._answers] if rank_0 else [self._own]
        try:
            self._until_all_have_ended()
            if rank_0:
                _settle(self._values, self._taken)
            good, value, rank = pickle.loads(self._answered())
            return good, value, rank
        except LostError as error:
            self._jobs.cancel()
            if rank_0 and not self._values.done():
                self._values.set_exception(error)
            raise self._links.give_up(self._what, error, steps) from error
        except BaseException as error:
            # What no step has raised: an answer that cannot be made again here, no memory.
            self._jobs.cancel()
            text = f"{type(error).__name__}: {error}"
            self._links.close(text)
            raise CheckpointError(text, rank=self._links.rank) from error
        finally:
            if rank_0 and not self._values.done():  # or its caller would wait for ever
                self._values.set_exception(CancelledError("was given up"))
            del steps

    def _round(self, failed: bool, ended: dict[int, bytes], answer: Any = None) -> _Down:
        """Tell the others how this rank is, hear how all are; on rank 0 give them the `answer`."""
        links = self._links
        own = done, total = self._jobs.progress()
        up = _Up(self._what, False, [links.rank] if failed else [], done, total, ended)
        for message in links.from_below().values():
            up = _both(up, _Up(*pickle.loads(message)))
        if links.above is None:
            down = self._decided(up, answer)
            message = pickle.dumps(tuple(down), pickle.HIGHEST_PROTOCOL)
        else:
            links.send(links.above, pickle.dumps(tuple(up), pickle.HIGHEST_PROTOCOL))
            message = links.from_above()
            down = _Down(*pickle.loads(message))
        if isinstance(down.answer, dict):
            for rank, part in _parts(links, down.answer).items():
                links.send(rank, pickle.dumps((*down[:-1], part), pickle.HIGHEST_PROTOCOL))
        else:
            for rank in links.below:
                links.send(rank, message)
        self._others = down.done - own[0], down.total - own[1]
        return down

    def _decided(self, up: _Up, answer: bytes | dict[int, bytes] | None) -> _Down:
        """On rank 0: what all hear after a round."""
        self._first = self._first or sorted(up.failed)
        self._ended.update(up.ended)
        stops = bool(up.failed) or up.differs
        return _Down(stops, up.done, up.total, len(self._ended) == self._links.size, answer)

    def _tell(self) -> None:
        """Tell `progress` what all ranks have done, the others as of the last round."""
        if self._progress is None or self._stopped is not None:
            return
        done, total = self._jobs.progress()
        try:
            self._progress(done + self._others[0], total + self._others[1])
        except BaseException as error:
            self._stop(error)

    def _until_all_have_ended(self) -> None:
        """Until the steps of all ranks have."""
        said = ended = False
        while not ended:
            wait([self._own], _ROUND_S)
            if self._cancel is not None and self._cancel.is_set():
                self._stop(CancelledError("was cancelled"))
            self._tell()
            stopped_late = self._stopped is not None and self._raised is None
            news = {}
            if self._own.done() and (not said or stopped_late):
                news[self._links.rank] = self._outcome()
                said = True
            failed = self._stopped is not None or (said and self._own.exception() is not None)
            down = self._round(failed, news)
            if down.stops:
                self._jobs.cancel()
            ended = down.ended

    def _outcome(self) -> bytes:
        """This rank's call, and True and what its step returned, or False and why it has not. Rank
        0 has what it returned itself."""
        rank = self._links.rank
        error = self._stopped or self._own.exception()
        if error is None:
            outcome = (self._what, True, self._own.result() if rank != 0 else None)
            try:
                return pickle.dumps(outcome, pickle.HIGHEST_PROTOCOL)
            except Exception as unpicklable:
                error = self._stopped = unpicklable
        return pickle.dumps((self._what, False, self._heard(error, rank)))

    def _heard(self, error: BaseException, rank: int) -> BaseException:
        """What others hear of this rank's `error`: one that can be pickled and says the rank."""
        self._raised = with_rank(error, rank)
        if self._raised is not error:
            self._raised.__cause__ = error
        return portable(self._raised, rank)

    def _taken(self) -> list[Any]:
        """On rank 0: what all steps have returned, or raises why one has not."""
        outcomes = [pickle.loads(self._ended.pop(rank)) for rank in range(self._links.size)]
        if len({what for what, _, _ in outcomes} - {BETWEEN}) > 1:
            calls = ", ".join(f"rank {rank} '{each[0]}'" for rank, each in enumerate(outcomes))
            raise _Failed(None, InvalidArgumentError(f"ranks make different calls: {calls}"))
        failed = [rank for rank, (_, good, _) in enumerate(outcomes) if not good]
        if failed:
            # Those that failed later may have been cancelled because of the first.
            first = [rank for rank in self._first if rank in failed] or failed
            rank = min(first, key=lambda rank: isinstance(outcomes[rank][2], CancelledError))
            raise _Failed(rank, outcomes[rank][2])
        return [self._own.result(), *(value for _, _, value in outcomes[1:])]

    def _answered(self) -> bytes:
        """Until rank 0 has answered: this rank's answer."""
        while True:
            given: bytes | dict[int, bytes] | None = None
            if self._links.rank == 0:
                wait([self._answers], _ROUND_S)
                if self._answers.done():
                    texts = self._answer_texts()
                    given = texts[0] if len(texts) == 1 else dict(enumerate(texts))
            answer = self._round(False, {}, given).answer
            self._tell()
            if answer is not None:
                return answer[self._links.rank] if isinstance(answer, dict) else answer

    def _outcome_of(self, good: bool, value: Any, rank: int) -> Any:
        """What the call returns, or the error of all."""
        if not good:
            try:
                raise (self._raised if rank == self._links.rank else None) or value
            finally:
                del value
        if self._stopped is not None:  # by what `progress` raised, too late to end anything
            raise self._stopped
        return self._answers.result()[0] if self._links.rank == 0 else value

    def _answer_texts(self) -> list[bytes]:
        """On rank 0: (True, an answer, None) each, or (False, the error, the rank that has it)."""
        error = self._answers.exception()
        if error is None:
            try:
                answers = self._answers.result()
                if len(answers) > 1:  # of which it has its own already
                    answers = [None, *answers[1:]]
                return [
                    pickle.dumps((True, answer, None), pickle.HIGHEST_PROTOCOL)
                    for answer in answers
                ]
            except Exception as unpicklable:
                error = unpicklable
        if isinstance(error, _Failed):
            return [pickle.dumps((False, error.error, error.rank))]
        return [pickle.dumps((False, self._heard(self._stopped or error, 0), 0))]


def portable(error: BaseException, rank: int | None) -> Exception:
    """What another process can be told of `error`: one of our kinds or of the system's that can be
    pickled and made again there, or a CheckpointError with its words."""
    if not isinstance(error, Exception):
        return CancelledError("was interrupted", rank=rank)
    if isinstance(error, CheckpointError | OSError):
        with contextlib.suppress(Exception):
            pickle.loads(pickle.dumps(error))
            return error
    return CheckpointError(f"{type(error).__name__}: {error}", rank=rank)


def _both(one: _Up, other: _Up) -> _Up:
    return _Up(
        one.call,
        one.differs or other.differs or one.call != other.call,
        one.failed + other.failed,
        one.done + other.done,
        one.total + other.total,
        {**one.ended, **other.ended},
    )


def _parts(links: Links, answers: dict[int, bytes]) -> dict[int, dict[int, bytes]]:
    """The answers for the ranks below, by the one that they go through."""
    parts: dict[int, dict[int, bytes]] = {rank: {} for rank in links.below}
    for rank, answer in answers.items():
        if rank != links.rank:
            parts[tree.way(links.rank, rank)][rank] = answer
    return parts


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
    finally:
        del future, step  # or the error would find itself in this frame
