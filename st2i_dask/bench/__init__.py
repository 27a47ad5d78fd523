"""Benchmarks. Each measures ours and its rival in one run and reports ratios.

    st2i bench NAME [--json F]

Every benchmark is a module here with `run() -> dict` and a docstring whose first line says what.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any


def names() -> list[str]:
    """The benchmarks there are."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_"))


def describe(name: str) -> str:
    """First line of a benchmark's docstring."""
    return (importlib.import_module(f"{__name__}.{name}").__doc__ or "").partition("\n")[0]


def run(name: str) -> dict[str, Any]:
    """Run one benchmark; its figures by name."""
    figures: dict[str, Any] = importlib.import_module(f"{__name__}.{name}").run()
    return figures
