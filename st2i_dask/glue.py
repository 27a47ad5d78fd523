"""Glue: the cheap functions between models (pack latents, a scheduler step, post-processing)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, overload

from .errors import ComposeError
from .trace import current_trace


@overload
def glue(function: Callable[..., Any], /) -> Callable[..., Any]: ...


@overload
def glue(*, outputs: int | None = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]: ...


def glue(function: Any = None, /, *, outputs: int | None = None) -> Any:
    """Mark a cheap, pure function for use inside workflows.

    Inside a workflow a call is recorded and its result is symbolic; it runs inside the task of the
    ModelFn it follows or precedes, never as a task of its own. Outside a workflow it is the plain
    function. Glue must not change its arguments (they may be read again after a loss) and must give
    the same result for the same arguments: it may run more than once.

    outputs: the number of values of a returned tuple, so that the call can be unpacked.
    """
    if outputs is not None and (not isinstance(outputs, int) or outputs < 1):
        raise ComposeError(f"glue outputs={outputs!r}; give the number of returned values, >= 1")
    if function is None:
        return lambda inner: _wrap(inner, outputs)
    return _wrap(function, outputs)


def _wrap(function: Callable[..., Any], outputs: int | None) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        trace = current_trace()
        if trace is None:
            return function(*args, **kwargs)
        return trace.add_glue(wrapper, args, kwargs, outputs)

    return wrapper
