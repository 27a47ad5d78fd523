"""An executor's weights in virtual time: its `WeightCache` decides, this file moves the clock.

A run is worked out from its dispatch on, as nothing else happens to that executor's weights meanwhile:
layer by layer while something is missing, in one go when all of it is resident.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from worker_plugin.prefix import exposed_s, resident_prefix
from worker_plugin.weight_cache import Evict, Load, Mode, WeightCache

from ..errors import ParameterError
from .arena import Arena
from .profiles import Model, Profile

#: Modes in which the beginning and the end of a run that misses nothing move nothing.
_KEEPING: tuple[Mode, ...] = ("elastic", "mcache", "wcache")
WHOLE_MODES: tuple[Mode, ...] = ("mcache", "wcache", "nocache")


class Took(NamedTuple):
    """A run: seconds until its first invocation ends, and each later one takes; of the first, seconds
    that it waited for loads. whole: all its layers were resident at the start."""

    first_s: float
    next_s: float
    stalled_s: float
    whole: bool


class Kept(NamedTuple):
    """A model as one system caches it: name of its weights, and what is evicted together with it."""

    weights: str
    model: str
    unit: str


class _Weights:
    """What is derived from a model once for all executors."""

    def __init__(self, kept: Kept, model: Model, streams: bool):
        self.kept, self.model, self.sizes = kept, model, model.sizes
        self.layer_load_s = model.load_s / model.layers
        self.layer_compute_s = model.compute_s / model.layers
        self.load = [self.layer_load_s] * model.layers
        self.compute = [self.layer_compute_s if streams else 0.0] * model.layers
        self.prefix = resident_prefix(self.load, self.compute) if streams else model.layers
        self.from_scratch_s = exposed_s(self.load, self.compute, [False] * model.layers)
        self._missing: dict[tuple[bool, ...], float] = {}

    def missing(self, resident: tuple[bool, ...]) -> float:
        """Share of the seconds that a run would wait if nothing were resident."""
        found = self._missing.get(resident)
        if found is None:
            found = 0.0
            if self.from_scratch_s:
                stalls = exposed_s(self.load, self.compute, resident)
                found = min(1.0, stalls / self.from_scratch_s)
            self._missing[resident] = found
        return found


class Catalogue:
    """Weights and tasks of one system. tasks: by the name the policy knows a task's model by, the
    weights of a run of it, in order of use."""

    def __init__(self, profile: Profile, tasks: Mapping[str, Sequence[Kept]], mode: Mode):
        self.profile, self.mode = profile, mode
        self.streams = mode not in WHOLE_MODES
        self.weights: dict[str, _Weights] = {}
        self.tasks = {task: tuple(k.weights for k in kept) for task, kept in tasks.items()}
        for kept in (k for ks in tasks.values() for k in ks):
            if kept.weights not in self.weights:
                model = profile.model(kept.model)
                self.weights[kept.weights] = _Weights(kept, model, self.streams)
        self.layers = {name: weights.model.layers for name, weights in self.weights.items()}
        self.users: dict[str, list[str]] = {name: [] for name in self.weights}
        for task, names in self.tasks.items():
            for name in dict.fromkeys(names):
                self.users[name].append(task)

    def load_s(self, task: str) -> float:
        """Seconds that a run waits when nothing of it is resident."""
        return sum(self.weights[name].from_scratch_s for name in self.tasks[task])


class Device:
    """One executor. capacity: bytes for weights by region, as `WeightCache` takes it. arena: where
    tensors lie, and weights as far as `capacity` has room in region "arena"."""

    def __init__(
        self,
        name: str,
        catalogue: Catalogue,
        capacity: Mapping[str, int],
        arena: Arena | None = None,
    ):
        self.name = name
        self._catalogue = catalogue
        self.cache = WeightCache(capacity, catalogue.mode)  # type: ignore[arg-type]
        for weights in catalogue.weights.values():
            sizes, kept = weights.sizes, weights.kept
            self.cache.add(kept.weights, sizes, (), kept.unit)
            if catalogue.streams:
                self.cache.set_prefix(kept.weights, weights.prefix)
            why = self.cache.fits(kept.weights)
            if why is not None:
                raise ParameterError(f"{kept.weights} does not fit an executor: {why}")
        self.capacity = sum(capacity.values())
        self.arena, self._shared = arena, capacity.get("arena", 0) > 0
        #: By task: the share of it that is to be loaded; absent: all of it.
        self.missing = {task: 0.0 for task in catalogue.tasks if not catalogue.load_s(task)}
        self.loaded_bytes = self.loads = 0
        self.weight_bytes = 0  # resident or being copied in
        self.accounted = 0.0  # until when these were added up, s
        self._changed: set[str] = set()
        self._load: Load | None = None
        self._loaded_at = 0.0
        self._link_free = 0.0
        self._runs = 0
        # A run that finds all its layers moves nothing: only that it was used is told, and late.
        self._used: dict[str, None] | None = {} if catalogue.mode in _KEEPING else None
        self._there = dict.fromkeys(catalogue.weights, 0)

    @property
    def free_bytes(self) -> int:
        left = self.capacity - self.weight_bytes
        return left if left > 0 else 0

    def run(self, task: str, compute_s: float, now: float) -> Took:
        """A run of that task begins. compute_s: of one invocation."""
        cache, names = self.cache, self._catalogue.tasks[task]
        if self._used is not None:
            if self._is_whole(names):
                self._used.pop(task, None)
                self._used[task] = None
                return Took(compute_s, compute_s, 0.0, True)
            self._tell_used(now)
        self._runs += 1
        number = self._runs
        while self._load is not None and self._loaded_at <= now:
            self._arrived()
        self._obey(cache.begin(number, names, now), now)
        whole = cache.hold(number, now)
        if whole:
            ends = now + compute_s
        elif self._catalogue.streams:
            ends = self._stream(number, names, compute_s, now)
        else:
            ends = self._await_all(number, now) + compute_s
        self._obey(cache.end(number, ends), ends)
        if self._changed:
            self._renew()
        return Took(ends - now, compute_s, max(0.0, ends - now - compute_s), whole)

    def place_tensor(self, nbytes: int, now: float) -> int | None:
        """In the arena, over cached layers if need be. None: there is no room, it goes elsewhere."""
        arena = self.arena
        assert arena is not None
        arena.tensors += 1
        offset = arena.place_tensor(nbytes)
        while offset is None and self._shared:
            evicts = self.cache.demand("arena", nbytes, now)
            if not evicts:
                break
            self._obey(evicts, now)
            offset = arena.place_tensor(nbytes)
        if offset is None:
            arena.fallbacks += 1
        else:
            self._resize(now)
        return offset

    def drop_tensor(self, offset: int, nbytes: int, now: float) -> None:
        assert self.arena is not None
        self.arena.drop_tensor(offset, nbytes)
        self._resize(now)

    def _resize(self, now: float) -> None:
        """What tensors leave of the arena is for weights."""
        if self._shared and self.arena is not None:
            left = self.arena.nbytes - self.arena.tensor_bytes
            self._obey(self.cache.set_capacity("arena", left, now), now)
            if self._changed:
                self._renew()

    def _is_whole(self, names: Sequence[str]) -> bool:
        loading = self._load.weights if self._load is not None else None
        for name in names:
            if name == loading or self._there[name] != self._catalogue.layers[name]:
                return False
        return True

    def _tell_used(self, now: float) -> None:
        """Runs that found all their layers since the last one that did not, in order of last use."""
        assert self._used is not None
        for task in self._used:
            self._runs += 1
            names = self._catalogue.tasks[task]
            self._obey(self.cache.begin(self._runs, names, now), now)
            self._obey(self.cache.end(self._runs, now), now)
        self._used.clear()

    def clear(self, now: float) -> None:
        """Nothing stays."""
        for name in self._catalogue.weights:
            self._obey(self.cache.clear(name, now), now)
        self._renew()

    def _stream(self, number: int, names: Sequence[str], compute_s: float, now: float) -> float:
        """The first invocation, layer by layer; loads go on behind it. When it ends."""
        cache, at = self.cache, now
        usual_s = sum(self._catalogue.weights[name].model.compute_s for name in names)
        factor = compute_s / usual_s if usual_s else 0.0
        for name in names:
            weights = self._catalogue.weights[name]
            compute_s = weights.layer_compute_s * factor
            for layer in range(weights.model.layers):
                self._obey(cache.enter(number, name, layer, at), at)
                while cache.waiting(number):
                    assert self._load is not None, "it waits, and nothing is being copied in"
                    at = max(at, self._loaded_at)
                    self._arrived()
                ends = at + compute_s
                while self._load is not None and self._loaded_at <= ends:
                    self._arrived()
                at = ends
                self._obey(cache.leave(number, name, layer, at), at)
        return at

    def _await_all(self, number: int, now: float) -> float:
        """Whole modes compute once everything is there. When that is."""
        at = now
        while not self.cache.ready(number):
            assert self._load is not None, "it waits, and nothing is being copied in"
            at = max(at, self._loaded_at)
            self._arrived()
        return at

    def _arrived(self) -> None:
        load, self._load = self._load, None
        assert load is not None
        self._obey(self.cache.loaded(load.weights, load.layer, self._loaded_at), self._loaded_at)

    def _obey(self, instructions: list[Load | Evict], now: float) -> None:
        for what in instructions:
            weights = self._catalogue.weights[what.weights]
            if isinstance(what, Evict):
                if self.arena is not None:
                    self.arena.drop_layer(what.weights, what.layer)
            elif self.arena is not None and what.region == "arena":
                nbytes = weights.sizes[what.layer]
                if not self.arena.place_layer(what.weights, what.layer, nbytes):
                    self._obey(self.cache.no_room(what.weights, what.layer, now), now)
                    continue
            nbytes = weights.sizes[what.layer]
            self._changed.add(what.weights)
            if isinstance(what, Evict):
                self.weight_bytes -= nbytes
                self._there[what.weights] -= 1
                continue
            self._load = what
            self._loaded_at = max(now, self._link_free) + weights.layer_load_s
            self._link_free = self._loaded_at
            self.weight_bytes += nbytes
            self.loaded_bytes += nbytes
            self.loads += 1
            self._there[what.weights] += 1

    def _renew(self) -> None:
        """The missing shares of the tasks whose weights came or went."""
        catalogue, cache = self._catalogue, self.cache
        tasks = dict.fromkeys(t for name in self._changed for t in catalogue.users[name])
        self._changed.clear()
        found = dict(self.missing)
        for task in tasks:
            total = stalls = 0.0
            for name in catalogue.tasks[task]:
                weights = catalogue.weights[name]
                total += weights.from_scratch_s
                stalls += weights.from_scratch_s * weights.missing(cache.resident(name))
            share = stalls / total if total else 0.0
            if share < 1.0:
                found[task] = share
            else:
                found.pop(task, None)
        self.missing = found
