"""Who may orchestrate on a worker."""

from __future__ import annotations

import asyncio

from worker_plugin.orchestrators import Places


def taken(places, tasks):
    return [name for name, task in tasks if task.done() and not task.cancelled()]


def run(scenario):
    asyncio.run(asyncio.wait_for(scenario(), 10))


async def asked(places, names):
    tasks = [(name, asyncio.ensure_future(places.take(name[0]))) for name in names]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return tasks


def test_a_tenant_with_many_does_not_keep_others_out():
    async def scenario():
        places = Places(total=4, per_tenant=3)
        tasks = await asked(places, ["a1", "a2", "a3", "a4", "a5", "b1"])
        assert taken(places, tasks) == ["a1", "a2", "a3", "b1"]
        more = await asked(places, ["b2"])
        places.give_back("a")
        await asyncio.sleep(0)
        assert taken(places, more) == ["b2"]  # before a4, whose tenant has two
        places.give_back("b")
        await asyncio.sleep(0)
        assert taken(places, tasks)[-2:] == ["a4", "b1"]
        for _, task in tasks:
            task.cancel()

    run(scenario)


def test_who_gives_up_waiting_takes_no_place():
    async def scenario():
        places = Places(total=1, per_tenant=1)
        tasks = await asked(places, ["a1", "a2", "b1"])
        assert taken(places, tasks) == ["a1"]
        tasks[1][1].cancel()
        places.give_back("a")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert taken(places, tasks) == ["a1", "b1"]
        # One that was served and cancelled in the same moment gives its place back.
        late = await asked(places, ["c1"])
        places.give_back("b")
        late[0][1].cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert taken(places, await asked(places, ["d1"])) == ["d1"]

    run(scenario)
