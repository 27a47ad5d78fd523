"""Forms of one orchestrator function: without parameters that a form has not, with other defaults."""

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


def with_defaults(function: Callable[..., Any], values: Mapping[str, Any]) -> Callable[..., Any]:
    """The function with these default values; its parameters become keyword-only."""

    def with_values(**given: Any) -> Any:
        return function(**given)

    signature = inspect.signature(function)
    with_values.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[
            p.replace(kind=p.KEYWORD_ONLY, default=values.get(p.name, p.default))
            for p in signature.parameters.values()
        ]
    )
    with_values.__annotations__ = dict(inspect.get_annotations(function))
    with_values.__doc__ = function.__doc__
    return with_values
