"""Who reads which of the boxes that ranks of several nodes ask for, and sends it to the others."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from torch_ckpt.errors import CorruptError
from torch_ckpt.megatron.boxes import Box
from torch_ckpt.megatron.sharding import BoxLayout, RankLayout
from torch_ckpt.megatron.sharing import Part, Share
from torch_ckpt.native import operators
from torch_ckpt.planning.share import SharedBox, outermost, share_boxes
from torch_ckpt.ranks import Ranks
from torch_ckpt.ranks.transfers import Incoming, Outgoing, connected, transfer

_PIECE = 16 << 20  # bytes that are sent, and checked, at once
_CRC = struct.Struct("<I")


class Asked(NamedTuple):
    """What a rank asks for. node: where it is. readers: the ranks, by their places, that read
    together; None where each reads by itself."""

    layout: RankLayout
    node: int
    readers: frozenset[int] | None


class Reads(NamedTuple):
    """What one rank does for a load.

    gives: what it reads for others as well, and which.
    takes: what it is sent, and by whom.
    beside: the places of boxes that another rank of its node reads, too.
    sends: whether any rank is sent anything.
    """

    gives: list[tuple[Share, list[int]]]
    takes: list[tuple[Share, int]]
    beside: set[int]
    sends: bool


def plan_reads(asked: Sequence[Asked]) -> list[Reads]:
    """For each rank. What ranks of several nodes ask for, and read together, is read by one of
    them, so that it comes from storage once; of one node they all read it, from the page cache."""
    sent = _sent(asked)
    reads = [Reads([], [], set(), bool(sent)) for _ in asked]
    for rank, place in _beside(asked):
        reads[rank].beside.add(place)
    nodes = [each.node for each in asked]
    for (places, shared), pieces in zip(
        sent, share_boxes(nodes, [box for _, box in sent]), strict=True
    ):
        for rank in shared.holders:
            reads[rank].beside.discard(places[rank])
        for source, begin, end in pieces:
            others = [rank for rank in shared.holders if rank != source]
            reads[source].gives.append((Share(places[source], begin, end), others))
            for rank in others:
                reads[rank].takes.append((Share(places[rank], begin, end), source))
    return reads


def _sent(asked: Sequence[Asked]) -> list[tuple[dict[int, int], SharedBox]]:
    """What ranks on several nodes ask for that read together: where it is among the boxes of each
    that asks for it, and which of these read together."""
    groups = {each.readers for each in asked if each.readers is not None}
    spread = {group for group in groups if len({asked[rank].node for rank in group}) > 1}
    if not spread:
        return []
    wanted: dict[Part, dict[int, int]] = {}
    first: dict[Part, BoxLayout] = {}
    for rank, each in enumerate(asked):
        for place, box in enumerate(each.layout.boxes):
            part = (box.key, box.offset, box.sizes)
            wanted.setdefault(part, {}).setdefault(rank, place)
            first.setdefault(part, box)
    sent: list[tuple[dict[int, int], SharedBox]] = []
    for part, places in wanted.items():
        by_group: dict[frozenset[int] | None, list[int]] = {}
        for rank in places:
            by_group.setdefault(asked[rank].readers, []).append(rank)
        box = first[part]
        for readers, ranks in by_group.items():
            if readers in spread and len({asked[rank].node for rank in ranks}) > 1 and box.elements:
                shared = SharedBox.of(tuple(ranks), box.key, box.sizes, box.dtype)
                sent.append((places, shared))
    return sent


def _beside(asked: Sequence[Asked]) -> Iterator[tuple[int, int]]:
    """Rank and place of each box that another rank of its node reads, too. Of boxes that share
    what is stored otherwise, as columns may, the engine sees that much of it is not needed here.
    """
    held: dict[tuple[int, Part], list[tuple[int, int]]] = {}
    for rank, each in enumerate(asked):
        for place, box in enumerate(each.layout.boxes):
            held.setdefault((each.node, (box.key, box.offset, box.sizes)), []).append((rank, place))
    for boxes in held.values():
        if boxes[0][0] != boxes[-1][0]:  # they stand in the order of ranks
            yield from boxes


def boxes_to_read(boxes: Sequence[Box], reads: Reads) -> list[Box]:
    """What of `boxes`, those that a rank asks for, it reads itself."""
    given = [share for share, _ in reads.gives]
    shared = {share.place for share in (*given, *(share for share, _ in reads.takes))}
    own = [box for place, box in enumerate(boxes) if place not in shared and not box.absent]
    return own + [
        boxes[place].rows(begin, end) for place, begin, end in given if not boxes[place].absent
    ]


def deliver(boxes: Sequence[Box], reads: Reads, ranks: Ranks) -> None:
    """Send what was read to those that take it, and take what others have read. A collective call
    of `ranks`."""
    if not reads.sends:
        return
    gives = [(boxes[share.place], share, to) for share, to in reads.gives]
    gives = [give for give in gives if not give[0].absent]
    takes: dict[int, list[tuple[Box, Share]]] = {}
    for share, source in reads.takes:
        if not boxes[share.place].absent:
            takes.setdefault(source, []).append((boxes[share.place], share))
    peers = {rank for _, _, to in gives for rank in to} | set(takes)
    what = "what one rank reads for others"
    with connected(ranks, what, peers) as sockets:
        incoming = {source: _taken(source, of_source) for source, of_source in takes.items()}
        ranks.together(what, lambda: transfer(sockets, _given(gives), incoming))


def _given(gives: list[tuple[Box, Share, list[int]]]) -> Iterator[Outgoing]:
    for box, share, to in gives:
        for piece in _pieces(box.rows(share.begin, share.end).memory()):
            host = piece.to("cpu").resolve_conj().resolve_neg().contiguous()
            yield Outgoing(to, _bytes_of(host))
            yield Outgoing(to, memoryview(_CRC.pack(operators.crc32c(host))))


def _taken(source: int, takes: list[tuple[Box, Share]]) -> Iterator[Incoming]:
    for box, share in takes:
        for piece in _pieces(box.rows(share.begin, share.end).memory()):
            plain = not (piece.is_conj() or piece.is_neg())
            in_place = piece.is_cpu and piece.is_contiguous() and plain
            host = (
                piece
                if in_place
                else torch.empty_like(piece, device="cpu", memory_format=torch.contiguous_format)
            )
            digest = bytearray(_CRC.size)
            yield Incoming(_bytes_of(host), lambda: None)
            yield Incoming(memoryview(digest), _checked(source, box.key, piece, host, digest))


def _checked(
    source: int, key: str, piece: torch.Tensor, host: torch.Tensor, digest: bytearray
) -> Callable[[], None]:
    def done() -> None:
        if _CRC.unpack(digest) != (operators.crc32c(host),):
            raise CorruptError(f"came otherwise than rank {source} has sent it", tensor=key)
        if host is not piece:
            piece.copy_(host)
        else:
            torch.autograd.graph.increment_version(piece)

    return done


def _pieces(memory: torch.Tensor) -> Iterator[torch.Tensor]:
    """Views that are all of it, each of at most _PIECE bytes, or of one element."""
    if memory.nbytes <= _PIECE:
        yield memory
        return
    axis = outermost(memory.shape)
    size = memory.shape[axis]
    count = max(1, _PIECE * size // memory.nbytes)
    for begin in range(0, size, count):
        yield from _pieces(memory.narrow(axis, begin, min(count, size - begin)))


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor of the CPU, which it keeps."""
    array: object = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    array.tensor = tensor  # type: ignore[attr-defined]
    return memoryview(array).cast("B")  # type: ignore[arg-type]
