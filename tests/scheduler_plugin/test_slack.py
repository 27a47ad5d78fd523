"""Slack trades fairness for deadlines (the paper's 8.4): more slack, at least as many met."""

from __future__ import annotations

from itertools import pairwise

import pytest

from .slack_workload import attainment

UNIT = 1.0  # second of vTime
SLACKS = [0.0, 5.0, 10.0, 20.0]


def curve(seeds, seconds, load):
    """Mean attainment for each slack."""
    return [
        sum(attainment(slack * UNIT, seed, seconds, load) for seed in seeds) / len(seeds)
        for slack in SLACKS
    ]


def test_more_slack_meets_more_deadlines():
    """The paper: 62, 75, 81 and 84 %. Here about 52, 55, 63 and 72 %."""
    found = curve(seeds=range(4), seconds=60.0, load=0.45)
    assert found == sorted(found)
    assert found[-1] > found[0] + 0.1, found


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("load", [0.45, 0.5])
def test_more_slack_over_many_seeds(load):
    """Never worse, but for what the sample leaves open (3 %), and clearly better in the end."""
    found = curve(seeds=range(16), seconds=60.0, load=load)
    for less, more in pairwise(found):
        assert more >= less - 0.03, found
    assert found[-1] > found[0] + 0.05, found
