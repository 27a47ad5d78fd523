"""The benchmarks of the data plane, shortened: their keys, and that ours wins where it must."""

from __future__ import annotations

import multiprocessing

import pytest

from st2i_dask.bench import arena, pull

MIB = 1 << 20


def test_best_fit_holds_more_than_the_buddy_on_both_workloads():
    figures = arena.run(steps=1500, seeds=1)
    assert set(figures) == {"best_fit", "buddy", "random_gain", "requests_gain"}
    for kind in ("best_fit", "buddy"):
        assert set(figures[kind]) == {"alloc_free_us", "random_held", "requests_held"}
        assert 0.3 < figures[kind]["random_held"] <= 1
        assert 0.3 < figures[kind]["requests_held"] <= 1
        assert 0 < figures[kind]["alloc_free_us"] < 100
    assert figures["best_fit"]["random_held"] > 0.9
    assert figures["best_fit"]["requests_held"] > 0.9
    assert figures["random_gain"] == pytest.approx(
        figures["best_fit"]["random_held"] / figures["buddy"]["random_held"], abs=0.01
    )
    assert figures["random_gain"] > 1.2
    assert figures["requests_gain"] > 1.2


def test_a_workload_ends_with_what_it_holds():
    for workload in (arena._random_mix, arena._requests):
        held = arena._Arena("best_fit")
        payloads = list(workload(held, arena.random.Random(1), 1500))
        assert payloads
        assert max(payloads) <= arena.ARENA
        statistics = held.allocator.statistics()
        assert 0 < held.payload <= statistics["used"] <= arena.ARENA
        held.allocator._check()


def test_a_pull_is_measured_against_both_rivals():
    sizes = (65536, 8 * MIB)
    figures = pull.run(sizes, rounds=3)
    lists = {"sizes", "get_ms", "pull_ms", "vs_copy", "vs_dask"}
    assert set(figures) == {*lists, "worst_vs_copy", "worst_vs_dask"}
    assert figures["sizes"] == list(sizes)
    for name in ("get_ms", "pull_ms", "vs_copy", "vs_dask"):
        assert len(figures[name]) == len(sizes)
        assert all(value > 0 for value in figures[name])
    assert figures["vs_dask"][1] < 0.8  # about 0.1 on a quiet machine
    assert figures["worst_vs_dask"] == max(figures["vs_dask"])
    assert not multiprocessing.active_children()
