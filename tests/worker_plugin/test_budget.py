"""Defaults of the budget and of the arena in it."""

from __future__ import annotations

from types import SimpleNamespace

import psutil
import pytest

from st2i_dask._core import GRANULE
from worker_plugin.budget import default_arena, default_memory, memory_limit


def worker(limit):
    return SimpleNamespace(memory_manager=SimpleNamespace(memory_limit=limit))


@pytest.mark.parametrize(
    ("memory", "arena"),
    [(4 << 20, 1 << 20), (2 << 30, 512 << 20), (1 << 40, 1 << 30), (GRANULE, GRANULE)],
)
def test_the_arena_is_a_share_of_the_budget_with_limits(memory, arena):
    assert default_arena(memory) == arena


def test_the_budget_is_half_of_the_workers_limit():
    assert default_memory(worker(1 << 30), "cpu") == 512 << 20


def test_the_budget_is_a_share_of_the_device(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=1000)
    )
    assert default_memory(worker(1 << 30), "cuda:1") == 800


def test_a_worker_without_a_limit_has_the_machine():
    assert memory_limit(worker(None)) == psutil.virtual_memory().total
