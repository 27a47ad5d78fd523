"""Share of the last minute."""

from __future__ import annotations

import pytest

from scheduler_plugin.recent import WINDOW_S, RecentUse


def test_shares_sum_up_and_old_use_is_forgotten():
    recent = RecentUse()
    recent.add(0.0, "a", 3.0)
    recent.add(10.0, "b", 1.0)
    assert recent.shares(10.0) == {"a": 0.75, "b": 0.25}
    assert recent.shares(WINDOW_S + 5.0) == {"b": 1.0}
    assert recent.shares(1000.0) == {}
    recent._check()


def test_memory_is_bounded():
    recent = RecentUse()
    for tenth in range(10_000):
        recent.add(tenth / 10, f"t{tenth % 3}", 0.1)
    recent._check()
    assert sum(recent.shares(999.9).values()) == pytest.approx(1.0)
