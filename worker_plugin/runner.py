"""Runs the calls of a task: one invocation, or several denoising steps while nobody else waits.

Between two steps it looks whether the scheduler wants the executor back. The results of the steps after
the first are put under their own keys in this worker's memory, so that Dask's view stays true; the
completion message names them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from distributed.worker import thread_state
from distributed.worker_state_machine import UpdateDataEvent

from st2i_dask.invocation import BoundTask, Call

from .executor import CacheExecutor, Seconds


# States of a task in Dask's worker while its thread runs and its result is wanted.
_RUNNING = ("executing", "long-running")


class StepRunner:
    """One per worker. `run` is called from task threads, the other methods from the event loop."""

    def __init__(self, worker: Any, executor: CacheExecutor):
        self._worker = worker
        self._executor = executor
        self._yielding: set[str] = set()
        self._reported: tuple[str, ...] | None = None  # resident models, as last told
        self._lock = threading.Lock()

    def run(self, calls: Sequence[Call], values: dict[str, Any]) -> Any:
        """The first call's result. Later calls run ahead until a yield or an error."""
        key = thread_state.key
        total = Seconds()
        done: list[Any] = []
        try:
            for call in calls:
                if done and (key in self._yielding or self._unwanted(key)):
                    break
                try:
                    task = BoundTask(
                        call.packed,
                        call.parameters,
                        call.about,
                        [values[name] for name in call.dependencies],
                    )
                    result, seconds = self._executor.run(task)
                except Exception:
                    if done:
                        break  # it runs again, and fails, under its own key
                    raise
                total = Seconds(*(a + b for a, b in zip(total, seconds, strict=True)))
                values[call.key] = result
                done.append(result)
        finally:
            self._yielding.discard(key)
            ahead = {c.key: r for c, r in zip(calls[1:], done[1:], strict=False)}
            self._worker.loop.add_callback(self._over, key, ahead)
        self._report(key, total, ahead)
        return done[0]

    def _unwanted(self, key: str) -> bool:
        task = self._worker.state.tasks.get(key)
        return task is None or task.state not in _RUNNING

    def yield_wanted(self, key: str, **message: Any) -> None:
        """Stream message `st2i_yield`: hand back after the current step."""
        if not self._unwanted(key):
            self._yielding.add(key)

    def _over(self, key: str, ahead: dict[str, Any]) -> None:
        """In the event loop, before Dask hears that the thread is done."""
        if self._unwanted(key):
            # Cancelled meanwhile: Dask tells the scheduler nothing, which waits for the executor.
            self._worker.batched_stream.send({"op": "st2i_ended", "key": key})
        elif ahead:
            self._worker.handle_stimulus(
                UpdateDataEvent(data=ahead, stimulus_id=f"st2i-ahead-{key}")
            )

    def _report(self, key: str, seconds: Seconds, ahead: dict[str, Any]) -> None:
        """Put what was measured on the completion message of the running task."""
        task = self._worker.state.tasks.get(key)
        if task is None:
            return
        report: dict[str, Any] = seconds._asdict()
        if ahead:
            report["ahead"] = {name: value.__sizeof__() for name, value in ahead.items()}
        with self._lock:
            resident = self._executor.models.statistics().models
            if resident != self._reported:
                self._reported = resident
                report["resident"] = list(resident)
        task.metadata = {**(task.metadata or {}), "st2i": report}
