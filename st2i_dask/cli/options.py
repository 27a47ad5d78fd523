"""From what people write to a workflow's parameters: --steps, --size, --param, JSONL fields."""

from __future__ import annotations

import inspect
import json
import re
import types
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin

from ..errors import ParameterError
from ..quoting import quoted
from .pictures import with_pictures

if TYPE_CHECKING:
    from ..parameters import Parameter
    from ..workflow import Workflow

_SIZE = re.compile(r"\s*(\d{1,6})\s*[xX]\s*(\d{1,6})\s*")
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


def parameter_values(
    workflow: Workflow, written: Mapping[str, Any], *, shown: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Values by the workflow's own parameter names.

    `steps` stands for num_steps and `size` ("WxH") for width and height, unless the workflow has
    parameters of these names. shown: how errors call a name (`{"steps": "--steps"}`).
    ParameterError lists the parameters when the workflow does not take one.
    """
    names = {parameter.name for parameter in workflow.parameters}
    values: dict[str, Any] = {}
    source: dict[str, str] = {}
    for name, value in written.items():
        called = (shown or {}).get(name, name)
        for real, converted in _spread(name, value, names, called):
            if real not in names:
                alias = "" if real == called else f" (for {called})"
                raise ParameterError(
                    f"workflow {workflow.name!r} has no parameter {quoted(real)}{alias}; it takes: "
                    + ", ".join(parameter.name for parameter in workflow.parameters)
                )
            if real in values:
                raise ParameterError(
                    f"{real} is given twice, by {source[real]} and by {called}; give it once"
                )
            values[real], source[real] = converted, called
    return values


def _spread(name: str, value: Any, names: set[str], called: str) -> Iterable[tuple[str, Any]]:
    if name in names:
        return [(name, value)]
    if name == "steps":
        return [("num_steps", value)]
    if name == "size":
        width, height = parse_size(value, called)
        return [("width", width), ("height", height)]
    return [(name, value)]


def parse_size(text: Any, called: str = "size") -> tuple[int, int]:
    """Width and height in pixels.

    >>> parse_size("1024x768")
    (1024, 768)
    """
    match = _SIZE.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise ParameterError(
            f"{called}={quoted(text)} is not a size; write WIDTHxHEIGHT in pixels, for example 64x64"
        )
    return int(match[1]), int(match[2])


def checked(workflow: Workflow, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values, each checked by its parameter's type and rules, or ParameterError.

    A rule that looks at other parameters sees their defaults where they are not given.
    """
    found = {parameter.name: parameter for parameter in workflow.parameters}
    try:
        opened = with_pictures(workflow, values)
        made = {name: found[name].check(value) for name, value in opened.items()}
        defaults = {name: p.default for name, p in found.items() if not p.required}
        for name, value in made.items():
            found[name].check_rules(value, {**defaults, **made})
    except ParameterError as error:
        raise ParameterError(f"workflow {workflow.name!r}: {error}") from None
    # Of a picture its file, which takes no memory.
    return {name: v if opened[name] is values[name] else values[name] for name, v in made.items()}


def convert(parameter: Parameter, text: str) -> Any:
    """The text of `--param NAME=TEXT` as a value of the declared type.

    The first alternative that can read the text wins, numbers before strings. A parameter without
    a plain type takes JSON, or the text itself where it is not JSON.
    """
    choices = _alternatives(parameter.annotation)
    for choice in sorted(choices, key=lambda choice: choice is str):
        ok, value = _read(choice, text)
        if ok:
            return value
    raise ParameterError(
        f"{parameter.name}={quoted(text)} cannot be read; wanted: {parameter.describe()}"
    )


def parse_assignments(workflow: Workflow, texts: Iterable[str]) -> dict[str, Any]:
    """`NAME=VALUE` texts as values by name; each name at most once."""
    found = {parameter.name: parameter for parameter in workflow.parameters}
    values: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        name = name.strip()
        if not equals or not name:
            raise ParameterError(
                f"--param {quoted(text)} is not NAME=VALUE; write for example seed=7"
            )
        if name in values:
            raise ParameterError(f"--param {quoted(name)} is given twice; give it once")
        # An unknown name is refused later, with the list of parameters.
        values[name] = convert(found[name], value) if name in found else value
    return values


def _alternatives(annotation: Any) -> list[Any]:
    if get_origin(annotation) in (Union, types.UnionType):
        return list(get_args(annotation))
    return [annotation]


def _read(choice: Any, text: str) -> tuple[bool, Any]:
    word = text.strip().lower()
    if choice is str:
        return True, text
    if choice is types.NoneType:
        return word in ("none", "null"), None
    if choice is bool:
        return word in _TRUE + _FALSE, word in _TRUE
    if choice in (int, float):
        try:
            return True, choice(text)
        except ValueError:
            return False, None
    if get_origin(choice) is Literal:
        by_text = {str(value): value for value in get_args(choice)}
        return text in by_text, by_text.get(text)
    try:
        return True, json.loads(text)
    except ValueError:
        free = choice in (inspect.Parameter.empty, Any)
        return free, text
