"""VTC's suites in device seconds: fair shares within the bound, and no executor idle beside work."""

from __future__ import annotations

import pytest

from scheduler_plugin.policy import FairPolicy
from scheduler_plugin.settings import Settings

from .spreads import spreads
from .workloads import EXECUTORS, SUITES, WEIGHTS, play

SECONDS = 60.0
SLACK = 1.0


def served(name, *, seconds=SECONDS, slack_s=SLACK, **more):
    """Device seconds per tenant until the arrivals end, and the cluster after everything ran."""
    weights = WEIGHTS if name == "overload-weighted" else {}
    policy = FairPolicy(Settings(slack_s=slack_s, weights=weights, default_cap=None))
    cluster = play(policy, SUITES[name](seconds), check_every=200, **more)
    policy._check()
    return cluster.service(until=seconds), cluster


@pytest.mark.parametrize("name", sorted(SUITES))
def test_within_the_bound_and_work_conserving(name):
    _, cluster = served(name)
    worst = spreads(cluster, SLACK)
    assert worst.excess <= 1e-6, worst
    assert cluster.idle_s == 0.0
    assert all(job.finished is not None for job in cluster.jobs.values())


def test_overload_gives_equal_service():
    service, cluster = served("overload")
    assert abs(service["a"] - service["b"]) <= 2 * (SLACK + cluster.largest())
    assert sum(service.values()) == pytest.approx(EXECUTORS * SECONDS, rel=0.02)


def test_proportional_gives_everything_to_whoever_asks_for_less_than_a_share():
    service, _ = served("proportional")
    assert service["a"] == pytest.approx(0.25 * SECONDS, rel=0.25)
    assert service["b"] == pytest.approx(0.5 * SECONDS, rel=0.25)
    assert service["c"] > service["b"]


def test_on_off_less_serves_the_modest_tenant_at_once_and_leaves_the_rest_to_the_other():
    service, cluster = served("on_off_less")
    assert service["a"] == pytest.approx(0.25 * SECONDS, rel=0.25)
    waits = [j.finished - j.submitted for j in cluster.jobs.values() if j.tenant == "a"]
    assert max(waits) <= 1.0 * 1.3 + 4 * (SLACK + cluster.largest())
    assert service["b"] > 1.4 * SECONDS


def test_on_off_overload_halves_while_both_are_there():
    service, cluster = served("on_off_overload")
    assert service["a"] == pytest.approx(SECONDS / 2, rel=0.15) or service["a"] > SECONDS / 2
    assert sum(service.values()) == pytest.approx(EXECUTORS * SECONDS, rel=0.02)
    assert cluster.idle_s == 0.0


def test_poisson_short_long_does_not_count_requests():
    service, cluster = served("poisson_short_long")
    assert abs(service["short"] - service["long"]) <= 2 * (SLACK + cluster.largest()) + 4.0


def test_increase_does_not_harm_the_steady_tenant():
    _, cluster = served("increase")
    waits = [j.finished - j.submitted for j in cluster.jobs.values() if j.tenant == "a"]
    assert max(waits) <= 1.0 * 1.3 + 4 * (SLACK + cluster.largest())


def test_dist_shift_is_equal_in_the_overloaded_phase():
    policy = FairPolicy(Settings(slack_s=SLACK, default_cap=None))
    cluster = play(policy, SUITES["dist_shift"](SECONDS))
    before, after = cluster.service(until=SECONDS / 3), cluster.service(until=2 * SECONDS / 3)
    gained = {tenant: after[tenant] - before[tenant] for tenant in after}
    assert abs(gained["a"] - gained["b"]) <= 2 * (SLACK + cluster.largest()) + 1.0


def test_overload_multi_serves_eight_tenants_alike():
    service, cluster = served("overload-multi")
    assert len(service) == 8
    assert max(service.values()) - min(service.values()) <= 2 * (SLACK + cluster.largest())


def test_overload_weighted_serves_in_proportion():
    service, cluster = served("overload-weighted")
    normal = [service[tenant] / weight for tenant, weight in WEIGHTS.items()]
    assert max(normal) - min(normal) <= 2 * (SLACK + cluster.largest())
    assert service["t3"] > 3 * service["t0"]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SUITES))
@pytest.mark.parametrize("slack_s", [0.0, 5.0])
def test_at_full_length(name, slack_s):
    _, cluster = served(name, seconds=600.0, slack_s=slack_s)
    assert spreads(cluster, slack_s).excess <= 1e-6
    assert cluster.idle_s == 0.0
