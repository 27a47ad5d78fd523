"""What `map` is given for many requests: one value for all, or one per prompt."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

from .errors import ParameterError
from .quoting import quoted


def rows(
    prompts: Iterable[str], seed: Any, each: Any, parameters: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The parameters of each request. Of any column at most one value more than prompts is taken.

    seed: one, one per prompt, or None. each: one value per prompt, by name, or None. parameters: those
    that are the same for all. ParameterError names what does not fit.
    """
    if isinstance(prompts, str):
        raise ParameterError(
            f"prompts is one text, {prompts[:40]!r}; give a list of prompts, or use submit for one"
        )
    if "prompt" in parameters:
        raise ParameterError("'prompt' is given beside the prompts; give it once")
    columns = {"prompt": list(prompts)}
    count = len(columns["prompt"])
    common = dict(parameters)
    if isinstance(seed, Iterable):
        columns["seed"] = _column("seed", seed, count)
    elif seed is not None:
        common["seed"] = seed
    if each is not None and not isinstance(each, Mapping):
        raise ParameterError(
            f"each is one {type(each).__name__}; give a dict with one value per prompt by parameter: "
            "each={'control_image': images}"
        )
    for name, values in (each or {}).items():
        if name == "tenant":
            raise ParameterError(
                "'tenant' is given once per map, as tenant=...; call map once for each tenant"
            )
        if name in columns or name in common:
            raise ParameterError(f"{quoted(name)} is given in each and outside of it; give it once")
        columns[name] = _column(name, values, count)
    return [
        dict(zip(columns, row, strict=True)) | common for row in zip(*columns.values(), strict=True)
    ]


def _column(name: str, values: Any, count: int) -> list[Any]:
    """One value per prompt, of an iterator that may be endless."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise ParameterError(
            f"each[{quoted(name)}] is one {type(values).__name__}; give a list with one per prompt, or "
            f"{name}=... for all of them"
        )
    listed = list(islice(values, count + 1))
    if len(listed) != count:
        many = f"more than {count}" if len(listed) > count else len(listed)
        raise ParameterError(
            f"{many} values of {quoted(name)} for {count} prompts; give one for all, or one per prompt"
        )
    return listed
