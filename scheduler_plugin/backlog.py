"""Candidates in order of (rank, key), with removal from the middle: a heap with tombstones."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from .candidates import Candidate

Rank = tuple[float, ...]
#: Living or a tombstone, told apart by identity: a candidate may come back with the same rank. The
#: number keeps candidates from being compared.
_Entry = tuple[Rank, str, int, Candidate]


class Backlog:
    """The smallest (rank, key) first. O(log n) amortised; a removed entry costs memory at most
    until the tombstones outnumber the living."""

    __slots__ = ("_heap", "_living", "_pushed")

    def __init__(self) -> None:
        self._heap: list[_Entry] = []
        self._living: dict[str, _Entry] = {}
        self._pushed = 0

    def __len__(self) -> int:
        return len(self._living)

    def __contains__(self, key: object) -> bool:
        return key in self._living

    def push(self, rank: Rank, candidate: Candidate) -> None:
        assert candidate.key not in self._living
        self._pushed += 1
        entry = (rank, candidate.key, self._pushed, candidate)
        self._living[candidate.key] = entry
        heappush(self._heap, entry)

    def remove(self, key: str) -> Candidate:
        """Take an entry out, wherever it stands. KeyError if it is not there."""
        entry = self._living.pop(key)
        heap = self._heap
        if heap[0] is entry:
            heappop(heap)
            self._sweep()
        elif len(heap) > 2 * len(self._living) + 8:
            self._heap = [other for other in heap if self._living.get(other[1]) is other]
            heapify(self._heap)
        return entry[3]

    def first(self) -> Candidate:
        """The entry with the smallest (rank, key). IndexError when empty."""
        return self._heap[0][3]

    def first_rank(self) -> Rank:
        return self._heap[0][0]

    def _sweep(self) -> None:
        heap, living = self._heap, self._living
        while heap and living.get(heap[0][1]) is not heap[0]:
            heappop(heap)

    def _check(self) -> None:
        alive = [entry for entry in self._heap if self._living.get(entry[1]) is entry]
        assert len(alive) == len(self._living)
        if self._heap:
            assert self._living, "an empty backlog holds tombstones"
            assert self._heap[0] == min(alive, key=lambda entry: entry[:2])
        assert len(self._heap) <= 2 * len(self._living) + 9
