"""Many threads, models and tensors in little memory: right outputs, no deadlock, nothing left."""

from __future__ import annotations

import gc
import os
import random
import shutil
import threading
import time

import pytest
import torch

from st2i_dask._core import GRANULE
from st2i_dask.errors import LoadError
from worker_plugin.arena import Arena
from worker_plugin.host_heap import HostHeap
from worker_plugin.weights import WeightStore

from .models import Model, make_plain, mapped_weights, outputs, same, save_plain

WAIT = 30.0
#: Name, class and shape of each model; a layer of the larger ones takes a granule of an arena.
SHAPES = [
    ("one", "even", {"depth": 5, "width": 64}),
    ("two", "even", {"depth": 3, "width": 128}),
    ("three", "even", {"depth": 4, "width": 128, "root": 4096}),
    ("four", "uneven", {"widths": [64, 8, 512]}),
    ("five", "even", {"depth": 1, "width": 128}),
]
LAYER = 128 * 128 * 4


class Stress:
    """A store, its models, and threads that do as they like with them until the time is over."""

    def __init__(self, folder, mode, memory, arena_bytes, seed):
        self.arena = Arena(HostHeap(arena_bytes, poison=True))
        self.store = WeightStore(
            memory=memory + self.arena.heap.address.nbytes,
            arena=self.arena,
            mode=mode,
            wait_s=WAIT,
        )
        self.random = random.Random(seed)
        self.over = threading.Event()
        self.errors, self.done = [], 0
        self.models = []
        for number, (name, kind, shape) in enumerate(SHAPES):
            path = save_plain(folder / f"{name}.safetensors", kind, number, **shape)
            module = make_plain(kind, number, **shape)
            x = torch.linspace(-1, 1, shape.get("width", 8)).expand(2, -1)
            model = Model(str(path), kind=kind, **shape)
            self.models.append((model, kind, x, outputs(module, kind, {"x": x})))

    def run(self, seconds, workers):
        jobs = [self.lease] * workers + [self.allocate] * 2 + [self.evict, self.check]
        threads = [
            threading.Thread(target=self.until_over, args=(job, self.random.random()))
            for job in jobs
        ]
        for thread in threads:
            thread.start()
        self.over.wait(seconds)
        self.over.set()
        deadline = time.monotonic() + 2 * WAIT
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        assert not any(thread.is_alive() for thread in threads), "a deadlock"
        if self.errors:
            raise self.errors[0]

    def until_over(self, job, seed):
        torch.set_num_threads(1)
        dice = random.Random(seed)
        try:
            while not self.over.is_set():
                job(dice)
        except BaseException as error:
            self.errors.append(error)
            self.over.set()

    def lease(self, dice):
        model, kind, x, expected = dice.choice(self.models)
        names = dict(workflow=dice.choice("ab"), request=str(dice.randrange(3)))
        with self.store.lease(model, bucket=dice.choice("xy"), **names) as lease:
            for _ in range(dice.randrange(3)):
                got = outputs(lease.components["model"], kind, {"x": x})
                assert same(got, expected), f"{model} gave something else"
        self.done += 1

    def allocate(self, dice):
        blocks = [
            self.arena.allocate(dice.randrange(1, 2 * GRANULE), 0.001)
            for _ in range(dice.randrange(4))
        ]
        tensors = [self.arena.heap.tensor(block).fill_(7) for block in blocks if block is not None]
        time.sleep(dice.random() * 0.01)
        assert all((tensor == 7).all() for tensor in tensors), "weights lie in a tensor's memory"

    def evict(self, dice):
        act = dice.choice(["relieve", "reclaim", "trim", "look"])
        if act == "relieve":
            self.store.relieve(dice.randrange(1, 3 * LAYER))
        elif act == "reclaim":
            self.store._layers._reclaim(dice.randrange(1, 3 * LAYER))
        elif act == "trim":
            self.store.trim(dice.choice(self.models)[0], dice.randrange(5))
        else:
            assert all(0 <= share <= 1 for share in self.store.missing().values())
            assert 0 <= self.store.free_bytes() <= self.store.memory
            for row in self.store.models():
                assert row["resident_bytes"] <= row["nbytes"]
        time.sleep(dice.random() * 0.005)

    def check(self, dice):
        self.store._check()
        time.sleep(0.002)

    def close(self):
        self.store._check()
        assert not self.store._leases
        loader = self.store._layers._loader._thread
        self.store.close()
        assert not loader.is_alive()
        gc.collect()
        assert self.arena.heap.used_bytes == 0, "a block is still held"
        assert self.arena.statistics().weights == 0
        assert not self.store._layers._buffers
        assert not self.store._layers._weights
        self.arena.heap._check()
        self.arena.heap.close()


@pytest.fixture
def stress(tmp_path):
    made = []

    def make(*args):
        made.append(Stress(tmp_path, *args))
        return made[-1]

    yield make
    made.clear()
    assert not any(str(tmp_path) in path for path in mapped_weights())


def least_framework(mode):
    """Room for the largest layer and what stays with it; in whole modes for the largest model."""
    whole = mode not in ("elastic", "pipelined")
    return 5 * LAYER if whole else LAYER + 4 * 4096


@pytest.mark.parametrize(
    ("mode", "more", "arena_granules"),
    [("elastic", 0, 8), ("elastic", 3 * LAYER, 4), ("pipelined", LAYER, 8), ("mcache", 0, 4)],
)
def test_any_mix_of_leases_tensors_and_evictions(stress, mode, more, arena_granules):
    one = stress(mode, least_framework(mode) + more, arena_granules * GRANULE, 3)
    one.run(1.2, workers=4)
    assert one.done > 20
    one.close()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["elastic", "pipelined", "mcache", "wcache", "nocache"])
def test_any_mix_for_a_minute(stress, mode):
    for seed in range(4):
        one = stress(mode, least_framework(mode) + seed * LAYER, (seed + 2) * GRANULE, seed)
        one.run(3.0, workers=3 + seed)
        assert one.done > 20
        one.close()


def test_files_that_are_replaced_all_the_time(stress, tmp_path):
    """Requests fail with a LoadError or give the right bits; the store goes on."""
    one = stress("elastic", 3 * LAYER, 4 * GRANULE, 1)
    refused = []

    def lease(dice):
        try:
            Stress.lease(one, dice)
        except LoadError as error:
            refused.append(str(error))

    def replace(dice):
        path = dice.choice(one.models)[0].model_path
        shutil.copy(path, f"{path}.new")
        os.replace(f"{path}.new", path)
        time.sleep(0.02)

    one.lease, one.evict = lease, replace
    one.run(1.5, workers=3)
    assert one.done > 5
    assert refused
    # The last: replaced while it was read, the model lies in no file and all of it has to fit.
    words = ("read anew", "load the model again", "does not fit this worker")
    assert all(any(word in why for word in words) for why in refused)
    for model, kind, x, expected in one.models:
        got = None
        for _ in range(3):
            try:
                with one.store.lease(model) as held:
                    got = outputs(held.components["model"], kind, {"x": x})
                break
            except LoadError:
                continue
        assert got is not None
        assert same(got, expected)
    assert not one.store._shelf._retired
    one.close()
