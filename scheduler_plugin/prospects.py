"""What a request's owner may know: how far it is, how many are before it, and about how long it takes.

An estimate, from fair shares: while a tenant's requests before this one run, every other tenant uses as
many device seconds for its own, by weight, as long as it has any. It decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from .outline import Outline
from .requests import Request, State

if TYPE_CHECKING:
    from .policy import FairPolicy


@dataclass(frozen=True, slots=True)
class Prospect:
    """done, total: invocations. place: of those that have not started, from 1; None once it has
    started. wait_s: seconds until its result; None while there is no executor."""

    done: int
    total: int
    place: int | None
    wait_s: float | None


@dataclass(slots=True)
class _Backlog:
    """What one tenant has open."""

    waiting: int = 0
    seconds: float = 0.0


def prospects(policy: FairPolicy, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Prospects by request, as dicts; requests that are not open are left out.

    One pass over all open requests, however many are asked for.
    """
    book = policy._book
    asked = {name for name in names if name in book.requests}
    if not asked:
        return {}
    whole: dict[Outline, float] = {}
    backlogs: dict[str, _Backlog] = {}
    found: dict[str, tuple[Request, int, float]] = {}
    for name, request in book.requests.items():  # in order of arrival
        backlog = backlogs.setdefault(request.tenant, _Backlog())
        if request.open:
            if request.outline not in whole:
                whole[request.outline] = policy._paths.whole_s(request.outline)
            seconds = whole[request.outline] * request.open / len(request.outline)
            if not request.dispatches:
                backlog.waiting += 1
            backlog.seconds += seconds
        if name in asked:
            found[name] = request, backlog.waiting, backlog.seconds
    executors = len(policy._placement.executors())
    return {
        name: asdict(_prospect(policy, *found[name], backlogs, executors)) for name in sorted(asked)
    }


def _prospect(
    policy: FairPolicy,
    request: Request,
    place: int,
    seconds: float,
    backlogs: dict[str, _Backlog],
    executors: int,
) -> Prospect:
    own_weight = policy.ledger.weight(request.tenant)
    total_s, total_place = seconds, place
    for tenant, backlog in backlogs.items():
        if tenant != request.tenant:
            ratio = policy.ledger.weight(tenant) / own_weight
            total_s += min(backlog.seconds, seconds * ratio)
            total_place += min(backlog.waiting, round(place * ratio))
    return Prospect(
        done=request.states.count(State.DONE),
        total=len(request.states),
        place=None if request.dispatches or not request.open else total_place,
        wait_s=total_s / executors if executors else None,
    )
