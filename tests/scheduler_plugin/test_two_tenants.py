"""Cheap against ten times dearer requests at equal rates (the paper's figure 9, right).

Both tenants are backlogged all the time. Each rival favours somebody; the fair queue stays within its
bound.
"""

from __future__ import annotations

import pytest

from scheduler_plugin.outline import chain
from scheduler_plugin.policy import FairPolicy
from scheduler_plugin.rivals import chooser
from scheduler_plugin.settings import Settings

from .spreads import spreads
from .virtual_cluster import Truth, VirtualCluster

CHEAP = chain("cheap", [("Text", "clip", "77")] + [("Step", "sd3", "1")] * 4)
DEAR = chain("dear", [("Text", "t5", "77")] + [("Step", "flux", "1")] * 4)
TRUTH = {"clip": 0.05, "sd3": 0.1, "t5": 0.5, "flux": 1.0}
SECONDS, SLACK = 40.0, 1.0


def compete(policy):
    cluster = VirtualCluster(
        FairPolicy(Settings(slack_s=SLACK, default_cap=None), chooser=chooser(policy)),
        4,
        Truth(compute=TRUTH, noise=0.1),
        seed=9,
    )
    for number in range(int(10 * SECONDS)):
        cluster.submit(number / 10, "sd3", CHEAP)
        cluster.submit(number / 10, "flux", DEAR)
    cluster.run(until=SECONDS)
    return cluster


def difference(cluster, until):
    """Device seconds that the dear tenant got more than the cheap one, by dispatch time."""
    service = cluster.service(until=until)
    return service.get("flux", 0.0) - service.get("sd3", 0.0)


def test_ours_stays_within_the_bound():
    cluster = compete("fair")
    worst = spreads(cluster, SLACK)
    assert worst.intervals >= 1
    assert worst.excess <= 0
    bound = 2 * (SLACK + cluster.largest()) + 2 * worst.error
    for tenth in range(1, 10):
        assert abs(difference(cluster, SECONDS * tenth / 10)) <= bound
    assert cluster.idle_s == 0.0


@pytest.mark.parametrize(
    ("policy", "sign"),
    [("fifo", +1), ("sjf", -1), ("vtc", +1)],
)
def test_each_rival_drifts_the_way_the_paper_says(policy, sign):
    """FIFO counts requests and VTC operations, so the dear tenant gains; SJF starves it."""
    cluster = compete(policy)
    ours = compete("fair")
    bound = 2 * (SLACK + ours.largest()) + 2 * spreads(ours, SLACK).error
    half, whole = difference(cluster, SECONDS / 2), difference(cluster, SECONDS)
    assert sign * whole > 1.5 * bound
    assert sign * whole > 1.5 * sign * half > 0
    assert spreads(cluster, SLACK).excess > 0
    assert cluster.idle_s == 0.0
