"""Usage by tenant: sums of what completions report."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_plugin.usage import TenantUsage, UsageTotals

seconds = st.floats(0, 1e6)
completions = st.lists(
    st.tuples(st.sampled_from(["alice", "bob", "carol"]), seconds, seconds, seconds)
)


def test_nothing_is_known_before_the_first_completion():
    assert UsageTotals().tenants == {}
    assert TenantUsage().device_seconds == 0


def test_completions_add_up_by_tenant():
    totals = UsageTotals()
    totals.completed("alice", load=2.0, compute=1.0, transfer=0.25)
    totals.completed("bob", 0.0, 3.0, 0.0)
    totals.completed("alice", load=0.0, compute=1.5, transfer=0.25, invocations=4)
    assert totals.tenants == {
        "alice": TenantUsage(5, 2.0, 2.5, 0.5),
        "bob": TenantUsage(1, 0.0, 3.0, 0.0),
    }
    assert totals.tenants["alice"].device_seconds == 5.0
    totals._check()


@given(completions=completions)
def test_no_second_is_lost_or_given_to_another(completions):
    totals = UsageTotals()
    for completion in completions:
        totals.completed(*completion)
        totals._check()
    assert set(totals.tenants) == {tenant for tenant, *_ in completions}
    for tenant, usage in totals.tenants.items():
        own = [rest for name, *rest in completions if name == tenant]
        assert usage.invocations == len(own)
        assert usage.device_seconds == pytest.approx(sum(map(sum, own)))


def test_check_notices_nonsense():
    totals = UsageTotals()
    totals.tenants["alice"] = TenantUsage(1, -1.0)
    with pytest.raises(AssertionError):
        totals._check()
