"""The channel from an orchestrator to the scheduler: what it has put into the worker's memory goes again."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from distributed.worker_state_machine import FreeKeysEvent, UpdateDataEvent

from st2i_dask.outputs import TaskOutputs
from worker_plugin.component_calls import CallChannel, CallsOver


class Worker:
    """A worker's memory, and the scheduler as `answer` has it."""

    address = "tcp://here"

    def __init__(self, answer):
        self.data = {}
        self.asked = asyncio.Event()

        async def st2i_call(**message):
            assert message["arguments"].keys() == self.data.keys() != set()
            self.asked.set()
            return await answer()

        async def st2i_orchestrates(**message):
            return {"calls": [], "run": "1"}

        self.scheduler = SimpleNamespace(st2i_call=st2i_call, st2i_orchestrates=st2i_orchestrates)

    def handle_stimulus(self, event):
        if isinstance(event, UpdateDataEvent):
            self.data |= event.data
        else:
            assert isinstance(event, FreeKeysEvent)
            for key in event.keys:
                del self.data[key]


CALL = SimpleNamespace(
    model_fn=SimpleNamespace(name="vae"),
    task=lambda key, workflow, sent: (key, workflow, sent),
    annotation=lambda key, tenant, workflow: {},
)


async def submitting(worker):
    """A channel's coroutine for a call with one tensor."""
    request = SimpleNamespace(workflow="w", tenant="ann", source="s")
    channel = CallChannel(worker, None, "pipeline@w-000-abc", request)
    await channel.open()
    return channel.submit(0, CALL, [channel.new(TaskOutputs((b"bytes",)))])


async def over():
    return {"status": "over"}


async def unreachable():
    raise OSError("no route")


@pytest.mark.parametrize(("answer", "error"), [(over, CallsOver), (unreachable, OSError)])
def test_arguments_go_where_the_call_is_not_taken(answer, error):
    async def use():
        worker = Worker(answer)
        with pytest.raises(error):
            await (await submitting(worker))
        assert worker.data == {}

    asyncio.run(use())


def test_arguments_go_where_it_is_stopped_while_the_scheduler_is_asked():
    async def use():
        worker = Worker(asyncio.Event().wait)
        task = asyncio.create_task(await submitting(worker))
        await asyncio.wait_for(worker.asked.wait(), 5)
        assert worker.data
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert worker.data == {}

    asyncio.run(use())
