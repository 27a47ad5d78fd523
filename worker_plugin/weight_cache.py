"""Which layers of which weights are in a worker's memory: what to copy in, what to evict, where to.

Pure policy, driven by one thread at a time: events in, instructions out. The driver carries out the
instructions in order and reports the outcome of each Load; at most one is outstanding.

Elastic: a run keeps its root layers from begin to end, and every other layer only while it executes it;
the rest is copied in behind it, in order of execution, into free memory and over what is needed latest.
Whole modes, the paper's rivals: a run keeps all its layers, and executes once all of them are there.

No deadlock: a run is *admitted*, and what it keeps is pinned, only while that leaves room for the largest
layer of every admitted run; the others wait in order of begin. The driver must not let a run wait for a
layer while it holds another one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from st2i_dask.errors import PolicyError

from .weight_books import MODES as MODES
from .weight_books import REGIONS as REGIONS
from .weight_books import Books, Run, Weights
from .weight_books import Evict as Evict
from .weight_books import Instructions as Instructions
from .weight_books import Load as Load
from .weight_books import Mode as Mode
from .weight_books import Region as Region
from .weight_fit import divides, packs
from .weight_victims import AHEAD, Group, Want, elastic, fewest, whole


class Row(NamedTuple):
    """For display. last_used: seconds, when a run of it last began or ended."""

    weights: str
    nbytes: int
    resident_bytes: int
    layers: int
    resident_layers: int
    prefix: int | None
    runs: int
    last_used: float


class WeightCache:
    """Not thread-safe. Every event takes `now`, seconds on a monotonic clock. PolicyError for an event
    that is not legal; nothing has changed then. An `enter` or `leave` of a resident layer is O(1)."""

    def __init__(self, capacity: Mapping[Region, int], mode: Mode = "elastic"):
        """capacity: bytes for weights in each region, at least 0."""
        if mode not in MODES:
            raise PolicyError(f"mode {mode!r} is none of {', '.join(MODES)}")
        for region, nbytes in capacity.items():
            _refuse_region(region)
            _refuse_bytes(f"capacity of region {region!r}", nbytes, 0)
        self.mode = mode
        self._whole = mode in ("mcache", "wcache", "nocache")
        self._books = Books(capacity)
        self._runs: dict[int, Run] = {}  # in order of begin
        self._turns: dict[int, None] = {}  # whose load was longest ago first
        self._loader: Want | None = None  # what the outstanding load is for
        # Regions where the outstanding load found no gap, and loads that found none anywhere.
        self._refused: set[Region] = set()
        self._stuck: set[tuple[str, int]] = set()

    # Questions

    def __contains__(self, weights: object) -> bool:
        return weights in self._books.weights

    def is_resident(self, weights: str, layer: int) -> bool:
        return self._books.is_resident(*self._find(weights, layer))

    def is_pinned(self, weights: str, layer: int) -> bool:
        known, layer = self._find(weights, layer)
        return known.pins[layer] > 0

    def region_of(self, weights: str, layer: int) -> Region | None:
        """Where it is resident."""
        known, layer = self._find(weights, layer)
        return known.region[layer] if self._books.is_resident(known, layer) else None

    def resident(self, weights: str) -> tuple[bool, ...]:
        """By layer."""
        known = self._known(weights)
        return tuple(self._books.is_resident(known, i) for i in range(len(known.sizes)))

    def missing(self, weights: str) -> list[int]:
        """Layers that are not resident."""
        return [layer for layer, there in enumerate(self.resident(weights)) if not there]

    def used(self, region: Region) -> int:
        """Bytes of resident layers and of the one being copied in."""
        _refuse_region(region)
        return self._books.used[region]

    def capacity(self, region: Region) -> int:
        _refuse_region(region)
        return self._books.capacity[region]

    def waiting(self, run: int) -> bool:
        """Whether a layer it has entered is not there yet: it must not execute."""
        return bool(self._run(run).waits)

    def ready(self, run: int) -> bool:
        """Whether everything that it needs from begin to end is there."""
        return self._run(run).complete

    def outstanding(self) -> tuple[str, int] | None:
        """Weights and layer of the Load that has no outcome yet."""
        if self._books.loading is None:
            return None
        weights, layer = self._books.loading
        return weights.name, layer

    def fits(self, *weights: str) -> str | None:
        """Why a run of these can never get its layers at the present capacity; None if it can."""
        known = tuple(dict.fromkeys(self._known(name) for name in weights))
        if self._fits(known, self._kept(known)):
            return None
        room = ", ".join(f"{self._books.capacity[region]:,} in {region}" for region in REGIONS)
        what = (
            f"all their layers, {sum(sum(w.sizes) for w in known):,} bytes,"
            if self._whole
            else f"the root layers, {sum(w.root_bytes for w in known):,} bytes, and the largest "
            f"layer, {max(w.largest for w in known):,} bytes,"
        )
        return f"{what} must be in memory at once, each layer in one region, and there is {room}"

    def models(self) -> list[Row]:
        """Least recently used first."""
        rows = []
        for w in self._books.weights.values():
            there = [self._books.is_resident(w, layer) for layer in range(len(w.sizes))]
            nbytes = sum(size for size, is_there in zip(w.sizes, there, strict=True) if is_there)
            shape = (sum(w.sizes), nbytes, len(there), sum(there))
            rows.append(Row(w.name, *shape, w.prefix, w.users, w.last_used))
        return rows

    # Weights

    def add(
        self, weights: str, sizes: Sequence[int], roots: Sequence[int] = (), unit: str | None = None
    ) -> None:
        """New weights, nothing of them resident. sizes: bytes of each layer. roots: layers needed
        from begin to end of a run. unit: what is evicted together in whole modes; itself if None."""
        if weights in self._books.weights:
            raise PolicyError(f"weights {weights!r} are known already; remove them first")
        for size in sizes:
            _refuse_bytes(f"a layer of weights {weights!r}", size, 1)
        for layer in roots:
            _refuse_layer(weights, layer, len(sizes))
        added = Weights(weights, sizes, frozenset(roots), weights if unit is None else unit)
        added.prefix = 0 if self.mode == "pipelined" else None
        # Before all others in order of use: they have never been used.
        self._books.weights = {weights: added, **self._books.weights}

    def remove(self, weights: str) -> Instructions:
        """Forget weights that no run uses."""
        known = self._known(weights)
        if known.users:
            raise PolicyError(
                f"weights {weights!r} are used by {known.users} runs; remove them after their end"
            )
        if self._books.loading is not None and self._books.loading[0] is known:
            raise PolicyError(
                f"layer {self._books.loading[1]} of weights {weights!r} is being copied in; "
                "remove them after its outcome"
            )
        evicts = self._evict_all_of(known)
        del self._books.weights[weights]
        self._stuck.clear()
        return evicts

    def set_prefix(self, weights: str, prefix: int | None) -> None:
        """How many first layers, in order of execution and root layers not counted, hide the loads of
        the others. None, and until it is set: not known, all layers count as worth keeping."""
        known = self._known(weights)
        if prefix is not None and not 0 <= prefix <= len(known.sizes):
            raise PolicyError(
                f"prefix {prefix} of weights {weights!r} is not between 0 and their "
                f"{len(known.sizes)} layers"
            )
        if self.mode != "pipelined":
            known.prefix = prefix

    def set_order(self, weights: str, order: Sequence[int]) -> None:
        """Layers in order of execution; one that runs several times counts where it runs first.
        Layers that are left out are copied in only when a run enters them; roots may be left out."""
        known = self._known(weights)
        for layer in order:
            _refuse_layer(weights, layer, len(known.sizes))
        at = {
            run.number: known.order[run.cursor % len(known.order)]
            for run in self._runs.values()
            if run.current is known and known.order
        }
        known.set_order(order)
        for number, layer in at.items():
            self._runs[number].cursor = known.position[layer]

    # Events

    def set_capacity(self, region: Region, nbytes: int, now: float) -> Instructions:
        """Bytes for weights there changed: tensors or activations took or gave back memory."""
        _refuse_region(region)
        _refuse_bytes(f"capacity of region {region!r}", nbytes, 0)
        if nbytes > self._books.capacity[region]:
            self._freed()
        self._books.capacity[region] = nbytes
        for run in self._runs.values():
            run.repacked = False
        return [*self._shrink(), *self._admit(), *self._next()]

    def demand(self, region: Region, nbytes: int, now: float) -> Instructions:
        """Evicts so that so many bytes are free there, for somebody who found no room: one layer at
        least, as there was no gap of that size. Nothing if it is out of reach. Never a Load."""
        _refuse_region(region)
        _refuse_bytes("a demand", nbytes, 1)
        needed = max(1, nbytes - self._books.free(region))
        found = fewest(self._victims(None), {region: needed})
        return [] if found is None else self._evict(found[1])

    def trim(self, weights: str, layers: int, now: float) -> Instructions:
        """Evict the layers of idle weights from that one on, in order of execution."""
        known = self._known(weights)
        if known.users:
            return []
        gone = [(known, layer) for layer in reversed(known.order[layers:])]
        return self._evict([pair for pair in gone if self._books.evictable(*pair)])

    def begin(self, run: int, weights: Sequence[str], now: float) -> Instructions:
        """A run that will use these, in this order."""
        if run in self._runs:
            raise PolicyError(f"run {run} has already begun; end it first")
        known = tuple(dict.fromkeys(self._known(name) for name in weights))
        self._try_again(known)
        for w in known:
            self._books.use(w, now)
        begun = self._runs[run] = Run(run, known, self._kept(known))
        self._turns[run] = None
        evicts: Instructions = []
        if self.mode == "nocache":
            units = {w.unit for w in known}
            for other in list(self._books.weights.values()):
                if not other.users and other.unit not in units:
                    evicts += self._evict_all_of(other)
        if not begun.kept:
            begun.complete = True
        return [*evicts, *self._admit(), *self._next()]

    def enter(self, run: int, weights: str, layer: int, now: float) -> Instructions:
        """The run wants to execute it. It is pinned if it is there; else the run waits for it."""
        r, w = self._used(run, weights, layer)
        key = (weights, layer)
        position = w.position[layer]
        if position >= 0:
            r.current, r.cursor = w, position
            r.begun.add(weights)
        if self._ready(r, w, layer) and key not in r.waits:
            r.held[key] = r.held.get(key, 0) + 1
            w.pins[layer] += 1
        else:
            r.waits[key] = r.waits.get(key, 0) + 1
            self._stuck.discard(key)
            self._try_again(r.weights)
        return self._next() if self._books.loading is None else []

    def leave(self, run: int, weights: str, layer: int, now: float) -> Instructions:
        """The run has executed it, or does not wait for it any more."""
        r, w = self._used(run, weights, layer)
        key = (weights, layer)
        if key in r.held:
            _take_one(r.held, key)
            w.pins[layer] -= 1
        elif key in r.waits:
            _take_one(r.waits, key)
        else:
            raise PolicyError(f"run {run} leaves layer {layer} of weights {weights!r} unentered")
        if r.current is w and w.position[layer] == r.cursor:
            r.cursor = (r.cursor + 1) % max(1, w.executed)
        if self._stuck:
            self._freed()
        evicts = self._shrink()
        return [*evicts, *self._next()] if self._books.loading is None else evicts

    def hold(self, run: int, now: float) -> bool:
        """Pin all layers of a run that waits for nothing until its end, if all are resident: it need
        not enter and leave them one by one."""
        held = self._run(run)
        layers = [(w, layer) for w in held.weights for layer in range(len(w.sizes))]
        if not held.complete or not all(self._books.is_resident(*pair) for pair in layers):
            return False
        for w, layer in layers:
            key = (w.name, layer)
            held.held[key] = held.held.get(key, 0) + 1
            w.pins[layer] += 1
        return True

    def end(self, run: int, now: float) -> Instructions:
        """Unpins whatever it holds."""
        ended = self._run(run)
        del self._runs[run], self._turns[run]
        for (name, layer), times in ended.held.items():
            ended.of[name].pins[layer] -= times
        self._unpin_kept(ended)
        evicts: Instructions = []
        for w in ended.weights:
            self._books.disuse(w, now)
            if self.mode == "pipelined" and not w.users:
                evicts += self._evict_all_of(w)
        self._freed()
        return [*evicts, *self._shrink(), *self._admit(), *self._next()]

    def loaded(self, weights: str, layer: int, now: float) -> Instructions:
        """The outstanding Load is done."""
        w = self._outcome(weights, layer)
        self._books.loading = None
        for run in self._runs.values():
            if run.admitted and (w, layer) in run.kept:
                w.pins[layer] += 1
                self._complete(run)
        self._grant()
        evicts: Instructions = []
        if self.mode == "pipelined" and not w.users:
            evicts = self._evict([(w, layer)])
        return [*evicts, *self._shrink(), *self._admit(), *self._next()]

    def no_room(self, weights: str, layer: int, now: float) -> Instructions:
        """The outstanding Load found no gap where it should go."""
        w = self._outcome(weights, layer)
        region = w.region[layer]
        assert region is not None
        want = self._loader
        self._refused.add(region)
        self._books.take_out(w, layer)
        shrunk = self._shrink()
        if want is not None and self._runs.get(want.run.number) is want.run:
            again = self._wanted(want.run)
            if again is not None and (again.weights, again.layer) == (w, layer):
                placed = self._place(again)
                if placed is not None:
                    return [*shrunk, *placed]
                self._stuck.add((weights, layer))
        return [*shrunk, *self._next()]

    def failed(self, weights: str, layer: int, now: float) -> Instructions:
        """The copy failed. It is tried again when a run of these weights begins, or
        enters a layer that it must wait for."""
        w = self._outcome(weights, layer)
        self._books.take_out(w, layer)
        w.failed.add(layer)
        w.list_missing()
        self._freed()
        return [*self._shrink(), *self._next()]

    # What to load

    def _next(self) -> Instructions:
        """The next Load, if one is wanted, possible, and none is outstanding."""
        if self._books.loading is not None:
            return []
        wants = [
            want for number in self._turns if (want := self._wanted(self._runs[number])) is not None
        ]
        for want in sorted(wants, key=lambda want: not want.urgent):
            if (want.weights.name, want.layer) in self._stuck:
                continue
            self._refused.clear()
            placed = self._place(want)
            if placed is not None:
                return placed
        return []

    def _wanted(self, run: Run) -> Want | None:
        """What it kept and misses, what it waits for, then what comes next."""
        if not run.admitted:
            return None
        if not run.complete:
            for w, layer in run.kept:
                if w.region[layer] is None and layer not in w.failed:
                    return Want(run, w, layer, -1, True)
        if self._whole:
            return None
        for name, layer in run.waits:
            w = run.of[name]
            if w.region[layer] is None and layer not in w.failed:
                return Want(run, w, layer, 0, True)
        w = run.current  # type: ignore[assignment]
        if w is not None and w.missing:
            at = bisect_left(w.missing, run.cursor)
            position = w.missing[at if at < len(w.missing) else 0]
            distance = (position - run.cursor) % w.executed
            return Want(run, w, w.order[position], distance, False)
        for w in run.weights:
            if w.missing and w.name not in run.begun and w is not run.current:
                layer = w.order[w.missing[0]]
                distance = run.distance(w, layer, run.bases()[w.name])
                return Want(run, w, layer, distance, False)
        return None

    # Where to, over what

    def _place(self, want: Want) -> Instructions | None:
        """Evicts what must go and the Load; None when there is no place now."""
        books, size = self._books, want.weights.sizes[want.layer]
        regions = [region for region in self._allowed(want) if size <= books.capacity[region]]
        for region in regions:
            if region not in self._refused and size <= books.free(region):
                return self._load(want, region)
        hurried = self._whole or want.urgent or want.distance <= AHEAD
        needed = {
            region: max(1, size - books.free(region))
            for region in regions
            if hurried or size <= books.free(region) + books.idle[region]
        }
        found = fewest(self._victims(want), needed) if needed else None
        if found is not None:
            region, group = found
            return [*self._evict(group), *self._load(want, region)]
        if self._whole and self._repack(want.run):
            evicts = [e for w in self._books.weights.values() for e in self._evict_all_of(w)]
            first = self._wanted(want.run)
            assert first is not None
            return [*evicts, *(self._place(first) or [])]
        return None

    def _load(self, want: Want, region: Region) -> Instructions:
        self._books.place(want.weights, want.layer, region)
        self._loader = want
        del self._turns[want.run.number]
        self._turns[want.run.number] = None
        return [Load(want.weights.name, want.layer, region)]

    def _allowed(self, want: Want) -> Iterator[Region]:
        """A root layer must leave room for the other roots and the largest layer."""
        for region in REGIONS:
            if self._whole or want.distance >= 0:
                yield region
                continue
            room, pending, largest = self._promises()
            pending.remove(want.weights.sizes[want.layer])
            room[region] -= want.weights.sizes[want.layer]
            if room[region] >= 0 and divides(room, pending, largest):
                yield region

    def _victims(self, want: Want | None) -> Iterator[Group]:
        return whole(self._books) if self._whole else elastic(self._books, self._runs, want)

    def _evict(self, group: Group) -> Instructions:
        for weights, layer in group:
            self._books.take_out(weights, layer)
        if group:
            self._freed()
        return [Evict(weights.name, layer) for weights, layer in group]

    def _evict_all_of(self, weights: Weights) -> Instructions:
        return self._evict(
            [(weights, i) for i in weights.from_the_last() if self._books.evictable(weights, i)]
        )

    def _shrink(self) -> Instructions:
        """Back to the capacity, as far as what is pinned or being copied in allows."""
        done: Instructions = []
        for region in REGIONS:
            over = -self._books.free(region)
            if over <= 0:
                continue
            group: Group = []
            found = fewest(self._collect(self._victims(None), group), {region: over})
            if found is None:
                group = [(w, layer) for w, layer in group if w.region[layer] == region]
            done += self._evict(group if found is None else found[1])
        return done

    @staticmethod
    def _collect(groups: Iterator[Group], into: Group) -> Iterator[Group]:
        for group in groups:
            into += group
            yield group

    def _freed(self) -> None:
        """What found no gap may find one now."""
        self._stuck.clear()

    @staticmethod
    def _try_again(weights: Sequence[Weights]) -> None:
        for w in weights:
            if w.failed:
                w.failed.clear()
                w.list_missing()

    # Who may run

    def _kept(self, weights: Sequence[Weights]) -> list[tuple[Weights, int]]:
        """What a run of these needs from begin to end, in order of loading."""
        if not self._whole:
            return [(w, layer) for w in weights for layer in sorted(w.roots)]
        layers = [(w, layer) for w in weights for layer in range(len(w.sizes))]
        return sorted(layers, key=lambda pair: -pair[0].sizes[pair[1]])

    def _fits(self, weights: Sequence[Weights], kept: Sequence[tuple[Weights, int]]) -> bool:
        sizes = [w.sizes[layer] for w, layer in kept]
        if self._whole:
            return packs(self._books.capacity, sizes)
        return divides(self._books.capacity, sizes, max((w.largest for w in weights), default=0))

    def _promises(self, extra: Run | None = None) -> tuple[dict[Region, int], list[int], int]:
        """Room beside the resident kept layers of admitted runs, sizes of their absent ones, and the
        largest other layer; all as if `extra` were admitted. Elastic only."""
        runs = [run for run in self._runs.values() if run.admitted or run is extra]
        room, pending = dict(self._books.capacity), []
        for w, layer in {pair for run in runs for pair in run.kept}:
            region = w.region[layer]
            if region is None:
                pending.append(w.sizes[layer])
            else:
                room[region] -= w.sizes[layer]
        return room, pending, max((w.largest for run in runs for w in run.weights), default=0)

    def _admit(self) -> Instructions:
        """In order of begin; one that would not fit alone does not stop the others."""
        evicts: Instructions = []
        for run in self._runs.values():
            if run.admitted or not self._fits(run.weights, run.kept):
                continue
            if self._whole:
                if not self._may_load_whole(run):
                    continue
            elif not divides(*self._promises(run)):
                movable = [pair for pair in run.kept if self._books.evictable(*pair)]
                room, pending, largest = self._promises(run)
                for w, layer in movable:
                    region = w.region[layer]
                    assert region is not None
                    room[region] += w.sizes[layer]
                    pending.append(w.sizes[layer])
                if not movable or not divides(room, pending, largest):
                    break
                evicts += self._evict(movable)
            run.admitted = True
            for w, layer in run.kept:
                if self._books.is_resident(w, layer):
                    w.pins[layer] += 1
            self._complete(run)
        self._grant()
        return evicts

    def _may_load_whole(self, run: Run) -> bool:
        """One run at a time copies its models in, or two half loaded ones would block each other;
        one that has all of its own there may go beside it."""
        loading = [other for other in self._runs.values() if other.admitted and not other.complete]
        return not loading or (
            self._books.loading is not None
            and all(self._books.is_resident(w, layer) for w, layer in run.kept)
        )

    def _repack(self, run: Run) -> bool:
        """A run that is alone and finds no place has layers in its way, in the wrong regions: its own
        are unpinned, once, so that all may go and come anew in the order that fits."""
        if run.repacked or any(
            other.admitted and other is not run for other in self._runs.values()
        ):
            return False
        run.repacked = True
        self._refused.clear()
        self._unpin_kept(run)
        return True

    def _unpin_kept(self, run: Run) -> None:
        for w, layer in run.kept if run.admitted else ():
            if self._books.is_resident(w, layer):
                w.pins[layer] -= 1

    def _complete(self, run: Run) -> None:
        run.complete = all(self._books.is_resident(w, layer) for w, layer in run.kept)

    def _ready(self, run: Run, weights: Weights, layer: int) -> bool:
        if not run.admitted or not self._books.is_resident(weights, layer):
            return False
        if run.complete:
            return True
        return not self._whole and all(self._books.is_resident(weights, i) for i in weights.roots)

    def _grant(self) -> None:
        """Runs that waited for what is there now hold it."""
        for run in self._runs.values():
            for key in list(run.waits):
                w, layer = run.of[key[0]], key[1]
                if self._ready(run, w, layer):
                    times = run.waits.pop(key)
                    run.held[key] = run.held.get(key, 0) + times
                    w.pins[layer] += times

    # Refusals

    def _known(self, weights: str) -> Weights:
        try:
            return self._books.weights[weights]
        except KeyError:
            raise PolicyError(f"weights {weights!r} are not known; add them first") from None

    def _find(self, weights: str, layer: int) -> tuple[Weights, int]:
        known = self._known(weights)
        _refuse_layer(weights, layer, len(known.sizes))
        return known, layer

    def _run(self, run: int) -> Run:
        try:
            return self._runs[run]
        except KeyError:
            raise PolicyError(f"run {run} has not begun or has ended; begin it first") from None

    def _used(self, run: int, weights: str, layer: int) -> tuple[Run, Weights]:
        r = self._run(run)
        w = r.of.get(weights)
        if w is None:
            raise PolicyError(f"run {run} did not name weights {weights!r}; name them at its begin")
        if not 0 <= layer < len(w.sizes):
            _refuse_layer(weights, layer, len(w.sizes))
        return r, w

    def _outcome(self, weights: str, layer: int) -> Weights:
        known, layer = self._find(weights, layer)
        if self._books.loading != (known, layer):
            raise PolicyError(
                f"an outcome for layer {layer} of weights {weights!r}; the outstanding load is "
                f"{self.outstanding()}"
            )
        return known

    def _check(self) -> None:
        runs = list(self._runs.values())
        self._books._check(runs)
        assert set(self._turns) == set(self._runs)
        for run in runs:
            assert not run.complete or run.admitted or not run.kept
            assert run.admitted or not run.held
            if run.admitted:
                complete = all(self._books.is_resident(*pair) for pair in run.kept)
                assert run.complete == complete
            for name, layer in run.waits:
                assert not self._ready(run, run.of[name], layer), "it waits for what is there"
            for (name, layer), times in (*run.held.items(), *run.waits.items()):
                assert times > 0
                assert 0 <= layer < len(run.of[name].sizes)
        if self._whole:
            assert sum(run.admitted and not run.complete for run in runs) <= 1


def _take_one(counts: dict[tuple[str, int], int], key: tuple[str, int]) -> None:
    if counts[key] == 1:
        del counts[key]
    else:
        counts[key] -= 1


def _refuse_region(region: object) -> None:
    if region not in REGIONS:
        raise PolicyError(f"region {region!r} is none of {', '.join(REGIONS)}")


def _refuse_bytes(what: str, nbytes: object, least: int) -> None:
    if isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes < least:
        raise PolicyError(f"{what} is {nbytes!r} bytes; give an int of at least {least}")


def _refuse_layer(weights: str, layer: object, layers: int) -> None:
    if isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer < layers:
        raise PolicyError(f"layer {layer!r} of weights {weights!r} is not one of their {layers}")
