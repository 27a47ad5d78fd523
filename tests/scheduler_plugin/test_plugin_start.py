"""The plugin's start leaves nothing behind when it fails, and its close is sound at any time."""

from __future__ import annotations

import asyncio
import pickle

import dask.config
import pytest
from distributed import Scheduler

import st2i_dask as st2i
from scheduler_plugin import plugin as module
from scheduler_plugin.plugin import ServingSchedulerPlugin


class Broken(Exception):
    """What a part of the plugin raises here."""


def on_a_scheduler(use):
    async def run():
        async with Scheduler(host="127.0.0.1", port=0, dashboard_address=":0") as scheduler:
            await use(scheduler)

    asyncio.run(asyncio.wait_for(run(), 60))


def traces_of_us(scheduler):
    """What the plugin changes on a scheduler."""
    rules = scheduler.http_application.wildcard_router.rules
    return (
        dict(scheduler.handlers),
        type(scheduler.queued),
        scheduler._TRANSITIONS_TABLE,
        [rule.target for rule in rules],
    )


def test_close_before_start_and_twice():
    async def use(scheduler):
        before = traces_of_us(scheduler)
        plugin = pickle.loads(pickle.dumps(ServingSchedulerPlugin()))
        await plugin.close()
        await plugin.start(scheduler)
        assert "st2i_usage" in scheduler.handlers
        assert traces_of_us(scheduler) != before
        await plugin.close()
        await plugin.close()
        after = traces_of_us(scheduler)
        assert after[:3] == before[:3]

    on_a_scheduler(use)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("st2i.logs.level", "loud"),
        ("st2i.traces.enabled", 3),
        ("st2i.scheduler.weights", "studio=3"),
    ],
)
def test_a_wrong_configuration_is_the_only_error(key, value):
    async def use(scheduler):
        before = traces_of_us(scheduler)
        plugin = ServingSchedulerPlugin()
        with dask.config.set({key: value}), pytest.raises(st2i.AttachError, match=key):
            await plugin.start(scheduler)
        await plugin.close()
        assert traces_of_us(scheduler) == before

    on_a_scheduler(use)


@pytest.mark.parametrize("part", ["MetricsPage", "Bridge", "ComponentCalls", "open_board"])
def test_a_start_that_fails_takes_everything_back(monkeypatch, part):
    def broken(*args):
        raise Broken

    async def use(scheduler):
        before = traces_of_us(scheduler)
        plugin = ServingSchedulerPlugin()
        with monkeypatch.context() as patched:
            patched.setattr(module, part, broken)
            with pytest.raises(Broken):
                await plugin.start(scheduler)
        assert traces_of_us(scheduler) == before
        await plugin.close()
        await plugin.start(scheduler)  # and it can start after all
        assert "st2i_usage" in scheduler.handlers
        await plugin.close()

    on_a_scheduler(use)
