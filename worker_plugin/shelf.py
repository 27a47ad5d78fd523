"""The models that this worker has read: skeletons by ModelFn, read once, kept while they are of use."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

from st2i_dask.errors import LoadError
from st2i_dask.model_fn import ModelFn

from . import import_clock
from .components import has_adapters, is_compiled, release_adapters
from .configurations import configurations
from .content import ContentIds
from .held import NEGLIGIBLE, held_bytes, move_held, take_from_files
from .resident import ResidentLayers
from .skeletons import Hook, ModelWeights, Part, Skeleton, install_hooks
from .virtual_modules import Found, find_virtual, make_weights, mark_taken
from .weight_cache import WeightCache

logger = logging.getLogger(__name__)

#: Models that nobody uses and that have no weights in memory are kept as skeletons, at most so many.
SKELETONS = 256

# While they build a model, the libraries change torch for the whole process (its default dtype, how
# parameters are made): another model built at that moment would have parameters without memory.
building = threading.Lock()


class Shelf:
    """Methods take the lock, `changed`, themselves, except those that say that it is held; it is never
    held while a model is read."""

    def __init__(
        self,
        cache: WeightCache,
        layers: ResidentLayers,
        ids: ContentIds,
        device: str,
        hooks: tuple[Hook, Hook],
        changed: threading.Condition,
        wait_s: float,
    ):
        self._cache = cache
        self._layers = layers
        self._ids = ids
        self._device = device
        self._hooks = hooks
        self._changed = changed
        self._wait_s = wait_s
        self._skeletons: OrderedDict[str, Skeleton] = OrderedDict()  # least recently used first
        self._retired: list[Skeleton] = []  # stale ones whose place another has taken
        self._loading: set[str] = set()

    def __iter__(self) -> Iterator[Skeleton]:
        """Those that whoever asks next gets. The lock is held."""
        return iter(self._skeletons.values())

    def has(self, model_fn: ModelFn, unit: str) -> bool:
        """Whether it is there, or is being loaded. The lock is held."""
        key = _key(model_fn, unit)
        skeleton = self._skeletons.get(key)
        return key in self._loading or (skeleton is not None and not skeleton.stale)

    def take(self, model_fn: ModelFn, unit: str) -> tuple[Skeleton, float | None]:
        """The model, in use from now on, and the seconds that reading it took; None: it was there. One
        thread loads it, others wait. Neither waiting for other loads counts nor importing modules, which
        the first model of a worker does for all."""
        key = _key(model_fn, unit)
        with self._changed:
            if not self._changed.wait_for(lambda: key not in self._loading, self._wait_s):
                raise LoadError(
                    f"model {model_fn!r} was still being loaded by another thread after "
                    f"{self._wait_s:g} s; see the worker's log for that load"
                )
            skeleton = self._skeletons.get(key)
            if skeleton is not None and not skeleton.stale:
                skeleton.users += 1
                skeleton.label = repr(model_fn)  # of several that are one model, the last one's
                self._skeletons.move_to_end(key)
                return skeleton, None
            self._loading.add(key)
            if self._cache.mode == "nocache":
                self.forget([s for s in self._skeletons.values() if s.unit != unit])
        try:
            return self._load(model_fn, key, unit)
        finally:
            with self._changed:
                self._loading.discard(key)
                self._changed.notify_all()

    def _load(self, model_fn: ModelFn, key: str, unit: str) -> tuple[Skeleton, float]:
        """Read it, one model at a time in this process."""
        if not building.acquire(timeout=self._wait_s):
            raise LoadError(
                f"model {model_fn!r} was not read: others were being read for {self._wait_s:g} s; "
                "see the worker's log for these loads"
            )
        start, since_ns = time.perf_counter(), time.time_ns()
        with import_clock.running() as imports:
            try:
                components = model_fn.load_model(model_fn.model_path)
            finally:
                building.release()
            skeleton = self._place(model_fn, components, key, unit, since_ns)
        if imports.seconds >= 0.1:
            logger.info(
                "imports for %r took %.1f s, of this worker's time", model_fn, imports.seconds
            )
        return skeleton, max(0.0, time.perf_counter() - start - imports.seconds)

    def _place(
        self, model_fn: ModelFn, components: Any, key: str, unit: str, since_ns: int
    ) -> Skeleton:
        """What load_model has returned becomes a skeleton. since_ns: see `configurations`."""
        if not isinstance(components, Mapping):
            raise LoadError(
                f"{model_fn.name}.load_model returned {type(components).__name__}; "
                "return a dict of components by name"
            )
        virtual = find_virtual(components, self._ids)
        take_from_files(components, virtual)
        held = held_bytes(components, virtual)
        skeleton = Skeleton(key, model_fn.model_key, repr(model_fn), unit, components, users=1)
        skeleton.configurations = configurations(components, since_ns)
        with self._changed:
            mark_taken(components)
            for found in virtual:
                weights = self._known(found, unit)
                assert weights.table is not None
                bound = weights.table.register(found.layers)
                skeleton.parts.append(Part(weights, found.layers, bound))
            skeleton.parameters = [
                parameter
                for part in skeleton.parts
                for layer in part.layers
                for _, parameter in layer.parameters
                if not parameter.is_inference()
            ]
            skeleton.was_written()
            virtual_bytes = sum(part.weights.nbytes for part in skeleton.parts)
            # Of adapters there may be any number beside one model: what they take is counted, and goes
            # with the model that has not been used for longest.
            if held > NEGLIGIBLE * virtual_bytes or has_adapters(components):
                skeleton.held = ModelWeights(f"held {key}", (held,), (0,))
                self._layers.add(skeleton.held, unit)
            skeleton.is_compiled = is_compiled(components)
            stale = self._skeletons.get(key)
            if stale is not None:
                self._retired.append(stale)
            self._skeletons[key] = skeleton
            idle = [s for s in self._skeletons.values() if not s.users]
            self.forget(idle[: max(0, len(idle) - SKELETONS)])
        if self._device != "cpu":
            try:
                move_held(components, self._device)
            except BaseException:
                skeleton.stale = True
                self.let_go(skeleton)
                raise
        return skeleton

    def _known(self, found: Found, unit: str) -> ModelWeights:
        """The weights of a module; files that were read last are where they are copied from."""
        made = make_weights(found, unit, self._device)
        weights = self._layers.find(made.id)
        if weights is None:
            self._layers.add(made, unit)
            return made
        weights.sources, weights.files = made.sources, made.files
        return weights

    def let_go(self, skeleton: Skeleton) -> None:
        with self._changed:
            skeleton.users -= 1
            if skeleton.stale:
                self.forget([skeleton])

    def forget(self, skeletons: list[Skeleton]) -> None:
        """Those of them that nobody uses; their weights too, where no other skeleton has them. The lock
        is held."""
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
            self._unhook(skeleton)
            for part in skeleton.parts:
                table = part.weights.table
                assert table is not None
                table.unregister(part.bound)
                if not table.skeletons:
                    self._layers.remove(part.weights)
            if skeleton.held is not None:
                self._layers.remove(skeleton.held)
            release_adapters(skeleton.components)

    def set_hooked(self, skeleton: Skeleton, wanted: bool) -> None:
        """Its layers are to be waited for, or all of them stay where they are: then hooks, which cost a
        per cent of a step, are for nothing. The lock is held, and the skeleton in use by who asks."""
        if wanted and not skeleton.handles:
            for part in skeleton.parts:
                skeleton.handles += install_hooks(part, *self._hooks)
        elif not wanted and skeleton.users == 1 and not skeleton.is_compiled:
            # Others may be about to need them; compiled code would be compiled anew without them.
            self._unhook(skeleton)

    @staticmethod
    def _unhook(skeleton: Skeleton) -> None:
        for handle in skeleton.handles:
            handle.remove()
        skeleton.handles.clear()

    def forget_stale(self) -> None:
        """The lock is held."""
        stale = [s for s in (*self._skeletons.values(), *self._retired) if s.stale]
        if stale:
            self.forget(stale)

    def close(self) -> None:
        with self._changed:
            self.forget([*self._skeletons.values(), *self._retired])

    def _check(self) -> None:
        for skeleton in (*self._skeletons.values(), *self._retired):
            assert skeleton.users >= 0
            assert all(weights in self._layers for weights in skeleton.weights)


def _key(model_fn: ModelFn, unit: str) -> str:
    return f"{unit}\0{model_fn.model_key}" if unit else model_fn.model_key
