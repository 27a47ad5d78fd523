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

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from st2i_dask.errors import PolicyError

from .weight_books import MODES as MODES
from .weight_books import REGIONS as REGIONS
from .weight_books import Books, Weights
from .weight_books import Evict as Evict
from .weight_books import Instructions as Instructions
from .weight_books import Load as Load
from .weight_books import Mode as Mode
from .weight_books import Region as Region
from .weight_fit import packs
from .weight_loads import Loads
from .weight_refusals import refuse_bytes, refuse_layer, refuse_region
from .weight_runs import Run, Runs


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
            refuse_region(region)
            refuse_bytes(f"capacity of region {region!r}", nbytes, 0)
        self.mode = mode
        self._books = Books(capacity)
        self._runs = Runs(self._books, mode in ("mcache", "wcache", "nocache"))
        self._loads = Loads(self._books, self._runs)

    # Questions

    def __contains__(self, weights: object) -> bool:
        return weights in self._books.weights

    def is_resident(self, weights: str, layer: int) -> bool:
        return self._books.is_resident(*self._find(weights, layer))

    def is_pinned(self, weights: str, layer: int) -> bool:
        known, layer = self._find(weights, layer)
        return self._books.is_pinned(known, layer)

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
        refuse_region(region)
        return self._books.used[region]

    def capacity(self, region: Region) -> int:
        refuse_region(region)
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
        if self._runs.fits(known, self._runs.kept(known)):
            return None
        room = ", ".join(f"{self._books.capacity[region]:,} in {region}" for region in REGIONS)
        what = (
            f"all their layers, {sum(sum(w.sizes) for w in known):,} bytes,"
            if self._runs.whole
            else f"the root layers, {sum(w.root_bytes for w in known):,} bytes, and the largest "
            f"layer, {max(w.largest for w in known):,} bytes,"
        )
        return f"{what} must be in memory at once, each layer in one region, and there is {room}"

    def fits_whole(self, *weights: str) -> bool:
        """Whether all their layers can be in memory at once."""
        sizes = [size for name in dict.fromkeys(weights) for size in self._known(name).sizes]
        return packs(self._books.capacity, sorted(sizes, reverse=True))

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
            refuse_bytes(f"a layer of weights {weights!r}", size, 1)
        for layer in roots:
            refuse_layer(weights, layer, len(sizes))
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
        evicts = self._loads.evict_all_of(known)
        del self._books.weights[weights]
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
            refuse_layer(weights, layer, len(known.sizes))
        at = {
            run.number: known.order[run.cursor % len(known.order)]
            for run in self._runs
            if run.current is known and known.order
        }
        known.set_order(order)
        for number, layer in at.items():
            self._runs.active[number].cursor = known.position[layer]

    # Events

    def set_capacity(self, region: Region, nbytes: int, now: float) -> Instructions:
        """Bytes for weights there changed: tensors or activations took or gave back memory."""
        refuse_region(region)
        refuse_bytes(f"capacity of region {region!r}", nbytes, 0)
        self._books.capacity[region] = nbytes
        self._loads.freed()
        for run in self._runs:
            run.repacked = False
        return self._settle()

    def demand(self, region: Region, nbytes: int, now: float) -> Instructions:
        """Evicts so that so many bytes are free there, for somebody who found no room: one layer at
        least, as there was no gap of that size. Nothing if it is out of reach. Never a Load."""
        refuse_region(region)
        refuse_bytes("a demand", nbytes, 1)
        return self._loads.make_room(region, max(1, nbytes - self._books.free(region)))

    def is_used(self, weights: str) -> bool:
        """Whether a run uses them, or a layer of them is being copied in."""
        known, loading = self._known(weights), self._books.loading
        return known.users > 0 or (loading is not None and loading[0] is known)

    def clear(self, weights: str, now: float) -> Instructions:
        """Evict all layers of weights that nobody uses."""
        return self._loads.evict_all_of(self._known(weights))

    def trim(self, weights: str, layers: int, now: float) -> Instructions:
        """Evict the layers of idle weights from that one on, in order of execution."""
        known = self._known(weights)
        if layers < 0:
            raise PolicyError(f"trim of weights {weights!r} to {layers} layers; give at least 0")
        if known.users:
            return []
        gone = [(known, layer) for layer in reversed(known.order[layers:])]
        return self._loads.evict(pair for pair in gone if self._books.evictable(*pair))

    def begin(self, run: int, weights: Sequence[str], now: float) -> Instructions:
        """A run that will use these, in this order."""
        if run in self._runs.active:
            raise PolicyError(f"run {run} has already begun; end it first")
        known = tuple(dict.fromkeys(self._known(name) for name in weights))
        self._runs.begin(run, known, now)
        evicts: Instructions = []
        if self.mode == "nocache":
            units = {w.unit for w in known}
            for other in self._books.weights.values():
                if not other.users and other.unit not in units:
                    evicts += self._loads.evict_all_of(other)
        return [*evicts, *self._settle()]

    def enter(self, run: int, weights: str, layer: int, now: float) -> Instructions:
        """The run wants to execute it. It is pinned if it is there; else the run waits for it."""
        r, w = self._used(run, weights, layer)
        key = (weights, layer)
        position = w.position[layer]
        if position >= 0:
            r.current, r.cursor = w, position
            r.begun.add(weights)
        if self._runs.ready(r, w, layer) and key not in r.waits:
            r.held[key] = r.held.get(key, 0) + 1
            w.pins[layer] += 1
        else:
            r.waits[key] = r.waits.get(key, 0) + 1
            self._loads.entered(w, layer)
            for each in r.weights:
                each.try_again()
        return self._loads.next() if self._books.loading is None else []

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
        self._loads.freed()
        evicts = self._loads.shrink()
        return [*evicts, *self._loads.next()] if self._books.loading is None else evicts

    def hold(self, run: int, now: float) -> bool:
        """Pin all layers of a run that waits for nothing until its end, if all are resident: it need
        not enter and leave them one by one."""
        held = self._run(run)
        if not held.complete or not all(map(self._books.is_whole, held.weights)):
            return False
        if not held.holds:
            held.holds = True
            for w in held.weights:
                w.holders += 1
        return True

    def end(self, run: int, now: float) -> Instructions:
        """Unpins whatever it holds."""
        ended = self._run(run)
        self._runs.end(ended, now)
        self._loads.freed()
        evicts: Instructions = []
        if self.mode == "pipelined":
            for w in ended.weights:
                evicts += [] if w.users else self._loads.evict_all_of(w)
        return [*evicts, *self._settle()]

    def loaded(self, weights: str, layer: int, now: float) -> Instructions:
        """The outstanding Load is done."""
        w = self._outcome(weights, layer)
        self._books.loading = None
        self._runs.arrived(w, layer)
        passing = self.mode == "pipelined" and not w.users
        evicts = self._loads.evict([(w, layer)]) if passing else []
        return [*evicts, *self._settle()]

    def no_room(self, weights: str, layer: int, now: float) -> Instructions:
        """The outstanding Load found no gap where it should go: it goes over something there, or
        elsewhere, or is asked for again when something was freed."""
        return self._loads.again(self._outcome(weights, layer), layer)

    def failed(self, weights: str, layer: int, now: float) -> Instructions:
        """The copy failed. It is tried again when a run of these weights begins, or enters a layer
        that it must wait for."""
        w = self._outcome(weights, layer)
        self._books.take_out(w, layer)
        w.failed.add(layer)
        w.list_missing()
        self._loads.freed()
        return self._settle()

    def _settle(self) -> Instructions:
        """Bytes, pins or runs have changed."""
        return [*self._loads.shrink(), *self._runs.admit(), *self._loads.next()]

    # Refusals

    def _known(self, weights: str) -> Weights:
        try:
            return self._books.weights[weights]
        except KeyError:
            raise PolicyError(f"weights {weights!r} are not known; add them first") from None

    def _find(self, weights: str, layer: int) -> tuple[Weights, int]:
        known = self._known(weights)
        refuse_layer(weights, layer, len(known.sizes))
        return known, layer

    def _run(self, run: int) -> Run:
        try:
            return self._runs.active[run]
        except KeyError:
            raise PolicyError(f"run {run} has not begun or has ended; begin it first") from None

    def _used(self, run: int, weights: str, layer: int) -> tuple[Run, Weights]:
        r = self._run(run)
        w = r.of.get(weights)
        if w is None:
            raise PolicyError(f"run {run} did not name weights {weights!r}; name them at its begin")
        if not 0 <= layer < len(w.sizes):
            refuse_layer(weights, layer, len(w.sizes))
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
        self._books._check()
        self._runs._check()


def _take_one(counts: dict[tuple[str, int], int], key: tuple[str, int]) -> None:
    if counts[key] == 1:
        del counts[key]
    else:
        counts[key] -= 1
