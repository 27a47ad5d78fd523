"""200 clients of five tenants for two minutes: nothing lost or doubled, fair shares, memory flat."""

from __future__ import annotations

import asyncio
import base64
import io
import os
import time
from collections import Counter

import httpx
import psutil
import pytest
from PIL import Image

import st2i_dask as st2i
from st2i_dask.serve.keys import Entry, Holder, KeyRing, digest_of
from st2i_dask.serve.limits import Limits
from st2i_dask.serve.models import Models
from st2i_dask.serve.server import application

from .conftest import SKETCH, serving

SECONDS, SETTLED = 120.0, 30.0
#: By tenant: clients and weight. Many clients give no right to more.
TENANTS = {"many": (80, 1), "some": (50, 1), "heavy": (30, 2), "few": (20, 1), "last": (20, 1)}


def key(tenant):
    return f"st2i-{tenant}"


class Load:
    """Clients that ask, wait and ask again."""

    def __init__(self, url):
        self.url, self.end = url, time.monotonic() + SECONDS
        self.asked, self.answers, self.health = 0, [], []

    async def client(self, http, tenant):
        while time.monotonic() < self.end:
            seed = self.asked
            self.asked += 1
            began = time.monotonic()
            answer = await http.post(
                "/v1/images/generations",
                json={"prompt": f"{tenant} {seed} slow", "seed": seed, "num_inference_steps": 2},
                headers={"authorization": f"Bearer {key(tenant)}"},
            )
            self.answers.append((tenant, seed, answer, time.monotonic() - began))

    async def watch(self, http):
        while time.monotonic() < self.end:
            began = time.monotonic()
            assert (await http.get("/healthz")).status_code == 200
            self.health.append(time.monotonic() - began)
            await asyncio.sleep(0.25)

    async def run(self):
        limits = httpx.Limits(max_connections=300)
        async with httpx.AsyncClient(
            base_url=self.url, timeout=300, limits=limits, verify=False
        ) as http:
            clients = [
                self.client(http, name) for name, (n, _) in TENANTS.items() for _ in range(n)
            ]
            await asyncio.gather(self.watch(http), *clients)


def resident():
    """MiB of this process (server, scheduler, clients) and of its children (workers)."""
    own = psutil.Process(os.getpid())
    children = sum(child.memory_info().rss for child in own.children(recursive=True))
    return own.memory_info().rss / 2**20, children / 2**20


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_minutes_of_200_clients(path_as_before, fresh_registry, capsys):
    models = Models()
    models.add("sketch", f"{SKETCH}:sketch")
    ring = KeyRing(
        [Entry(digest_of(key(t)), Holder(t), weight=float(w)) for t, (_, w) in TENANTS.items()]
    )
    with st2i.local_cluster(2, dashboard_address=":0") as cluster:
        from distributed import Client

        with Client(cluster, set_as_default=False) as client:
            app = application(cluster.scheduler_address, models, ring, Limits())
            with serving(app, Limits()) as url:
                st2i.settings(client, slack_s=0.5)
                load, samples = Load(url), []

                def sample():
                    used = {row["tenant"]: row["service_s"] for row in st2i.tenants(client)}
                    samples.append((time.monotonic(), used, resident()))

                async def main():
                    async def look():
                        await asyncio.sleep(SETTLED)
                        while time.monotonic() < load.end:
                            await asyncio.to_thread(sample)
                            await asyncio.sleep(5)

                    await asyncio.gather(load.run(), look())

                asyncio.run(main())
                totals = {
                    row["tenant"]: row["queued"] + row["running"] for row in st2i.tenants(client)
                }
                left = app.state.service.jobs.open_images
    report(capsys, load, samples)
    check_answers(load)
    assert left == 0
    assert not any(totals.values())
    check_shares(samples)
    check_memory(samples)


def check_answers(load):
    """Every request was answered, with its own image, once."""
    assert [a.status_code for _, _, a, _ in load.answers] == [200] * load.asked
    assert sorted(seed for _, seed, _, _ in load.answers) == list(range(load.asked))
    assert len({answer.json()["id"] for _, _, answer, _ in load.answers}) == load.asked
    for tenant, seed, answer, _ in load.answers:
        image = Image.open(io.BytesIO(base64.b64decode(answer.json()["data"][0]["b64_json"])))
        assert (image.text["tenant"], image.text["seed"]) == (tenant, str(seed))
        assert image.text["prompt"] == f"{tenant} {seed} slow"


def used(samples):
    first, last = samples[0][1], samples[-1][1]
    return {tenant: last[tenant] - first[tenant] for tenant in TENANTS}


def check_shares(samples):
    """Device seconds by weight, to a tenth."""
    seconds = used(samples)
    total, weights = sum(seconds.values()), sum(w for _, w in TENANTS.values())
    for tenant, (_, weight) in TENANTS.items():
        assert seconds[tenant] / total == pytest.approx(weight / weights, rel=0.1)


def check_memory(samples):
    """From half a minute on, less than 5 % more; the clients keep what they have got."""
    kept = 20.0  # MiB
    assert samples[-1][2][1] < 1.05 * samples[0][2][1]
    assert samples[-1][2][0] < 1.05 * samples[0][2][0] + kept


def report(capsys, load, samples):
    seconds = used(samples)
    waits = sorted(wait for *_, wait in load.answers)
    health = sorted(load.health)
    with capsys.disabled():
        print(
            f"\n{load.asked} requests in {SECONDS:.0f} s;",
            Counter(a.status_code for _, _, a, _ in load.answers),
        )
        print("device seconds:", {t: round(s, 1) for t, s in seconds.items()})
        print(f"wait p50 {waits[len(waits) // 2]:.1f} s, p99 {waits[int(len(waits) * 0.99)]:.1f} s")
        print(
            f"health p50 {1e3 * health[len(health) // 2]:.0f} ms, p99 {1e3 * health[int(len(health) * 0.99)]:.0f} ms"
        )
        print(
            "MiB (own, workers):", [tuple(map(round, rss)) for *_, rss in (samples[0], samples[-1])]
        )
