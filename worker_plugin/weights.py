"""The models of one worker: layer by layer in its memory, as the policy decides.

`lease` gives a model for one invocation, or for several in a row. Before a layer runs, a hook waits until
it is resident and keeps it there; behind it the loader brings in what comes next. `WeightCache` decides all
of that, `ResidentLayers` carries it out, `Shelf` keeps the models that were read.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from st2i_dask.errors import LoadError, OutputError
from st2i_dask.model_fn import ModelFn

from .arena import Arena
from .content import ContentIds
from .file_identity import FileIdentity
from .host_tier import HostTier, HostTierStatistics
from .lease import Lease, Timing
from .preparer import Preparer
from .profiles import Profiles
from .residency import Residency
from .resident import ResidentLayers
from .shelf import Shelf
from .skeletons import ModelWeights, Skeleton
from .weight_books import REGIONS, Load, Mode, Region
from .weight_cache import WeightCache
from .weight_waits import WeightWaits

#: How long a run waits for a layer, or for another thread's load of its model, seconds.
WAIT_SECONDS = 600.0
#: Files that change again while they are read anew are tried so often.
ATTEMPTS = 3


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
        self._wait_s = wait_s
        self._changed = threading.Condition()
        self._leases: dict[int, Lease] = {}
        self._numbers = itertools.count()
        self._here = threading.local()
        self.residency = Residency(self.profiles, device)
        self._layers = ResidentLayers(
            self._cache, self._host, device, self._arena, self.residency, self._changed, self
        )
        self._waits = WeightWaits(self._cache, self._layers, self._changed, wait_s)
        self._shelf = Shelf(
            self._cache,
            self._layers,
            ids or ContentIds(),
            device,
            (self._enter, self._leave),
            self._changed,
            wait_s,
        )
        self._preparer = Preparer(
            self._shelf, self._cache, self._layers, self._changed, self._numbers
        )

    # Leases

    @contextmanager
    def lease(
        self, model_fn: ModelFn, *, workflow: str = "", request: str = "", bucket: str = ""
    ) -> Iterator[Lease]:
        """The model for one invocation or several in this thread. bucket: the shapes that they compute.

        What `load_model` raises goes to the caller. A model whose files have changed since it was last
        used is read anew. LoadError: it cannot fit, its files change meanwhile, or it found no room for
        `wait_s` seconds. Nothing else is affected.
        """
        unit = {"wcache": workflow, "nocache": request}.get(self.mode, "")
        skeleton, files, read_s = self._take(model_fn, unit)
        self._preparer.used(skeleton)
        outer = getattr(self._here, "lease", None)
        lease = Lease(next(self._numbers), skeleton, bucket, outer)
        lease.load_s = read_s
        try:
            self._begin(lease)
            self._here.lease = lease
            try:
                with self._preparer.beside(model_fn, unit):
                    yield lease
            except BaseException:
                lease.timings.clear()  # it may have broken off anywhere: no measure of the model
                raise
            finally:
                self._here.lease = outer
                self._end(lease)
        finally:
            self._host.release(files)
            self._shelf.let_go(skeleton)
        if lease.is_spoilt:
            raise written_to(lease)

    def _take(
        self, model_fn: ModelFn, unit: str
    ) -> tuple[Skeleton, frozenset[FileIdentity], float]:
        """The model, the files of its weights, which are open, and seconds that reading it took; 0 if
        it was there."""
        left = ATTEMPTS
        while True:
            skeleton, read_s = self._shelf.take(model_fn, unit)
            files = skeleton.files
            try:
                if read_s is None:
                    skeleton.configurations.check()
                self._host.acquire(files)
                return skeleton, files, read_s or 0.0
            except LoadError:
                skeleton.stale = True
                self._shelf.let_go(skeleton)
                left -= 1
                if read_s is not None or not left:  # they change all the time
                    raise

    def _begin(self, lease: Lease) -> None:
        weights = lease.skeleton.weights
        with self._changed:
            self._waits.for_room(lease)
            self.residency.leased([self._cache.resident(each.id) for each in weights], lease.load_s)
            for each in weights:
                self.residency.begins(each, lease.bucket, self._cache.resident(each.id))
                key = self.residency.key(each, lease.bucket)
                if each.table is not None and self.profiles.wants_compute(key):
                    lease.timings[each.id] = Timing(each, self.device)
            self._leases[lease.number] = lease
            names = [each.id for each in weights]
            try:
                self._layers.do(self._cache.begin(lease.number, names, time.monotonic()))
                self._changed.notify_all()
                self._waits.for_layers(lease, lambda: self._cache.ready(lease.number))
                if lease.skeleton.is_undivided:
                    self._load_all(lease)
            except BaseException:
                del self._leases[lease.number]
                self._layers.do(self._cache.end(lease.number, time.monotonic()))
                self._changed.notify_all()  # the next ones may be ready without a load
                raise
            lease.held = lease.is_free = self._hold(lease)
            self._shelf.set_hooked(lease.skeleton, not lease.held)

    def again(self, lease: Lease) -> None:
        """The next invocation uses this lease, which holds all layers."""
        with self._changed:
            self.residency.again(lease.skeleton.weights)

    def hold_all(self, lease: Lease) -> bool:
        """Bring in all layers for the rest of the lease: its code may use weights without calling the
        module that has them, where no hook waits for them. False: they are there, or do not fit at
        once."""
        with self._changed:
            if lease.held or lease.skeleton.is_undivided or not lease.skeleton.parts:
                return False
            return self._load_all(lease)

    def keep_undivided(self, lease: Lease) -> None:
        """Later leases of this model begin with all its layers, where they fit: it needs them so."""
        with self._changed:
            lease.skeleton.is_undivided = True

    def _load_all(self, lease: Lease) -> bool:
        """Holds the lock; waiting lets go of it. False: they do not fit at once."""
        if not self._cache.fits_whole(*lease.ids):
            return False
        for each in lease.skeleton.weights:
            for layer in range(len(each.sizes)):
                entering = self._cache.enter(lease.number, each.id, layer, time.monotonic())
                self._layers.do(entering)
                self._waits.for_layers(lease, lambda: not self._cache.waiting(lease.number))
        return True

    def _end(self, lease: Lease) -> None:
        with self._changed:
            del self._leases[lease.number]
            self.residency.totals.stalled_s += lease.stalled_s
            self._layers.do(self._cache.end(lease.number, time.monotonic()))
            for each in lease.skeleton.weights:
                timing = lease.timings.get(each.id)
                prefix = self.residency.ends(each, lease.bucket, timing, lease.stalled_s)
                if lease.held or each not in self._layers or each.table is None:
                    continue  # nothing was learned
                if timing is not None:
                    self._cache.set_order(each.id, timing.order)
                self._cache.set_prefix(each.id, prefix)
            spoilt = lease.skeleton.was_written()
            for part in lease.skeleton.parts:
                if spoilt:
                    self._layers.renew(part.weights)
                lease.is_spoilt |= spoilt or self._layers.is_spoilt(part.weights)
            self._layers.renew_spoilt()
            self._changed.notify_all()

    def _enter(self, weights: ModelWeights, layer: int) -> None:
        """Hook: that layer is about to run. Waits until it is resident."""
        lease = self._lease_of(weights)
        if lease.is_free:
            return
        with self._changed:
            self._layers.do(self._cache.enter(lease.number, weights.id, layer, time.monotonic()))
            self._waits.for_layers(lease, lambda: not self._cache.waiting(lease.number))
        timing = lease.timings.get(weights.id)
        if timing is not None:
            timing.enter(layer)

    def _leave(self, weights: ModelWeights, layer: int) -> None:
        """Hook: that layer has run, or failed, or did not get so far."""
        lease = self._lease_of(weights)
        if lease.is_free:
            return
        timing = lease.timings.get(weights.id)
        if timing is not None:
            timing.leave(layer)
        with self._changed:
            self._layers.do(self._cache.leave(lease.number, weights.id, layer, time.monotonic()))
            # While others run too, they may need room for what they stream.
            lease.is_free = len(self._leases) == 1 and self._hold(lease)
            self._changed.notify_all()

    def _hold(self, lease: Lease) -> bool:
        """Keep all layers until the lease ends, where all are there and none is to be measured."""
        return not lease.timings and self._cache.hold(lease.number, time.monotonic())

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

    # What happens to layers

    def held_evicted(self, weights: ModelWeights) -> None:
        self._shelf.forget([skeleton for skeleton in self._shelf if skeleton.held is weights])

    def load_failed(self, load: Load, error: Exception) -> None:
        for lease in self._leases.values():
            if load.weights in lease.ids:
                lease.skeleton.stale |= isinstance(error, LoadError)
                if lease.waits:
                    lease.error = error

    def load_over(self) -> None:
        self._layers.renew_spoilt()
        self._shelf.forget_stale()

    # Memory

    def relieve(self, nbytes: int) -> bool:
        """Activations of so many bytes found no room; whether there is some now."""
        with self._changed:
            return self._layers.give_up("framework", nbytes)

    def trim(self, model_fn: ModelFn, layers: int) -> None:
        """Keep only so many first layers, in order of execution, of an idle model."""
        with self._changed:
            for skeleton in [s for s in self._shelf if s.model_key == model_fn.model_key]:
                for part in skeleton.parts:
                    self._layers.do(self._cache.trim(part.weights.id, layers, time.monotonic()))

    def close(self) -> None:
        """Give everything back. Nothing may be leased."""
        self._preparer.close(self._wait_s)
        self._layers.close()
        self._shelf.close()
        self._host.close()
        self.profiles.close()
        self._layers.leave_arena()
        self._arena = None

    # Questions

    def missing(self) -> dict[str, float]:
        """By model_key, the share of its seconds to load that a run would wait for now, of models
        that are here: 0 to 1."""
        with self._changed:
            return {
                skeleton.model_key: self.residency.missing(skeleton.weights)
                for skeleton in self._shelf
            }

    def free_bytes(self) -> int:
        """Of the budget, what weights and tensors leave."""
        with self._changed:
            weights = self._cache.used("framework") + self._cache.used("arena")
        tensors = self._arena.tensor_bytes() if self._arena is not None else 0
        return max(0, self.memory - weights - tensors)

    def statistics(self) -> tuple[dict[Region, int], HostTierStatistics]:
        """Bytes of layers in memory by region, and what the host tier has."""
        with self._changed:
            return {r: self._cache.used(r) for r in REGIONS}, self._host.statistics()

    def models(self) -> list[dict[str, Any]]:
        """Per model here: model, model_key, content (ids of its weights, alike where they are the same),
        layers, resident_layers, nbytes, resident_bytes, by_layer (a "1" for each that is resident, else
        a "0"), and what `Residency.figures` has."""
        with self._changed:
            return [self._row(skeleton) for skeleton in self._shelf]

    def _row(self, skeleton: Skeleton) -> dict[str, Any]:
        resident = {w.id: self._cache.resident(w.id) for w in skeleton.weights}
        sizes = [
            (size, there)
            for w in skeleton.weights
            for size, there in zip(w.sizes, resident[w.id], strict=True)
        ]
        return {
            "model": skeleton.label,
            "model_key": skeleton.model_key,
            "content": [w.id for w in skeleton.weights],
            "layers": len(sizes),
            "resident_layers": sum(there for _, there in sizes),
            "nbytes": sum(size for size, _ in sizes),
            "resident_bytes": sum(size for size, there in sizes if there),
            "by_layer": "".join("1" if there else "0" for _, there in sizes),
            **self.residency.figures(skeleton.weights),
        }

    def _check(self) -> None:
        with self._changed:
            self._layers._check()
            self._shelf._check()
            self._preparer._check()
            self._host._check()
            assert set(self._leases) == {lease.number for lease in self._leases.values()}


def _same_kind(arena: Arena, device: str) -> bool:
    return arena.heap.device.partition(":")[0] == device.partition(":")[0]


def written_to(lease: Lease) -> OutputError:
    """The error of a lease whose weights were changed in place."""
    return OutputError(
        f"{lease.skeleton.label}: execute changed a parameter in place while it ran, or another run "
        "with the same weights did; weights are shared between requests and tenants: copy a "
        "parameter (parameter.clone()) before changing it"
    )
