"""LoRA adapters that the operator has named; clients say names, never files or hub repositories."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .problems import ApiError


def adapters(asked: Any, known: Mapping[str, str]) -> list[tuple[str, float]]:
    """(source, scale) of each. ApiError 400 for a name that is not known.

    asked: a name, an object {"name", "scale"}, or a list of these; or such as JSON text, of a form.
    known: sources by name.
    """
    if isinstance(asked, str) and asked.lstrip()[:1] in ("{", "["):
        try:
            asked = json.loads(asked)
        except (ValueError, RecursionError):
            raise _wrong("it is no JSON") from None
    return [_adapter(one, known) for one in (asked if isinstance(asked, list) else [asked])]


def _adapter(one: Any, known: Mapping[str, str]) -> tuple[str, float]:
    scale: Any = 1.0
    if isinstance(one, dict):
        if set(one) - {"name", "scale"} or "name" not in one:
            raise _wrong("an adapter has a name and a scale, and nothing else")
        one, scale = one["name"], one.get("scale", 1.0)
    if not isinstance(one, str) or one not in known:
        names = ", ".join(known) or "none"
        raise _wrong(f"{str(one)[:100]!r} is not known; there are: {names}")
    if type(scale) not in (int, float):
        raise _wrong(f"the scale of {one!r} is no number")
    return known[one], float(scale)


def _wrong(why: str) -> ApiError:
    return ApiError(
        400,
        f'lora: {why}; write a name, or {{"name": ..., "scale": ...}}, or a list of these',
        code="invalid_value",
        param="lora",
    )
