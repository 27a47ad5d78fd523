"""Benchmarks. Each measures ours and its rival in one run and reports ratios.

    st2i bench NAME [--json FILE] [--plot FILE]

Every benchmark is a module here with `run() -> dict` and a docstring whose first line says what. Some
also have `plot(figures, path)`, which draws what `run` found.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any


def names() -> list[str]:
    """The benchmarks there are."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_"))


def describe(name: str) -> str:
    """First line of a benchmark's docstring."""
    return (_module(name).__doc__ or "").partition("\n")[0]


def run(name: str) -> dict[str, Any]:
    """Run one benchmark; its figures by name."""
    figures: dict[str, Any] = _module(name).run()
    return figures


def plotter(name: str) -> Callable[[dict[str, Any], Path], None] | None:
    """What draws a benchmark's figures into a PNG; None if it has nothing to draw."""
    return getattr(_module(name), "plot", None)


def _module(name: str) -> Any:
    return importlib.import_module(f"{__name__}.{name}")
