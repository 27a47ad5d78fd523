"""Loading and evicting in full memory, in virtual time: the real policy, the real allocator in the arena."""

from __future__ import annotations

import gc
import heapq
import itertools
import math
import random
import time
from bisect import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from st2i_dask._core import GRANULE, Allocator
from worker_plugin.prefix import resident_prefix
from worker_plugin.weight_cache import REGIONS, Evict, Load, Region, WeightCache

from ._layer_sizes import models, packed

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
BANDWIDTH = 25e9  # bytes per second from host to device
LOAD_PER_COMPUTE = 3.2  # of a layer, as the paper measured for FLUX
FILL = 0.97
NBYTES: dict[Region, int] = {"framework": 40 * GIB, "arena": 24 * GIB}
ZIPF = 1.0

#: Tensors in the arena: bytes, how often, and for how many layers they live on average.
TENSORS = (
    (64 * KIB, 4, 200),  # pooled embeddings, signals
    (512 * KIB, 8, 200),  # latents
    (4 * MIB, 4, 600),  # embeddings of prompts
    (24 * MIB, 8, 60),  # residuals of ControlNets
    (100 * MIB, 1, 60),  # images, hints
)
OFTEN = list(itertools.accumulate(often for _, often, _ in TENSORS))
TENSORS_PER_LAYER = 1.0

PAGE = 2 * MIB


class _Pages:
    """Virtual memory: the methods of `Allocator` that are used here."""

    def __init__(self, nbytes: int):
        self.nbytes, self._used, self._serial = nbytes, 0, 0
        self._live: dict[int, int] = {}

    def alloc(self, nbytes: int) -> int | None:
        rounded = -(-nbytes // PAGE) * PAGE
        if self._used + rounded > self.nbytes:
            return None
        self._used += rounded
        self._serial += 1
        self._live[self._serial] = rounded
        return self._serial

    def free(self, block: int) -> None:
        self._used -= self._live.pop(block)

    def statistics(self) -> dict[str, int]:
        return {"free": (self.nbytes - self._used) // PAGE * PAGE}

    def _check(self) -> None:
        assert self._used == sum(self._live.values()) <= self.nbytes


@dataclass
class _Region:
    """An allocator and what lies in it."""

    allocator: Allocator | _Pages
    fill: float
    weights: int = 0
    tensors: int = 0
    blocks: int = 0  # of weights

    def capacity(self) -> int:
        return max(0, int(self.fill * self.allocator.nbytes) - self.tensors)


def _would_do(allocator: Allocator | _Pages, nbytes: int) -> bool:
    """Whether its free bytes would hold so many, in granules."""
    return allocator.statistics()["free"] >= -(-nbytes // GRANULE) * GRANULE


@dataclass
class Churn:
    """kind: of allocator. paged: regions of virtual memory. scattered: elsewhere a layer may take several
    blocks. per_tensor: a block for each tensor of a layer. swapped: weights go to the arena first.
    fill: what policy and tensors may take of memory."""

    paged: Sequence[Region] = ("framework",)
    kind: str = "best_fit"
    scattered: bool = True
    per_tensor: bool = False
    swapped: bool = False
    fill: float = FILL
    seed: int = 1
    now: float = 0.0
    counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(
            (
                *("layers", "failed", "tensors", "failed_tensors", "fallbacks"),
                *("loads", "evicted_bytes", "loaded_bytes", "in_arena", "blocks"),
            ),
            0,
        )
    )

    def __post_init__(self) -> None:
        self.regions = {
            r: _Region(
                _Pages(NBYTES[r]) if r in self.paged else Allocator(NBYTES[r], self.kind), self.fill
            )
            for r in REGIONS
        }
        first, second = REGIONS
        # The policy fills its first region first.
        self.lies = {first: second, second: first} if self.swapped else {r: r for r in REGIONS}
        self.cache = WeightCache({r: self.regions[self.lies[r]].capacity() for r in REGIONS})
        self.models = models()
        self.blocks: dict[str, list[list[int]]] = {}
        for name, layers in self.models.items():
            sizes = [packed(shapes) for shapes in layers]
            self.blocks[name] = (
                [[packed([e]) for e in shapes] for shapes in layers]
                if self.per_tensor
                else [[size] for size in sizes]
            )
            self.cache.add(name, sizes)
            load = [size / BANDWIDTH for size in sizes]
            prefix = resident_prefix(load, [s / LOAD_PER_COMPUTE for s in load])
            self.cache.set_prefix(name, prefix)
        self.sizes = {name: [packed(s) for s in layers] for name, layers in self.models.items()}
        self.places: dict[tuple[str, int], tuple[Region, list[int]]] = {}
        self.chance = random.Random(self.seed)
        self.tensors: list[tuple[int, int, int]] = []  # layer count when it dies, offset, bytes
        self.layers = 0
        self.load: Load | None = None
        self.loaded_at = 0.0
        self.filled = self.samples = self.most_blocks = 0

    def run(self, seconds: float, requests: float = math.inf) -> dict[str, Any]:
        names = list(self.models)
        popularity = list(itertools.accumulate(1 / rank**ZIPF for rank in range(1, len(names) + 1)))
        started = time.perf_counter()
        collects = gc.isenabled()
        gc.disable()  # no cycles here, and looking for them takes an eighth of the time
        try:
            for number in itertools.count():
                if self.now >= seconds or number >= requests:
                    break
                name = self.chance.choices(names, cum_weights=popularity)[0]
                self.request(number, name)
        finally:
            if collects:
                gc.enable()
        for region in self.regions.values():
            region.allocator._check()
        counts = self.counts
        return {
            "failed": counts["failed"],
            "failed_share": round(counts["failed"] / max(1, counts["layers"]), 5),
            "failed_tensors": counts["failed_tensors"],
            "failed_tensors_share": round(counts["failed_tensors"] / max(1, counts["tensors"]), 5),
            "fallbacks": counts["fallbacks"],
            "blocks": round(counts["blocks"] / max(1, counts["in_arena"]), 2),
            "most_blocks": self.most_blocks,
            "loads": counts["loads"],
            "evicted_bytes": counts["evicted_bytes"],
            "request_bytes": counts["loaded_bytes"] // max(1, number),
            "loading_share": round(counts["loaded_bytes"] / BANDWIDTH / self.now, 3),
            "fill": round(self.filled / max(1, self.samples) / sum(NBYTES.values()), 4),
            "requests": number,
            "us_per_load": round(1e6 * (time.perf_counter() - started) / counts["loads"], 1),
        }

    def request(self, number: int, name: str) -> None:
        cache = self.cache
        self.obey(cache.begin(number, [name], self.now))
        for layer, size in enumerate(self.sizes[name]):
            self.obey(cache.enter(number, name, layer, self.now))
            while cache.waiting(number):
                if self.load is None:
                    raise RuntimeError(f"layer {layer} of {name} finds no place in empty memory")
                self.now = max(self.now, self.loaded_at)
                self.finish_load()
            computed_at = self.now + size / BANDWIDTH / LOAD_PER_COMPUTE
            self.tensor_traffic()
            while self.load is not None and self.loaded_at <= computed_at:
                self.now = self.loaded_at
                self.finish_load()
            self.now = max(self.now, computed_at)
            self.obey(cache.leave(number, name, layer, self.now))
        self.obey(cache.end(number, self.now))

    # Weights

    def obey(self, instructions: list[Load | Evict]) -> None:
        for instruction in instructions:
            if isinstance(instruction, Evict):
                self.evict(instruction)
                continue
            while not self.start(instruction):
                again = self.cache.no_room(instruction.weights, instruction.layer, self.now)
                for other in again:
                    if isinstance(other, Evict):
                        self.evict(other)
                load = next((i for i in again if isinstance(i, Load)), None)
                if load is None:
                    return
                instruction = load

    def start(self, load: Load) -> bool:
        lies = self.lies[load.region]
        region = self.regions[lies]
        offsets: list[int] = []
        for nbytes in self.blocks[load.weights][load.layer]:
            found = self.place(lies, nbytes)
            if found is None:
                for made in offsets:
                    region.allocator.free(made)
                return False
            offsets += found
        self.places[load.weights, load.layer] = lies, offsets
        nbytes = self.sizes[load.weights][load.layer]
        region.weights += nbytes
        region.blocks += len(offsets)
        if lies == "arena":
            self.counts["in_arena"] += 1
            self.counts["blocks"] += len(offsets)
            self.most_blocks = max(self.most_blocks, region.blocks)
        self.load, self.loaded_at = load, self.now + nbytes / BANDWIDTH
        return True

    def place(self, lies: Region, nbytes: int) -> list[int] | None:
        """Blocks for a layer, or for a tensor of one."""
        self.counts["layers"] += 1
        allocator = self.regions[lies].allocator
        if self.scattered and isinstance(allocator, Allocator):
            pieces = allocator.alloc_scattered(nbytes)
            found = None if pieces is None else [offset for offset, _ in pieces]
        else:
            offset = allocator.alloc(nbytes)
            found = None if offset is None else [offset]
        if found is None and _would_do(allocator, nbytes):
            self.counts["failed"] += 1
        return found

    def finish_load(self) -> None:
        load, self.load = self.load, None
        assert load is not None
        self.counts["loads"] += 1
        self.counts["loaded_bytes"] += self.sizes[load.weights][load.layer]
        if self.counts["evicted_bytes"]:
            self.filled += sum(r.weights + r.tensors for r in self.regions.values())
            self.samples += 1
        self.obey(self.cache.loaded(load.weights, load.layer, self.now))

    def evict(self, evict: Evict) -> None:
        lies, offsets = self.places.pop((evict.weights, evict.layer))
        region = self.regions[lies]
        for offset in offsets:
            region.allocator.free(offset)
        nbytes = self.sizes[evict.weights][evict.layer]
        region.weights -= nbytes
        region.blocks -= len(offsets)
        self.counts["evicted_bytes"] += nbytes

    # Tensors

    def tensor_traffic(self) -> None:
        """One layer's: old ones die, new ones come."""
        self.layers += 1
        arena = self.regions["arena"]
        changed = False
        while self.tensors and self.tensors[0][0] <= self.layers:
            _, offset, nbytes = heapq.heappop(self.tensors)
            arena.allocator.free(offset)
            arena.tensors -= nbytes
            changed = True
        for nbytes, lives in self.new_tensors():
            found = self.place_tensor(nbytes)
            if found is None:
                found = self.make_room(nbytes)
            if found is None:
                self.counts["fallbacks"] += 1
                continue
            arena.tensors += nbytes
            changed = True
            heapq.heappush(self.tensors, (self.layers + lives, found, nbytes))
        if changed:
            region = next(r for r in REGIONS if self.lies[r] == "arena")
            self.obey(self.cache.set_capacity(region, arena.capacity(), self.now))

    def place_tensor(self, nbytes: int) -> int | None:
        self.counts["tensors"] += 1
        allocator = self.regions["arena"].allocator
        offset = allocator.alloc(nbytes)
        if offset is None and _would_do(allocator, nbytes):
            self.counts["failed_tensors"] += 1
        return offset

    def new_tensors(self) -> Iterator[tuple[int, int]]:
        """Bytes, and how many layers they live."""
        chance = self.chance
        while chance.random() < TENSORS_PER_LAYER / (1 + TENSORS_PER_LAYER):
            nbytes, _, lives = TENSORS[bisect(OFTEN, chance.random() * OFTEN[-1])]
            yield nbytes, 1 + int(chance.expovariate(1 / lives))

    def make_room(self, nbytes: int) -> int | None:
        region = next(r for r in REGIONS if self.lies[r] == "arena")
        while True:
            evicts = self.cache.demand(region, nbytes, self.now)
            if not evicts:
                return None
            for evict in evicts:
                self.evict(cast(Evict, evict))
            offset = self.place_tensor(nbytes)
            if offset is not None:
                return offset
