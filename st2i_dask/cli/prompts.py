"""Prompt files: one prompt a line, or one JSON object a line, in any mixture."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import ParameterError
from ..quoting import quoted
from .options import parameter_values

if TYPE_CHECKING:
    from ..workflow import Workflow

#: Most images that one line may ask for.
MAX_IMAGES = 100_000


@dataclass(frozen=True)
class Wanted:
    """What one line asks for. `values` are by the workflow's parameter names, not yet checked."""

    where: str  # for messages: "line 3"
    values: dict[str, Any]
    images: int
    tenant: str


@dataclass(frozen=True)
class Failure:
    """A prompt that cannot be drawn, and why."""

    where: str
    prompt: str
    reason: str


def read_prompts(
    workflow: Workflow, lines: Iterable[bytes], *, common: dict[str, Any], images: int, tenant: str
) -> tuple[list[Wanted], list[Failure]]:
    """The lines' requests, and the lines that cannot be read.

    common: parameter values for every line; a line's own fields win. Blank lines and lines that
    start with '#' are skipped. A line that starts with '{' is a JSON object with the fields prompt,
    seed, steps, size ("WxH"), images, tenant, and any other parameter of the workflow.
    """
    wanted: list[Wanted] = []
    failures: list[Failure] = []
    for number, raw in enumerate(lines, 1):
        where = f"line {number}"
        try:
            text = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
        except UnicodeDecodeError as error:
            shown = raw.decode("utf-8", "replace").strip()
            failures.append(
                Failure(
                    where, shown, f"is not UTF-8 text (byte {error.start + 1}); save it as UTF-8"
                )
            )
            continue
        if not text or text.startswith("#"):
            continue
        try:
            fields = _fields(text)
            # A workflow may have parameters of these names; then they are its own.
            names = {parameter.name for parameter in workflow.parameters}
            count = images if "images" in names else fields.pop("images", images)
            for_tenant = tenant if "tenant" in names else fields.pop("tenant", tenant)
            wanted.append(
                Wanted(
                    where,
                    {**common, **parameter_values(workflow, fields)},
                    check_images(count),
                    for_tenant,
                )
            )
        except ParameterError as error:
            failures.append(Failure(where, text, str(error)))
    return wanted, failures


def check_images(count: Any) -> int:
    """The number of images for one prompt, or ParameterError."""
    if type(count) is not int or not 1 <= count <= MAX_IMAGES:
        raise ParameterError(
            f"images={quoted(count)} is out of range; allowed: whole numbers from 1 to {MAX_IMAGES:,}"
        )
    return count


def _fields(text: str) -> dict[str, Any]:
    if not text.startswith("{"):
        return {"prompt": text}
    try:
        fields = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        if isinstance(error, ParameterError):
            raise
        raise ParameterError(
            f"is not a JSON object ({error}); write it as "
            '{"prompt": "...", "seed": 1}, all on one line'
        ) from None
    try:
        json.dumps(fields, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ParameterError(
            "holds half of a surrogate pair (\\ud800 to \\udfff), which is no character; "
            "write the character itself"
        ) from None
    assert isinstance(fields, dict)
    return fields


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ParameterError(f"has the field {quoted(twice)} twice; give it once")
    return fields
