"""The paper's 8.4 microbenchmark in virtual time: 8 executors, Z-Image-Turbo against Flux.1-Schnell.

Step and decode seconds of Flux.1-Schnell are those measured on an H800 by the DiFlow artifact,
rounded; Z-Image-Turbo is scaled by its size. Arrivals are Poisson, and come in bursts. An executor
holds the models of one workflow: serving the other tenant in between costs loads, which is what
strict fairness pays for and slack saves.
"""

from __future__ import annotations

import random

from scheduler_plugin.outline import chain
from scheduler_plugin.policy import FairPolicy
from scheduler_plugin.settings import Settings

from .virtual_cluster import Truth, VirtualCluster

ZIMAGE = chain(
    "z-image-turbo",
    [("Text", "qwen", "77"), *[("Step", "z-image", "1024")] * 8, ("Decode", "z-vae", "1024")],
)
FLUX = chain(
    "flux-schnell",
    [("Text", "t5", "77"), *[("Step", "flux", "1024")] * 4, ("Decode", "f-vae", "1024")],
)
COMPUTE = {"qwen": 0.03, "z-image": 0.12, "z-vae": 0.25, "t5": 0.03, "flux": 0.22, "f-vae": 0.25}
LOAD = {"qwen": 0.8, "z-image": 1.2, "z-vae": 0.03, "t5": 1.2, "flux": 2.7, "f-vae": 0.03}
EXECUTORS = 8
DEADLINE = 4.0  # times the latency of a request alone, models loaded


def attainment(slack_s: float, seed: int, seconds: float, load: float) -> float:
    """Part of the requests that finish within their deadline. load: of the executors, loads of models
    not counted."""
    rng = random.Random(seed)
    policy = FairPolicy(Settings(slack_s=slack_s, default_cap=None))
    truth = Truth(compute=COMPUTE, load=LOAD, noise=0.1, held=3)
    cluster = VirtualCluster(policy, EXECUTORS, truth, seed=seed)
    alone = {o.workflow: sum(COMPUTE[s.model] for s in o.steps) for o in (ZIMAGE, FLUX)}
    for tenant, outline in (("z", ZIMAGE), ("f", FLUX)):
        rate = load * EXECUTORS / 2 / alone[outline.workflow]
        at = 0.0
        while (at := at + rng.expovariate(rate)) < seconds:
            burst = 1.6 if int(at // 5) % 2 == (tenant == "z") else 0.4
            if rng.random() < burst / 1.6:
                for _ in range(rng.choice((1, 1, 3))):
                    cluster.submit(at, tenant, outline)
    cluster.run()
    met = [
        job.finished is not None
        and job.finished - job.submitted <= DEADLINE * alone[job.outline.workflow]
        for job in cluster.jobs.values()
    ]
    return sum(met) / len(met)
