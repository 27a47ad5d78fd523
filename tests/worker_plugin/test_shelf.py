"""Reading a model: one at a time, and charged its own seconds alone, whoever is first in a worker."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import threading
import time

import pytest

from .models import Model, read_plain, save_plain, store_of

NO_LIMIT = 1 << 30
SECONDS = 0.3


@pytest.fixture
def path(tmp_path):
    return save_plain(tmp_path / "model.safetensors", "uneven")


class Importing(Model):
    """Its library takes SECONDS to import, and reading it a third of that."""

    def load_model(self, model_path):
        importlib.import_module(self.options["library"])
        time.sleep(SECONDS / 3)
        return {"model": read_plain(model_path, "uneven")}


def test_imports_are_nobodys_load(path, tmp_path, monkeypatch):
    library = f"st2i_library_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{library}.py").write_text(f"import time\ntime.sleep({SECONDS})\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    model = Importing(str(path), library=library)
    start = time.perf_counter()
    with store_of(NO_LIMIT) as store:
        with store.lease(model) as lease:
            pass
        took = time.perf_counter() - start
        assert library in sys.modules
        assert SECONDS / 3 <= lease.load_s <= took - SECONDS
        assert store.residency.totals.read_s + lease.stalled_s == pytest.approx(lease.load_s)
    sys.modules.pop(library)


class Slow(Model):
    entered: list[threading.Event] = []  # noqa: RUF012

    def load_model(self, model_path):
        self.entered[self.options["number"]].set()
        time.sleep(SECONDS)
        return {"model": read_plain(model_path, "uneven")}


def test_waiting_for_the_load_of_another_model_is_nobodys_load(path):
    Slow.entered[:] = [threading.Event(), threading.Event()]
    leases = {}
    with store_of(NO_LIMIT) as store:

        def work(number):
            with store.lease(Slow(str(path), number=number)) as lease:
                leases[number] = lease

        first = threading.Thread(target=work, args=(0,))
        first.start()
        assert Slow.entered[0].wait(10)
        start = time.perf_counter()
        work(1)
        took = time.perf_counter() - start
        first.join(10)
        # Most of the first load passed before the second began.
        assert leases[1].load_s <= took - SECONDS / 2
        assert leases[0].load_s >= SECONDS
        assert leases[1].load_s >= SECONDS


def test_models_are_built_one_at_a_time_in_a_process(path):
    """Libraries change torch for the whole process while they build one."""
    busy, most = [], []

    def note(delta):
        busy.append(delta)
        most.append(sum(busy))

    notes.note = note
    with store_of(NO_LIMIT) as one, store_of(NO_LIMIT) as other:

        def work(store, number):
            with store.lease(Noting(str(path), kind="uneven", number=number)):
                pass

        threads = [
            threading.Thread(target=work, args=(store, number))
            for store in (one, other)
            for number in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
    assert max(most) == 1
    assert len(most) == 8


class Notes:
    note = None


notes = Notes()


class Noting(Model):
    def load_model(self, model_path):
        notes.note(1)
        threading.Event().wait(0.01)
        model = read_plain(model_path, "uneven")
        notes.note(-1)
        return {"model": model}


FIRST = """
import sys, time
from worker_plugin.weights import WeightStore
from st2i_dask.catalogue.flux.parts import ClipText
assert not {"torch", "diffusers", "transformers"} & set(sys.modules)
store = WeightStore(memory=1 << 34)
start = time.perf_counter()
with store.lease(ClipText("shapes", dtype="float32")) as lease:
    took = time.perf_counter() - start
print(lease.load_s, took)
store.close()
"""


@pytest.mark.slow
def test_the_first_model_of_a_worker_is_not_charged_for_torch():
    """Diffusers' own way of importing, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", FIRST], capture_output=True, text=True, timeout=300, env=os.environ
    )
    assert done.returncode == 0, done.stderr
    load_s, took = map(float, done.stdout.split())
    assert load_s < took / 4
