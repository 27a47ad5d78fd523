"""What a request's owner may know: how far it is, how many are before it, and about how long it takes.

An estimate, from fair shares: while a tenant's requests before this one run, every other tenant uses as
many device seconds for its own, by weight, as long as it has any. It decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

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
    """What one tenant has open. number: of the tenant, in order of appearance."""

    number: int
    waiting: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class _Asked:
    """A request, and what its tenant has before its end. gone_s: what it has used of what is not over."""

    request: Request
    place: int
    seconds: float
    left_s: float
    gone_s: float


def prospects(
    policy: FairPolicy,
    names: Iterable[str],
    now: float,
    under_way: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, dict[str, Any]]:
    """Prospects by request, as dicts; requests that are not open are left out.

    under_way: by request, the steps that running tasks have done and the policy has not heard of; where
    nobody says, what runs is as far as the clock and its estimate say. One pass over all open requests,
    however many are asked for.
    """
    book = policy._book
    asked = {name for name in names if name in book.requests}
    if not asked:
        return {}
    # By identity: an outline is one object for all its requests, and dear to hash.
    each_s: dict[int, float] = {}
    backlogs: dict[str, _Backlog] = {}
    served_s = _served(policy, now)
    found: dict[str, _Asked] = {}
    for name, request in book.requests.items():  # in order of arrival
        backlog = backlogs.get(request.tenant)
        if backlog is None:
            backlog = backlogs[request.tenant] = _Backlog(len(backlogs))
        left_s = gone_s = 0.0
        if request.open:
            outline = request.outline
            seconds = each_s.get(id(outline))
            if seconds is None:
                seconds = each_s[id(outline)] = policy._paths.whole_s(outline) / len(outline)
            if not request.dispatches:
                backlog.waiting += 1
            steps = under_way.get(name)
            gone_s = served_s.get(name, 0.0) if steps is None else seconds * steps
            left_s = max(0.0, seconds * request.open - gone_s)
            backlog.seconds += left_s
        if name in asked:
            found[name] = _Asked(request, backlog.waiting, backlog.seconds, left_s, gone_s)
    others = _Others(policy, backlogs)
    return {
        name: asdict(_prospect(policy, found[name], under_way.get(name, 0), others))
        for name in sorted(asked)
    }


def _served(policy: FairPolicy, now: float) -> dict[str, float]:
    """By request, the seconds that what runs has probably used, of those it is expected to take."""
    found: dict[str, float] = {}
    for invocation in policy._fleet.running.values():
        run = invocation.run
        assert run is not None
        name = invocation.request.name
        found[name] = found.get(name, 0.0) + min(now - run.started, run.estimate_s)
    return found


class _Others:
    """What all tenants have, in arrays."""

    def __init__(self, policy: FairPolicy, backlogs: dict[str, _Backlog]) -> None:
        self._backlogs = backlogs
        self._weights = np.array([policy.ledger.weight(tenant) for tenant in backlogs])
        self._waiting = np.array([backlog.waiting for backlog in backlogs.values()])
        self._seconds = np.array([backlog.seconds for backlog in backlogs.values()])

    def meanwhile(self, tenant: str, place: int, seconds: float) -> tuple[int, float]:
        """Requests and device seconds of the others while the tenant has so many."""
        own = self._backlogs[tenant].number
        ratios = self._weights / self._weights[own]
        places = np.minimum(self._waiting, np.rint(place * ratios))
        service = np.minimum(self._seconds, seconds * ratios)
        return int(places.sum() - places[own]), float(service.sum() - service[own])


def _prospect(policy: FairPolicy, asked: _Asked, under_way: int, others: _Others) -> Prospect:
    request = asked.request
    more, meanwhile_s = others.meanwhile(request.tenant, asked.place, asked.seconds)
    executors = len(policy._placement.executors())
    return Prospect(
        done=request.states.count(State.DONE) + under_way,
        total=len(request.states),
        place=None if request.dispatches or not request.open else asked.place + more,
        wait_s=_wait_s(policy, asked, asked.seconds + meanwhile_s, executors)
        if executors
        else None,
    )


def _wait_s(policy: FairPolicy, asked: _Asked, total_s: float, executors: int) -> float:
    """total_s: device seconds until its end, its own included. However many executors share them, its own
    steps come one after the other."""
    request = asked.request
    paths = [
        policy._paths.path_s(request.outline, position)
        for position, state in enumerate(request.states)
        if state not in (State.DONE, State.DEAD)
    ]
    path_s = min(asked.left_s, max(paths, default=0.0) - asked.gone_s)
    return max(total_s / executors, (total_s - asked.left_s) / executors + path_s)
