"""The denoiser with new adapters is read while the text encoder runs: ready when its run comes, and the same."""

from __future__ import annotations

import gc
import shutil
import threading
import time
from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import load_file, save_file

from st2i_dask.catalogue import part as part_module
from st2i_dask.catalogue import tiny, tiny_lora
from st2i_dask.catalogue.flux.parts import ClipText
from st2i_dask.catalogue.folder import read_folder
from st2i_dask.errors import LoadError
from worker_plugin import preparer

from .models import settle, store_of
from .test_lora_weights import base_digest, files, folder, model, reference, root, run

__all__ = ["files", "folder", "root"]  # fixtures

NO_LIMIT = 1 << 30
torch.set_num_threads(1)


@pytest.fixture
def slow(monkeypatch):
    """Putting adapters in takes `slow.seconds` longer; threads and times of it are kept."""

    class Calls(list):
        seconds = 0.0
        free = None  # an event that is waited for

    calls, load = Calls(), part_module.load_adapters

    def recorded(*args):
        start = time.perf_counter()
        time.sleep(calls.seconds)
        assert calls.free is None or calls.free.wait(10)
        made = load(*args)
        calls.append((threading.current_thread().name, start, time.perf_counter()))
        return made

    monkeypatch.setattr(part_module, "load_adapters", recorded)
    return calls


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert not [t for t in threading.enumerate() if t.name == "st2i-preparer"]


def quiet(store):
    """Until nothing is read ahead any more."""
    with store._changed:
        assert store._changed.wait_for(lambda: store._preparer._thread is None, 20)


@contextmanager
def encoding(store, folder, *loras):
    """The run of a text encoder that says what comes next."""
    plain = model(folder, cls=ClipText)
    encoder = model(folder, *loras, cls=ClipText)
    encoder.options = {**plain.options, "soon": encoder.options["soon"]}
    with store.lease(encoder) as lease:
        yield lease


@contextmanager
def store_with_base(folder):
    with store_of(NO_LIMIT) as store:
        with store.lease(model(folder)):
            pass
        yield store


def unused(store):
    return list(store._preparer._unused)


def test_the_first_step_does_not_wait_for_adapters(folder, files, slow):
    loras = [(files["a"], 0.5), (files["b"], 1.0)]
    made = model(folder, *loras)
    slow.seconds = 0.3
    waited = {}
    for is_ahead in (False, True):
        with store_of(NO_LIMIT) as store:
            with store.lease(model(folder)) as lease:
                run(model(folder), lease.components)
            before = base_digest(store, model(folder))
            with encoding(store, folder, *loras) if is_ahead else store.lease(model(folder)):
                time.sleep(0.2)  # the encoder's own time, less than the adapters take
                if is_ahead:
                    quiet(store)
                    assert len(unused(store)) == 1
            start = time.perf_counter()
            with store.lease(made) as lease:
                waited[is_ahead] = time.perf_counter() - start
                assert (lease.load_s == 0) == is_ahead
                ours = run(made, lease.components)
            assert torch.equal(ours, reference(folder, *loras))
            assert not unused(store)
            assert base_digest(store, model(folder)) == before
            assert len([w for w in store._layers._weights.values() if w.table is not None]) <= 2
            settle(store)
    assert [thread for thread, _, _ in slow] == ["MainThread", "st2i-preparer"]
    assert waited[False] > 0.3
    assert waited[True] < 0.15, waited


def test_a_run_that_comes_too_early_waits_for_the_rest_only(folder, files, slow):
    made = model(folder, files["a"])
    slow.seconds = 0.4
    with store_with_base(folder) as store:
        with encoding(store, folder, files["a"]):
            time.sleep(0.25)
        asked = time.perf_counter()
        with store.lease(made) as lease:
            had = time.perf_counter()
            ours = run(made, lease.components)
        assert torch.equal(ours, reference(folder, (files["a"], 1.0)))
        quiet(store)
    [(thread, begun, ended)] = slow
    assert thread == "st2i-preparer"
    assert begun < asked < ended < had


def test_another_model_runs_meanwhile(folder, files, slow):
    slow.free = threading.Event()
    plain = model(folder)
    with store_of(NO_LIMIT) as store:
        with store.lease(plain) as lease:
            expected = run(plain, lease.components)
        with encoding(store, folder, files["a"]):
            for _ in range(3):
                with store.lease(plain) as lease:
                    assert torch.equal(run(plain, lease.components), expected)
            assert not slow, "it is still being read"
            slow.free.set()
        quiet(store)
        assert len(slow) == 1
        store._check()


def test_what_is_there_is_not_read_again(folder, files, slow):
    with store_with_base(folder) as store:
        for _ in range(3):
            with encoding(store, folder, files["a"]):
                quiet(store)
            with store.lease(model(folder, (files["a"], 0.3))):
                pass
        assert len(slow) == 1


def test_what_has_not_begun_goes_with_a_run_that_fails(folder, files, slow):
    slow.free = threading.Event()
    with store_with_base(folder) as store:
        with pytest.raises(RuntimeError), encoding(store, folder, files["a"]):  # noqa: PT012
            while store._preparer._queue:
                time.sleep(0.001)
            with encoding(store, folder, files["b"]):
                assert len(store._preparer._queue) == 1
                raise RuntimeError("cancelled")
        assert not store._preparer._queue
        slow.free.set()
        quiet(store)
        assert len(slow) == 1
        assert [key.count("transformer") for key in unused(store)] == [1]


def test_how_much_is_read_ahead_is_bounded(folder, tmp_path, slow):
    base = tiny.flux(layers=(2, 3))
    several = [
        tiny_lora.save_lora(tmp_path / f"{seed}.safetensors", base, seed=seed)
        for seed in range(preparer.UNUSED + 2)
    ]
    with store_with_base(folder) as store:
        for file in several:
            with encoding_of(store, folder, file):
                quiet(store)
            with store._changed:
                store._preparer._check()
        assert len(unused(store)) == preparer.UNUSED
        assert len(store.models()) == preparer.UNUSED + 2  # the base, and the encoder
        held = [w for w in store._layers._weights.values() if w.id.startswith("held")]
        assert len(held) == preparer.UNUSED
        assert store._cache.used("framework") >= sum(w.nbytes for w in held)
        # Many that wait: no more than so many are kept.
        slow.free = threading.Event()
        with encoding_of(store, folder, several[0]):
            for file in several:
                with encoding_of(store, folder, file):
                    pass
            assert len(store._preparer._queue) <= preparer.WAITING
            slow.free.set()
        quiet(store)


@contextmanager
def encoding_of(store, folder, file):
    """As `encoding`, of adapters that the encoder has not."""
    encoder = model(folder, file, cls=ClipText)
    assert "adapters" not in encoder.options
    with store.lease(encoder) as lease:
        yield lease


def test_errors_show_when_the_model_is_needed(folder, tmp_path):
    file = tiny_lora.save_lora(tmp_path / "gone.safetensors", tiny.flux(layers=(2, 3)))
    made = model(folder, file)
    with store_with_base(folder) as store:
        encoder = model(folder, file, cls=ClipText)
        file.unlink()
        with store.lease(encoder):
            quiet(store)
        assert not unused(store)
        with pytest.raises(LoadError, match=r"gone.safetensors.*not there"), store.lease(made):
            pass


def test_without_room_for_adapters_the_run_reads_them_itself(folder, files, monkeypatch):
    monkeypatch.setattr(preparer, "_TRIES", 2)
    with store_with_base(folder) as store:
        monkeypatch.setattr(store._preparer, "_book", lambda skeleton: False)
        with encoding(store, folder, files["a"]):
            quiet(store)
        assert not unused(store)
        assert len(store.models()) == 2, "the base and the encoder"
        made = model(folder, files["a"])
        with store.lease(made) as lease:
            assert torch.equal(run(made, lease.components), reference(folder, (files["a"], 1.0)))


def test_in_little_memory_results_are_the_same(folder, files):
    loras = [[(files["a"], 1.0)], [(files["b"], 0.5)], [(files["a"], 0.2), (files["b"], 1.0)]]
    expected = [reference(folder, *each) for each in loras]
    with store_of(700_000) as store:
        for number in range(9):
            wanted = loras[number % 3]
            made = model(folder, *wanted)
            with encoding(store, folder, *wanted), torch.no_grad():
                pass
            with store.lease(made) as lease:
                assert torch.equal(run(made, lease.components), expected[number % 3])
            store._check()
        quiet(store)


def test_nothing_is_read_after_the_end(folder, files, slow):
    slow.seconds = 0.2
    with store_with_base(folder) as store, encoding(store, folder, files["a"]):
        pass
    # The store is closed: what was being read is over, and gone.
    assert len(slow) <= 1


def test_a_base_that_was_never_read_is_not_read_beside_a_run(folder, files, slow):
    """That would change torch for the model that runs."""
    gc.collect()
    with store_of(NO_LIMIT) as store:
        with encoding(store, folder, files["a"]):
            quiet(store)
        assert not unused(store)
    assert not slow


def test_what_runs_meanwhile_finds_torch_as_it_is(folder, files, slow):
    """Parameters made in another thread have memory, tensors the default dtype."""
    register, dtype = torch.nn.Module.register_parameter, torch.get_default_dtype()
    made = []
    with store_with_base(folder) as store, encoding(store, folder, files["a"], files["b"]):
        while store._preparer._thread is not None:
            assert torch.nn.Module.register_parameter is register
            assert torch.get_default_dtype() is dtype
            layer = torch.nn.Linear(2, 2)
            assert layer.weight.device.type == "cpu"
            assert float(torch.nn.init.ones_(layer.weight).sum()) == 4
            made.append(layer)
    assert slow
    assert len(made) > 10


def test_a_changed_file_is_read_anew(folder, files, slow, tmp_path):
    path = shutil.copytree(folder.source, tmp_path / "copy")
    copied = read_folder(str(path))
    wanted = [(files["a"], 0.5)]
    with store_with_base(copied) as store:
        weights = path / "transformer" / "diffusion_pytorch_model.safetensors"
        tensors = load_file(weights)
        changed = tmp_path / "new.safetensors"
        save_file({k: v * 1.5 for k, v in tensors.items()}, changed, {"format": "pt"})
        changed.replace(weights)
        with encoding(store, copied, *wanted):
            quiet(store)
        assert not unused(store), "a copy of what is not there any more"
        made = model(copied, *wanted)
        with store.lease(made) as lease:
            assert torch.equal(run(made, lease.components), reference(copied, *wanted))
