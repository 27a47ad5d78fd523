"""A cluster in this process: requests run in a thread, task after task, and can be held."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from concurrent.futures import ThreadPoolExecutor

from st2i_dask.errors import LimitError
from st2i_dask.invocation import BoundTask
from st2i_dask.outputs import TaskOutputs


class FakeFuture:
    """As Dask's: who waits for it may be cancelled, and it goes on."""

    def __init__(self, name, task):
        self.name, self.task = name, task

    def __await__(self):
        return asyncio.shield(self.task).__await__()


class FakeCluster:
    """`hold()` keeps requests from starting until `release()`.

    submitted, cancelled: names of requests. caps: most open requests by tenant.
    """

    def __init__(self):
        self.up = True
        self.submitted, self.cancelled = [], []
        self.caps = {}
        self._open = {}  # name -> (tenant, task)
        self._wanted = {}  # futures of other tasks by key
        self._held = False
        self._threads = ThreadPoolExecutor(2)

    def hold(self):
        self._held = True

    def release(self):
        """From any thread."""
        self._held = False

    async def submit(self, requests, also=()):
        tenant = requests[0].tenant
        cap = self.caps.get(tenant)
        waiting = sum(1 for whose, _ in self._open.values() if whose == tenant)
        if cap is not None and waiting + len(requests) > cap:
            raise LimitError(f"tenant {tenant!r} has {waiting} queued requests, its limit is {cap}")
        futures = [self._start(request) for request in requests]
        loop = asyncio.get_running_loop()
        self._wanted.update({key: loop.create_future() for key in also})
        return futures + [FakeFuture(key, self._wanted[key]) for key in also]

    def _start(self, request):
        name = request.key.rpartition("-")[2]
        self.submitted.append(name)
        task = asyncio.ensure_future(self._run(request))
        self._open[name] = request.tenant, task
        task.add_done_callback(lambda done: self._open.pop(name, None))
        return FakeFuture(name, task)

    async def _run(self, request):
        while self._held:
            await asyncio.sleep(0.005)
        loop = asyncio.get_running_loop()
        results = {}
        for key, task in request.tasks.items():
            results[key] = await loop.run_in_executor(
                self._threads, self._evaluate, task, results, key == request.key
            )
            if key in self._wanted:
                self._wanted.pop(key).set_result(results[key])
        return results[request.key]

    def _evaluate(self, task, results, final):
        packed, values, about, _callbacks, *dependencies = task.args
        made = BoundTask(packed, values, about, [results[d.key] for d in dependencies])
        torch = sys.modules.get("torch")  # for the models that use it
        with torch.no_grad() if torch else contextlib.nullcontext():
            result = made.evaluate(made.model_fn.load_model(made.model_fn.model_path))
        if not final:
            return TaskOutputs(result)
        from st2i_dask.image import finish

        return finish(result, about)

    async def prospects(self, names):
        return {
            name: {"done": 0, "total": 4, "place": 1 if self._held else None, "wait_s": 1.5}
            for name in names
            if name in self._open
        }

    async def cancel(self, futures):
        for future in futures:
            if not future.task.done():
                self.cancelled.append(future.name)
                future.task.cancel()

    def close(self):
        self._threads.shutdown()
