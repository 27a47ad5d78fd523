"""The books of a worker's weights: which layer lies where, who uses it, and when it is used next.

Pure. `WeightCache` decides; only this file counts bytes and pins. A layer is absent, being copied in
(at most one is), or resident in one region; its bytes count from the moment its copy is asked for.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

Region = Literal["framework", "arena"]
REGIONS: tuple[Region, ...] = ("framework", "arena")
Mode = Literal["elastic", "pipelined", "mcache", "wcache", "nocache"]
MODES: tuple[Mode, ...] = ("elastic", "pipelined", "mcache", "wcache", "nocache")


@dataclass(frozen=True, slots=True)
class Load:
    """Copy the layer in; report `loaded`, `no_room` or `failed`."""

    weights: str
    layer: int
    region: Region


@dataclass(frozen=True, slots=True)
class Evict:
    """Give the layer's memory back, before any Load that comes after it in the list."""

    weights: str
    layer: int


Instructions = list[Load | Evict]


class Weights:
    """One model's parameters. Sizes in bytes, by layer.

    A layer's position is its place in the order of execution; root layers have none (-1) and count as
    executed before all others. Positions from `executed` on are those of layers never seen to run.
    """

    def __init__(self, name: str, sizes: Sequence[int], roots: frozenset[int], unit: str):
        self.name, self.sizes, self.roots, self.unit = name, tuple(sizes), roots, unit
        self.prefix: int | None = None
        self.root_bytes = sum(self.sizes[layer] for layer in roots)
        self.largest = max((s for i, s in enumerate(self.sizes) if i not in roots), default=0)
        self.region: list[Region | None] = [None] * len(self.sizes)
        self.total = sum(self.sizes)
        self.pins = [0] * len(self.sizes)
        self.holders = 0  # runs that hold all its layers
        self.users = 0  # runs that have begun and not ended
        self.last_used = 0.0
        self.nbytes: dict[Region, int] = dict.fromkeys(REGIONS, 0)
        self.failed: set[int] = set()
        self.missing: list[int] = []  # positions to load ahead of need, ascending
        self.there: list[int] = []  # positions resident or being copied in, ascending
        self.set_order([i for i in range(len(self.sizes)) if i not in roots])

    def set_order(self, order: Sequence[int]) -> None:
        first_runs = dict.fromkeys(layer for layer in order if layer not in self.roots)
        self.executed = len(first_runs)
        others = (i for i in range(len(self.sizes)) if i not in self.roots)
        self.order = list(dict.fromkeys([*first_runs, *others]))
        self.position = [-1] * len(self.sizes)
        for position, layer in enumerate(self.order):
            self.position[layer] = position
        self.cumulative = list(accumulate((self.sizes[i] for i in self.order), initial=0))
        self.there = [p for p, layer in enumerate(self.order) if self.region[layer] is not None]
        self.list_missing()

    def try_again(self) -> None:
        """Copies that failed may be asked for again."""
        if self.failed:
            self.failed.clear()
            self.list_missing()

    def list_missing(self) -> None:
        self.missing = [
            position
            for position, layer in enumerate(self.order[: self.executed])
            if self.region[layer] is None and layer not in self.failed
        ]

    def from_the_last(self) -> Iterator[int]:
        """Layers in memory, last executed first, root layers at the end."""
        yield from [self.order[position] for position in reversed(self.there)]
        yield from [layer for layer in self.roots if self.region[layer] is not None]

    def _check(self) -> None:
        layers = range(len(self.sizes))
        assert sorted([*self.order, *self.roots]) == list(layers)
        in_memory = {layer for layer in layers if self.region[layer] is not None}
        assert [self.order[p] for p in self.there] == [i for i in self.order if i in in_memory]
        for position, layer in enumerate(self.order):
            assert self.position[layer] == position
        absent = set(self.order[: self.executed]) - in_memory - self.failed
        assert {self.order[p] for p in self.missing} == absent
        assert self.missing == sorted(self.missing)
        assert min([0, *self.pins]) == 0


class Books:
    """Bytes and pins of all weights. Methods suppose that the change is legal."""

    def __init__(self, capacity: Mapping[Region, int]):
        self.capacity: dict[Region, int] = {region: capacity.get(region, 0) for region in REGIONS}
        self.used: dict[Region, int] = dict.fromkeys(REGIONS, 0)
        self.idle: dict[Region, int] = dict.fromkeys(REGIONS, 0)  # bytes of weights without a run
        self.weights: dict[str, Weights] = {}  # least recently used first
        self.loading: tuple[Weights, int] | None = None

    def free(self, region: Region) -> int:
        return self.capacity[region] - self.used[region]

    def is_resident(self, weights: Weights, layer: int) -> bool:
        loading = self.loading
        return weights.region[layer] is not None and (
            loading is None or loading[1] != layer or loading[0] is not weights
        )

    def is_whole(self, weights: Weights) -> bool:
        """Whether every layer is resident."""
        there = sum(weights.nbytes.values()) == weights.total
        return there and (self.loading is None or self.loading[0] is not weights)

    def is_pinned(self, weights: Weights, layer: int) -> bool:
        return weights.pins[layer] > 0 or weights.holders > 0

    def evictable(self, weights: Weights, layer: int) -> bool:
        return not self.is_pinned(weights, layer) and self.is_resident(weights, layer)

    def place(self, weights: Weights, layer: int, region: Region) -> None:
        """It is being copied in."""
        self._count(weights, layer, region, 1)
        weights.region[layer] = region
        self.loading = (weights, layer)
        position = weights.position[layer]
        if position < 0:
            return
        insort(weights.there, position)
        if position < weights.executed and layer not in weights.failed:
            weights.missing.remove(position)

    def take_out(self, weights: Weights, layer: int) -> None:
        """It is evicted, or its copy did not come about."""
        region = weights.region[layer]
        assert region is not None
        self._count(weights, layer, region, -1)
        weights.region[layer] = None
        if self.loading == (weights, layer):
            self.loading = None
        position = weights.position[layer]
        if position < 0:
            return
        weights.there.remove(position)
        if position < weights.executed and layer not in weights.failed:
            insort(weights.missing, position)

    def _count(self, weights: Weights, layer: int, region: Region, sign: int) -> None:
        nbytes = sign * weights.sizes[layer]
        self.used[region] += nbytes
        weights.nbytes[region] += nbytes
        if not weights.users:
            self.idle[region] += nbytes

    def use(self, weights: Weights, now: float) -> None:
        """A run of it begins."""
        if not weights.users:
            for region in REGIONS:
                self.idle[region] -= weights.nbytes[region]
        weights.users += 1
        self.touch(weights, now)

    def disuse(self, weights: Weights, now: float) -> None:
        weights.users -= 1
        if not weights.users:
            for region in REGIONS:
                self.idle[region] += weights.nbytes[region]
        self.touch(weights, now)

    def touch(self, weights: Weights, now: float) -> None:
        weights.last_used = now
        self.weights[weights.name] = self.weights.pop(weights.name)

    def _check(self) -> None:
        for region in REGIONS:
            found = idle = 0
            stuck = True
            for weights in self.weights.values():
                lying = [i for i, there in enumerate(weights.region) if there == region]
                nbytes = sum(weights.sizes[i] for i in lying)
                assert weights.nbytes[region] == nbytes
                found += nbytes
                idle += 0 if weights.users else nbytes
                stuck = stuck and not any(self.evictable(weights, i) for i in lying)
            assert self.used[region] == found
            assert self.idle[region] == idle
            assert found <= self.capacity[region] or stuck, f"{region} is over its capacity"
        if self.loading is not None:
            weights, layer = self.loading
            assert self.weights[weights.name] is weights
            assert weights.region[layer] is not None
            assert not self.is_pinned(weights, layer)
        for name, weights in self.weights.items():
            assert weights.name == name
            weights._check()
            for layer in range(len(weights.sizes)):
                there = self.is_resident(weights, layer)
                assert there or not self.is_pinned(weights, layer), "a pinned layer is absent"
            there = all(self.is_resident(weights, layer) for layer in range(len(weights.sizes)))
            assert self.is_whole(weights) == there
