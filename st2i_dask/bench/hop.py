"""One hop: a chain of dependent no-op ModelFns against a chain of no-op Dask tasks.

Both run on two worker processes of one thread. Stock Dask has a cluster of its own with default
settings; ours has the plugins installed, and runs one step a task, so that every hop is one. Rounds
alternate, medians are compared, so that a busy machine slows both.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

LENGTH = 300
ROUNDS = 5


def run(length: int = LENGTH, rounds: int = ROUNDS) -> dict[str, float]:
    """Milliseconds per dependent task: `ours_ms`, `dask_ms`, and their `ratio`."""
    from distributed import Client, LocalCluster

    import st2i_dask as st2i

    workflow = no_op_chain()
    with (
        st2i.local_cluster(2, dashboard_address=None) as our_cluster,
        LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None
        ) as stock_cluster,
        Client(our_cluster) as ours,
        Client(stock_cluster) as stock,
    ):
        st2i.settings(ours, steps_per_task=1)
        our_times, stock_times = [], []
        for number in range(rounds + 1):
            our_times.append(_ours(workflow, ours, length))
            stock_times.append(_stock(stock, length, f"round{number}"))
    # The first round warms imports and connections.
    our_ms = 1e3 * statistics.median(our_times[1:])
    dask_ms = 1e3 * statistics.median(stock_times[1:])
    return {
        "ours_ms": round(our_ms, 3),
        "dask_ms": round(dask_ms, 3),
        "ratio": round(our_ms / dask_ms, 3),
    }


def no_op_chain() -> Any:
    """A workflow of `length` dependent invocations of a ModelFn that does nothing."""
    import st2i_dask as st2i

    class NoOp(st2i.ModelFn):
        def setup_io(self) -> None:
            self.add_input("value")
            self.add_output("same")

        def execute(self, model_components: Any, **inputs: Any) -> dict[str, Any]:
            return {"same": inputs["value"]}

    @st2i.workflow(name="st2i-bench-hop", replace=True)
    def chain(value: float, length: int) -> Any:
        no_op = NoOp()
        for _ in range(length):
            value = no_op(value)
        return value

    return chain


def _ours(workflow: Any, client: Any, length: int) -> float:
    start = time.perf_counter()
    workflow.submit(client, value=1.0, length=length).result(timeout=120)
    return (time.perf_counter() - start) / length


def _same(value: float) -> float:
    return value


def _stock(client: Any, length: int, name: str) -> float:
    from dask._task_spec import Task, TaskRef

    tasks = {f"{name}-0": Task(f"{name}-0", _same, 1.0)}
    for i in range(1, length):
        key = f"{name}-{i}"
        tasks[key] = Task(key, _same, TaskRef(f"{name}-{i - 1}"))
    start = time.perf_counter()
    client.get(tasks, f"{name}-{length - 1}")
    return (time.perf_counter() - start) / length
