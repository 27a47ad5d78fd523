"""Seconds that a thread spends importing modules.

The first model that a worker reads brings in torch and what reads models with it: seconds that no second
model pays, and that belong to the process, not to the tenant who came first.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class ImportClock:
    """seconds: spent in imports since the body of `running` began. Belongs to its thread."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0

    @contextmanager
    def _import(self) -> Iterator[None]:
        """One import; what it imports in its turn is part of it."""
        start = time.perf_counter()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self.seconds += time.perf_counter() - start


@contextmanager
def running() -> Iterator[ImportClock]:
    """Counts what this thread imports in the body, also what is imported inside of function calls. What
    other threads import, or wait for, is not counted."""
    if not any(finder is _finder for finder in sys.meta_path):
        # It stays: others may be walking along the list, and would miss one if it got shorter.
        sys.meta_path.insert(0, _finder)
    before, clock = _clock(), ImportClock()
    _here.clock = clock
    try:
        yield clock
    finally:
        _here.clock = before
        if before is not None:
            before.seconds += clock.seconds


_here = threading.local()


def _clock() -> ImportClock | None:
    found: ImportClock | None = getattr(_here, "clock", None)
    return found


class _Finder(MetaPathFinder):
    """Finds what the others find, and times how it is loaded. In threads without a clock, and within an
    import that is being timed, it finds nothing."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        clock = _clock()
        if clock is None or clock._depth:
            return None
        with clock._import():
            for finder in list(sys.meta_path):
                find = getattr(finder, "find_spec", None)
                spec: ModuleSpec | None = find(fullname, path, target) if find else None
                if spec is not None:
                    inner: Any = spec.loader
                    if hasattr(inner, "create_module") and hasattr(inner, "exec_module"):
                        timed: Any = _Loader(inner, clock)
                        spec.loader = timed
                    return spec
        return None


class _Loader:
    """Another loader, timed; in all else it is that one, and the module that it loads knows only that."""

    def __init__(self, loader: Any, clock: ImportClock):
        self._loader, self._clock = loader, clock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        with self._clock._import():
            module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        with self._clock._import():
            self._loader.exec_module(module)


_finder = _Finder()
