"""Loaded models of one worker: least recently used out, bounded in bytes.

Thread-safe. The lock is never held while a model loads, so a hit never waits for a load of another
model; one thread loads a model, others that want the same one wait for it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from st2i_dask.errors import LoadError

#: How long a caller waits for another thread's load, or for models in use to be released, seconds.
WAIT_SECONDS = 600.0


@dataclass
class _Entry:
    components: Any
    nbytes: int
    users: int = 0


@dataclass(frozen=True)
class CacheStatistics:
    hits: int
    loads: int
    evictions: int
    nbytes: int
    models: tuple[str, ...]  # least recently used first


class ModelCache:
    """Models by key. `budget` bounds their bytes; a model in use is never evicted."""

    def __init__(self, budget: int, *, wait: float = WAIT_SECONDS):
        if budget <= 0:
            raise LoadError(f"model budget {budget} bytes is not positive; give at least 1")
        self.budget = budget
        self._wait = wait
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._loading: set[str] = set()
        self._reserved = 0  # bytes of loaded models on their way to the device
        self._changed = threading.Condition()
        self._hits = self._loads = self._evictions = 0

    @contextmanager
    def lease(
        self,
        key: str,
        load: Callable[[], Any],
        size: Callable[[Any], int],
        place: Callable[[Any], None] | None = None,
    ) -> Iterator[Any]:
        """The model's components, held in memory while the context is open.

        load: makes the components in host memory. size: their bytes. place: moves them to the device,
        after room was made there. An exception of theirs goes to the caller and leaves the cache
        unchanged. LoadError when the model alone is over the budget, or when what is in use leaves no
        room for `wait` seconds.
        """
        entry = self._acquire(key) or self._load(key, load, size, place)
        try:
            yield entry.components
        finally:
            with self._changed:
                entry.users -= 1
                self._changed.notify_all()

    def statistics(self) -> CacheStatistics:
        with self._changed:
            return CacheStatistics(
                self._hits,
                self._loads,
                self._evictions,
                self._nbytes(),
                tuple(self._entries),
            )

    def clear(self) -> None:
        """Forget every model that is not in use."""
        with self._changed:
            for key in [k for k, entry in self._entries.items() if not entry.users]:
                del self._entries[key]

    def _nbytes(self) -> int:
        return self._reserved + sum(entry.nbytes for entry in self._entries.values())

    def _acquire(self, key: str) -> _Entry | None:
        """The resident entry, or None: then this thread is the one to load it."""
        with self._changed:
            arrived = self._changed.wait_for(lambda: key not in self._loading, self._wait)
            if not arrived:
                raise LoadError(
                    f"model {key!r} was still being loaded by another thread after "
                    f"{self._wait:g} s; see the worker's log for that load"
                )
            entry = self._entries.get(key)
            if entry is None:
                self._loading.add(key)
                return None
            self._entries.move_to_end(key)
            entry.users += 1
            self._hits += 1
            return entry

    def _load(
        self,
        key: str,
        load: Callable[[], Any],
        size: Callable[[Any], int],
        place: Callable[[Any], None] | None,
    ) -> _Entry:
        try:
            components = load()
            nbytes = size(components)
            if nbytes > self.budget:
                raise LoadError(
                    f"model {key!r} needs {nbytes:,} bytes, the worker's budget for models is "
                    f"{self.budget:,}; raise it with st2i.attach(client, model_bytes=...) or use "
                    "a smaller dtype"
                )
            with self._changed:
                self._make_room(key, nbytes)
                self._reserved += nbytes
            try:
                if place is not None:
                    place(components)
            except BaseException:
                with self._changed:
                    self._reserved -= nbytes
                raise
            with self._changed:
                self._reserved -= nbytes
                entry = self._entries[key] = _Entry(components, nbytes, users=1)
                self._loading.discard(key)
                self._loads += 1
            return entry
        finally:
            with self._changed:
                self._loading.discard(key)
                self._changed.notify_all()

    def _make_room(self, key: str, nbytes: int) -> None:
        def fits() -> bool:
            for other in [k for k, entry in self._entries.items() if not entry.users]:
                if self._nbytes() + nbytes <= self.budget:
                    break
                del self._entries[other]
                self._evictions += 1
            return self._nbytes() + nbytes <= self.budget

        if not self._changed.wait_for(fits, self._wait):
            raise LoadError(
                f"no room for model {key!r} ({nbytes:,} bytes): models in use fill the budget of "
                f"{self.budget:,} bytes for {self._wait:g} s; raise it with "
                "st2i.attach(client, model_bytes=...) or run fewer threads per worker"
            )

    def _check(self) -> None:
        with self._changed:
            assert self._nbytes() <= self.budget
            assert all(entry.users >= 0 for entry in self._entries.values())
            assert not self._loading & set(self._entries)
            assert self._reserved >= 0
            assert self._loading or not self._reserved
