"""Live clusters on which everything goes wrong at once: nothing of any request is left."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest
from distributed import Client, Reschedule, wait

import st2i_dask as st2i

from .live import (
    TIMEOUT,
    chain,
    fan,
    gate,
    hooks,
    rest,
    serving,
    submit,
    until,
)


@pytest.mark.parametrize("seed", [1, 2])
def test_requests_with_random_cancels_leave_nothing(seed):
    random_ = random.Random(seed)
    with serving(2, steps_per_task=4) as client:

        def sometimes(value):
            if random_.random() < 0.02:
                raise ZeroDivisionError
            if random_.random() < 0.02:
                raise Reschedule

        futures = []
        for number in range(150):
            tenant = random_.choice(["ann", "bob", "cid"])
            hooks[tenant] = sometimes
            workflow, size = random_.choice([(chain, "steps"), (fan, "width")])
            futures.append(
                workflow.submit(
                    client,
                    tenant=tenant,
                    value=float(number),
                    label=tenant,
                    **{size: random_.randint(1, 6)},
                )
            )
            if random_.random() < 0.4:
                futures.pop(random_.randrange(len(futures))).cancel()
            if random_.random() < 0.1:
                client.map(lambda x: x, range(5), pure=False)
            time.sleep(random_.random() * 0.005)
        wait(futures, timeout=TIMEOUT)
        assert {f.status for f in futures} <= {"finished", "error"}
        until(lambda: not any(r["queued"] or r["running"] for r in st2i.tenants(client)))
        del futures
        rest(client)
        assert client.gather(submit(client, "dan", 4, steps=5)) == [5.0 + i for i in range(4)]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_soak_with_killed_and_retired_workers_and_plain_tasks(seed):
    random_ = random.Random(seed)
    with serving(3, processes=True, steps_per_task=6) as client:
        futures, expected, size_of_cluster = [], [], 3
        for _ in range(120):
            value, size = float(random_.randint(0, 9)), random_.randint(1, 12)
            seconds = random_.choice([0.0, 0.005, 0.02])
            future = chain.submit(
                client,
                tenant=random_.choice(["ann", "bob", "cid"]),
                value=value,
                steps=size,
                seconds=seconds,
            )
            futures.append(future)
            expected.append(value + size)
            event = random_.random()
            if event < 0.3:
                at = random_.randrange(len(futures))
                futures.pop(at).cancel()
                expected.pop(at)
            elif event < 0.34:
                pids = client.run(os.getpid, on_error="ignore")
                os.kill(random_.choice(sorted(pids.values())), signal.SIGKILL)
                client.wait_for_workers(min(size_of_cluster, 2), timeout=TIMEOUT)
            elif event < 0.4:
                plain = client.map(time.sleep, [0.01] * 10, pure=False)
            elif event < 0.44:
                size_of_cluster = random_.choice([2, 3, 4])
                client.cluster.scale(size_of_cluster)
            time.sleep(random_.random() * 0.05)
        assert client.gather(futures) == expected
        del future, futures, plain


def test_a_client_that_disappears_takes_its_requests_along():
    with serving(1) as client:
        begun, go = gate("ann")
        with Client(client.cluster) as other:
            st2i.attach(other)
            submit(other, "ann", 5, steps=5)
            kept = submit(other, "ann", 1)
            begun.wait(TIMEOUT)
        del kept
        go.set()
        rest(client)
        assert submit(client, "bob", 1)[0].result(timeout=TIMEOUT) == 3.0
