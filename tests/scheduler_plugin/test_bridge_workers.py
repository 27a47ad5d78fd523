"""Workers of a live cluster that come and go while requests run."""

from __future__ import annotations

import os
import signal
import time

import pytest
from distributed import Worker, wait

from .live import (
    TIMEOUT,
    decisions_of,
    gate,
    hooks,
    learn,
    rest,
    runs,
    serving,
    standing,
    submit,
    until,
)


def test_losing_an_input_while_the_consumer_runs():
    """The thread goes on after Dask has taken the task back: its executor is not free."""
    with serving(2, steps_per_task=1) as client:
        workers = sorted(client.scheduler_info(n_workers=-1)["workers"])
        learn(client, steps=2)
        begun, go = gate("ann", at=1.0)
        (future,) = submit(client, "ann", 1, steps=2)
        begun.wait(TIMEOUT)
        here = next(w for w, keys in client.processing().items() if keys)
        (source,) = [run for run in runs if run.label == "ann"]
        key = source.key
        assert source.worker in workers
        made = decisions_of(client)

        def lose(dask_scheduler):
            dask_scheduler.transitions({key: "released"}, "test-lost")

        client.run_on_scheduler(lose)
        until(lambda: client.run_on_scheduler(standing)["draining in the bridge"] == 1)
        until(lambda: [d.key for d in made].count(key) == 1)
        assert {d.executor for d in made} == set(workers) - {here}
        go.set()
        assert future.result(timeout=TIMEOUT) == 2.0
        del future


def test_restart_in_the_middle():
    with serving(2, processes=True) as client:
        futures = submit(client, "ann", 6, steps=20, seconds=0.02)
        time.sleep(0.3)
        client.restart(timeout=TIMEOUT)
        assert all(future.status in ("cancelled", "lost") for future in futures)
        del futures
        rest(client)
        assert client.gather(submit(client, "bob", 3, steps=3)) == [3.0, 4.0, 5.0]


@pytest.mark.parametrize("steps_per_task", [1, 8])
def test_retire_workers_while_requests_run(steps_per_task):
    with serving(3, steps_per_task=steps_per_task) as client:
        futures = submit(client, "ann", 6, steps=12, seconds=0.01)
        until(lambda: runs)
        gone = sorted(client.scheduler_info(n_workers=-1)["workers"])[:2]
        client.retire_workers(gone)
        assert client.gather(futures) == [12.0 + i for i in range(6)]
        late = [r for r in runs if r.worker in gone]
        assert len(late) < len(runs)
        del futures


def test_scaling_up_and_down_while_requests_run():
    with serving(1) as client:
        cluster = client.cluster
        futures = submit(client, "ann", 12, steps=10, seconds=0.01)
        until(lambda: runs)
        cluster.scale(3)
        until(lambda: len({run.worker for run in runs}) == 3)
        cluster.scale(1)
        assert client.gather(futures) == [10.0 + i for i in range(12)]
        until(lambda: len(client.scheduler_info(n_workers=-1)["workers"]) == 1)
        del futures


def test_no_worker_at_first_and_adaptive_scaling():
    with serving(0) as client:
        futures = submit(client, "ann", 6, steps=4, seconds=0.02)
        until(lambda: client.run_on_scheduler(standing)["queued"] == 6)
        adaptive = client.cluster.adapt(minimum=0, maximum=2, interval="100 ms")
        assert client.gather(futures) == [4.0 + i for i in range(6)]
        del futures
        until(lambda: not client.scheduler_info(n_workers=-1)["workers"])
        assert submit(client, "ann", 1)[0].result(timeout=TIMEOUT) == 3.0
        adaptive.stop()


@pytest.mark.parametrize("steps_per_task", [1, 8])
def test_kill_nine_and_the_nannys_next_worker(steps_per_task):
    with serving(2, processes=True, steps_per_task=steps_per_task) as client:
        futures = submit(client, "ann", 6, steps=16, seconds=0.02)
        time.sleep(0.25)
        for pid in list(client.run(os.getpid).values())[:1]:
            os.kill(pid, signal.SIGKILL)
        assert not wait(futures, timeout=TIMEOUT).not_done
        assert client.gather(futures) == [16.0 + i for i in range(6)]
        client.wait_for_workers(2, timeout=TIMEOUT)
        del futures


def test_a_worker_comes_back_under_its_old_address():
    with serving(0, cluster_options={"protocol": "tcp"}) as client:
        address = client.cluster.scheduler_address
        first = client.cluster.sync(_start, address, 0)
        port = first.port
        begun, go = gate("ann", at=2.0)
        (future,) = submit(client, "ann", 1, steps=6)
        begun.wait(TIMEOUT)
        client.cluster.sync(_vanish, first)
        until(lambda: not client.scheduler_info(n_workers=-1)["workers"])
        hooks.clear()
        second = client.cluster.sync(_start, address, port)
        assert second.address == first.address
        assert future.result(timeout=TIMEOUT) == 6.0
        go.set()
        del future
        rest(client)
        client.cluster.sync(_close, second)


async def _start(scheduler, port):
    return await Worker(scheduler, nthreads=1, host="127.0.0.1", port=port, dashboard=False)


async def _vanish(worker):
    """The connection breaks; nothing is said."""
    worker.batched_stream.comm.abort()
    await worker.close(executor_wait=False, nanny=False)


async def _close(worker):
    await worker.close()
