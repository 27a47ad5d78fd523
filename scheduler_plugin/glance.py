"""What people who watch may see of a policy: tenants' standings, and what occupies each executor.

Read-only, and cheap enough to ask once a second: one pass over the tenants asked for, or the executors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from .requests import Standing

if TYPE_CHECKING:
    from .policy import FairPolicy
    from .requests import Run


class TenantGlance(NamedTuple):
    """One tenant now. vtime_s and service_s: seconds, as in the ledger. Requests `queued` have not
    started, `running` have. active: it has work; ready: it has some that waits for an executor."""

    vtime_s: float
    service_s: float
    queued: int
    running: int
    active: bool
    ready: bool


_NOTHING = Standing()


class Occupant(NamedTuple):
    """What an executor runs. since: when it was dispatched, on the policy's clock, seconds.

    state: "runs"; "ends", for a cancelled run that cannot be stopped; "plain", a task that is no
    ModelFn, of which nothing else is known; "assists", held for the run of another executor, `leader`.
    """

    executor: str
    state: str
    tenant: str = ""
    request: str = ""
    fn: str = ""
    workflow: str = ""
    since: float = 0.0
    steps: int = 1
    leader: str = ""


class RunGlance(NamedTuple):
    """A run that has not ended. Times on the policy's clock, seconds."""

    request: str
    tenant: str
    workflow: str
    positions: int
    position: int
    fn: str
    executor: str
    submitted: float
    started: float
    steps: int


def active_tenants(policy: FairPolicy) -> list[str]:
    """Tenants that have ready, running or blocked work."""
    return policy.ledger.active()


def tenant_names(policy: FairPolicy, containing: str, limit: int) -> list[str]:
    """At most `limit` of the tenants ever seen whose names contain the text."""
    found = []
    for tenant in policy.ledger.totals():
        if containing in tenant:
            found.append(tenant)
            if len(found) == limit:
                break
    return found


def standings(policy: FairPolicy, tenants: Sequence[str]) -> list[TenantGlance]:
    """One each, in the order asked for; zeros for a tenant never seen."""
    standing = policy._book.standings
    rows = []
    for (vtime_s, service_s), tenant in zip(policy.ledger.of(tenants), tenants, strict=True):
        has = standing.get(tenant, _NOTHING)
        active = has.open > 0 or has.draining > 0
        rows.append(
            TenantGlance(vtime_s, service_s, has.waiting, has.started, active, has.ready > 0)
        )
    return rows


def executors(policy: FairPolicy) -> list[str]:
    """All executors, by name."""
    return sorted(policy._placement.executors())


def occupants(policy: FairPolicy) -> dict[str, Occupant]:
    """What runs, by executor; idle ones are left out."""
    fleet = policy._fleet
    found = {executor: Occupant(executor, "plain") for executor in fleet._plain}
    for executor, (tenant, run) in fleet.draining.items():
        found[executor] = _occupant(executor, "ends", tenant, run)
    for executor, run in fleet.members.items():
        found[executor] = _occupant(executor, "assists", run.dispatch.tenant, run)
    for executor, invocation in fleet.running.items():
        assert invocation.run is not None
        found[executor] = _occupant(executor, "runs", invocation.request.tenant, invocation.run)
    return found


def run_of(policy: FairPolicy, key: str) -> RunGlance | None:
    """The run of a task; None when it does not run for an open request."""
    invocation = policy._book.invocations.get(key)
    if invocation is None or invocation.run is None:
        return None
    request, run = invocation.request, invocation.run
    return RunGlance(
        request.name,
        request.tenant,
        request.outline.workflow,
        len(request.outline),
        invocation.position,
        request.outline.steps[invocation.position].fn,
        run.dispatch.executor,
        request.submitted,
        run.started,
        run.dispatch.steps,
    )


def runs(policy: FairPolicy) -> list[RunGlance]:
    """All that runs for open requests."""
    found = [run_of(policy, invocation.key) for invocation in policy._fleet.running.values()]
    return [run for run in found if run is not None]


def _occupant(executor: str, state: str, tenant: str, run: Run) -> Occupant:
    dispatch, outline = run.dispatch, run.candidate.outline
    fn = outline.steps[dispatch.position].fn
    leader = dispatch.executor if dispatch.executor != executor else ""
    about = dispatch.request, fn, outline.workflow, run.started, dispatch.steps, leader
    return Occupant(executor, state, tenant, *about)
