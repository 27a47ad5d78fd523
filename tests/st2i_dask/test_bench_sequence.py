"""The benchmark of sequence parallelism runs both ways, and its figures follow from what it measured."""

from __future__ import annotations

import pytest

from st2i_dask.bench import sequence


def test_figures_follow_from_the_times():
    assert sequence.figures(0.8, 0.5, share=0.9) == {
        "one_s": 0.8,
        "two_s": 0.5,
        "ideal_s": 0.44,
        "speedup": 1.6,
        "ideal_speedup": 1.818,
        "shared_fraction": 0.9,
    }


def test_each_way_runs_what_it_says(tmp_path):
    sequence.save(tmp_path, layers=1, heads=1)
    workflow = sequence._steps(str(tmp_path), side=8)
    for executors in (1, 2):
        request = workflow.request(value=1.0, num_steps=3, sequence_parallel=executors)
        gangs = [a["gang"] for a in request.annotations.values()]
        assert sorted(gangs) == [1, *[executors] * 3]


@pytest.mark.slow
def test_it_measures_both_ways():
    figures = sequence.run(steps=2, rounds=1, layers=1, heads=1, side=16)
    assert figures["one_s"] > 0
    assert figures["two_s"] > 0
    assert 0 < figures["shared_fraction"] < 1
    assert 0 <= figures["members"] <= 1  # none where it comes too late
