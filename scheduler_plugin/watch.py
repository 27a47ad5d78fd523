"""What is recorded of a policy for people who watch it, and the one object that dashboard pages ask.

    watch.sample(now)         about once a second
    watch.run_over(run), watch.request_over(request)       told by the journal
    watch.close()             the policy serves no more: pages have nothing left to ask

Pure: the scheduler's plugin drives it. Once closed it refers to no policy any more.
"""

from __future__ import annotations

from typing import Any

from . import glance
from .journal import RequestRecord, RunRecord, Watcher
from .policy import FairPolicy
from .run_history import RunHistory
from .tenant_history import TenantHistory


class Watch(Watcher):
    """policy: None once closed. facts: what executors say they hold, see `Facts`."""

    def __init__(self, policy: FairPolicy) -> None:
        self.policy: FairPolicy | None = policy
        self.tenants = TenantHistory()
        self.requests = RunHistory()
        self.facts = Facts()
        # Device seconds of runs that have ended since the last sample, by tenant.
        self._worked: dict[str, float] = {}

    def close(self) -> None:
        self.policy = None

    def sample(self, now: float) -> None:
        """Take down how tenants stand. O(tenants that are, or lately were, active)."""
        if self.policy is None:
            return
        tenants = self.tenants.watched([*glance.active_tenants(self.policy), *self._worked])
        self.tenants.sample(now, tenants, glance.standings(self.policy, tenants), self._worked)
        self._worked = {}

    def run_over(self, run: RunRecord) -> None:
        if self.policy is None:
            return
        self.requests.ended(run)
        tenant, seconds = run.request.tenant, run.used.total_s if run.used is not None else 0.0
        self._worked[tenant] = self._worked.get(tenant, 0.0) + seconds

    def request_over(self, request: RequestRecord) -> None:
        if self.policy is not None:
            self.requests.request_over(request)

    def _check(self) -> None:
        self.tenants._check()
        self.requests._check()


class Facts:
    """What executors have answered, and which do not: by executor, replaced by newer answers."""

    def __init__(self) -> None:
        self.answers: dict[str, dict[str, Any]] = {}
        self.answered: dict[str, float] = {}
        self.silent: dict[str, str] = {}  # why, of those whose last question was not answered

    def answer(self, now: float, executor: str, facts: dict[str, Any]) -> None:
        self.answers[executor] = facts
        self.answered[executor] = now
        self.silent.pop(executor, None)

    def no_answer(self, executor: str, why: str) -> None:
        """It did not answer; what it said before stays, with its age."""
        self.silent[executor] = why

    def keep(self, executors: set[str]) -> None:
        """Forget those that have left."""
        for known in (self.answers, self.answered, self.silent):
            for executor in known.keys() - executors:
                del known[executor]
