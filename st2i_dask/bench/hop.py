"""One hop: a chain of dependent no-op ModelFns against a chain of no-op Dask tasks.

Both run on two worker processes of one thread. Stock Dask has a cluster of its own with default
settings; ours has the plugins installed with theirs, under which several steps of a request run as one
task while nobody else waits. `one_step_ms` is the same chain with one step a task, as under
contention. Rounds alternate, medians are compared, so that a busy machine slows all.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from scheduler_plugin.settings import Settings

LENGTH = 300
ROUNDS = 5


def run(length: int = LENGTH, rounds: int = ROUNDS) -> dict[str, float]:
    """Milliseconds per dependent task: `ours_ms`, `dask_ms`, their `ratio`; `one_step_ms` and its."""
    from distributed import Client, LocalCluster

    import st2i_dask as st2i

    workflow = no_op_chain()
    default = Settings().steps_per_task
    with (
        st2i.local_cluster(2, dashboard_address=None) as our_cluster,
        LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None
        ) as stock_cluster,
        Client(our_cluster) as ours,
        Client(stock_cluster) as stock,
    ):
        times: dict[str, list[float]] = {"ours": [], "one_step": [], "dask": []}
        for number in range(rounds + 1):
            st2i.settings(ours, steps_per_task=default)
            times["ours"].append(_ours(workflow, ours, length))
            st2i.settings(ours, steps_per_task=1)
            times["one_step"].append(_ours(workflow, ours, length))
            times["dask"].append(_stock(stock, length, f"round{number}"))
    # The first round warms imports and connections.
    ms = {name: 1e3 * statistics.median(values[1:]) for name, values in times.items()}
    return {
        "ours_ms": round(ms["ours"], 3),
        "dask_ms": round(ms["dask"], 3),
        "ratio": round(ms["ours"] / ms["dask"], 3),
        "one_step_ms": round(ms["one_step"], 3),
        "one_step_ratio": round(ms["one_step"] / ms["dask"], 3),
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
