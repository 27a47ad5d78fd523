"""What an operator configures, through Dask's configuration under the key `st2i`.

Defaults are in st2i.yaml. Files and environment variables are Dask's own. A key that is not known is
an error, unlike elsewhere in Dask: a typing error would otherwise serve with a default.

>>> worker_options()["allocator"]
'best_fit'
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import dask.config
import yaml
from dask.utils import parse_bytes

from .errors import AttachError

#: Allocators of the arena; the first is the default.
ALLOCATORS = ("best_fit", "buddy")

#: How a worker may keep models; the first is the default.
WEIGHTS = ("elastic", "pipelined", "mcache", "wcache", "nocache")

#: Levels of logs, the most talkative first.
LEVELS = ("debug", "info", "warning", "error", "critical")

#: Sections and keys with their defaults, as in st2i.yaml.
DEFAULTS: dict[str, dict[str, Any]] = yaml.safe_load(
    Path(__file__).with_name("st2i.yaml").read_text()
)["st2i"]

_DEVICE = re.compile(r"cpu|cuda(:\d+)?")

dask.config.update_defaults({"st2i": DEFAULTS})


def worker_options() -> dict[str, Any]:
    """This node's options of a worker, by the names `attach` has for them. AttachError on a bad one."""
    return _checked_section("worker")


def log_options() -> dict[str, Any]:
    """How this node logs: json (bool), level (a name, or None). AttachError on a bad one."""
    return _checked_section("logs")


def trace_options() -> dict[str, Any]:
    """Whether this node makes traces: enabled (bool). AttachError on a bad one."""
    return _checked_section("traces")


def scheduler_settings() -> dict[str, Any]:
    """This node's settings of the scheduler, by the names of `Settings`, which checks the values."""
    check_keys()
    return _section("scheduler")


def checked_option(name: str, value: Any) -> Any:
    """One option, of `attach` or of another section: sizes in bytes. None stays. AttachError says what is allowed."""
    return value if value is None else _CHECKS[name](name, value)


def check_keys() -> None:
    """AttachError for a key under `st2i` that is not known."""
    found = dask.config.get("st2i")
    _check_names("st2i", found, DEFAULTS)
    for section, known in DEFAULTS.items():
        # `dask.config.set({"st2i": ...})` leaves out the others.
        _check_names(f"st2i.{section}", found.get(section, {}), known)


def _check_names(where: str, found: Any, known: Mapping[str, Any]) -> None:
    if not isinstance(found, Mapping):
        raise AttachError(
            f"configuration {where} is {found!r}; it is a section with {', '.join(known)}"
        )
    for name in found:
        written = str(name).replace("_", "-")
        if written in known:
            continue
        near = get_close_matches(written, known, n=1, cutoff=0.6)
        hint = f"did you mean {near[0]}? " if near else ""
        variable = f"DASK_{where}.{name}".replace(".", "__").replace("-", "_").upper()
        raise AttachError(
            f"configuration {where}.{written} is not known; {hint}{where} has {', '.join(known)}; "
            f"correct the environment variable {variable}, or the file in "
            f"{', '.join(map(str, dask.config.paths))}"
        )


def _checked_section(section: str) -> dict[str, Any]:
    check_keys()
    options = {}
    for name, value in _section(section).items():
        try:
            options[name] = checked_option(name, value)
        except AttachError as error:
            raise AttachError(f"configuration {_key(section, name)}: {error}") from None
    return options


def _section(section: str) -> dict[str, Any]:
    return {
        name.replace("-", "_"): dask.config.get(_key(section, name), default)
        for name, default in DEFAULTS[section].items()
    }


def _key(section: str, name: str) -> str:
    return f"st2i.{section}.{name.replace('_', '-')}"


def _size(name: str, size: Any) -> int:
    try:
        nbytes = 0 if isinstance(size, bool) else int(parse_bytes(size))
    except (ValueError, TypeError, OverflowError, AttributeError):
        nbytes = 0
    if nbytes <= 0:
        raise AttachError(f"{name}={size!r} is not a positive size; write for example '8 GiB'")
    return nbytes


def _switch(name: str, value: Any) -> bool:
    if value not in (False, True):
        raise AttachError(f"{name}={value!r} is not known; use False, or leave it out")
    return bool(value)


def _true_or_false(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise AttachError(f"{name}={value!r} is not known; use true or false")
    return value


def _level(name: str, value: Any) -> str:
    return _one_of(LEVELS, f"one of {', '.join(LEVELS)}")(name, str(value).lower())


def _one_of(choices: tuple[str, ...], listing: str) -> Callable[[str, Any], str]:
    def check(name: str, value: Any) -> str:
        if value not in choices:
            raise AttachError(f"{name}={value!r} is not known; use {listing}")
        return str(value)

    return check


def _device(name: str, value: Any) -> str:
    if not isinstance(value, str) or not _DEVICE.fullmatch(value):
        raise AttachError(f"{name}={value!r} is not known; use 'cpu', 'cuda' or 'cuda:N'")
    return value


_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "memory_bytes": _size,
    "arena_bytes": _size,
    "allocator": _one_of(ALLOCATORS, " or ".join(map(repr, ALLOCATORS))),
    "nvshmem": _switch,
    "weights": _one_of(WEIGHTS, f"one of {', '.join(map(repr, WEIGHTS))}"),
    "host_bytes": _size,
    "load_bandwidth": _size,
    "device": _device,
    "json": _true_or_false,
    "level": _level,
    "enabled": _true_or_false,
}
