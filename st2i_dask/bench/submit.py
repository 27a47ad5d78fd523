"""Submitting: how long `Workflow.submit` takes for a request of 31 invocations.

Measured on the client while nothing else runs: parameters checked, graph built, message sent.
"""

from __future__ import annotations

import statistics
import time

from .hop import no_op_chain

INVOCATIONS = 31
ROUNDS = 30


def run(rounds: int = ROUNDS) -> dict[str, float]:
    """Median and worst milliseconds of one submit: `submit_ms`, `worst_ms`."""
    from distributed import Client

    import st2i_dask as st2i

    workflow = no_op_chain()
    times = []
    with st2i.local_cluster(1, dashboard_address=None) as cluster, Client(cluster) as client:
        st2i.attach(client)
        for _ in range(rounds + 1):
            start = time.perf_counter()
            future = workflow.submit(client, value=1.0, length=INVOCATIONS)
            times.append(1e3 * (time.perf_counter() - start))
            future.result(timeout=60)
    times = times[1:]  # the first one composes
    return {"submit_ms": round(statistics.median(times), 3), "worst_ms": round(max(times), 3)}
