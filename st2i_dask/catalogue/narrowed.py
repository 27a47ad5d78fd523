"""One orchestrator function for several forms of a family: fixing parameters that a form has not."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any


def without(function: Callable[..., Any], fixed: Mapping[str, Any]) -> Callable[..., Any]:
    """The function without the parameters that have these values for good."""

    def narrowed(**values: Any) -> Any:
        return function(**values, **fixed)

    signature = inspect.signature(function)
    kept = [p for p in signature.parameters.values() if p.name not in fixed]
    narrowed.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
    narrowed.__annotations__ = {p.name: p.annotation for p in kept}
    narrowed.__doc__ = function.__doc__
    return narrowed
