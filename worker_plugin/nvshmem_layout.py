"""Where things are in an NVSHMEM arena, the same on every PE: a scratch word, a word for each granule,
the payload. And what a heap is called."""

from __future__ import annotations

import math

from st2i_dask._core import GRANULE

#: Bytes of a word.
WORD = 8
#: Offset of the scratch word in the arena.
SCRATCH = 0


def word_of(offset: int) -> int:
    """Offset in the arena of the word of the granule that is at this offset in the payload."""
    return WORD * (1 + offset // GRANULE)


def payload_start(arena: int) -> int:
    """Offset of the first granule that is not needed for words, in an arena of so many bytes."""
    granules = arena // GRANULE
    head = math.ceil(WORD * (1 + granules) / GRANULE) * GRANULE
    if head + GRANULE > arena:
        raise ValueError(f"an arena of {arena:,} bytes holds no payload; give it {2 * GRANULE:,}")
    return head


def heap_uuid(world: str, pe: int) -> str:
    """The name of a PE's heap: a world's name is used once, and a PE has one heap."""
    return f"{world}/{pe}"
