"""The vTime ledger: hand-computed charges, lifts and limits; then any sequence of operations."""

from __future__ import annotations

import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from scheduler_plugin.ledger import VTimeLedger
from st2i_dask.errors import PolicyError


@pytest.fixture
def ledger():
    ledger = VTimeLedger()
    yield ledger
    ledger._check()


def test_the_estimate_is_charged_at_dispatch_and_replaced_by_the_measurement(ledger):
    ledger.activate("a")
    number = ledger.charge("a", 2.0)
    assert ledger.vtime("a") == 2.0
    assert ledger.service("a") == 0.0
    assert ledger.settle(number, 0.5) == "a"
    assert ledger.vtime("a") == ledger.service("a") == 0.5


def test_parallel_invocations_are_each_charged(ledger):
    ledger.activate("a")
    first, second = ledger.charge("a", 2.0), ledger.charge("a", 3.0)
    assert ledger.vtime("a") == 5.0
    ledger.settle(first, 2.0)
    ledger.settle(second, 4.0)
    assert ledger.vtime("a") == 6.0


def test_the_weight_divides_the_charge_and_a_charge_in_flight_keeps_its_weight(ledger):
    ledger.set_weights({"a": 4.0}, 1.0)
    ledger.activate("a")
    number = ledger.charge("a", 2.0)
    assert ledger.vtime("a") == 0.5
    ledger.set_weights({"a": 1.0}, 1.0)
    ledger.settle(number, 8.0)
    assert ledger.vtime("a") == 2.0
    assert ledger.service("a") == 8.0


def test_a_newcomer_is_lifted_to_the_least_of_the_other_active_tenants(ledger):
    ledger.activate("a")
    ledger.activate("b")
    for tenant, seconds in (("a", 5.0), ("b", 3.0)):
        ledger.settle(ledger.charge(tenant, seconds), seconds)
    assert ledger.activate("new") == ledger.vtime("b") == 3.0


def test_coming_back_never_lowers(ledger):
    ledger.activate("debtor")
    ledger.activate("other")
    ledger.settle(ledger.charge("debtor", 9.0), 9.0)
    ledger.deactivate("debtor")
    assert ledger.activate("debtor") == 9.0


def test_who_ran_alone_owes_nothing_to_whoever_comes_next(ledger):
    ledger.activate("alone")
    ledger.settle(ledger.charge("alone", 3600.0), 3600.0)
    ledger.deactivate("alone")
    assert ledger.activate("next") == 3600.0
    assert ledger.activate("alone") == 3600.0


def test_credit_of_a_blocked_tenant_is_limited_to_slack_and_one_dispatch(ledger):
    ledger.activate("blocked")
    ledger.activate("busy")
    for _ in range(10):
        ledger.settle(ledger.charge("busy", 2.0), 2.0)
    assert ledger.limit_credit("blocked", slack_s=5.0) == 20.0 - 5.0 - 2.0
    assert ledger.limit_credit("busy", slack_s=5.0) == 20.0


def test_credit_within_the_limit_is_kept(ledger):
    ledger.activate("blocked")
    ledger.activate("busy")
    ledger.settle(ledger.charge("busy", 10.0), 10.0)
    assert ledger.limit_credit("blocked", slack_s=0.0) == 0.0


def test_the_least_served_are_those_with_work_and_the_slack_counts_from_who_has_some_ready(ledger):
    assert ledger.least() == ledger.least(ready=True) == math.inf
    for tenant, seconds in (("ann", 1.0), ("bob", 2.0), ("eve", 3.0)):
        ledger.activate(tenant)
        ledger.settle(ledger.charge(tenant, seconds), seconds)
    for tenant in ("bob", "eve"):
        ledger.set_ready(tenant, True)
    least = min(map(ledger.vtime, ledger.active()))
    assert ledger.least() == least == ledger.vtime("ann")
    assert ledger.least(ready=True) == ledger.vtime("bob")
    ledger.deactivate("ann")
    assert ledger.least() == ledger.vtime("bob")


def test_a_revised_charge_counts_at_once(ledger):
    ledger.activate("a")
    number = ledger.charge("a", 30.0, unit_s=1.0)
    ledger.revise(number, 4.0)
    assert ledger.vtime("a") == 4.0
    assert ledger.estimate_in_flight(number) == 4.0
    assert ledger.largest_charge() == 1.0
    ledger.settle(number, 3.0, unit_s=1.0)
    assert ledger.vtime("a") == 3.0


@pytest.mark.parametrize("seconds", [-1.0, math.nan, math.inf])
def test_nonsense_is_refused_and_changes_nothing(ledger, seconds):
    ledger.activate("a")
    number = ledger.charge("a", 1.0)
    for attempt in (
        lambda: ledger.charge("a", seconds),
        lambda: ledger.revise(number, seconds),
        lambda: ledger.settle(number, seconds),
    ):
        with pytest.raises(PolicyError, match="finite number of seconds"):
            attempt()
    assert ledger.vtime("a") == 1.0


def test_misuse_is_refused(ledger):
    with pytest.raises(PolicyError, match="not active"):
        ledger.charge("nobody", 1.0)
    ledger.activate("a")
    with pytest.raises(PolicyError, match="already active"):
        ledger.activate("a")
    number = ledger.charge("a", 1.0)
    with pytest.raises(PolicyError, match="1 charges in flight"):
        ledger.deactivate("a")
    ledger.settle(number, 1.0)
    with pytest.raises(PolicyError, match="not in flight"):
        ledger.settle(number, 1.0)


SECONDS = st.floats(0.0, 1e4, allow_subnormal=False)
TENANTS = st.sampled_from("abcdef")


class LedgerMachine(RuleBasedStateMachine):
    """Against a model that keeps every charge ever made."""

    def __init__(self):
        super().__init__()
        self.ledger = VTimeLedger()
        self.ledger.set_weights({"a": 2.0, "b": 0.5}, 1.0)
        self.open: dict[int, str] = {}
        self.used: dict[str, list[float]] = {}

    @rule(tenant=TENANTS)
    def activate(self, tenant):
        if self.ledger.is_active(tenant):
            return
        own = self.ledger.vtime(tenant)
        others = [self.ledger.vtime(t) for t in self.ledger.active()]
        lifted = self.ledger.activate(tenant)
        if others:
            assert lifted == max(own, min(others))
        else:
            assert lifted >= own

    @rule(tenant=TENANTS)
    def deactivate(self, tenant):
        if self.ledger.is_active(tenant) and tenant not in self.open.values():
            before = self.ledger.vtime(tenant)
            self.ledger.deactivate(tenant)
            assert self.ledger.vtime(tenant) == before

    @rule(tenant=TENANTS, slack=st.floats(0, 100))
    def becomes_ready(self, tenant, slack):
        if self.ledger.is_active(tenant):
            own = self.ledger.vtime(tenant)
            vtimes = {t: self.ledger.vtime(t) for t in self.ledger.active()}
            ready = [v for t, v in vtimes.items() if self.ledger.is_ready(t)]
            after = self.ledger.limit_credit(tenant, slack)
            if after > own:
                assert after <= min(ready, default=math.inf) + 1e-6, "lifted above who waits"
            else:
                assert after == own
            behind = max(vtimes.values()) - after
            if behind > slack + self.ledger.largest_charge() + 1e-6:
                assert after >= min(ready) - 1e-6, "only who waits keeps it further behind"

    @rule(tenant=TENANTS, ready=st.booleans())
    def ready(self, tenant, ready):
        if self.ledger.is_active(tenant):
            self.ledger.set_ready(tenant, ready)
            assert self.ledger.is_ready(tenant) is ready

    @rule(tenant=TENANTS, seconds=SECONDS)
    def charge(self, tenant, seconds):
        if self.ledger.is_active(tenant):
            self.open[self.ledger.charge(tenant, seconds)] = tenant

    @precondition(lambda self: self.open)
    @rule(data=st.data(), seconds=SECONDS)
    def revise(self, data, seconds):
        self.ledger.revise(data.draw(st.sampled_from(sorted(self.open))), seconds)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), seconds=SECONDS)
    def settle(self, data, seconds):
        number = data.draw(st.sampled_from(sorted(self.open)))
        tenant = self.open.pop(number)
        before = self.ledger.vtime(tenant) - self.ledger.estimate_in_flight(
            number
        ) / self.ledger.weight(tenant)
        assert self.ledger.settle(number, seconds) == tenant
        after = self.ledger.vtime(tenant)
        assert math.isclose(
            after, before + seconds / self.ledger.weight(tenant), rel_tol=1e-6, abs_tol=1e-5
        )
        self.used.setdefault(tenant, []).append(seconds)

    @invariant()
    def consistent(self):
        self.ledger._check()
        for tenant, used in self.used.items():
            assert math.isclose(self.ledger.service(tenant), math.fsum(used), rel_tol=1e-9)


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
