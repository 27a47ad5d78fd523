"""What an operator configures, through Dask's configuration under the key `st2i`.

Defaults are in st2i.yaml. Files and environment variables are Dask's own. A key that is not known is
an error, unlike elsewhere in Dask: a typing error would otherwise serve with a default.

>>> worker_options()["allocator"]
'best_fit'
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import dask.config
import yaml
from dask.utils import parse_bytes

from .errors import AttachError
from .quoting import quoted

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

_SECTIONS = {"st2i": list(DEFAULTS), **{f"st2i.{name}": list(d) for name, d in DEFAULTS.items()}}

#: Keys whose value is a mapping, outer ones first, with what is in it.
_MAPPINGS: dict[str, str] = {
    **{key: f"it is a section with {', '.join(inner)}" for key, inner in _SECTIONS.items()},
    "st2i.scheduler.weights": "it gives tenants their weights, as {studio: 3.0}",
    "st2i.scheduler.caps": "it gives tenants their caps, as {studio: 200}",
}


def _register_defaults() -> None:
    """Dask puts an empty mapping in the place of a value that is none, where another file has a mapping
    or the default is one. What was written stays here, for `check_keys` to refuse."""
    written = dict(_no_mappings())
    dask.config.update_defaults({"st2i": DEFAULTS})
    for key, value in written.items():
        dask.config.set({key: value})


def _no_mappings() -> Iterator[tuple[str, Any]]:
    """Keys of mappings, inner ones first, whose value is something else, and that value: as Dask has it
    now, and as the first of the environment and the files has it that has one."""
    files = list(dask.config.collect_yaml(dask.config.paths))
    sources = [dask.config.collect_env(), *reversed(files)]
    for key in reversed(_MAPPINGS):
        written = [dask.config.get(key, None, config=source) for source in sources]
        first = [value for value in written if value is not None][:1]
        for value in (dask.config.get(key, None), *first):
            if value is not None and not isinstance(value, Mapping):
                yield key, value


_register_defaults()


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
    """AttachError for a key under `st2i` that is not known, or holds no mapping where it is to."""
    for key, wanted in _MAPPINGS.items():
        # `dask.config.set({"st2i": ...})` leaves out the others.
        value = dask.config.get(key, {})
        if not isinstance(value, Mapping):
            raise AttachError(f"configuration {key} is {quoted(value)}; {wanted}; {_where(key)}")
    for section, known in _SECTIONS.items():
        _check_names(section, dask.config.get(section, {}), known)


def check_node() -> None:
    """AttachError for what a scheduler and a worker both read: keys, `st2i.logs` and `st2i.traces`."""
    log_options()
    trace_options()


def _check_names(where: str, found: Mapping[str, Any], known: list[str]) -> None:
    for name in found:
        written = str(name).replace("_", "-")
        if written in known:
            continue
        near = get_close_matches(written, known, n=1, cutoff=0.6)
        hint = f"did you mean {near[0]}? " if near else ""
        raise AttachError(
            f"configuration {where}.{written} is not known; {hint}{where} has {', '.join(known)}; "
            f"{_where(f'{where}.{name}')}"
        )


def _where(key: str) -> str:
    variable = f"DASK_{key}".replace(".", "__").replace("-", "_").upper()
    files = ", ".join(map(str, dask.config.paths))
    return f"correct the environment variable {variable}, or the file in {files}"


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
        raise AttachError(
            f"{name}={quoted(size)} is not a positive size; write for example '8 GiB'"
        )
    return nbytes


def _switch(name: str, value: Any) -> bool:
    if value not in (False, True):
        raise AttachError(f"{name}={quoted(value)} is not known; use False, or leave it out")
    return bool(value)


def _true_or_false(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise AttachError(f"{name}={quoted(value)} is not known; use true or false")
    return value


def _level(name: str, value: Any) -> str:
    return _one_of(LEVELS, f"one of {', '.join(LEVELS)}")(name, str(value).lower())


def _one_of(choices: tuple[str, ...], listing: str) -> Callable[[str, Any], str]:
    def check(name: str, value: Any) -> str:
        if value not in choices:
            raise AttachError(f"{name}={quoted(value)} is not known; use {listing}")
        return str(value)

    return check


def _device(name: str, value: Any) -> str:
    if not isinstance(value, str) or not _DEVICE.fullmatch(value):
        raise AttachError(f"{name}={quoted(value)} is not known; use 'cpu', 'cuda' or 'cuda:N'")
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
