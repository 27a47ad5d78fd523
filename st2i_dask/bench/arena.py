"""Arena: best fit against the buddy: microseconds, and how full an arena is when it is full.

Tensors of text-to-image workflows in an arena of 8 GiB. `random`: a mix of all sizes, a third of them
dropped, at random, whenever one does not fit. `requests`: embeddings and latents for the length of a
request, and per step 19 residuals of 24 MiB that the next step replaces; requests overlap.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

from st2i_dask._core import Allocator

KIB, MIB = 1 << 10, 1 << 20
ARENA = 8 << 30
KINDS = ("best_fit", "buddy")
STEPS = 6_000
SEEDS = 3

#: Bytes and how often: pooled and sequence embeddings, latents, images, residuals, weights.
MIX = (
    (1536, 3),
    (308 * KIB, 5),
    (512 * KIB, 20),
    (4 * MIB, 10),
    (6 * MIB, 5),
    (18 * MIB, 2),
    (24 * MIB, 19),
    (72 * MIB, 1),
)
REQUEST = (4 * MIB, 1536, 6 * MIB, 512 * KIB)
STEP = (512 * KIB, *([24 * MIB] * 19))


def run(steps: int = STEPS, seeds: int = SEEDS) -> dict[str, Any]:
    """Per allocator `alloc_free_us`, and medians of payload per arena at a failed allocation.

    `random_gain`, `requests_gain`: what best fit holds, over what the buddy holds.
    """
    pairs: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _, kind in itertools.product(range(5), KINDS):
        pairs[kind].append(_pair_us(kind, 4 * steps))
    figures: dict[str, Any] = {
        kind: {
            "alloc_free_us": round(statistics.median(pairs[kind]), 3),
            "random_held": _held(kind, _random_mix, steps, seeds),
            "requests_held": _held(kind, _requests, steps, seeds),
        }
        for kind in KINDS
    }
    for workload in ("random", "requests"):
        best, buddy = (figures[kind][f"{workload}_held"] for kind in KINDS)
        figures[f"{workload}_gain"] = round(best / buddy, 3)
    return figures


Held = list[tuple[int, int]]  # offset, bytes asked for


class _Arena:
    """An allocator and the payload that lies in it, as asked for."""

    def __init__(self, kind: str):
        self.allocator = Allocator(ARENA, kind)
        self.payload = 0

    def put(self, held: Held, nbytes: int) -> bool:
        offset = self.allocator.alloc(nbytes)
        if offset is None:
            return False
        held.append((offset, nbytes))
        self.payload += nbytes
        return True

    def drop(self, held: Held) -> None:
        for offset, nbytes in held:
            self.allocator.free(offset)
            self.payload -= nbytes
        held.clear()


Workload = Callable[[_Arena, random.Random, int], Iterator[int]]


def _held(kind: str, workload: Workload, steps: int, seeds: int) -> float:
    found = [
        payload / ARENA
        for seed in range(seeds)
        for payload in workload(_Arena(kind), random.Random(seed), steps)
    ]
    return round(statistics.median(found), 3)


def _random_mix(arena: _Arena, chance: random.Random, steps: int) -> Iterator[int]:
    """The payload whenever an allocation fails."""
    sizes, weights = zip(*MIX, strict=True)
    held: Held = []
    for _ in range(steps):
        if not arena.put(held, chance.choices(sizes, weights)[0]):
            yield arena.payload
            chance.shuffle(held)
            third = [held.pop() for _ in range(len(held) // 3)]
            arena.drop(third)
        elif chance.random() < 0.3:
            arena.drop([held.pop(chance.randrange(len(held)))])


def _requests(arena: _Arena, chance: random.Random, steps: int) -> Iterator[int]:
    """The payload whenever an allocation fails."""
    active: list[tuple[Held, Held]] = []

    def end(request: tuple[Held, Held]) -> None:
        for held in request:
            arena.drop(held)

    for _ in range(steps):
        fits = True
        if not active or chance.random() < 0.25:
            active.append(([], []))
            fits = all(arena.put(active[-1][0], nbytes) for nbytes in REQUEST)
        if fits:
            request = chance.choice(active)
            arena.drop(request[1])
            fits = all(arena.put(request[1], nbytes) for nbytes in STEP)
        if not fits:
            yield arena.payload
            chance.shuffle(active)
            for _ in range(max(1, len(active) // 3)):
                end(active.pop())
        elif chance.random() < 0.1:
            active.remove(request)
            end(request)


def _pair_us(kind: str, pairs: int) -> float:
    """Microseconds of one alloc and one free, with 256 blocks alive."""
    allocator = Allocator(ARENA, kind)
    sizes = itertools.cycle((512 * KIB, 4 * MIB, 24 * MIB, 6 * MIB))
    held = [allocator.alloc(next(sizes)) for _ in range(256)]
    assert None not in held
    start = time.perf_counter()
    for number in range(pairs):
        place = number * 7919 % 256
        offset = held[place]
        assert offset is not None
        allocator.free(offset)
        held[place] = allocator.alloc(next(sizes))
    return 1e6 * (time.perf_counter() - start) / pairs
