"""Slack trades fairness for deadlines (the paper's 8.4), where strictness costs loads; waiting for an
executor that has the model spares most of those, and then strictness costs little."""

from __future__ import annotations

from itertools import pairwise

import pytest

from scheduler_plugin import patience

from .slack_workload import attainment

UNIT = 1.0  # second of vTime
SLACKS = [0.0, 5.0, 10.0, 20.0]


def curve(seeds, seconds, load):
    """Mean attainment for each slack."""
    return [
        sum(attainment(slack * UNIT, seed, seconds, load) for seed in seeds) / len(seeds)
        for slack in SLACKS
    ]


def curves(monkeypatch, seeds, load):
    """With patience and without."""
    patient = curve(seeds, 60.0, load)
    monkeypatch.setattr(patience, "PATIENCE", 1e9)
    return patient, curve(seeds, 60.0, load)


def test_more_slack_meets_more_deadlines_and_patience_more_still(monkeypatch):
    """The paper: 62, 75, 81 and 84 %. Here about 52, 55, 63 and 72 % without patience, 72 to 76 with."""
    patient, hasty = curves(monkeypatch, range(4), 0.45)
    assert hasty == sorted(hasty)
    assert hasty[-1] > hasty[0] + 0.1, hasty
    assert all(more > less for more, less in zip(patient, hasty, strict=True)), (patient, hasty)
    assert patient[0] > patient[-1] - 0.1, "strict fairness costs deadlines again"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("load", [0.45, 0.5])
def test_more_slack_over_many_seeds(monkeypatch, load):
    """Never worse, but for what the sample leaves open (3 %), and clearly better in the end."""
    patient, hasty = curves(monkeypatch, range(16), load)
    for less, more in pairwise(hasty):
        assert more >= less - 0.03, hasty
    assert hasty[-1] > hasty[0] + 0.05, hasty
    assert all(more > less for more, less in zip(patient, hasty, strict=True)), (patient, hasty)
