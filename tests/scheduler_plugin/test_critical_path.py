"""Remaining critical paths, computed by hand, and when they are computed again."""

from __future__ import annotations

import pytest

from scheduler_plugin.cost_model import CostModel
from scheduler_plugin.critical_path import CriticalPaths
from scheduler_plugin.events import Measured
from scheduler_plugin.outline import CostKey, Outline, Step, chain


def learn(costs, model, seconds):
    key = CostKey("Fn", model, "1")
    for _ in range(2):
        costs.observe(key, Measured(0.0, seconds, 0.0), loaded_share=0.0, pulled=False)
    return key


def step(model, *deps, callbacks=()):
    return Step("Fn", model, "1", deps, callbacks)


@pytest.fixture
def costs():
    costs = CostModel()
    for model, seconds in (("text", 1.0), ("control", 4.0), ("base", 5.0), ("vae", 2.0)):
        learn(costs, model, seconds)
    return costs


@pytest.fixture
def paths(costs):
    paths = CriticalPaths(costs)
    yield paths
    paths._check()


def path_of(paths, outline):
    outline = paths.hold(outline)
    return [paths.path_s(outline, position) for position in range(len(outline))]


def test_a_chain_sums_up(paths):
    assert path_of(paths, chain("w", [("Fn", "text", "1"), ("Fn", "vae", "1")])) == [3.0, 2.0]


def test_a_fork_takes_the_longer_way(paths):
    outline = Outline("w", (step("text"), step("base", 0), step("vae", 0), step("vae", 1, 2)))
    assert path_of(paths, outline) == [8.0, 7.0, 4.0, 2.0]


def test_a_callback_consumer_starts_with_its_producer(paths):
    outline = Outline(
        "w", (step("text"), step("control", 0), step("base", 0, callbacks=(1,)), step("vae", 2))
    )
    assert path_of(paths, outline) == [8.0, 7.0, 7.0, 2.0]


def test_the_whole_job_is_the_sum_of_all_positions(paths):
    outline = Outline("w", (step("text"), step("base", 0), step("base", 0)))
    assert paths.whole_s(outline) == 11.0


def test_a_moved_cost_renews_only_the_outlines_that_use_it(paths, costs):
    with_vae = paths.hold(chain("v", [("Fn", "text", "1"), ("Fn", "vae", "1")]))
    without = paths.hold(chain("t", [("Fn", "text", "1")]))
    assert paths.path_s(with_vae, 0) == 3.0
    assert paths.path_s(without, 0) == 1.0
    key = learn(costs, "vae", 3.0)
    assert paths.cost_moved(key) == [with_vae]
    assert paths.path_s(with_vae, 0) == 4.0


def test_guessed_costs_follow_everything(paths, costs):
    guessing = paths.hold(chain("g", [("Fn", "never-seen", "1")]))
    before = paths.path_s(guessing, 0)
    key = learn(costs, "text", 40.0)
    assert guessing in paths.cost_moved(key)
    assert paths.path_s(guessing, 0) != before


def test_equal_outlines_are_one_and_the_last_release_forgets_it(paths):
    first = paths.hold(chain("w", [("Fn", "text", "1")]))
    second = paths.hold(chain("w", [("Fn", "text", "1")]))
    assert first is second
    paths.release(first)
    assert len(paths) == 1
    paths.release(second)
    assert len(paths) == 0
    paths._check()
