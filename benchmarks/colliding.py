"""Names of one length and one value of libstdc++'s std::hash, which is MurmurHash64A with a fixed
seed.

From a state that is known two blocks of 8 bytes lead to another, and so do two others: the first of
these is anything, the second follows, and is text in one of 3,000 tries. n such pairs after each
other make 2^n names.
"""

from __future__ import annotations

import random

M = 0xC6A4A7935BD1E995
MASK = (1 << 64) - 1
INVERSE = pow(M, -1, 1 << 64)
SEED = 0xC70F6907


def murmur(text: bytes) -> int:
    """std::hash of a std::string_view of that text, whole blocks long, in libstdc++ on 64 bits."""
    state = SEED ^ (len(text) * M & MASK)
    for at in range(0, len(text), 8):
        state = _after(state, text[at : at + 8])
    state = (state ^ state >> 47) * M & MASK
    return state ^ state >> 47


def _after(state: int, block: bytes) -> int:
    return (state ^ _mixed(int.from_bytes(block, "little"))) * M & MASK


def _mixed(block: int) -> int:
    block = block * M & MASK
    return (block ^ block >> 47) * M & MASK


def _unmixed(block: int) -> int:
    block = block * INVERSE & MASK
    return (block ^ block >> 47) * INVERSE & MASK


def _pair(state: int, chance: random.Random) -> tuple[bytes, bytes]:
    """Two texts of two blocks that lead from `state` to the same one."""
    letters = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
    while True:
        first, second, other = (bytes(chance.choices(letters, k=8)) for _ in range(3))
        apart = _after(state, first) ^ _after(state, other)
        last = _unmixed(apart ^ _mixed(int.from_bytes(second, "little"))).to_bytes(8, "little")
        # All that JSON leaves as it is.
        if all(0x20 < byte < 0x7F and byte not in b'"\\' for byte in last):
            return first + second, other + last


def names(bits: int) -> list[str]:
    """2^bits names of 16 * bits bytes and one hash."""
    chance = random.Random(0)
    state = SEED ^ (16 * bits * M & MASK)
    made = [b""]
    for _ in range(bits):
        variants = _pair(state, chance)
        made = [name + variant for name in made for variant in variants]
        state = _after(_after(state, variants[0][:8]), variants[0][8:])
    return [name.decode("ascii") for name in made]
