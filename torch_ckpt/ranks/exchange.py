"""One exchange between ranks: a step of each, rank 0's answers, the error of one as that of all.

The steps run in the thread that calls; another one talks to the other ranks meanwhile, so that each
hears within a moment that a step has failed elsewhere, and nobody meets a timeout while somebody
else is still at work.
"""

from __future__ import annotations

import contextlib
import pickle
import struct
import threading
import zlib
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, NamedTuple

from torch_ckpt.errors import CancelledError, CheckpointError, InvalidArgumentError, with_rank
from torch_ckpt.jobs import Jobs, apart, in_thread
from torch_ckpt.progress import Progress
from torch_ckpt.ranks.links import Links, LostError

_ROUND_S = 0.2  # how often ranks hear of each other


class _Message(NamedTuple):
    """What a rank says in a round. Short texts are in it."""

    call: int  # a hash of which it is
    failed: bool
    done: int  # bytes, of the native jobs of its step
    total: int
    texts: int  # how many it has for the others; none while its step runs
    longest: int  # of these, in bytes
    text: bytes


_NUMBERS = "<I?qqIq"
_MESSAGE_BYTES = 512
_ROOM = _MESSAGE_BYTES - struct.calcsize(_NUMBERS)  # for a text, in bytes


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
        self._messages: list[_Message] = []  # of the last round

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
                apart(lambda: self._answer(answers), self._interrupted, lambda _: None)
            wait([talk])
        except BaseException as error:  # Ctrl-C, at any line
            self._stop(error)
            for future in (self._own, self._answers):
                if not future.done():
                    future.set_exception(error)
            if talk is None:  # no thread was to be had
                self._links.close()
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

    def _interrupted(self) -> None:
        """Ctrl-C on rank 0, whose own step has ended."""
        if self._values.done():
            self._jobs.cancel()
        else:
            self._stop(KeyboardInterrupt())

    def _stop(self, error: BaseException) -> None:
        self._stopped = self._stopped or error
        self._jobs.cancel()

    def _answer(self, answers: Callable[[list[Any]], list[Any]]) -> None:
        with self._jobs:
            _settle(self._answers, lambda: answers(self._values.result()))

    def _talk(self) -> Any:
        rank_0 = self._links.rank == 0
        try:
            texts = self._until_all_have_ended()
            if rank_0:
                _settle(self._values, lambda: self._taken(texts))
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

    def _round(self, failed: bool, texts: list[bytes]) -> list[_Message]:
        """How all ranks are; `texts` are what this rank has to say, if it has ended."""
        done, total = self._jobs.progress()
        longest = max(map(len, texts), default=0)
        call = zlib.crc32(self._what.encode())
        numbers = struct.pack(_NUMBERS, call, failed, done, total, len(texts), longest)
        text = texts[0] if len(texts) == 1 and longest <= _ROOM else b""
        packed = self._links.all_gather(numbers + text, _MESSAGE_BYTES)
        self._messages = [
            _Message(*struct.unpack_from(_NUMBERS, message), message[-_ROOM:])  # type: ignore[call-arg]
            for message in packed
        ]
        return self._messages

    def _tell(self) -> None:
        """Tell `progress` what all ranks have done, the others as of the last round."""
        if self._progress is None or self._stopped is not None:
            return
        counts = [(message.done, message.total) for message in self._messages]
        counts[self._links.rank : self._links.rank + 1] = [self._jobs.progress()]
        try:
            self._progress(sum(done for done, _ in counts), sum(total for _, total in counts))
        except BaseException as error:
            self._stop(error)

    def _until_all_have_ended(self) -> list[bytes]:
        """Until the steps of all ranks have ended. Returns, on rank 0 at least, how each did."""
        text = b""
        while True:
            wait([self._own], _ROUND_S)
            if self._cancel is not None and self._cancel.is_set():
                self._stop(CancelledError("was cancelled"))
            self._tell()
            stopped_late = self._stopped is not None and self._raised is None
            if self._own.done() and (text == b"" or stopped_late):
                text = self._outcome()
            ended = text != b""
            failed = self._stopped is not None or (ended and self._own.exception() is not None)
            messages = self._round(failed, [text] if ended else [])
            failed_ranks = [rank for rank, message in enumerate(messages) if message.failed]
            self._first = self._first or failed_ranks
            if failed_ranks or any(message.call != messages[0].call for message in messages):
                self._jobs.cancel()
            if all(message.texts for message in messages):
                longest = max(message.longest for message in messages)
                if longest <= _ROOM:
                    return [message.text for message in messages]
                return self._links.gather(text, longest)

    def _outcome(self) -> bytes:
        """This rank's call, and True and what its step returned, or False and why it has not."""
        rank = self._links.rank
        error = self._stopped or self._own.exception()
        if error is None:
            outcome = (self._what, True, self._own.result())
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

    def _taken(self, texts: list[bytes]) -> list[Any]:
        """On rank 0: what all steps have returned, or raises why one has not."""
        outcomes = [pickle.loads(text) for text in texts]
        if any(what != self._what for what, _, _ in outcomes):
            calls = ", ".join(f"rank {rank} '{each[0]}'" for rank, each in enumerate(outcomes))
            raise _Failed(None, InvalidArgumentError(f"ranks make different calls: {calls}"))
        failed = [rank for rank, (_, good, _) in enumerate(outcomes) if not good]
        if failed:
            # Those that failed later may have been cancelled because of the first.
            first = [rank for rank in self._first if rank in failed] or failed
            rank = min(first, key=lambda rank: isinstance(outcomes[rank][2], CancelledError))
            raise _Failed(rank, outcomes[rank][2])
        return [self._own.result(), *(value for _, _, value in outcomes[1:])]

    def _answered(self) -> Any:
        """Until rank 0 has answered: this rank's answer. Raises the error of all."""
        texts: list[bytes] = []
        answer = None
        while answer is None or answer.texts == 0:
            if self._links.rank == 0:
                wait([self._answers], _ROUND_S)
                if self._answers.done():
                    texts = self._answer_texts()
            answer = self._round(False, texts)[0]
            self._tell()
        if answer.texts > 1:
            text = self._links.scatter(texts, answer.longest)
        elif answer.longest > _ROOM:
            text = self._links.broadcast(texts[0] if texts else b"", answer.longest)
        else:
            text = answer.text
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
