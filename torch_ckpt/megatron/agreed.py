"""What ranks agreed on in their last save or load, for one in which nothing has changed."""

from __future__ import annotations

import hashlib
import secrets
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from torch_ckpt.ranks import Ranks

S = TypeVar("S")
T = TypeVar("T")


@dataclass(frozen=True)
class _Agreed:
    """token: of this agreement, the same on all ranks. offer: what this rank said. answer: what it
    was told. offers: on rank 0, of all ranks."""

    token: str
    offer: bytes
    answer: Any
    offers: list[bytes]


class _Offer(NamedTuple):
    """token: of the agreement that this rank knows, "" for none. digest: of what it would say.
    compared: of what all ranks should have alike."""

    token: str
    digest: bytes
    compared: bytes


# By the strategy with which it was saved or loaded.
_last: weakref.WeakKeyDictionary[Any, _Agreed] = weakref.WeakKeyDictionary()


def agree(
    ranks: Ranks,
    what: str,
    say: Callable[[], S],
    settle: Callable[[list[S]], list[T]],
    memory: Any,
    fields: Callable[[S], tuple[Any, Any]],
) -> T:
    """`ranks.scatter(what, say, settle)`, whose answers are kept in `memory`, an object that this
    rank saves or loads with; None keeps nothing. They are given again where every rank says what it
    said then, of which digests are compared: a change on any rank settles all anew. A collective
    call.

    fields: of what a rank says, that on which the answers depend, and what is compared between
        ranks; where the latter differs, all is settled anew, and told. Their `repr` says all of
        them.
    """
    if memory is None:
        return ranks.scatter(what, say, settle)
    said: list[S] = []

    def offer() -> _Offer:
        said.append(say())
        own, compared = map(digest_of, fields(said[0]))
        known = _last.get(memory)
        return _Offer(known.token if known else "", own, compared)

    def is_known(offers: list[_Offer]) -> bool:
        known = _last.get(memory)
        return (
            known is not None
            and all(each.token == known.token for each in offers)
            and [each.digest for each in offers] == known.offers
            and len({each.compared for each in offers}) == 1
        )

    if ranks.gather(f"whether {what} has changed", offer, is_known):
        answer: T = _last[memory].answer
        return answer
    token = secrets.token_hex(8)
    offers: list[bytes] = []

    def answers(all_said: list[tuple[S, bytes]]) -> list[tuple[str, T]]:
        offers.extend(digest for _, digest in all_said)
        return [(token, each) for each in settle([each for each, _ in all_said])]

    own = digest_of(fields(said[0])[0])
    token, answer = ranks.scatter(what, lambda: (said[0], own), answers)
    _last[memory] = _Agreed(token, own, answer, offers)
    return answer


def digest_of(value: Any) -> bytes:
    return hashlib.blake2b(repr(value).encode("utf-8", "surrogatepass"), digest_size=16).digest()
