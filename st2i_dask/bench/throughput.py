"""Throughput: CPU seconds of the scheduler per ModelFn task, against stock Dask's per plain task.

2,000 requests of five dependent no-op invocations over four workers of one thread, sent 100 to a
message; on the stock cluster, the same chains of no-op tasks. Each scheduler has a process of its own,
whose CPU time is read before and after. Rounds alternate, medians are compared.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from dask._task_spec import Task, TaskRef
from distributed import Client

import st2i_dask as st2i
from scheduler_plugin.settings import Settings
from st2i_dask.submission import submit_requests

from .hop import no_op_chain

REQUESTS = 2000
LENGTH = 5
WORKERS = 4
ROUNDS = 3
MESSAGE = 100  # requests


def run(requests: int = REQUESTS, rounds: int = ROUNDS, workers: int = WORKERS) -> dict[str, float]:
    """Microseconds of scheduler CPU per task, and ratios to stock Dask.

    `ratio`, `ours_us`: with the default settings, where the steps of a tenant that is alone run
    several to a task. `one_step_ratio`, `one_step_us`: every step is a task of its own, as while
    others wait.
    """
    workflow = no_op_chain()
    seconds: dict[str, list[float]] = {"dask": [], "ours": [], "one_step": []}
    with _cluster(workers) as ours, _cluster(workers) as stock:
        st2i.attach(ours)
        _requests(ours, workflow, min(requests, 50))  # costs learned, imports done
        _chains(stock, min(requests, 50), "warm")
        for number in range(rounds):
            seconds["dask"].append(_measured(stock, _chains, requests, f"round{number}"))
            for kind, steps in (("one_step", 1), ("ours", Settings().steps_per_task)):
                st2i.settings(ours, default_cap=None, steps_per_task=steps)
                seconds[kind].append(_measured(ours, _requests, workflow, requests))
    tasks = requests * LENGTH
    us = {kind: 1e6 * statistics.median(found) / tasks for kind, found in seconds.items()}
    return {
        "ratio": round(us["ours"] / us["dask"], 3),
        "one_step_ratio": round(us["one_step"] / us["dask"], 3),
        "ours_us": round(us["ours"], 1),
        "one_step_us": round(us["one_step"], 1),
        "dask_us": round(us["dask"], 1),
    }


@contextmanager
def _cluster(workers: int) -> Iterator[Client]:
    """A client of a cluster where everything has a process of its own."""
    from distributed.deploy.subprocess import SubprocessCluster

    with (
        SubprocessCluster(
            n_workers=workers,
            worker_class="distributed.Worker",
            threads_per_worker=1,
            dashboard_address=":0",
            scheduler_kwargs={"dashboard": False},
        ) as cluster,
        Client(cluster) as client,
    ):
        client.wait_for_workers(workers, timeout=120)
        yield client


def _measured(client: Client, work: Callable[..., None], *args: Any) -> float:
    """CPU seconds that the scheduler spends on `work(client, *args)`."""
    before = client.run_on_scheduler(time.process_time)
    work(client, *args)
    while client.run_on_scheduler(_tasks):  # until it has forgotten them
        time.sleep(0.05)
    after: float = client.run_on_scheduler(time.process_time)
    return after - before


def _requests(client: Client, workflow: Any, n: int) -> None:
    futures: list[Any] = []
    for first in range(0, n, MESSAGE):
        futures += submit_requests(
            client,
            [
                workflow.request("bench", value=1.0, length=LENGTH)
                for _ in range(min(MESSAGE, n - first))
            ],
        )
    _finish(futures)


def _chains(client: Client, n: int, name: str) -> None:
    futures: list[Any] = []
    for first in range(0, n, MESSAGE):
        tasks: dict[str, Task] = {}
        ends = []
        for number in range(first, min(first + MESSAGE, n)):
            keys = [f"same-{name}-{number}-{step}" for step in range(LENGTH)]
            tasks[keys[0]] = Task(keys[0], _same, 1.0)
            for before, key in itertools.pairwise(keys):
                tasks[key] = Task(key, _same, TaskRef(before))
            ends.append(keys[-1])
        futures += client.get(tasks, ends, sync=False)
    _finish(futures)


def _finish(futures: list[Any]) -> None:
    from distributed import wait

    wait(futures, timeout=300)
    for future in futures:
        assert future.status == "finished", future
        future.release()


def _same(value: float) -> float:
    return value


def _tasks(dask_scheduler: Any) -> int:
    return len(dask_scheduler.tasks)
