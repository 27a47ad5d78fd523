"""A model with adapters that several runs share: equal scales run at once, others wait."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

import st2i_dask as st2i
from st2i_dask.catalogue.lora_loading import LoadedAdapters


class Layer:
    def __init__(self):
        self.scales = {}

    def set_scale(self, name, scale):
        self.scales[name] = scale


def test_threads_with_equal_scales_overlap_and_others_wait():
    layer = Layer()
    loaded = LoadedAdapters([layer], ["a", "b"])
    inside, wrong = [], []
    both = threading.Barrier(2, timeout=10)

    def equal():
        with loaded.scaled([1.0, 2.0]):
            both.wait()  # would break if the other one waited

    threads = [threading.Thread(target=equal) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not both.broken
    rng = np.random.default_rng(0)

    def run(scales):
        for a, b in scales:
            with loaded.scaled([a, b]):
                inside.append(1)
                time.sleep(0)  # lets others run
                if layer.scales != {"a": a, "b": b}:
                    wrong.append((layer.scales, a, b))

    threads = [
        threading.Thread(target=run, args=(rng.integers(0, 3, (100, 2)).tolist(),))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(inside) == 400
    assert not wrong


def test_who_waits_too_long_for_other_scales_is_told(monkeypatch):
    monkeypatch.setattr("st2i_dask.catalogue.lora_loading.WAIT_SECONDS", 0.01)
    loaded = LoadedAdapters([Layer()], ["a"])
    with (
        loaded.scaled([1.0]),
        pytest.raises(st2i.LoadError, match=r"other scales of its adapters for 0\.01 s"),
        loaded.scaled([2.0]),
    ):
        pytest.fail("entered")
    with loaded.scaled([2.0]):
        pass
