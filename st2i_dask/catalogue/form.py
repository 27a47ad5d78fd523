"""One form of a family as a workflow: of a function that has the parameters of all its forms."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..errors import LoadError
from ..quoting import quoted
from ..workflow import Workflow, workflow
from .narrowed import with_defaults, without


def form(
    compose: Callable[..., Any],
    absent: Iterable[str],
    defaults: Mapping[str, Any],
    *,
    source: str,
    name: str,
    about: str,
) -> Workflow:
    """The workflow of a function without parameters that this form has not; they are None.

    defaults: values of parameters in place of the function's own. source: what errors call the folder.
    about: one line on what the workflow draws. LoadError for a default of no parameter.
    """
    narrowed = without(compose, dict.fromkeys(absent))
    narrowed.__doc__ = about
    names = [parameter for parameter in narrowed.__annotations__ if parameter != "return"]
    check_defaults(source, defaults, names)
    made: Workflow = workflow(name=name, replace=True)(with_defaults(narrowed, defaults))
    return made


def check_defaults(source: str, defaults: Iterable[str], names: Sequence[str]) -> None:
    """LoadError for a default of no parameter. names: the workflow's parameters."""
    for default in defaults:
        if default not in names:
            raise LoadError(
                f"{source!r}: no parameter {quoted(default)} to give a default to; its workflow takes: "
                f"{', '.join(names)}"
            )
