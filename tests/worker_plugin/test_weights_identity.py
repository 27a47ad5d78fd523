"""Whatever of a model is in memory, and whatever goes while it runs: its outputs are the same bits."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import pytest
import torch
import torch._dynamo
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from st2i_dask._core import GRANULE

from .models import (
    KINDS,
    PIPELINE,
    PLAIN,
    Model,
    inputs,
    layer_bytes,
    least_budget,
    outputs,
    read,
    resident,
    same,
    save_pipeline,
    save_plain,
    store_of,
)

CASES = [(kind, dtype) for kind in KINDS for dtype in ("float32", "bfloat16")]
STREAMED = ["transformer", "t5", "vae", "controlnet", "uneven", "tied", "single"]
NO_LIMIT = 1 << 30
QUICK = dict(
    deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)


class Case:
    """A model in a file, an input, and what the model gives when all of it is there."""

    def __init__(self, root, kind, dtype):
        self.kind, self.dtype = kind, dtype
        path = root / dtype / kind
        if kind in PLAIN:
            path = save_plain(path / "model.safetensors", kind, dtype=dtype)
        self.model = Model(str(path), kind=kind, dtype=dtype)
        self.inputs = inputs(kind, dtype)
        self.expected = outputs(read(path, kind, dtype), kind, self.inputs)
        assert not any(tensor.isnan().any() for tensor in self.expected)
        with store_of(NO_LIMIT) as store:
            assert self.runs_in(store)
            self.sizes, self.roots = layer_bytes(store, self.model)

    def runs_in(self, store):
        """Whether the outputs are the same."""
        with store.lease(self.model) as lease:
            return self.gives(lease)

    def gives(self, lease):
        return same(outputs(lease.components["model"], self.kind, self.inputs), self.expected)


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("models")
    save_pipeline(root)
    return {(kind, dtype): Case(root, kind, dtype) for kind, dtype in CASES}


@pytest.mark.parametrize(("kind", "dtype"), CASES)
def test_any_prefix_gives_the_same_bits(cases, kind, dtype):
    case = cases[kind, dtype]
    layers = len(case.sizes)
    with store_of(NO_LIMIT) as store:
        assert case.runs_in(store)
        for prefix in range(layers + 1):
            store.trim(case.model, prefix)
            there = sum(resident(store, case.model))
            assert there == min(layers, len(case.roots) + prefix)
            assert case.runs_in(store)
            store._check()
        assert all(resident(store, case.model))


def test_what_is_not_there_shows_as_nan(cases):
    """Else these tests would pass for a model that is never evicted."""
    case = cases["transformer", "float32"]
    with store_of(NO_LIMIT) as store:
        with store.lease(case.model) as lease:
            module = lease.components["model"]
            assert case.gives(lease)
        store.trim(case.model, 3)
        assert all(p.isnan().all() for p in module.proj_out.parameters())
        assert not any(p.isnan().any() for p in module.x_embedder.parameters())


@pytest.mark.parametrize("mode", ["elastic", "pipelined"])
@pytest.mark.parametrize("kind", STREAMED)
def test_any_budget_gives_the_same_bits(cases, kind, mode):
    """From what one layer takes; in torch's memory only, or with a part of it in an arena."""
    case = cases[kind, "float32"]
    least, most = least_budget(case.sizes, case.roots), sum(case.sizes)

    @settings(max_examples=6, **QUICK)
    @given(st.integers(0, most - least), st.sampled_from([0, GRANULE, 4 * most + GRANULE]))
    def check(more, arena_bytes):
        with store_of(least + more, arena_bytes, mode=mode) as store:
            for _ in range(5):  # the first ones are measured layer by layer, the later ones are not
                assert case.runs_in(store)
                store._check()
                if mode == "pipelined":
                    assert not any(resident(store, case.model))

    check()


@contextmanager
def evictions(module, points):
    """Before and after the call of every part of a module: at some of these moments somebody else
    makes room. points: by number of the moment, what that thread does."""
    moment = iter(range(1 << 30))

    def here(*_):
        action = points.get(next(moment))
        if action is not None:
            thread = threading.Thread(target=action)
            thread.start()
            thread.join(10)
            assert not thread.is_alive()

    handles = []
    for part in module.modules():
        handles.append(part.register_forward_pre_hook(here))
        handles.append(part.register_forward_hook(here))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("kind", STREAMED)
def test_any_eviction_point_gives_the_same_bits(cases, kind):
    case, other = cases[kind, "float32"], cases["clip", "float32"]
    least, most = least_budget(case.sizes, case.roots), sum(case.sizes)
    moments = st.integers(0, 120)
    ways = st.tuples(st.sampled_from(["relieve", "reclaim", "other", "trim"]), st.integers(1, most))

    @settings(max_examples=8, **QUICK)
    @given(
        st.integers(0, 2 * most),
        st.sampled_from([0, most + GRANULE]),
        st.dictionaries(moments, ways, min_size=1),
    )
    def check(more, arena_bytes, chosen):
        memory = max(least, least_budget(other.sizes, other.roots)) + more
        with store_of(memory, arena_bytes) as store:
            acts = {
                "relieve": store.relieve,
                "reclaim": store._layers._reclaim,
                "trim": lambda nbytes: store.trim(case.model, nbytes % 3),
            }
            points = {
                at: lambda way=way, n=n: acts[way](n)
                for at, (way, n) in chosen.items()
                if way != "other"
            }
            for _ in range(2):
                with (
                    store.lease(case.model) as lease,
                    evictions(lease.components["model"], points),
                ):
                    assert case.gives(lease)
                    store._check()
                    assert case.gives(lease)
                assert other.runs_in(store)
                store._check()

    check()


def test_requests_that_evict_each_other_give_the_same_bits(cases):
    """Three threads, three models, room for a part of one."""
    chosen = [cases[kind, "bfloat16"] for kind in ("transformer", "t5", "vae")]
    least = max(least_budget(case.sizes, case.roots) for case in chosen)
    results = []

    def work(case):
        results.extend(case.runs_in(store) for _ in range(6))

    with store_of(least + 100_000, 1 << 18) as store:
        threads = [threading.Thread(target=work, args=(case,)) for case in chosen]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
    assert results == [True] * 18


@pytest.mark.parametrize("mode", ["mcache", "wcache", "nocache"])
def test_the_rivals_give_the_same_bits(cases, mode):
    chosen = [cases[kind, "float32"] for kind in ("transformer", "clip", "vae", "tied")]
    with store_of(max(sum(case.sizes) for case in chosen), mode=mode) as store:
        for turn in range(2):
            for case in chosen:
                with store.lease(case.model, workflow=case.kind, request=f"{turn}") as lease:
                    assert all(resident(store, case.model)[-len(case.sizes) :])
                    assert case.gives(lease)
                store._check()


@contextmanager
def steady_relief(store):
    """Another thread makes room all the time."""
    over = threading.Event()

    def relieve():
        while not over.wait(0.0005):
            store.relieve(NO_LIMIT)
            store.relieve(1)

    thread = threading.Thread(target=relieve)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(10)


@pytest.mark.parametrize("kind", ["transformer", "t5", "uneven"])
def test_no_code_is_compiled_anew_when_layers_come_and_go(cases, kind):
    """With the backend that computes the same bits."""
    case = cases[kind, "float32"]
    graphs = torch._dynamo.utils.counters["stats"]
    torch._dynamo.reset()
    graphs.clear()
    with store_of(NO_LIMIT) as store:
        with store.lease(case.model) as lease:
            for block in blocks(lease.components["model"]):
                block.compile(backend="eager", fullgraph=False)
            assert case.gives(lease)
        first = graphs["unique_graphs"]
        assert first > 0, "nothing was compiled"
        with torch._dynamo.config.patch(error_on_recompile=True):
            for prefix in (0, 2, len(case.sizes), 1):
                store.trim(case.model, prefix)
                assert case.runs_in(store)
                assert case.runs_in(store)
            with steady_relief(store):
                for _ in range(3):
                    assert case.runs_in(store)
        assert graphs["unique_graphs"] == first
    torch._dynamo.reset()


def blocks(module):
    """Items of the first lists of modules."""
    found = []
    for part in module.modules():
        if isinstance(part, torch.nn.ModuleList) and not any(
            part[0] in list(b.modules()) for b in found
        ):
            found += part
    return found


def test_every_kind_of_model_is_streamed(cases):
    """All have their weights in files, and in layers that can go one by one."""
    for (kind, dtype), case in cases.items():
        assert sum(case.sizes) >= 128
        assert len(case.sizes) > 1 or kind == "single", (kind, dtype)
    assert set(PIPELINE) <= {kind for kind, _ in cases}
