"""Which layer is copied in next, where to, and over what. Pure.

One load at a time. A layer that a run waits for comes before one ahead of need; among equals the runs
take turns. A place is free memory in the first region that has it, or what the fewest evictions make.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence

from .weight_books import REGIONS, Books, Evict, Instructions, Load, Region, Weights
from .weight_runs import Run, Runs
from .weight_victims import AHEAD, Group, Want, elastic, fewest, whole


class Loads:
    """Decides and enters it in the books."""

    def __init__(self, books: Books, runs: Runs):
        self.books, self.runs = books, runs
        self._loads = 0
        self._for: Run | None = None  # whose load is outstanding
        # Regions where that load found no gap, and loads that found none anywhere until then.
        self._refused: set[Region] = set()
        self._stuck: set[tuple[str, int]] = set()

    def next(self) -> Instructions:
        """The next Load, if one is wanted, possible, and none is outstanding."""
        if self.books.loading is not None:
            return []
        wants = []
        for run in self.runs:
            want = self._wanted(run)
            if want is not None:
                wants.append(want)
        if len(wants) > 1:
            wants.sort(key=lambda want: (not want.urgent, want.run.turn))
        for want in wants:
            if (want.weights.name, want.layer) in self._stuck:
                continue
            self._refused.clear()
            placed = self._place(want)
            if placed is not None:
                return placed
        return []

    def again(self, weights: Weights, layer: int) -> Instructions:
        """The outstanding load found no gap in its region: each further attempt evicts something
        there or goes elsewhere, so the attempts end."""
        region, run = weights.region[layer], self._for
        assert region is not None
        assert run is not None
        self._refused.add(region)
        self.books.take_out(weights, layer)
        done = self.shrink()
        want = self._wanted(run) if self.runs.active.get(run.number) is run else None
        if want is not None and want.weights is weights and want.layer == layer:
            placed = self._place(want)
            if placed is not None:
                return [*done, *placed]
            self._stuck.add((weights.name, layer))
        return [*done, *self.next()]

    def freed(self) -> None:
        """What found no gap may find one now."""
        self._stuck.clear()

    def entered(self, weights: Weights, layer: int) -> None:
        """Somebody waits for it: more may be evicted for it than before."""
        self._stuck.discard((weights.name, layer))

    # What

    def _wanted(self, run: Run) -> Want | None:
        """What it keeps and misses, what it waits for, then what comes next."""
        if not run.admitted:
            return None
        if not run.complete:
            for w, layer in run.kept:
                if w.region[layer] is None and layer not in w.failed:
                    return Want(run, w, layer, -1, True)
        if self.runs.whole:
            return None
        if run.waits:
            for name, layer in run.waits:
                w = run.of[name]
                if w.region[layer] is None and layer not in w.failed:
                    return Want(run, w, layer, 0, True)
        current = run.current
        if current is not None and current.missing:
            missing = current.missing
            at = bisect_left(missing, run.cursor)
            position = missing[at if at < len(missing) else 0]
            distance = (position - run.cursor) % current.executed
            return Want(run, current, current.order[position], distance, False)
        for w in run.weights:
            if w.missing and w.name not in run.begun and w is not current:
                layer = w.order[w.missing[0]]
                return Want(run, w, layer, run.distance(w, layer, run.bases()[w.name]), False)
        return None

    # Where, over what

    def _place(self, want: Want) -> Instructions | None:
        """Evicts what must go, and the Load; None when there is no place now."""
        books, size = self.books, want.weights.sizes[want.layer]
        hurried = self.runs.whole or want.urgent or want.distance <= AHEAD
        if not hurried:
            for region in REGIONS:
                if size <= books.capacity[region] - books.used[region] + books.idle[region]:
                    break
            else:
                return None
        free = {region: books.capacity[region] - books.used[region] for region in REGIONS}
        regions: Sequence[Region] = REGIONS
        if want.distance < 0 and not self.runs.whole:
            regions = self.runs.roots_may_go_to(size)
        for region in regions:
            if size <= free[region] and region not in self._refused:
                return self._load(want, region)
        # Where there is no gap now, evictions make one only by chance: the other region first.
        for refused in (False, True):
            needed = {
                region: max(1, size - free[region])
                for region in regions
                if (region in self._refused) == refused
                and size <= books.capacity[region]
                and (hurried or size <= free[region] + books.idle[region])
            }
            found = fewest(self._victims(want), needed) if needed else None
            if found is not None:
                region, group = found
                return [*self.evict(group), *self._load(want, region)]
        return self._repack(want.run) if self.runs.whole else None

    def _load(self, want: Want, region: Region) -> Instructions:
        self.books.place(want.weights, want.layer, region)
        self._for = want.run
        self._loads += 1
        want.run.turn = self._loads
        return [Load(want.weights.name, want.layer, region)]

    def _repack(self, run: Run) -> Instructions | None:
        """A run that is alone and finds no place has layers in its way, in the wrong regions: its own
        are unpinned, once, so that all may go and come anew in the order that fits."""
        if run.repacked or any(other.admitted and other is not run for other in self.runs):
            return None
        run.repacked = True
        self.runs.unpin_kept(run)
        evicts = [e for w in self.books.weights.values() for e in self.evict_all_of(w)]
        self._refused.clear()
        first = self._wanted(run)
        assert first is not None
        return [*evicts, *(self._place(first) or [])]

    def _victims(self, want: Want | None) -> Iterator[Group]:
        if self.runs.whole:
            return whole(self.books)
        return elastic(self.books, self.runs.active, want)

    # Making room

    def evict(self, group: Iterable[tuple[Weights, int]]) -> Instructions:
        done: Instructions = []
        for weights, layer in group:
            self.books.take_out(weights, layer)
            done.append(Evict(weights.name, layer))
        if done:
            self.freed()
        return done

    def evict_all_of(self, weights: Weights) -> Instructions:
        """As far as it is not pinned or being copied in."""
        return self.evict(
            [(weights, i) for i in weights.from_the_last() if self.books.evictable(weights, i)]
        )

    def make_room(self, region: Region, nbytes: int) -> Instructions:
        """Frees at least so many bytes, 1 or more; nothing if that is out of reach."""
        found = fewest(self._victims(None), {region: nbytes})
        return [] if found is None else self.evict(found[1])

    def shrink(self) -> Instructions:
        """Back to the capacity, as far as what is pinned or being copied in allows."""
        books = self.books
        done: Instructions = []
        for region, used in books.used.items():
            over = used - books.capacity[region]
            if over > 0:
                done += self.make_room(region, over) or self.evict(
                    [
                        (w, layer)
                        for group in list(self._victims(None))
                        for w, layer in group
                        if w.region[layer] == region
                    ]
                )
        return done
