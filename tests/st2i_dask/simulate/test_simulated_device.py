"""An executor's weights: what is told late changes nothing."""

from __future__ import annotations

import random

import pytest

from st2i_dask.simulate import systems, workload
from st2i_dask.simulate.device import Device


@pytest.mark.parametrize(
    "system", [systems.OURS, systems.MCACHE, systems.WCACHE], ids=lambda s: s.name
)
def test_telling_use_late_is_the_same_as_telling_it_at_once(system):
    """The same runs on two executors; one tells the cache of every run."""
    load = workload.s2()
    catalogue = system.catalogue(load)
    capacity = {"framework": system.weight_bytes(load), "arena": 0}
    late, prompt = (Device(name, catalogue, capacity) for name in "ab")
    prompt._used = None
    chance, now = random.Random(3), 0.0
    tasks = sorted(catalogue.tasks)
    for _ in range(600):
        task = tasks[min(int(chance.expovariate(0.3)), len(tasks) - 1)]
        took = late.run(task, 0.5, now)
        assert took == pytest.approx(prompt.run(task, 0.5, now), abs=1e-9)
        assert late.missing == prompt.missing
        assert late.weight_bytes == prompt.weight_bytes
        now += took.first_s + chance.random()
    assert late._runs < prompt._runs
    assert late.loaded_bytes == prompt.loaded_bytes > 3 * late.capacity
    late.cache._check()
