"""Inputs made of others, for where no coverage leads the way."""

import random
from collections.abc import Sequence

_INTERESTING = (0, 1, 0x7F, 0x80, 0xFF)


def mutate(rng: random.Random, corpus: Sequence[bytes], size_bytes_max: int) -> bytes:
    """One of the corpus, changed in a few places."""
    data = bytearray(rng.choice(corpus))
    for _ in range(1 << rng.randrange(4)):
        at = rng.randrange(len(data) + 1)
        length = rng.randrange(1, 17)
        match rng.randrange(6):
            case 0 if data:
                data[at % len(data)] ^= 1 << rng.randrange(8)
            case 1 if data:
                data[at % len(data)] = rng.choice(_INTERESTING)
            case 2:
                del data[at : at + length]
            case 3:
                data[at:at] = data[at : at + length] * rng.randrange(1, 9)
            case 4:
                other = rng.choice(corpus)
                start = rng.randrange(len(other) + 1)
                data[at : at + length] = other[start : start + length]
            case _:
                data[at : at + length] = rng.randbytes(length)
    return bytes(data[:size_bytes_max])
