"""The model cache: least recently used out, never over budget, one loader per model."""

from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from st2i_dask.errors import LoadError
from worker_plugin.model_cache import ModelCache

WAIT = 20.0


@pytest.fixture
def cache():
    cache = ModelCache(10, wait=WAIT)
    yield cache
    cache._check()


def lease(cache, key, size=1, load=None):
    return cache.lease(key, load or (lambda: key), lambda components: size)


def use(cache, key, size=1):
    with lease(cache, key, size) as components:
        assert components == key


def models(cache):
    return cache.statistics().models


# ---------------------------------------------------------------- one thread


def test_a_model_is_loaded_once_and_counted(cache):
    for _ in range(3):
        use(cache, "a", 4)
    statistics = cache.statistics()
    assert (statistics.loads, statistics.hits, statistics.evictions) == (1, 2, 0)
    assert statistics.nbytes == 4


def test_the_least_recently_used_goes_first(cache):
    for key in "abc":
        use(cache, key, 3)
    use(cache, "a")
    use(cache, "d", 3)
    assert models(cache) == ("c", "a", "d")
    use(cache, "e", 4)
    assert models(cache) == ("a", "d", "e")
    assert cache.statistics().evictions == 2


def test_no_more_is_evicted_than_needed(cache):
    for key in "abcde":
        use(cache, key, 2)
    use(cache, "f", 3)
    assert models(cache) == ("c", "d", "e", "f")


def test_a_model_as_large_as_the_budget_fits_alone(cache):
    use(cache, "a", 3)
    use(cache, "b", 10)
    assert models(cache) == ("b",)


def test_a_model_in_use_is_never_evicted():
    cache = ModelCache(10, wait=0)
    with lease(cache, "a", 6):
        use(cache, "b", 4)
        use(cache, "c", 4)
        assert models(cache) == ("a", "c")
        with pytest.raises(LoadError) as caught:
            use(cache, "d", 5)
        assert str(caught.value) == (
            "no room for model 'd' (5 bytes): models in use fill the budget of 10 bytes for 0 s; "
            "raise it with st2i.attach(client, model_bytes=...) or run fewer threads per worker"
        )
        assert "a" in models(cache)
    use(cache, "d", 5)
    cache._check()


def test_a_model_over_the_budget_is_refused_with_numbers_and_a_cure(cache):
    use(cache, "a", 4)
    with pytest.raises(LoadError) as caught:
        use(cache, "giant", 11_000)
    assert "model 'giant' needs 11,000 bytes, the worker's budget for models is 10" in str(
        caught.value
    )
    assert "raise it with st2i.attach(client, model_bytes=...)" in str(caught.value)
    assert models(cache) == ("a",)


@pytest.mark.parametrize("budget", [0, -1])
def test_a_budget_must_be_positive(budget):
    with pytest.raises(LoadError, match=f"model budget {budget} bytes is not positive; give at"):
        ModelCache(budget)


def fail():
    raise OSError("no such file")


@pytest.mark.parametrize("where", ["load", "size"])
def test_a_failing_load_goes_to_the_caller_and_leaves_nothing(cache, where):
    with (
        pytest.raises(OSError, match="no such file"),
        cache.lease("a", fail if where == "load" else list, lambda c: fail()),
    ):
        pytest.fail("entered")
    assert cache.statistics() == ModelCache(1).statistics()
    use(cache, "a")
    assert models(cache) == ("a",)


def test_an_error_while_in_use_releases_the_model(cache):
    with pytest.raises(ZeroDivisionError), lease(cache, "a", 10):
        _ = 1 / 0
    use(cache, "b", 10)
    assert models(cache) == ("b",)


def test_clear_forgets_only_what_is_not_in_use(cache):
    use(cache, "b")
    with lease(cache, "a"):
        cache.clear()
        assert models(cache) == ("a",)
    cache.clear()
    assert models(cache) == ()


def test_one_model_can_be_leased_twice_at_once(cache):
    with lease(cache, "a", 10) as first, lease(cache, "a", 10) as second:
        assert first is second
    assert cache.statistics().loads == 1


# ---------------------------------------------------------------- threads


def test_one_of_eight_threads_loads_and_all_get_the_same():
    cache = ModelCache(10, wait=WAIT)
    loads = Counter()
    start = threading.Barrier(8)

    def load():
        loads["a"] += 1
        time.sleep(0.05)
        return object()

    def work(_):
        start.wait(WAIT)
        with lease(cache, "a", load=load) as components:
            return components

    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(work, range(8)))
    assert len(set(map(id, got))) == 1
    assert loads == {"a": 1}
    assert (cache.statistics().loads, cache.statistics().hits) == (1, 7)
    cache._check()


def test_after_a_failed_load_one_waiting_thread_tries_again():
    cache = ModelCache(10, wait=WAIT)
    tries, active, most = Counter(), Counter(), Counter()

    def load():
        active["now"] += 1
        most["at once"] = max(most["at once"], active["now"])
        tries["a"] += 1
        time.sleep(0.02)
        active["now"] -= 1
        if tries["a"] <= 3:
            fail()
        return "a"

    def work(_):
        try:
            with lease(cache, "a", load=load) as components:
                return components
        except OSError:
            return None

    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(work, range(8)))
    assert sorted(map(str, got)) == ["None"] * 3 + ["a"] * 5
    assert most["at once"] == 1
    assert tries["a"] == 4


def test_a_hit_does_not_wait_for_another_models_load():
    cache = ModelCache(10, wait=WAIT)
    use(cache, "here")
    loading, go_on = threading.Event(), threading.Event()

    def slow():
        loading.set()
        assert go_on.wait(WAIT)
        return "slow"

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(lambda: lease(cache, "slow", load=slow).__enter__())
        assert loading.wait(WAIT)
        start = time.perf_counter()
        use(cache, "here")
        assert cache.statistics().hits == 1
        assert time.perf_counter() - start < WAIT / 4
        assert not future.done()
        go_on.set()
        assert future.result(WAIT) == "slow"


def test_waiting_for_another_threads_load_is_bounded():
    cache = ModelCache(10, wait=0.05)
    loading, go_on = threading.Event(), threading.Event()

    def slow():
        loading.set()
        assert go_on.wait(WAIT)
        return "a"

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(lambda: lease(cache, "a", load=slow).__enter__())
        assert loading.wait(WAIT)
        with pytest.raises(LoadError, match="'a' was still being loaded by another thread after"):
            use(cache, "a")
        go_on.set()
        future.result(WAIT)
    use(cache, "a")


def test_waiting_for_room_is_bounded_and_ends_when_there_is_room():
    cache = ModelCache(10, wait=0.05)
    with lease(cache, "a", 10), pytest.raises(LoadError, match=r"for 0\.05 s"):
        use(cache, "b", 1)
    assert models(cache) == ("a",)
    cache = ModelCache(10, wait=WAIT)
    holding, go_on = threading.Event(), threading.Event()

    def hold():
        with lease(cache, "a", 10):
            holding.set()
            assert go_on.wait(WAIT)

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(hold)
        assert holding.wait(WAIT)
        threading.Timer(0.05, go_on.set).start()
        use(cache, "b", 1)
        future.result(WAIT)
    assert models(cache) == ("b",)


def test_many_threads_and_models_stay_within_the_budget():
    cache = ModelCache(10, wait=WAIT)
    sizes = {"a": 3, "b": 4, "c": 5, "d": 2, "e": 1}
    loading: Counter[str] = Counter()

    def load(key):
        loading[key] += 1
        assert loading[key] == 1
        time.sleep(0.001)
        loading[key] -= 1
        return key

    def work(seed):
        for turn in range(40):
            key = "abcde"[(seed * 7 + turn * (seed + 1)) % 5]
            with cache.lease(key, lambda key=key: load(key), sizes.__getitem__) as components:
                assert components == key
                cache._check()
                assert key in models(cache)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))
    cache._check()
    assert not any(entry.users for entry in cache._entries.values())


# ---------------------------------------------------------------- any sequence


class CacheMachine(RuleBasedStateMachine):
    """Against a list of (key, size) in order of use, and the leases that are open."""

    BUDGET = 10

    def __init__(self):
        super().__init__()
        self.cache = ModelCache(self.BUDGET, wait=0)
        self.resident: list[str] = []  # least recently used first
        self.sizes: dict[str, int] = {}
        self.open: list[tuple[str, ExitStack]] = []
        self.loads = 0

    def in_use(self):
        return {key for key, _ in self.open}

    @rule(key=st.sampled_from("abcdef"), size=st.integers(0, 12), fails=st.booleans())
    def acquire(self, key, size, fails):
        stack = ExitStack()

        def load():
            if fails:
                fail()
            return object()

        if key in self.resident:
            stack.enter_context(self.cache.lease(key, fail, fail))
            self.resident.remove(key)
            self.resident.append(key)
            self.open.append((key, stack))
            return
        try:
            stack.enter_context(self.cache.lease(key, load, lambda c: size))
        except OSError:
            assert fails
            return
        except LoadError:
            assert not fails
            if size > self.BUDGET:
                return
            used = sum(self.sizes[k] for k in self.in_use())
            assert used + size > self.BUDGET
            # What could go has gone: room may come any moment.
            self.resident = [k for k in self.resident if k in self.in_use()]
            return
        assert not fails
        self.loads += 1
        idle = [k for k in self.resident if k not in self.in_use()]
        while sum(self.sizes[k] for k in self.resident) + size > self.BUDGET:
            self.resident.remove(idle.pop(0))
        self.resident.append(key)
        self.sizes[key] = size
        self.open.append((key, stack))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def release(self, data):
        _, stack = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        stack.close()

    @rule()
    def clear(self):
        self.cache.clear()
        self.resident = [k for k in self.resident if k in self.in_use()]

    @invariant()
    def agrees(self):
        self.cache._check()
        statistics = self.cache.statistics()
        assert list(statistics.models) == self.resident
        assert statistics.nbytes == sum(self.sizes[k] for k in self.resident) <= self.BUDGET
        assert statistics.loads == self.loads
        assert self.in_use() <= set(self.resident)

    def teardown(self):
        for _, stack in self.open:
            stack.close()
        self.cache.clear()
        assert self.cache.statistics().nbytes == 0


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
