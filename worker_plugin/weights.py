"""The models of one worker: layer by layer in its memory, as the policy decides.

`lease` gives a model for one invocation. Before a layer runs, a hook waits until it is resident and keeps
it there; behind it the loader brings in what comes next. `WeightCache` decides all of that; this file
carries out what it says.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from st2i_dask.errors import LoadError
from st2i_dask.model_fn import ModelFn

from .arena import Arena
from .content import ContentIds
from .device_copier import retire
from .host_tier import HostTier
from .lease import Lease, Timing
from .loader import Buffer, Loader
from .mappings import FileIdentity
from .profiles import Profiles
from .residency import Residency
from .skeletons import (
    NEGLIGIBLE,
    ModelWeights,
    Part,
    Skeleton,
    find_virtual,
    held_bytes,
    install_hooks,
    make_weights,
    mark_taken,
    move_held,
    take_from_files,
)
from .weight_books import Evict, Instructions, Load, Mode
from .weight_cache import WeightCache

#: How long a run waits for a layer, or for another thread's load of its model, seconds.
WAIT_SECONDS = 600.0
#: Share of an arena that weights leave to tensors from the start.
TENSOR_SHARE = 0.25
#: Models that nobody uses and that have no weights in memory are kept as skeletons, at most so many.
SKELETONS = 256
#: Who waits looks so often whether tensors have left the arena, seconds: nobody tells of that.
LOOK_SECONDS = 0.02

# While they build a model, the libraries change torch for the whole process (its default dtype, how
# parameters are made): another model built at that moment would have parameters without memory.
_building = threading.Lock()


class WeightStore:
    """Thread-safe. The lock is never held while a model loads or a layer is copied.

    memory: budget in bytes for weights, tensors and activations on the device. arena: the part of it
    where tensors go first and weights lie too; None: there is none. mode: see `WeightCache`.
    host_bytes: budget of the host tier. bandwidth: limit of copies, bytes/s. profiles, ids: what is
    known of weights; by default in memory only.
    """

    def __init__(
        self,
        *,
        memory: int,
        device: str = "cpu",
        arena: Arena | None = None,
        mode: Mode = "elastic",
        host_bytes: int = 1 << 40,
        bandwidth: float | None = None,
        profiles: Profiles | None = None,
        ids: ContentIds | None = None,
        wait_s: float = WAIT_SECONDS,
    ):
        self.memory = memory
        self.mode: Mode = mode
        self.device = device
        self._arena = arena if arena is not None and _same_kind(arena, device) else None
        framework = memory - (self._arena.heap.address.nbytes if self._arena else 0)
        if framework <= 0:
            raise LoadError(
                f"memory of {memory:,} bytes is no more than the arena in it; raise it with "
                "st2i.attach(client, memory_bytes=...), or give less to arena_bytes"
            )
        self._cache = WeightCache({"framework": framework, "arena": 0}, mode)
        self._host = HostTier(host_bytes, bandwidth=bandwidth)
        self.profiles = profiles or Profiles(None)
        self._ids = ids or ContentIds()
        self._wait_s = wait_s
        self._changed = threading.Condition()
        self._skeletons: OrderedDict[str, Skeleton] = OrderedDict()  # least recently used first
        self._retired: list[Skeleton] = []  # stale ones whose place another has taken
        self._loading: set[str] = set()
        self._weights: dict[str, ModelWeights] = {}
        self._buffers: dict[tuple[str, int], Buffer] = {}
        self._leases: dict[int, Lease] = {}
        self._numbers = itertools.count()
        self._here = threading.local()
        self.residency = Residency(self.profiles, device)
        self._loader = Loader(
            self._host, device, self._arena, self._loaded, self._no_room, self._failed
        )
        if self._arena is not None:
            self._arena.reclaim = self._reclaim

    # Leases

    @contextmanager
    def lease(
        self, model_fn: ModelFn, *, workflow: str = "", request: str = "", bucket: str = ""
    ) -> Iterator[Lease]:
        """The model for one run in this thread. bucket: the shapes that it will compute.

        What `load_model` raises goes to the caller. LoadError: it cannot fit, its files have changed,
        or it found no room for `wait_s` seconds. Nothing else is affected.
        """
        unit = {"wcache": workflow, "nocache": request}.get(self.mode, "")
        start = time.perf_counter()
        skeleton, was_there = self._skeleton(model_fn, unit)
        outer = getattr(self._here, "lease", None)
        lease = Lease(next(self._numbers), skeleton, bucket, outer)
        if not was_there:
            lease.load_s = time.perf_counter() - start
        try:
            with self._reading(skeleton):
                self._begin(lease)
                self._here.lease = lease
                try:
                    yield lease
                except BaseException:
                    lease.timings.clear()  # it may have broken off anywhere: no measure of the model
                    raise
                finally:
                    self._here.lease = outer
                    self._end(lease)
        finally:
            self._let_go(skeleton)

    def _begin(self, lease: Lease) -> None:
        weights = lease.skeleton.weights
        with self._changed:
            self._await_fit(lease)
            for each in weights:
                self.residency.begins(each, lease.bucket, self._cache.resident(each.id))
                key = self.residency.key(each, lease.bucket)
                if each.table is not None and self.profiles.wants_compute(key):
                    lease.timings[each.id] = Timing(each, self.device)
            self._leases[lease.number] = lease
            names = [each.id for each in weights]
            try:
                self._do(self._cache.begin(lease.number, names, time.monotonic()))
                self._changed.notify_all()
                self._await(lease, lambda: self._cache.ready(lease.number))
            except BaseException:
                del self._leases[lease.number]
                self._do(self._cache.end(lease.number, time.monotonic()))
                self._changed.notify_all()  # the next ones may be ready without a load
                raise
            lease.held = not lease.timings and self._cache.hold(lease.number, time.monotonic())

    def _end(self, lease: Lease) -> None:
        with self._changed:
            del self._leases[lease.number]
            self._do(self._cache.end(lease.number, time.monotonic()))
            for each in lease.skeleton.weights:
                timing = lease.timings.get(each.id)
                prefix = self.residency.ends(each, lease.bucket, timing, lease.stalled_s)
                if lease.held or each.id not in self._weights or each.table is None:
                    continue  # nothing was learned
                if timing is not None:
                    self._cache.set_order(each.id, timing.order)
                self._cache.set_prefix(each.id, prefix)
            self._changed.notify_all()

    def _enter(self, weights: ModelWeights, layer: int) -> None:
        """Hook: that layer is about to run. Waits until it is resident."""
        lease = self._lease_of(weights)
        if lease.held:
            return
        with self._changed:
            self._do(self._cache.enter(lease.number, weights.id, layer, time.monotonic()))
            self._await(lease, lambda: not self._cache.waiting(lease.number))
        timing = lease.timings.get(weights.id)
        if timing is not None:
            timing.enter(layer)

    def _leave(self, weights: ModelWeights, layer: int) -> None:
        """Hook: that layer has run, or failed, or did not get so far."""
        lease = self._lease_of(weights)
        if lease.held:
            return
        timing = lease.timings.get(weights.id)
        if timing is not None:
            timing.leave(layer)
        with self._changed:
            self._do(self._cache.leave(lease.number, weights.id, layer, time.monotonic()))
            self._changed.notify_all()

    def _lease_of(self, weights: ModelWeights) -> Lease:
        """This thread's, or, in a thread that model code has started, the only one that has them."""
        lease: Lease | None = getattr(self._here, "lease", None)
        while lease is not None:
            if weights.id in lease.ids:
                return lease
            lease = lease.outer
        with self._changed:
            having = [e for e in self._leases.values() if weights.id in e.ids]
        if len(having) != 1:
            raise LoadError(
                f"a model ran outside of its invocation ({len(having)} are running with its "
                "weights); run it in execute, in the thread that execute runs in"
            )
        return having[0]

    def _await(self, lease: Lease, is_there: Callable[[], bool]) -> None:
        """Until what the lease waits for is resident. Holds the lock; waiting lets go of it."""
        if is_there():
            return
        start = time.perf_counter()
        lease.waits = True
        try:
            while lease.error is None and not is_there():
                left = start + self._wait_s - time.perf_counter()
                if left <= 0:
                    break
                if not self._changed.wait(min(left, LOOK_SECONDS)):
                    self._look_again()
        finally:
            lease.waits = False
            lease.stall(start)
        if lease.error is not None:
            raise lease.error
        if not is_there():
            raise LoadError(
                f"no room for model {lease.skeleton.label}: what is in use left none for "
                f"{self._wait_s:g} s; raise the worker's memory with "
                "st2i.attach(client, memory_bytes=...) or run fewer threads per worker"
            )

    # Skeletons

    def _skeleton(self, model_fn: ModelFn, unit: str) -> tuple[Skeleton, bool]:
        """The model, in use from now on, and whether it was there. One thread loads it, others wait."""
        key = f"{unit}\0{model_fn.model_key}" if unit else model_fn.model_key
        with self._changed:
            if not self._changed.wait_for(lambda: key not in self._loading, self._wait_s):
                raise LoadError(
                    f"model {model_fn!r} was still being loaded by another thread after "
                    f"{self._wait_s:g} s; see the worker's log for that load"
                )
            skeleton = self._skeletons.get(key)
            if skeleton is not None and not skeleton.stale:
                skeleton.users += 1
                self._skeletons.move_to_end(key)
                return skeleton, True
            self._loading.add(key)
            if self.mode == "nocache":
                self._forget([s for s in self._skeletons.values() if s.unit != unit])
        try:
            return self._load(model_fn, key, unit), False
        finally:
            with self._changed:
                self._loading.discard(key)
                self._changed.notify_all()

    def _load(self, model_fn: ModelFn, key: str, unit: str) -> Skeleton:
        components = self._build(model_fn)
        virtual = find_virtual(components, self._ids)
        take_from_files(components, virtual)
        held = held_bytes(components, virtual)
        skeleton = Skeleton(key, model_fn.model_key, repr(model_fn), unit, components, users=1)
        with self._changed:
            mark_taken(components)
            for found in virtual:
                weights = self._known(found, unit)
                assert weights.table is not None
                bound = weights.table.register(found.layers)
                skeleton.parts.append(Part(weights, found.layers, bound))
            virtual_bytes = sum(part.weights.nbytes for part in skeleton.parts)
            if held > NEGLIGIBLE * virtual_bytes:
                skeleton.held = ModelWeights(f"held {key}", (held,), (0,))
                self._add(skeleton.held, unit)
            for part in skeleton.parts:
                skeleton.handles += install_hooks(part, self._enter, self._leave)
            stale = self._skeletons.get(key)
            if stale is not None:
                self._retired.append(stale)
            self._skeletons[key] = skeleton
            idle = [s for s in self._skeletons.values() if not s.users]
            self._forget(idle[: max(0, len(idle) - SKELETONS)])
        if self.device != "cpu":
            try:
                move_held(components, self.device)
            except BaseException:
                skeleton.stale = True
                self._let_go(skeleton)
                raise
        return skeleton

    def _build(self, model_fn: ModelFn) -> Mapping[str, Any]:
        """What load_model returns. One at a time in this process."""
        if not _building.acquire(timeout=self._wait_s):
            raise LoadError(
                f"model {model_fn!r} was not read: others were being read for {self._wait_s:g} s; "
                "see the worker's log for these loads"
            )
        try:
            components = model_fn.load_model(model_fn.model_path)
        finally:
            _building.release()
        if not isinstance(components, Mapping):
            raise LoadError(
                f"{model_fn.name}.load_model returned {type(components).__name__}; "
                "return a dict of components by name"
            )
        return components

    def _known(self, found: Any, unit: str) -> ModelWeights:
        """The weights of a module; files that were read last are where they are copied from."""
        made = make_weights(found, unit, self.device)
        weights = self._weights.get(made.id)
        if weights is None:
            self._add(made, unit)
            return made
        weights.sources, weights.files = made.sources, made.files
        return weights

    def _add(self, weights: ModelWeights, unit: str) -> None:
        self._weights[weights.id] = weights
        self._cache.add(weights.id, weights.sizes, weights.roots, unit or None)

    def _let_go(self, skeleton: Skeleton) -> None:
        with self._changed:
            skeleton.users -= 1
            if skeleton.stale:
                self._forget([skeleton])

    @contextmanager
    def _reading(self, skeleton: Skeleton) -> Iterator[None]:
        """Its files stay open. When one has changed the skeleton is no good any more."""
        files = frozenset[FileIdentity]().union(*(part.weights.files for part in skeleton.parts))
        try:
            self._host.acquire(files)
        except LoadError:
            skeleton.stale = True
            raise
        try:
            yield
        finally:
            self._host.release(files)

    def _forget(self, skeletons: list[Skeleton]) -> None:
        """Those of them that nobody uses; their weights too, where no other skeleton has them."""
        outstanding = self._cache.outstanding()
        for skeleton in skeletons:
            if skeleton.users or skeleton not in (
                self._skeletons.get(skeleton.key),
                *self._retired,
            ):
                continue
            if outstanding is not None and outstanding[0] in [w.id for w in skeleton.weights]:
                skeleton.stale = True  # until that load is over
                continue
            if skeleton in self._retired:
                self._retired.remove(skeleton)
            else:
                del self._skeletons[skeleton.key]
            for handle in skeleton.handles:
                handle.remove()
            for part in skeleton.parts:
                table = part.weights.table
                assert table is not None
                table.unregister(part.bound)
                if not table.skeletons:
                    self._remove(part.weights)
            if skeleton.held is not None:
                self._remove(skeleton.held)

    def _remove(self, weights: ModelWeights) -> None:
        self._do(self._cache.remove(weights.id))
        for layer in range(len(weights.sizes)):  # evictions that were decided but not carried out
            self._drop(weights, layer)
        del self._weights[weights.id]
        self.residency.forget(weights)

    # What the policy says, and what it is told

    def _do(self, instructions: Instructions) -> None:
        for instruction in instructions:
            weights = self._weights.get(instruction.weights)
            if weights is None:
                continue  # forgotten while an earlier instruction was carried out
            if isinstance(instruction, Evict):
                self._evict(weights, instruction.layer)
            elif weights.table is None:
                # What is held came with the skeleton.
                self.residency.loaded(weights, instruction.layer, 0.0)
                self._do(self._cache.loaded(weights.id, instruction.layer, time.monotonic()))
                self._changed.notify_all()
            else:
                self._loader.submit(instruction, weights)

    def _evict(self, weights: ModelWeights, layer: int) -> None:
        self.residency.evicted(weights, layer)
        if weights.table is not None:
            self._drop(weights, layer)
        else:
            self._forget([s for s in self._skeletons.values() if s.held is weights])

    def _drop(self, weights: ModelWeights, layer: int) -> None:
        """Free the layer's memory, if it has any."""
        buffer = self._buffers.pop((weights.id, layer), None)
        if buffer is not None:
            assert weights.table is not None
            weights.table.unbind(layer)
            if self._arena is not None and buffer.arena_bytes:
                self._arena.count_weights(-buffer.arena_bytes)
            elif self.device != "cpu":
                retire(buffer.tensor)

    def _loaded(self, load: Load, buffer: Buffer, seconds: float) -> None:
        weights = self._weights[load.weights]
        assert weights.table is not None
        views = weights.table.views(load.layer, buffer.tensor)
        with self._changed:
            weights.table.bind(load.layer, views)
            self._buffers[load.weights, load.layer] = buffer
            self.residency.loaded(weights, load.layer, seconds)
            self._do(self._cache.loaded(load.weights, load.layer, time.monotonic()))
            self._over()

    def _over(self) -> None:
        """A load has an outcome."""
        stale = [s for s in (*self._skeletons.values(), *self._retired) if s.stale]
        if stale:
            self._forget(stale)
        self._changed.notify_all()

    def _no_room(self, load: Load) -> None:
        with self._changed:
            self._do(self._cache.no_room(load.weights, load.layer, time.monotonic()))
            self._changed.notify_all()

    def _failed(self, load: Load, error: Exception) -> None:
        with self._changed:
            for lease in self._leases.values():
                names = [each.id for each in lease.skeleton.weights]
                if load.weights in names:
                    lease.skeleton.stale |= isinstance(error, LoadError)
                    if lease.waits:
                        lease.error = error
            self._do(self._cache.failed(load.weights, load.layer, time.monotonic()))
            self._over()

    # Memory

    def _size_arena(self) -> None:
        """What tensors leave of the arena is for weights. They never take it from weights here."""
        if self._arena is None:
            return
        total = self._arena.heap.address.nbytes
        tensors = max(self._arena.tensor_bytes(), int(total * TENSOR_SHARE))
        room = max(self._cache.used("arena"), total - tensors)
        self._do(self._cache.set_capacity("arena", room, time.monotonic()))

    def _await_fit(self, lease: Lease) -> None:
        """Until its layers fit beside the tensors that the arena holds. Holds the lock; waiting lets
        go of it. LoadError when they do not fit an empty one, or not for `wait_s` seconds."""
        start = time.perf_counter()
        while True:
            self._size_arena()
            why = self._cache.fits(*lease.ids)
            if why is None:
                return
            if not self._is_arena_busy() or time.perf_counter() - start > self._wait_s:
                # What is held may be so because its file was replaced while it was read.
                lease.skeleton.stale |= lease.skeleton.held is not None
                raise LoadError(
                    f"model {lease.skeleton.label} does not fit this worker: {why}; raise its "
                    "memory with st2i.attach(client, memory_bytes=...) or use a smaller dtype"
                )
            self._changed.wait(LOOK_SECONDS)

    def _is_arena_busy(self) -> bool:
        """Whether tensors take more of it than weights leave them anyway."""
        if self._arena is None:
            return False
        return self._arena.tensor_bytes() > int(self._arena.heap.address.nbytes * TENSOR_SHARE)

    def _look_again(self) -> None:
        """Somebody waits, and nothing is being copied: a layer that found no gap among the tensors of
        the arena may find one now. The policy tries again when a capacity grows."""
        if self._arena is None or self._cache.outstanding() is not None:
            return
        self._size_arena()
        room = self._cache.capacity("arena")
        for nbytes in (max(0, room - 1), room):
            self._do(self._cache.set_capacity("arena", nbytes, time.monotonic()))
        self._changed.notify_all()

    def _reclaim(self, nbytes: int) -> bool:
        """A tensor of so many bytes found no room in the arena."""
        with self._changed:
            evicts = self._cache.demand("arena", nbytes, time.monotonic())
            self._do(evicts)
            return bool(evicts)

    def relieve(self, nbytes: int) -> bool:
        """Activations of so many bytes found no room; whether there is some now."""
        with self._changed:
            evicts = self._cache.demand("framework", nbytes, time.monotonic())
            self._do(evicts)
            return bool(evicts)

    def trim(self, model_fn: ModelFn, layers: int) -> None:
        """Keep only so many first layers, in order of execution, of an idle model."""
        with self._changed:
            for skeleton in [
                s for s in self._skeletons.values() if s.model_key == model_fn.model_key
            ]:
                for part in skeleton.parts:
                    self._do(self._cache.trim(part.weights.id, layers, time.monotonic()))

    def close(self) -> None:
        """Give everything back. Nothing may be leased."""
        if self._arena is not None:
            self._arena.reclaim = None
        self._loader.close()
        with self._changed:
            self._forget([*self._skeletons.values(), *self._retired])
        self._host.close()
        self.profiles.close()

    # Questions

    def missing(self) -> dict[str, float]:
        """By model_key, the share of its seconds to load that a run would wait for now, of models
        that are here: 0 to 1."""
        with self._changed:
            return {
                skeleton.model_key: self.residency.missing(skeleton.weights)
                for skeleton in self._skeletons.values()
            }

    def free_bytes(self) -> int:
        """Of the budget, what weights and tensors leave."""
        with self._changed:
            weights = self._cache.used("framework") + self._cache.used("arena")
        tensors = self._arena.tensor_bytes() if self._arena is not None else 0
        return max(0, self.memory - weights - tensors)

    def models(self) -> list[dict[str, Any]]:
        """Per model here: model, layers, resident_layers, nbytes, resident_bytes, and what
        `Residency.figures` has."""
        with self._changed:
            return [self._row(skeleton) for skeleton in self._skeletons.values()]

    def _row(self, skeleton: Skeleton) -> dict[str, Any]:
        resident = {w.id: self._cache.resident(w.id) for w in skeleton.weights}
        sizes = [
            (size, there)
            for w in skeleton.weights
            for size, there in zip(w.sizes, resident[w.id], strict=True)
        ]
        return {
            "model": skeleton.label,
            "layers": len(sizes),
            "resident_layers": sum(there for _, there in sizes),
            "nbytes": sum(size for size, _ in sizes),
            "resident_bytes": sum(size for size, there in sizes if there),
            **self.residency.figures(skeleton.weights),
        }

    def _check(self) -> None:
        with self._changed:
            self._cache._check()
            self._host._check()
            assert set(self._leases) == {lease.number for lease in self._leases.values()}
            for skeleton in self._skeletons.values():
                assert skeleton.users >= 0
                for weights in skeleton.weights:
                    assert self._weights[weights.id] is weights
            for weights in self._weights.values():
                if weights.table is None:
                    continue
                weights.table._check()
                for layer, there in enumerate(self._cache.resident(weights.id)):
                    assert there == weights.table.is_bound(layer)
                    assert there == ((weights.id, layer) in self._buffers)


def _same_kind(arena: Arena, device: str) -> bool:
    return arena.heap.device.partition(":")[0] == device.partition(":")[0]
