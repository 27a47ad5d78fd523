"""The server over a real cluster: scheduler, two workers, several tenants."""

from __future__ import annotations

import contextlib
import threading
import time

import httpx
import numpy as np
import openai
import pytest

import st2i_dask as st2i
from st2i_dask.serve.keys import Entry, Holder, KeyRing, digest_of
from st2i_dask.serve.limits import Limits
from st2i_dask.serve.server import application

from .conftest import ADMIN, ALICE, BOB, Front, models, serving
from .test_generations import error, picture
from .test_requests import cancel, detached, state, until


def ring():
    return KeyRing(
        [
            Entry(digest_of(ALICE), Holder("alice"), weight=2.0, cap=4),
            Entry(digest_of(BOB), Holder("bob")),
            Entry(digest_of(ADMIN), Holder("operator", admin=True)),
        ]
    )


@contextlib.contextmanager
def front(address, limits=None):
    limits = limits or Limits()
    app = application(address, models(), ring(), limits)
    with serving(app, limits) as url, httpx.Client(base_url=url, timeout=60) as http:
        yield Front(app, app.state.service.cluster, url, http)
    app.state.service.jobs._check()


@pytest.fixture(scope="module")
def cluster():
    with st2i.local_cluster(2, dashboard_address=":0") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def client(cluster):
    from distributed import Client

    with Client(cluster, set_as_default=False) as client:
        yield client


@pytest.fixture(scope="module")
def served(cluster, path_as_before):
    with front(cluster.scheduler_address) as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_left(served, client):
    """After each test the scheduler knows no request, and no tenant has anything open."""
    yield
    until(lambda: served.jobs.open_images == 0)
    until(lambda: not open_requests(client))


def open_requests(client):
    return [r["tenant"] for r in st2i.tenants(client) if r["queued"] or r["running"]]


def service_s(client, tenant):
    return {r["tenant"]: r["service_s"] for r in st2i.tenants(client)}.get(tenant, 0.0)


def test_the_image_is_the_workflows_own(served, client):
    answer = served.draw(seed=5, size="32x32")
    workflow = served.service.models.get("sketch").workflow
    own = workflow.submit(
        client, prompt="a star", seed=5, width=32, height=32, tenant="alice"
    ).result()
    assert np.array_equal(np.asarray(picture(answer)), np.asarray(own))
    assert picture(answer).text["version"] == own.metadata["version"]


def test_weights_and_caps_of_keys_reach_the_scheduler(served, client):
    served.draw()
    rows = {(name, value) for name, value, _ in st2i.settings(client)}
    assert {("weight alice", "2"), ("cap alice", "4")} <= rows


def test_progress_place_and_wait(served, client, tmp_path):
    go = tmp_path / "go"
    blocking = [detached(served, key=BOB, prompt=f"wait {go}", seed=n) for n in range(2)]
    until(lambda: state(served, blocking[1], key=BOB)["status"] == "running")
    mine = [detached(served, seed=n) for n in range(2)]
    until(lambda: state(served, mine[1])["queue_position"] == 2)
    found = state(served, mine[1])
    assert found["status"] == "queued"
    assert found["progress"] == {"done": 0, "total": 5}
    assert found["estimated_wait_s"] > 0
    go.touch()
    for name in mine:
        until(lambda name=name: state(served, name)["status"] == "completed")


def test_over_the_cap_is_429_with_retry_after(served, tmp_path):
    go = tmp_path / "go"
    running = [detached(served, key=BOB, prompt=f"wait {go}", seed=n) for n in range(2)]
    until(lambda: state(served, running[1], key=BOB)["status"] == "running")
    waiting = detached(served, n=4)
    until(lambda: state(served, waiting)["queue_position"] is not None)
    answer = served.draw()
    found = error(answer, 429)
    assert (found["code"], found["type"]) == ("rate_limit_exceeded", "rate_limit_error")
    assert "its limit is 4" in found["message"]
    assert int(answer.headers["retry-after"]) >= 1
    go.touch()
    until(lambda: state(served, waiting)["status"] == "completed")


def test_a_failure_on_a_worker_is_an_error_with_its_reason(served):
    found = error(served.draw(prompt="broken"), 500)
    assert "RuntimeError: the brush broke" in found["message"]


@pytest.mark.parametrize("stage", ["queued", "first", "later"])
def test_cancelled_at_every_stage_it_frees_its_executor_within_a_step(
    served, client, tmp_path, stage
):
    """What is queued is never charged; what runs ends with its step."""
    go, count = tmp_path / "go", tmp_path / "count"
    blocking = [
        detached(served, key=BOB, prompt=f"wait {go}", seed=n)
        for n in range(2 if stage == "queued" else 1)
    ]
    until(lambda: state(served, blocking[-1], key=BOB)["status"] == "running")
    before = service_s(client, "alice")
    name = detached(served, prompt=f"slow count {count}", num_inference_steps=30)
    if stage == "queued":
        until(lambda: state(served, name)["queue_position"] is not None)
    else:
        least = 1 if stage == "first" else 4
        until(lambda: count.exists() and len(count.read_text().splitlines()) >= least)
    steps = len(count.read_text().splitlines()) if count.exists() else 0
    assert cancel(served, name).json()["status"] == "cancelled"
    free = detached(served, key=ADMIN, prompt="a free executor") if stage != "queued" else None
    if free:
        until(lambda: state(served, free, key=ADMIN)["status"] == "completed", 3)
    go.touch()
    until(lambda: not open_requests(client))
    done = len(count.read_text().splitlines()) if count.exists() else 0
    assert done <= steps + 2 if stage != "queued" else done == 0
    charged = service_s(client, "alice") - before
    assert charged == 0 if stage == "queued" else charged < 0.1 * (done + 2) + 0.3
    for each in blocking:
        until(lambda each=each: state(served, each, key=BOB)["status"] == "completed")


def test_partial_images_come_before_the_end(served):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key=ALICE, timeout=60) as client:
        stream = client.images.generate(
            prompt="slow a star",
            stream=True,
            partial_images=3,
            extra_body={"num_inference_steps": 12},
        )
        found = [(event.type, time.monotonic()) for event in stream]
    *partial, (last, end) = found
    assert last == "image_generation.completed"
    assert [kind for kind, _ in partial] == ["image_generation.partial_image"] * 3
    assert end - partial[0][1] > 0.5  # of the 1.2 s that 12 steps take


def test_a_client_that_leaves_frees_its_executor(served, client, tmp_path):
    count = tmp_path / "count"
    body = {"prompt": f"slow count {count}", "num_inference_steps": 40}
    with httpx.Client(base_url=served.url, timeout=httpx.Timeout(60, read=0.8)) as impatient:
        headers = {"authorization": f"Bearer {ALICE}"}
        with pytest.raises(httpx.ReadTimeout):
            impatient.post("/v1/images/generations", json=body, headers=headers)
    until(lambda: not open_requests(client))
    done = len(count.read_text().splitlines())
    time.sleep(0.5)
    assert len(count.read_text().splitlines()) <= done + 1 < 30


def test_a_server_that_ends_leaves_nothing_running(cluster, client, tmp_path):
    count = tmp_path / "count"
    with front(cluster.scheduler_address) as other:
        detached(other, prompt=f"slow count {count}", num_inference_steps=50)
        until(count.exists)
    assert not open_requests(client)
    done = len(count.read_text().splitlines())
    time.sleep(0.5)
    assert len(count.read_text().splitlines()) <= done + 1 < 45


def test_many_at_once_are_all_answered_once(served):
    """40 clients of two tenants; images belong to their own requests."""
    found: dict[int, httpx.Response] = {}

    def one(number):
        key = BOB if number % 2 else ADMIN
        found[number] = served.draw(key=key, seed=number, num_inference_steps=2)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [found[n].status_code for n in range(40)] == [200] * 40
    for number in range(40):
        text = picture(found[number]).text
        assert text["seed"] == str(number)
        assert text["tenant"] == ("bob" if number % 2 else "operator")
    assert len({found[n].json()["id"] for n in range(40)}) == 40
