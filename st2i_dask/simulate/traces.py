"""Traces: who asked for what, when. Read from files, scaled, resampled, written.

    at,tenant,workflow          seconds from the start; workflow may be left out or empty

Other formats, recognised by their first line: Alibaba's cluster-trace-v2026-GenAI (`gmt_create,...`), the
VTC artifact's (`req_time_s,tenant,...`), and `tenant seconds` per line, seconds since the line before.
"""

from __future__ import annotations

import csv
import itertools
import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from ..errors import ParameterError
from ..tenants import check_tenant
from .generate import gamma
from .tasks import Arrival


class Asked(NamedTuple):
    """One request of a trace. at: seconds from its start. workflow: empty where the trace has none."""

    at: float
    tenant: str
    workflow: str = ""
    adapters: int = 0


class Shape(NamedTuple):
    """gap_cv: coefficient of variation of the gaps. top5: share of the five most popular workflows.
    adapted: share of requests with an adapter."""

    requests: int
    seconds: float
    gap_cv: float
    window_cv: float
    top5: float
    adapted: float


def read(path: Path) -> list[Asked]:
    """The requests of a file by time, the first at 0. ParameterError says what cannot be read."""
    try:
        with path.open(newline="") as file:
            lines = file.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ParameterError(f"trace {path} cannot be read: {error}") from None
    first = lines[0] if lines else ""
    known = next((form for form in _FORMS if first.startswith(form.start)), None)
    found = []
    try:
        for asked in _gaps(lines) if known is None else _table(known, lines):
            found.append(asked)
    except (ValueError, csv.Error) as error:
        cure = ""
        if known is None:
            cure = (
                f"; its first line is {first[:60]!r}, write at,tenant,workflow there, then seconds, a "
                "name, and a workflow or nothing"
            )
        raise ParameterError(f"trace {path}, {error}{cure}") from None
    if not found:
        raise ParameterError(f"trace {path} has no request; give one at least")
    found.sort()
    start = found[0].at
    return [asked._replace(at=asked.at - start) for asked in found]


def write(requests: Iterable[Asked | Arrival], path: Path) -> None:
    """As `read` reads it."""
    with path.open("w", newline="") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(["at", "tenant", "workflow"])
        for asked in requests:
            out.writerow([repr(asked.at), asked.tenant, getattr(asked, "workflow", "")])


def scaled(requests: Sequence[Asked], rate: float) -> list[Asked]:
    """The same requests arriving `rate` times as fast."""
    if not 0 < rate < math.inf:
        raise ParameterError(f"rate scale is {rate!r}; give a finite number above 0")
    return [asked._replace(at=asked.at / rate) for asked in requests]


def resampled(
    requests: Sequence[Asked], cv_scale: float, *, window_s: float, seed: int
) -> list[Asked]:
    """Arrivals drawn anew: a Gamma process per window with its mean gap and its coefficient of
    variation times `cv_scale`; tenants and workflows as often as in that window (AlpaServe's way)."""
    if not (0 < cv_scale < math.inf and 0 < window_s < math.inf):
        raise ParameterError(
            f"cv_scale is {cv_scale!r}, window_s is {window_s!r}; give finite numbers above 0"
        )
    chance = random.Random(seed)
    windows: dict[int, list[Asked]] = {}
    for asked in requests:
        windows.setdefault(int(asked.at // window_s), []).append(asked)
    found: list[Asked] = []
    for number, there in sorted(windows.items()):
        cv = cv_of([asked.at for asked in there]) if len(there) > 9 else 1.0
        rate = len(there) / window_s
        for at in gamma(chance, number * window_s, window_s, rate, max(0.05, cv * cv_scale)):
            found.append(chance.choice(there)._replace(at=at))
    return found


def cv_of(times: Sequence[float]) -> float:
    """Coefficient of variation of the gaps; 0 where there are none."""
    gaps = [later - at for at, later in itertools.pairwise(times)]
    if not gaps or not sum(gaps):
        return 0.0
    mean = sum(gaps) / len(gaps)
    return math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) / mean


def shape(requests: Sequence[Asked], window_s: float = 600.0) -> Shape:
    """What a trace looks like."""
    times = [asked.at for asked in requests]
    windows: dict[int, list[float]] = {}
    for at in times:
        windows.setdefault(int(at // window_s), []).append(at)
    inner = sorted(cv_of(there) for there in windows.values() if len(there) >= 30)
    popular = Counter(asked.workflow for asked in requests).most_common(5)
    return Shape(
        len(times),
        times[-1] - times[0],
        cv_of(times),
        inner[len(inner) // 2] if inner else 0.0,
        sum(n for _, n in popular) / len(times),
        sum(asked.adapters > 0 for asked in requests) / len(times),
    )


def arrivals(requests: Iterable[Asked], tenants: Sequence[str]) -> list[Arrival]:
    """For a workload of these tenants: the most active tenant of the trace is the first of them, and
    so on; what is left over is left out."""
    requests = list(requests)
    names = [name for name, _ in Counter(asked.tenant for asked in requests).most_common()]
    known: Mapping[str, str] = dict(zip(names, tenants, strict=False))
    return [Arrival(a.at, known[a.tenant]) for a in requests if a.tenant in known]


class _Form(NamedTuple):
    """A table of requests: how its first line starts, and its columns. workflow may be missing."""

    start: str
    at: str
    tenant: str
    workflow: str = ""
    adapters: str = ""


_FORMS = (
    _Form("at,", "at", "tenant", "workflow"),
    _Form("gmt_create", "gmt_create", "groupId", "checkpoint_model_version_id", "num_lora"),
    _Form("req_time_s", "req_time_s", "tenant"),
)


def _table(form: _Form, lines: list[str]) -> Iterator[Asked]:
    rows = csv.DictReader(lines)
    there = rows.fieldnames or ()
    for column in filter(None, (form.at, form.tenant, form.adapters)):
        if column not in there:
            raise ValueError(f"line 1: there is no column {column!r}, only {', '.join(there)}")
    time = _date if form.at == "gmt_create" else _number
    for row in rows:
        where = f"line {rows.line_num}, column "
        yield Asked(
            time(row[form.at], where + form.at),
            _tenant(row[form.tenant], where + form.tenant),
            row.get(form.workflow) or "",
            int(_number(row[form.adapters], where + form.adapters)) if form.adapters else 0,
        )


def _gaps(lines: list[str]) -> Iterator[Asked]:
    at = 0.0
    for number, line in enumerate(lines, 1):
        words = line.split()
        if len(words) != 2:
            raise ValueError(f"line {number}: {line[:60]!r} is no tenant and seconds")
        at += _number(words[1], f"line {number}, word 2")
        yield Asked(at, _tenant(words[0], f"line {number}, word 1"))


def _number(text: str | None, where: str) -> float:
    try:
        number = float(text or "")
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{where}: {_cell(text)} is no finite number")
    return number


def _date(text: str | None, where: str) -> float:
    try:
        return datetime.fromisoformat(text or "").timestamp()
    except ValueError:
        raise ValueError(
            f"{where}: {_cell(text)} is no date, such as 2024-11-15 16:57:50"
        ) from None


def _tenant(text: str | None, where: str) -> str:
    try:
        return check_tenant(text)
    except ParameterError as error:
        raise ValueError(f"{where}: {error}") from None


def _cell(text: str | None) -> str:
    return "nothing" if text is None else f"{text[:60]!r}"
