"""Runs on a worker, and which of them are admitted: what they keep is pinned. Pure.

A run keeps its root layers from begin to end; in whole modes all its layers. Two runs that both keep a
part would block each other for ever. So one is admitted only while what all admitted ones keep leaves
room for the largest layer of each; in whole modes one at a time copies its models in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .weight_books import REGIONS, Books, Evict, Instructions, Region, Weights
from .weight_fit import divides, packs

Kept = list[tuple[Weights, int]]


class Run:
    """One invocation. `cursor`: position in the current weights that it executes or needs next."""

    def __init__(self, number: int, weights: tuple[Weights, ...], kept: Kept):
        self.number, self.weights = number, weights
        self.of = {w.name: w for w in weights}
        self.current: Weights | None = weights[0] if weights else None
        self.cursor = 0
        self.begun: set[str] = set()  # names of weights it has executed
        self.kept = kept  # layers it needs until it ends, in order of loading
        self.admitted = False  # its kept layers are pinned where resident
        self.complete = False  # it is, and all of them are
        self.repacked = False
        self.turn = 0  # number of its last load
        self.holds = False  # all layers of all its weights
        self.held: dict[tuple[str, int], int] = {}  # entered and pinned, how many times
        self.waits: dict[tuple[str, int], int] = {}  # entered and not pinned yet

    def bases(self) -> dict[str, int]:
        """How many layers from now each of its weights begins: the current ones, then the next in
        the order it named them, round and round."""
        if self.current is None:
            return {}
        start = self.weights.index(self.current)
        found, base = {}, 0
        for weights in (*self.weights[start:], *self.weights[:start]):
            found[weights.name] = base
            base += len(weights.order)
        return found

    def distance(self, weights: Weights, layer: int, base: int) -> int:
        """How many layers from now it executes that one; 0 is the cursor."""
        position = weights.position[layer]
        if weights is not self.current or not 0 <= position < weights.executed:
            return base + max(position, 0)
        return (position - self.cursor) % weights.executed


class Runs:
    """In order of begin. Methods suppose that the change is legal."""

    def __init__(self, books: Books, whole: bool):
        self.books, self.whole = books, whole
        self.active: dict[int, Run] = {}

    def __iter__(self) -> Iterator[Run]:
        return iter(self.active.values())

    def begin(self, number: int, weights: tuple[Weights, ...], now: float) -> Run:
        run = self.active[number] = Run(number, weights, self.kept(weights))
        for w in weights:
            self.books.use(w, now)
            w.try_again()
        return run

    def end(self, run: Run, now: float) -> None:
        del self.active[run.number]
        for (name, layer), times in run.held.items():
            run.of[name].pins[layer] -= times
        self.unpin_kept(run)
        for w in run.weights:
            w.holders -= run.holds
            self.books.disuse(w, now)

    def kept(self, weights: Sequence[Weights]) -> Kept:
        """What a run of these needs from begin to end, in order of loading: as it packs best."""
        if not self.whole:
            return [(w, layer) for w in weights for layer in sorted(w.roots)]
        layers = [(w, layer) for w in weights for layer in range(len(w.sizes))]
        return sorted(layers, key=lambda pair: -pair[0].sizes[pair[1]])

    def fits(self, weights: Sequence[Weights], kept: Kept) -> bool:
        """Whether a run of these gets its layers at the present capacity, once it is alone."""
        sizes = [w.sizes[layer] for w, layer in kept]
        if self.whole:
            return packs(self.books.capacity, sizes)
        return divides(self.books.capacity, sizes, max((w.largest for w in weights), default=0))

    def admit(self) -> Instructions:
        """In order of begin; one that would not fit alone does not stop the others."""
        evicts: Instructions = []
        for run in self:
            if run.admitted or not self.fits(run.weights, run.kept):
                continue
            if self.whole:
                if not self._may_load_whole(run):
                    continue
            elif run.kept or any(other.kept for other in self):
                movable = self._to_move(run)
                if movable is None:
                    break
                for w, layer in movable:
                    self.books.take_out(w, layer)
                    evicts.append(Evict(w.name, layer))
            run.admitted = True
            for w, layer in run.kept:
                w.pins[layer] += self.books.is_resident(w, layer)
            self._complete(run)
        self.grant()
        return evicts

    def _may_load_whole(self, run: Run) -> bool:
        """One that has all of its own there may go beside the one that copies."""
        return all(other.complete or not other.admitted for other in self) or (
            self.books.loading is not None
            and all(self.books.is_resident(w, layer) for w, layer in run.kept)
        )

    def _to_move(self, run: Run) -> Kept | None:
        """What it keeps and must be copied anew elsewhere when it is admitted; None if it cannot be."""
        room, pending, largest = self.promises(run)
        if divides(room, pending, largest):
            return []
        movable = [pair for pair in run.kept if self.books.evictable(*pair)]
        for w, layer in movable:
            region = w.region[layer]
            assert region is not None
            room[region] += w.sizes[layer]
            pending.append(w.sizes[layer])
        return movable if movable and divides(room, pending, largest) else None

    def promises(self, extra: Run | None = None) -> tuple[dict[Region, int], list[int], int]:
        """Room beside the resident kept layers of admitted runs, sizes of their absent ones, and the
        largest other layer; all as if `extra` were admitted."""
        runs = [run for run in self if run.admitted or run is extra]
        room, pending = dict(self.books.capacity), []
        for w, layer in {pair for run in runs for pair in run.kept}:
            region = w.region[layer]
            if region is None:
                pending.append(w.sizes[layer])
            else:
                room[region] -= w.sizes[layer]
        return room, pending, max((w.largest for run in runs for w in run.weights), default=0)

    def roots_may_go_to(self, size: int) -> list[Region]:
        """Regions for a kept layer that leave room for the other ones and the largest layer."""
        room, pending, largest = self.promises()
        pending.remove(size)
        return [
            region
            for region in REGIONS
            if size <= room[region]
            and divides({**room, region: room[region] - size}, pending, largest)
        ]

    def arrived(self, weights: Weights, layer: int) -> None:
        """It is resident now: pinned for those who keep it or have waited for it."""
        for run in self:
            if run.admitted and (weights, layer) in run.kept:
                weights.pins[layer] += 1
                self._complete(run)
        self.grant()

    def ready(self, run: Run, weights: Weights, layer: int) -> bool:
        """Whether it may execute it now."""
        if not run.admitted or not self.books.is_resident(weights, layer):
            return False
        if run.complete:
            return True
        return not self.whole and all(self.books.is_resident(weights, i) for i in weights.roots)

    def grant(self) -> None:
        """Runs that waited for what is there now hold it."""
        for run in self:
            for key in list(run.waits):
                w, layer = run.of[key[0]], key[1]
                if self.ready(run, w, layer):
                    times = run.waits.pop(key)
                    run.held[key] = run.held.get(key, 0) + times
                    w.pins[layer] += times

    def unpin_kept(self, run: Run) -> None:
        for w, layer in run.kept if run.admitted else ():
            w.pins[layer] -= self.books.is_resident(w, layer)

    def _complete(self, run: Run) -> None:
        run.complete = all(self.books.is_resident(w, layer) for w, layer in run.kept)

    def _check(self) -> None:
        books = self.books
        pins: dict[tuple[str, int], int] = {}
        users: dict[str, int] = {}
        holders: dict[str, int] = {}
        for number, run in self.active.items():
            assert run.number == number
            assert run.admitted or not run.held
            there = [(w.name, i) for w, i in run.kept if books.is_resident(w, i)]
            assert run.complete == (run.admitted and len(there) == len(run.kept))
            for key, times in (*run.held.items(), *((k, 1) for k in there if run.admitted)):
                assert times > 0
                pins[key] = pins.get(key, 0) + times
            for w in run.weights:
                assert books.weights[w.name] is w
                users[w.name] = users.get(w.name, 0) + 1
                holders[w.name] = holders.get(w.name, 0) + run.holds
            for (name, layer), times in run.waits.items():
                assert times > 0
                assert not self.ready(run, run.of[name], layer), "it waits for what is there"
        for name, weights in books.weights.items():
            assert weights.users == users.get(name, 0)
            assert weights.holders == holders.get(name, 0)
            for layer, pinned in enumerate(weights.pins):
                assert pinned == pins.get((name, layer), 0)
        if self.whole:
            assert sum(run.admitted and not run.complete for run in self) <= 1
