"""Models that are read ahead of need: what a later invocation of a request runs, while one runs that says so.

Reading a model with new adapters is mostly Python, a second or more for a large one, and would otherwise
come between the text encoder and the first step. It shares the interpreter with what runs meanwhile: that
loses as much as it would have waited, or nothing while it computes outside of the interpreter.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import contextmanager

from st2i_dask.model_fn import ModelFn

from .resident import ResidentLayers
from .shelf import Shelf
from .skeletons import Skeleton
from .weight_cache import WeightCache

logger = logging.getLogger(__name__)

#: Models that wait to be read; more than these are read when they are needed.
WAITING = 4
#: Models that were read and that nobody has used yet; of more the oldest are dropped.
UNUSED = 4
# What is held finds no room while others load: it is tried so often, with a pause, and given up then.
_TRIES, _PAUSE_SECONDS = 20, 0.05


class Preparer:
    """Thread-safe; `changed` is the store's lock. One model at a time is read, in a thread that ends when
    nothing waits. Whatever goes wrong shows when the model is needed."""

    def __init__(
        self,
        shelf: Shelf,
        cache: WeightCache,
        layers: ResidentLayers,
        changed: threading.Condition,
        numbers: Iterator[int],
    ):
        self._shelf = shelf
        self._cache = cache
        self._layers = layers
        self._changed = changed
        self._numbers = numbers
        self._queue: deque[tuple[ModelFn, str]] = deque()
        self._unused: OrderedDict[str, Skeleton] = OrderedDict()  # oldest first
        self._thread: threading.Thread | None = None
        self._closed = False

    @contextmanager
    def beside(self, model_fn: ModelFn, unit: str) -> Iterator[None]:
        """While the body runs, a run of this model, what comes next is read. Returns at once; what has not
        begun when the body fails is dropped with it. unit: see WeightStore."""
        mine = [(soon, unit) for soon in model_fn.soon()] if self._cache.mode != "nocache" else []
        if mine:
            with self._changed:
                self._want(mine)
        try:
            yield
        except BaseException:
            if mine:
                with self._changed:
                    self._queue = deque(e for e in self._queue if not any(e is m for m in mine))
            raise

    def _want(self, models: list[tuple[ModelFn, str]]) -> None:
        for entry in models:
            waits = [(model_fn.model_key, unit) for model_fn, unit in self._queue]
            model_fn, unit = entry
            is_known = (model_fn.model_key, unit) in waits or self._shelf.has(model_fn, unit)
            if not is_known and len(self._queue) < WAITING and not self._closed:
                self._queue.append(entry)
        if self._queue and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="st2i-preparer", daemon=True)
            self._thread.start()

    def used(self, skeleton: Skeleton) -> None:
        """A run has it. The lock is not held."""
        if skeleton.key in self._unused:
            with self._changed:
                self._unused.pop(skeleton.key, None)

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._queue:
                    self._thread = None
                    self._changed.notify_all()
                    return
                model_fn, unit = self._queue.popleft()
            start = time.perf_counter()
            try:
                self._prepare(model_fn, unit)
            except Exception as error:
                logger.info("model %r was not read ahead: %s", model_fn, error)
            else:
                logger.debug("model %r took %.3f s", model_fn, time.perf_counter() - start)

    def _prepare(self, model_fn: ModelFn, unit: str) -> None:
        skeleton, read_s = self._shelf.take(model_fn, unit)
        try:
            if read_s is None:  # it was there
                return
            if not self._book(skeleton):
                skeleton.stale = True  # goes when it is let go
                return
            with self._changed:
                self._unused[skeleton.key] = skeleton
                while len(self._unused) > UNUSED:
                    self._shelf.forget([self._unused.popitem(last=False)[1]])
        finally:
            self._shelf.let_go(skeleton)

    def _book(self, skeleton: Skeleton) -> bool:
        """What it holds is in memory: so the books must say. False: it found no room there."""
        if skeleton.held is None:
            return True
        for _ in range(_TRIES):
            with self._changed:
                # Begun and ended under one lock: nobody waits for what this waits for.
                run = next(self._numbers)
                self._layers.do(self._cache.begin(run, [skeleton.held.id], time.monotonic()))
                is_booked = self._cache.ready(run)
                self._layers.do(self._cache.end(run, time.monotonic()))
                self._changed.notify_all()
                if is_booked or self._closed:
                    return is_booked
            time.sleep(_PAUSE_SECONDS)
        return False

    def close(self, wait_s: float) -> None:
        """Nothing more is read; waits for the model that is being read, at most so long."""
        with self._changed:
            self._closed = True
            self._queue.clear()
            self._changed.wait_for(lambda: self._thread is None, wait_s)
            self._unused.clear()

    def _check(self) -> None:
        """The lock is held."""
        assert len(self._queue) <= WAITING
        assert len(self._unused) <= UNUSED
        assert self._thread is not None or not self._queue
