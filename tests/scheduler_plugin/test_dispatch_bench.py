"""The dispatch benchmark runs and its decisions do not slow down with the number queued."""

from __future__ import annotations

import pytest

from st2i_dask.bench.dispatch import run


@pytest.mark.slow
def test_a_decision_costs_the_same_whatever_is_queued():
    found = run()
    assert set(found) >= {"us_1k", "us_10k", "us_100k"}
    assert found["us_100k"] <= 1.5 * found["us_1k"]
    assert found["us_100k"] <= 50 * 4, "far beyond the target even for a busy machine"
