"""Several steps as one task: what it saves a tenant that is alone, and what a newcomer pays.

A request of 28 dependent steps on one worker, once with each step a task of its own and once with the
default of `steps_per_task`, rounds alternating. Then, while one tenant's multi-step task runs, another
tenant submits a request of one step: how many steps of the first it waits for.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from distributed import Client

import st2i_dask as st2i
from scheduler_plugin.settings import Settings

STEPS = 28
STEP_S = 0.005
ROUNDS = 7
#: Steps that a newcomer can be expected to notice, and how many newcomers come.
LONG_S = 0.2
NEWCOMERS = 6


def run(rounds: int = ROUNDS, newcomers: int = NEWCOMERS) -> dict[str, float]:
    """Seconds per request, with 1 and with the default steps per task.

    `alone_*_s`: steps of 5 ms. `no_op_*_s`: steps of nothing, so all of it is overhead.
    `saved_fraction`: share of `alone_1_s` that is saved; `saved_overhead_fraction`: of the overhead.
    `newcomer_wait_steps`: median steps of the running tenant from the newcomer's submit to its start,
    `newcomer_worst_steps`: the longest; `newcomer_task_steps`: how many steps that task would run.
    """
    many = Settings().steps_per_task
    workflow = _steps()
    with st2i.local_cluster(1, dashboard_address=None) as cluster, Client(cluster) as client:
        st2i.attach(client)
        times: dict[tuple[float, int], list[float]] = {}
        for number in range(rounds + 1):
            for seconds in (0.0, STEP_S):
                for per_task in (1, many):
                    st2i.settings(client, steps_per_task=per_task)
                    start = time.perf_counter()
                    _submit(workflow, client, "batch", STEPS, seconds).result(timeout=60)
                    if number:  # the first round learns costs and warms imports
                        times.setdefault((seconds, per_task), []).append(
                            time.perf_counter() - start
                        )
        waits = [_newcomer(workflow, client, many, number) for number in range(newcomers + 1)]
    median = {kind: statistics.median(found) for kind, found in times.items()}
    alone_1, alone_many = median[STEP_S, 1], median[STEP_S, many]
    bare = STEPS * STEP_S
    return {
        "alone_1_s": round(alone_1, 4),
        "alone_many_s": round(alone_many, 4),
        "saved_fraction": round(1 - alone_many / alone_1, 3),
        "saved_overhead_fraction": round(1 - (alone_many - bare) / (alone_1 - bare), 3),
        "no_op_1_s": round(median[0.0, 1], 4),
        "no_op_many_s": round(median[0.0, many], 4),
        "newcomer_wait_steps": round(statistics.median(waits[1:]), 2),
        "newcomer_worst_steps": round(max(waits[1:]), 2),
        "newcomer_task_steps": many,
    }


def _newcomer(workflow: Any, client: Client, per_task: int, number: int) -> float:
    """Steps of the running tenant that a newcomer waits for."""
    batch = _submit(workflow, client, "batch", per_task, LONG_S)
    # Somewhere in its task, at another point of a step every time.
    time.sleep(LONG_S * (1.5 + (number * 0.37) % 1.0))
    submitted = time.time()
    started = _submit(workflow, client, f"newcomer{number}", 1, 0.0).result(timeout=60)
    batch.result(timeout=60)
    return (started - submitted) / LONG_S


def _submit(workflow: Any, client: Client, tenant: str, steps: int, seconds: float) -> Any:
    return workflow.submit(client, tenant=tenant, value=0.0, num_steps=steps, seconds=seconds)


class Timed(st2i.ModelFn):
    """Sleeps for `seconds`, then gives the time (seconds of the epoch) at which it started."""

    def setup_io(self) -> None:
        self.add_input("value")
        self.add_input("seconds")
        self.add_output("started")

    def execute(self, model_components: Any, value: float, seconds: float) -> dict[str, float]:
        started = time.time()
        if seconds:
            time.sleep(seconds)
        return {"started": started}


def _steps() -> Any:
    @st2i.workflow(name="bench-steps", replace=True)
    def chain(value: float, num_steps: int, seconds: st2i.Static[float]) -> Any:
        step = Timed()
        for _ in range(num_steps):
            value = step(value, seconds)
        return value

    return chain
