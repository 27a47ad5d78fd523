"""Leases: who loads, who waits and how long, what is refused, what an error leaves behind."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from st2i_dask._core import GRANULE
from st2i_dask.errors import LoadError
from worker_plugin.arena import Arena
from worker_plugin.host_heap import HostHeap
from worker_plugin.weights import WeightStore

from .models import (
    Even,
    Model,
    inputs,
    layer_bytes,
    make_plain,
    mapped_weights,
    outputs,
    resident,
    same,
    save_plain,
    store_of,
)

WAIT = 20.0
NO_LIMIT = 1 << 30
LAYER = 64 * 64 * 4  # bytes, of class Even


class Loads:
    """What loads of `Slow` models do and have done. Not in the class: its attributes are part of a
    model's identity."""

    def __init__(self):
        self.of, self.failures = Counter(), Counter()
        self.now = self.most = 0
        self.loading, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()


loads = Loads()


class Slow(Model):
    """Its loads are counted, wait for `go_on`, and fail as often as `failures` says."""

    def load_model(self, model_path):
        tag = self.options["tag"]
        loads.now += 1
        loads.most = max(loads.most, loads.now)
        loads.of[tag] += 1
        loads.loading.set()
        try:
            assert loads.go_on.wait(WAIT)
            time.sleep(0.01)
            if loads.of[tag] <= loads.failures[tag]:
                raise OSError("no such folder")
            return {"name": tag, "model": Even(2, 8)}
        finally:
            loads.now -= 1


@pytest.fixture
def slow():
    loads.__init__()
    return lambda tag: Slow(None, kind="even", tag=tag)


@pytest.fixture
def even(tmp_path):
    """Makes models of equal layers, each in a file of its own."""

    def make(name, depth=4, seed=None, cls=Model, root=0, width=64, **options):
        path = tmp_path / f"{name}.safetensors"
        shape = {"depth": depth, "root": root, "width": width}
        save_plain(path, "even", ord(name[0]) if seed is None else seed, **shape)
        return cls(str(path), kind="even", **shape, **options)

    return make


def reference(model):
    """What it gives when its file is read anew."""
    return run(model.load_model(model.model_path)["model"])


def give(lease):
    return run(lease.components["model"])


def run(module):
    width = module.blocks[0].weight.shape[0]
    return outputs(module, "even", {"x": torch.linspace(-1, 1, width).expand(2, width)})


def use(store, model, **names):
    with store.lease(model, **names) as lease:
        return give(lease)


def hold(store, model):
    with store.lease(model) as lease:
        return lease.components["name"]


def row(store, model):
    return next(r for r in store.models() if r["model"] == repr(model))


@pytest.fixture
def store():
    with store_of(NO_LIMIT) as store:
        yield store


# ---------------------------------------------------------------- one thread


def test_a_model_is_read_once_and_counted(store, even):
    model = even("a")
    for _ in range(3):
        assert same(use(store, model), reference(model))
    figures = row(store, model)
    assert (figures["runs"], figures["hits"], figures["loads"]) == (3, 2, 4)
    assert (figures["layers"], figures["resident_layers"]) == (4, 4)
    assert figures["nbytes"] == figures["resident_bytes"] == 4 * LAYER
    assert figures["load_s"] > 0
    assert store.free_bytes() == NO_LIMIT - 4 * LAYER


def test_the_least_recently_used_gives_way_layer_by_layer(even):
    first, second, third = even("a"), even("b"), even("c", depth=2)
    with store_of(9 * LAYER) as store:
        for model in (first, second, first, third):
            use(store, model)
        assert [row(store, m)["resident_layers"] for m in (first, second, third)] == [4, 3, 2]
        assert resident(store, second) == [True, True, True, False]


def test_a_model_in_use_keeps_what_it_executes(even):
    model, other = even("a"), even("b")
    with store_of(4 * LAYER) as store:
        for _ in range(4):
            use(store, model)
        with store.lease(model) as lease:
            assert lease.held
            assert not store.relieve(LAYER)
            assert not store._layers._reclaim(LAYER)
            store.trim(model, 0)
            assert all(resident(store, model))
            assert same(give(lease), reference(model))
        assert store.relieve(LAYER)
        assert resident(store, model) == [True, True, True, False]
        assert same(use(store, other), reference(other))


def test_relief_evicts_no_more_than_asked(store, even):
    model = even("a")
    use(store, model)
    assert store.relieve(1)
    assert sum(resident(store, model)) == 3, "one layer at least: there was no gap"
    while store.relieve(1):
        store._check()
    assert not any(resident(store, model))


def test_missing_is_the_share_of_what_is_still_to_load(even):
    model = even("a")
    with store_of(NO_LIMIT) as store:
        use(store, model)
        version = store.residency.version
        assert store.missing() == {model.model_key: 0.0}
        store.trim(model, 1)
        assert store.residency.version > version
        assert 0 <= store.missing()[model.model_key] < 1  # by seconds: what hides is not missing
        store.trim(model, 0)
        assert store.missing() == {model.model_key: 1.0}


def test_seconds_of_loading_are_told_from_those_of_layers(even):
    class Lingering(Model):
        def load_model(self, model_path):
            time.sleep(0.05)
            return super().load_model(model_path)

    model = even("a", cls=Lingering)
    with store_of(NO_LIMIT, bandwidth=4 * LAYER / 0.1) as store:
        with store.lease(model) as lease:
            assert 0.05 <= lease.load_s < WAIT
            assert lease.stalled_s == 0
            give(lease)
            assert lease.stalled_s > 0.02
            assert lease.load_s == pytest.approx(lease.stalled_s + lease.load_s - lease.stalled_s)
        with store.lease(model) as lease:
            give(lease)
            assert lease.load_s == lease.stalled_s == 0


def test_a_lease_within_a_lease(even):
    outer, inner = even("a"), even("b")
    with store_of(3 * LAYER) as store:
        for _ in range(4):
            with store.lease(outer) as first:
                one = give(first)
                with store.lease(inner) as second, store.lease(outer) as third:
                    assert third.components is first.components
                    assert same(give(second), reference(inner))
                    assert same(give(third), one)
                    assert same(give(first), one)
                assert same(give(first), one)
            assert same(one, reference(outer))


def test_an_outer_lease_is_found_while_others_use_its_model(even):
    """The hook must not take another thread's lease, nor give up, because an inner one is there."""
    outer, inner = even("a"), even("b")
    there, go_on = threading.Event(), threading.Event()

    def other():
        with store.lease(outer):
            there.set()
            assert go_on.wait(WAIT)

    with store_of(3 * LAYER) as store, ThreadPoolExecutor(1) as pool:
        with store.lease(outer) as lease:
            future = pool.submit(other)
            assert there.wait(WAIT)
            with store.lease(inner):
                try:
                    assert same(give(lease), reference(outer))
                finally:
                    go_on.set()
        future.result(WAIT)


def test_model_code_may_run_it_in_a_thread_of_its_own(even):
    model = even("a")
    with store_of(2 * LAYER) as store, ThreadPoolExecutor(1) as pool:
        for _ in range(4):
            with store.lease(model) as lease:
                assert same(pool.submit(give, lease).result(WAIT), reference(model))


def test_a_model_that_runs_outside_of_its_lease_is_refused(store, even):
    model = even("a")
    with store.lease(model) as lease:
        module = lease.components["model"]
    with (
        pytest.warns(UserWarning, match="always_call"),
        pytest.raises(LoadError, match="ran outside of its invoc"),
    ):
        run(module)
    assert same(use(store, model), reference(model))


# ---------------------------------------------------------------- equal weights


def test_copies_of_a_folder_are_in_memory_once(store, even, tmp_path):
    model = even("a")
    shutil.copy(model.model_path, tmp_path / "copy.safetensors")
    copy = Model(str(tmp_path / "copy.safetensors"), **model.options)
    use(store, model)
    assert same(use(store, copy), reference(model))
    assert (row(store, copy)["loads"], row(store, copy)["hits"]) == (4, 1), (
        "nothing was left to load"
    )
    assert store._cache.used("framework") == 4 * LAYER
    for each in (model, copy):
        store.trim(each, 2)
        assert resident(store, model) == resident(store, copy) == [True, True, False, False]
        assert same(use(store, each), reference(model))


def test_two_models_share_an_encoder(store, tmp_path):
    """As two pipelines do; each has something of its own besides."""
    path = save_plain(tmp_path / "encoder.safetensors", "even")
    for name, seed in (("first", 1), ("second", 2)):
        save_plain(tmp_path / name / "own.safetensors", "uneven", seed)

    class Pair(Model):
        def load_model(self, model_path):
            own = Model(f"{model_path}/own.safetensors", kind="uneven")
            return {
                "model": Model(str(path), kind="even").load_model(str(path))["model"],
                "own": own.load_model(own.model_path)["model"],
            }

    first, second = (Pair(str(tmp_path / name), kind="pair") for name in ("first", "second"))
    results = {}
    for model in (first, second, first, second):
        with store.lease(model) as lease:
            results.setdefault(model, []).append(
                (give(lease), outputs(lease.components["own"], "uneven", inputs("uneven")))
            )
    encoder = sum(p.nbytes for p in make_plain("even").parameters())
    own = sum(p.nbytes for p in make_plain("uneven").parameters())
    assert encoder + 2 * own <= store._cache.used("framework") < encoder + 2 * own + 4096
    (a, b), (c, d) = results[first], results[second]
    assert same(a[0], c[0])
    assert same(a[1], b[1])
    assert same(c[1], d[1])
    assert not same(a[1], c[1])


def test_files_that_differ_in_one_byte_are_other_weights(store, even, tmp_path):
    model = even("a")
    content = bytearray(Path(model.model_path).read_bytes())
    content[-1] ^= 1
    (tmp_path / "b.safetensors").write_bytes(content)
    other = Model(str(tmp_path / "b.safetensors"), **model.options)
    assert same(use(store, model), reference(model))
    assert same(use(store, other), reference(other))
    assert store._cache.used("framework") == 8 * LAYER


# ---------------------------------------------------------------- several threads


def test_one_of_eight_threads_loads_and_all_get_the_same(store, slow):
    start = threading.Barrier(8)

    def work(_):
        start.wait(WAIT)
        with store.lease(slow("a")) as lease:
            return id(lease.components)

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(work, range(8)))) == 1
    assert loads.of == {"a": 1}
    assert row(store, slow("a"))["runs"] == 8


def test_after_a_failed_load_one_waiting_thread_tries_again(store, slow):
    loads.failures["a"] = 3

    def work(_):
        try:
            with store.lease(slow("a")) as lease:
                return lease.components["name"]
        except OSError:
            return None

    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(work, range(8)))
    assert sorted(map(str, got)) == ["None"] * 3 + ["a"] * 5
    assert loads.most == 1
    assert loads.of["a"] == 4


def test_a_hit_does_not_wait_for_another_models_load(store, slow, even):
    here = even("here")
    use(store, here)
    loads.go_on.clear()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(hold, store, slow("a"))
        assert loads.loading.wait(WAIT)
        start = time.perf_counter()
        use(store, here)
        assert time.perf_counter() - start < WAIT / 4
        assert not future.done()
        loads.go_on.set()
        assert future.result(WAIT) == "a"


def test_waiting_for_another_threads_load_is_bounded(slow):
    loads.go_on.clear()
    with store_of(NO_LIMIT, wait_s=0.05) as store, ThreadPoolExecutor(1) as pool:
        future = pool.submit(hold, store, slow("a"))
        assert loads.loading.wait(WAIT)
        with (
            pytest.raises(LoadError, match=r"still being loaded by another thread after 0\.05 s"),
            store.lease(slow("a")),
        ):
            pytest.fail("entered")
        loads.go_on.set()
        future.result(WAIT)
        assert hold(store, slow("a")) == "a"


@pytest.mark.parametrize("mode", ["elastic", "mcache"])
def test_waiting_for_room_is_bounded_and_ends_when_there_is_room(even, mode):
    model, other = even("a"), even("b")
    with store_of(4 * LAYER, mode=mode, wait_s=0.1) as store:
        for _ in range(4):
            use(store, model)
        with store.lease(model) as lease:
            assert lease.held or mode == "mcache"
            with pytest.raises(LoadError, match=r"no room for model .* for 0\.1 s; raise the wor"):
                use(store, other)
            assert same(give(lease), reference(model))
        assert same(use(store, other), reference(other))
    holding, go_on = threading.Event(), threading.Event()

    def hold():
        with store.lease(model):
            holding.set()
            assert go_on.wait(WAIT)

    with store_of(4 * LAYER, mode=mode, wait_s=WAIT) as store:
        for _ in range(4):
            use(store, model)
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(hold)
            assert holding.wait(WAIT)
            threading.Timer(0.05, go_on.set).start()
            assert same(use(store, other), reference(other))
            future.result(WAIT)


def test_who_gives_up_waiting_lets_the_next_one_in(even):
    """It may be ready at once: no load tells it."""
    holder, giant, small = even("h", 1, root=8192), even("g", 1, root=8192), even("s", 1, root=64)
    started = []

    def wait_in_vain():
        started.append(time.monotonic())
        with pytest.raises(LoadError, match="no room"), store.lease(giant):
            pass

    with store_of(4 * LAYER + 512, wait_s=1.0) as store:
        for _ in range(4):
            use(store, small)
        with ThreadPoolExecutor(1) as pool, store.lease(holder):
            future = pool.submit(wait_in_vain)
            time.sleep(0.5)
            assert same(use(store, small), reference(small))
            assert 0.9 < time.monotonic() - started[0] < 1.3
            future.result(WAIT)


# ---------------------------------------------------------------- refusals and errors


@pytest.mark.parametrize("mode", ["mcache", "wcache", "nocache"])
def test_a_whole_model_one_byte_over_the_budget_is_refused(even, mode):
    model, fitting = even("a"), even("b", 3)
    with store_of(4 * LAYER - 1, mode=mode) as store:
        with pytest.raises(LoadError) as caught:
            use(store, model)
        assert f"model {model!r} does not fit this worker: all their layers, 65,536 bytes" in str(
            caught.value
        )
        assert "there is 65,535 in framework" in str(caught.value)
        assert "raise its memory with st2i.attach(client, memory_bytes=...)" in str(caught.value)
        assert same(use(store, fitting), reference(fitting))
    with store_of(4 * LAYER, mode=mode) as store:
        assert same(use(store, model), reference(model))


def test_a_layer_over_the_budget_is_refused(even, tmp_path):
    path = save_plain(tmp_path / "roots.safetensors", "uneven")
    model = Model(str(path), kind="uneven")
    with store_of(NO_LIMIT) as store:
        with store.lease(model):
            pass
        sizes, roots = layer_bytes(store, model)
    least = sum(sizes[i] for i in roots) + max(sizes[1:])
    with store_of(least - 1) as store:
        with pytest.raises(LoadError) as caught, store.lease(model):
            pass
        assert f"the root layers, {sizes[0]:,} bytes, and the largest layer, {max(sizes):,}" in str(
            caught.value
        )
        other = even("b")
        with pytest.raises(LoadError, match="does not fit this worker"):
            use(store, other)
    with store_of(least) as store, store.lease(model):
        pass


def test_memory_no_larger_than_its_arena_is_refused():
    arena = Arena(HostHeap(1 << 20))
    with pytest.raises(LoadError, match=r"memory of 1,048,576 bytes is no more than the arena"):
        WeightStore(memory=1 << 20, arena=arena)


def test_a_failing_load_leaves_nothing(store, slow, even):
    loads.failures["a"] = 1
    with pytest.raises(OSError, match="no such folder"), store.lease(slow("a")):
        pytest.fail("entered")
    assert store.models() == []
    assert not store._layers._weights
    assert not store._shelf._loading
    use(store, even("b"))
    with store.lease(slow("a")) as lease:
        assert lease.components["name"] == "a"


def break_off(store, model, error):
    """A run of it, in whose third block something raises."""

    def fail(*_):
        raise error

    with store.lease(model) as lease:
        handle = lease.components["model"].blocks[2].register_forward_pre_hook(fail)
        try:
            give(lease)
        finally:
            handle.remove()


@pytest.mark.parametrize("error", [ZeroDivisionError("the model's own words"), KeyboardInterrupt()])
@pytest.mark.parametrize("runs", [0, 4])
def test_model_code_that_raises_in_a_layer_leaves_nothing_pinned(even, error, runs):
    model, other = even("a"), even("b")

    with store_of(3 * LAYER) as store:
        for _ in range(runs):
            use(store, model)
        with pytest.raises(type(error)):
            break_off(store, model, error)
        assert not any(store._cache.is_pinned(w, layer) for w, layer in store._layers._buffers)
        assert same(use(store, other), reference(other))
        for _ in range(3):
            assert same(use(store, model), reference(model))
        # What a run that broke off did not reach is no less a layer of the model.
        order = store._cache._books.weights[next(iter(w for w in store._layers._weights))].executed
        assert order == 4


def test_a_run_that_broke_off_is_no_measurement(store, even):
    model = even("a")
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            break_off(store, model, ZeroDivisionError())
    with store.lease(model) as lease:
        weights = lease.skeleton.weights[0]
        assert store._cache._books.weights[weights.id].executed == 4
        assert store.profiles.wants_compute(store.residency.key(weights, ""))


# ---------------------------------------------------------------- files that change


def damage(path, how):
    if how == "truncated":
        os.truncate(path, os.path.getsize(path) // 2)
    elif how == "truncated to nothing":
        os.truncate(path, 0)
    elif how == "overwritten":
        with open(path, "r+b") as file:
            file.seek(-8, os.SEEK_END)
            file.write(b"\1" * 8)
        os.utime(path, ns=(0, 0))
    elif how == "replaced":
        shutil.copy(path, f"{path}.new")
        os.replace(f"{path}.new", path)
    elif how == "deleted":
        os.unlink(path)


def use_damaged(store, model, how):
    """It is damaged while it is leased."""
    with store.lease(model) as lease:
        damage(model.model_path, how)
        return give(lease)


DAMAGES = ["truncated", "truncated to nothing", "overwritten", "replaced", "deleted"]


@pytest.mark.parametrize("how", DAMAGES)
def test_a_file_that_changes_in_use_is_an_error_and_the_model_is_read_anew(even, how):
    model, other = even("a"), even("b")
    good, whole = reference(model), Path(model.model_path).read_bytes()
    with store_of(3 * LAYER) as store:
        use(store, model)
        use(store, other)
        with pytest.raises(LoadError) as caught:
            use_damaged(store, model, how)
        assert str(caught.value).startswith(model.model_path)
        assert "submit again, and the model is read anew" in str(caught.value)
        assert same(use(store, other), reference(other))
        store._check()
        # As a user would: the file is put there again, whole.
        with open(f"{model.model_path}.new", "wb") as file:
            file.write(whole)
        os.replace(f"{model.model_path}.new", model.model_path)
        for _ in range(2):
            assert same(use(store, model), good)
        assert same(use(store, other), reference(other))
        assert not store._shelf._retired
        assert len(store._layers._weights) == 2
    assert model.model_path not in mapped_weights()


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("memory", [3 * LAYER, NO_LIMIT])
def test_a_file_that_changed_since_it_was_used_is_read_anew(even, how, memory):
    """What is resident of the old one, or was mapped, is not used."""
    model, other = even("a"), even("b")
    with store_of(memory) as store:
        use(store, model)
        damage(model.model_path, how)
        if how in ("overwritten", "replaced"):
            assert same(use(store, model), reference(model))
        else:
            with pytest.raises(Exception, match=r"(?i)safetensors|incomplete|header|no such file"):
                use(store, model)
        assert same(use(store, other), reference(other))
        store._check()
        assert not store._shelf._retired


def test_a_file_that_is_still_cut_is_refused_again_and_again(even):
    model, other = even("a"), even("b")
    with store_of(NO_LIMIT) as store:
        use(store, model)
        damage(model.model_path, "truncated")
        for _ in range(3):
            with pytest.raises(Exception, match=r"(?i)safetensors|incomplete|read anew"):
                use(store, model)
            assert same(use(store, other), reference(other))


class WithTensors(Model):
    """Bare tensors beside the module: nothing that may be compared as a whole."""

    def load_model(self, model_path):
        return {"bare": torch.zeros(3), **super().load_model(model_path)}


def test_an_old_model_goes_when_its_last_run_ends(even):
    """Though another has its name and place."""
    model = even("a", cls=WithTensors)
    with store_of(NO_LIMIT) as store:
        for _ in range(4):
            use(store, model)
        with store.lease(model) as lease:
            with ThreadPoolExecutor(1) as pool:
                for _ in range(3):
                    damage(model.model_path, "replaced")
                    assert same(pool.submit(use, store, model).result(WAIT), reference(model))
            assert [skeleton is lease.skeleton for skeleton in store._shelf._retired] == [True]
            assert len(store._shelf._skeletons) == 1
            assert same(give(lease), reference(model))
        assert not store._shelf._retired
        assert len(store._layers._weights) <= 2, (
            "its weights, unless they are the same, and the tensor"
        )


class Replaced(Model):
    """Its file is replaced while it is read, the first time."""

    def load_model(self, model_path):
        components = super().load_model(model_path)
        if not os.path.exists(f"{model_path}.done"):
            Path(f"{model_path}.done").touch()
            damage(model_path, "replaced")
        return components


def test_a_file_that_is_replaced_while_it_is_read(even):
    """All of the model is then in this process's memory; where that does not fit it is read anew."""
    for layers in (4, 3):
        model = even(f"a{layers}", cls=Replaced)
        with store_of(layers * LAYER) as store:
            if layers == 3:
                with pytest.raises(LoadError, match="does not fit this worker"):
                    use(store, model)
                assert store.models() == []
            for _ in range(3):
                assert same(use(store, model), reference(model))


def test_other_weights_in_the_same_file_are_used(store, even):
    model = even("a")
    old = use(store, model)
    save_plain(f"{model.model_path}.new", "even", 77, depth=4)
    os.replace(f"{model.model_path}.new", model.model_path)
    new = use(store, model)
    assert same(new, reference(model))
    assert not same(new, old)
    assert len(store._layers._weights) == 1, "the old ones are gone"


def test_a_run_of_old_weights_goes_on_beside_one_of_new(even):
    """What it has in memory is still right; what it would have to read is an error."""
    model = even("a")
    with store_of(NO_LIMIT) as store:
        for _ in range(4):
            old = use(store, model)
        with store.lease(model) as lease:
            save_plain(f"{model.model_path}.new", "even", 77, depth=4)
            os.replace(f"{model.model_path}.new", model.model_path)
            with ThreadPoolExecutor(1) as pool:
                new = pool.submit(use, store, model).result(WAIT)
            assert same(give(lease), old)
            assert not same(new, old)
        assert not store._shelf._retired
        assert len(store._layers._weights) == 1


def test_an_error_of_a_load_holds_no_memory(even):
    """Whoever keeps the error must not keep the arena's block that the layer was to go to."""
    model = even("a")
    # So slow that the file is damaged while layers are on their way.
    with store_of(LAYER // 2, 4 * GRANULE, bandwidth=20 * LAYER) as store:
        use(store, model)
        store.trim(model, 0)
        with pytest.raises(LoadError, match="read anew") as caught:
            use_damaged(store, model, "truncated")
        assert store._arena.heap.used_bytes == 0
        assert any("_copy" in str(entry.name) for entry in caught.traceback)


# ---------------------------------------------------------------- arena


@pytest.fixture
def large(even):
    """A model whose layers are a granule of an arena each."""
    return even("large", 4, width=128)


def test_tensors_take_the_arena_from_weights(large):
    with store_of(GRANULE, 6 * GRANULE) as store:
        arena = store._arena
        use(store, large)
        assert arena.statistics().weights == 3 * GRANULE
        blocks = [arena.allocate(GRANULE) for _ in range(6)]
        assert all(blocks), "weights made room"
        assert arena.statistics().weights == 0
        store._check()
        assert same(use(store, large), reference(large))
        assert arena.statistics().weights == 0
        del blocks
        assert same(use(store, large), reference(large))
        assert arena.statistics().weights == 3 * GRANULE


def test_a_model_waits_for_tensors_to_leave_the_arena(large):
    """One that fits an arena without them is not refused for good."""
    with store_of(GRANULE // 2, 6 * GRANULE) as store:
        blocks = [store._arena.allocate(GRANULE) for _ in range(6)]
        assert all(blocks)
        threading.Timer(0.1, blocks.clear).start()
        assert same(use(store, large), reference(large))


def test_a_layer_waits_for_a_gap_in_the_arena(large):
    """No event of the policy tells that a tensor has gone."""
    with store_of(GRANULE // 2, 6 * GRANULE) as store, store.lease(large) as lease:
        blocks = []
        while blocks[-1:] != [None]:
            blocks.append(store._arena.allocate(GRANULE))
        assert len(blocks) > 4
        threading.Timer(0.1, blocks.clear).start()
        assert same(give(lease), reference(large))


def test_an_arena_that_stays_full_refuses_within_the_bound(large):
    with store_of(GRANULE // 2, 6 * GRANULE, wait_s=0.1) as store:
        blocks = [store._arena.allocate(GRANULE) for _ in range(6)]
        start = time.monotonic()
        with pytest.raises(LoadError, match="does not fit this worker"):
            use(store, large)
        assert time.monotonic() - start < WAIT / 2
        blocks.clear()
        assert same(use(store, large), reference(large))
