"""A mutation fuzzer that needs nothing: bytes flipped, cut, repeated, swapped between files, words put in."""

import random
from collections.abc import Sequence

MOST_BYTES = 20_000


def mutated(rng: random.Random, files: Sequence[bytes], words: Sequence[bytes]) -> bytes:
    """One of the files, changed in one to eight places."""
    content = bytearray(rng.choice(files))
    for _ in range(rng.choice((1, 1, 2, 3, 8))):
        _change(rng, content, files, words)
    return bytes(content[:MOST_BYTES])


def _change(rng: random.Random, content: bytearray, files: Sequence[bytes], words: Sequence[bytes]) -> None:
    at, to = sorted(rng.randint(0, len(content)) for _ in range(2))
    match rng.randrange(7):
        case 0 if content:
            content[at % len(content)] ^= 1 << rng.randrange(8)
        case 1 if content:
            content[at % len(content)] = rng.choice((0, 1, 9, 10, 34, 45, 48, 127, 128, 255))
        case 2:
            del content[at : min(to, at + rng.choice((1, 4, 64, 10_000)))]
        case 3:
            content[at:at] = content[at : min(to, at + 64)] * rng.choice((1, 2, 50))
        case 4 if words:
            content[at : rng.choice((at, to))] = rng.choice(words)
        case 5:
            other = rng.choice(files)
            start = rng.randint(0, len(other))
            content[at : at + 16] = other[start : start + rng.randint(0, 64)]
        case _:
            content[at : at + 4] = rng.randbytes(4)
