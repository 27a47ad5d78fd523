"""Carries out what the policy of residency says: layers come, lie somewhere, and go."""

from __future__ import annotations

import logging
import threading
import time
from typing import Protocol

from .arena import Arena
from .device_copier import retire
from .host_tier import HostTier
from .loader import Buffer, Loader
from .residency import Residency
from .skeletons import ModelWeights
from .weight_books import Evict, Instructions, Load, Region
from .weight_cache import WeightCache

logger = logging.getLogger(__name__)

#: Share of an arena that weights leave to tensors from the start.
TENSOR_SHARE = 0.25


class Listener(Protocol):
    """Called with the lock held."""

    def held_evicted(self, weights: ModelWeights) -> None:
        """The policy has evicted what a skeleton holds."""
        ...

    def load_failed(self, load: Load, error: Exception) -> None: ...

    def load_over(self) -> None:
        """A load has an outcome, whatever it is."""
        ...


class ResidentLayers:
    """The layers in this worker's memory. Methods are called with the lock held, `changed`, which is
    notified of every change."""

    def __init__(
        self,
        cache: WeightCache,
        host: HostTier,
        device: str,
        arena: Arena | None,
        residency: Residency,
        changed: threading.Condition,
        listener: Listener,
    ):
        self._cache = cache
        self._device = device
        self._arena = arena
        self._residency = residency
        self._changed = changed
        self._listener = listener
        self._weights: dict[str, ModelWeights] = {}
        self._buffers: dict[tuple[str, int], Buffer] = {}
        self._spoilt: set[str] = set()
        self._loader = Loader(host, device, arena, self._loaded, self._no_room, self._failed)
        if arena is not None:
            arena.reclaim = self._reclaim

    def __contains__(self, weights: ModelWeights) -> bool:
        return self._weights.get(weights.id) is weights

    def add(self, weights: ModelWeights, unit: str) -> None:
        """Weights that are not known yet, nothing of them in memory. unit: see `WeightCache.add`."""
        self._weights[weights.id] = weights
        self._cache.add(weights.id, weights.sizes, weights.roots, unit or None)

    def find(self, id: str) -> ModelWeights | None:
        return self._weights.get(id)

    def remove(self, weights: ModelWeights) -> None:
        """Weights that nobody uses any more."""
        self.do(self._cache.remove(weights.id))
        for layer in range(len(weights.sizes)):  # evictions that were decided but not carried out
            self._drop(weights, layer)
        del self._weights[weights.id]
        self._residency.forget(weights)

    def do(self, instructions: Instructions) -> None:
        spare: dict[int, Buffer] = {}
        for instruction in instructions:
            weights = self._weights.get(instruction.weights)
            if weights is None:
                continue  # forgotten while an earlier instruction was carried out
            if isinstance(instruction, Evict):
                self._residency.evicted(weights, instruction.layer)
                _log("evicted", weights, instruction.layer)
                if weights.table is None:
                    self._listener.held_evicted(weights)
                    continue
                buffer = self._drop(weights, instruction.layer)
                if buffer is not None and buffer.is_free():
                    spare[buffer.tensor.numel()] = buffer
            elif weights.table is None:
                # What is held came with the skeleton.
                self._residency.loaded(weights, instruction.layer, 0.0)
                self.do(self._cache.loaded(weights.id, instruction.layer, time.monotonic()))
                self._changed.notify_all()
            else:
                nbytes = weights.sizes[instruction.layer]
                into = spare.pop(nbytes, None) if instruction.region == "framework" else None
                self._loader.submit(instruction, weights, into)

    def _drop(self, weights: ModelWeights, layer: int) -> Buffer | None:
        """Take the layer out of its memory, which is what it returns, if it has any."""
        buffer = self._buffers.pop((weights.id, layer), None)
        if buffer is not None:
            assert weights.table is not None
            weights.table.unbind(layer)
            if self._arena is not None and buffer.arena_bytes:
                self._arena.count_weights(-buffer.arena_bytes)
            elif self._device != "cpu":
                retire(buffer.tensor)
        return buffer

    def renew(self, weights: ModelWeights) -> None:
        """Their memory holds something else than their files by now: evict all of it as soon as no run
        uses it. What runs of it give until then is not to be trusted (see `is_spoilt`)."""
        self._spoilt.add(weights.id)
        self.renew_spoilt()

    def renew_spoilt(self) -> None:
        for id in list(self._spoilt):
            weights = self._weights.get(id)
            if weights is None:
                self._spoilt.discard(id)
            elif not self._cache.is_used(id):
                self._spoilt.discard(id)
                self.do(self._cache.clear(id, time.monotonic()))

    def is_spoilt(self, weights: ModelWeights) -> bool:
        return weights.id in self._spoilt

    # From the loader's thread

    def _loaded(self, load: Load, buffer: Buffer, seconds: float) -> None:
        weights = self._weights[load.weights]
        assert weights.table is not None
        views = weights.table.views(load.layer, buffer.tensor)
        with self._changed:
            weights.table.bind(load.layer, views)
            self._buffers[load.weights, load.layer] = buffer
            self._residency.loaded(weights, load.layer, seconds)
            _log("loaded", weights, load.layer)
            self.do(self._cache.loaded(load.weights, load.layer, time.monotonic()))
            self._listener.load_over()
            self._changed.notify_all()

    def _no_room(self, load: Load) -> None:
        with self._changed:
            self.do(self._cache.no_room(load.weights, load.layer, time.monotonic()))
            self._changed.notify_all()

    def _failed(self, load: Load, error: Exception) -> None:
        with self._changed:
            self._listener.load_failed(load, error)
            self.do(self._cache.failed(load.weights, load.layer, time.monotonic()))
            self._listener.load_over()
            self._changed.notify_all()

    # Memory

    def size_arena(self) -> None:
        """What tensors leave of the arena is for weights. They never take it from weights here."""
        if self._arena is None:
            return
        total = self._arena.heap.address.nbytes
        tensors = max(self._arena.tensor_bytes(), int(total * TENSOR_SHARE))
        room = max(self._cache.used("arena"), total - tensors)
        self.do(self._cache.set_capacity("arena", room, time.monotonic()))

    def is_arena_busy(self) -> bool:
        """Whether tensors take more of it than weights leave them anyway."""
        if self._arena is None:
            return False
        return self._arena.tensor_bytes() > int(self._arena.heap.address.nbytes * TENSOR_SHARE)

    def look_again(self) -> None:
        """Somebody waits, and nothing is being copied: a layer that found no gap among the tensors of
        the arena may find one now."""
        if self._arena is not None and self._cache.outstanding() is None:
            self.size_arena()
            self._changed.notify_all()

    def give_up(self, region: Region, nbytes: int) -> bool:
        """Evict for somebody who found no room there; False: there is nothing to evict."""
        evicts = self._cache.demand(region, nbytes, time.monotonic())
        self.do(evicts)
        return bool(evicts)

    def _reclaim(self, nbytes: int) -> bool:
        """A tensor of so many bytes found no room in the arena. From any thread."""
        with self._changed:
            return self.give_up("arena", nbytes)

    def close(self) -> None:
        """End the loader. Called without the lock: its thread may want it."""
        if self._arena is not None:
            self._arena.reclaim = None
        self._loader.close()

    def leave_arena(self) -> None:
        """When no layer is left. This and its listener refer to each other, but an arena must go with its
        last user, not when the garbage collector comes."""
        self._arena = None

    def _check(self) -> None:
        self._cache._check()
        for weights in self._weights.values():
            if weights.table is None:
                continue
            weights.table._check()
            for layer, there in enumerate(self._cache.resident(weights.id)):
                assert there == weights.table.is_bound(layer)
                assert there == ((weights.id, layer) in self._buffers)


def _log(what: str, weights: ModelWeights, layer: int) -> None:
    if logger.isEnabledFor(logging.DEBUG):
        fields = {"weights": weights.name, "layer": layer, "nbytes": weights.sizes[layer]}
        logger.debug("layer %d of %s %s", layer, weights.name, what, extra=fields)
