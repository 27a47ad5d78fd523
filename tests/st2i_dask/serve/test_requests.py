"""Requests by their ids: where they stand, cancelling, detaching, and whose they are."""

from __future__ import annotations

import threading
import time

import pytest

from .conftest import ALICE, BOB
from .test_generations import error, picture


def until(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def detached(served, **fields):
    answer = served.draw(detach=True, **fields)
    assert answer.status_code == 202, answer.text
    body = answer.json()
    assert answer.headers["x-st2i-request"] == body["id"]
    return body["id"]


def state(served, name, key=ALICE):
    answer = served.get(f"/v1/requests/{name}", key=key)
    assert answer.status_code == 200, answer.text
    return answer.json()


def cancel(served, name, key=ALICE):
    return served.send("DELETE", f"/v1/requests/{name}", key)


def test_a_detached_request_is_found_by_its_id(served):
    served.cluster.hold()
    name = detached(served, n=2, seed=3)
    until(lambda: len(served.cluster.submitted) == 2)
    until(lambda: state(served, name)["queue_position"] == 1)
    waiting = state(served, name)
    assert waiting["status"] == "queued"
    assert waiting["estimated_wait_s"] == 1.5
    assert waiting["progress"] == {"done": 0, "total": 10}
    assert waiting["n"] == 2
    served.cluster.release()
    until(lambda: state(served, name)["status"] == "completed")
    done = state(served, name)
    assert done["progress"] == {"done": 10, "total": 10}
    assert [each["seed"] for each in done["result"]["data"]] == [3, 4]
    assert done["result"]["data"][0]["b64_json"]
    listed = served.get("/v1/requests").json()["data"]
    assert listed[0]["id"] == name
    assert listed[0]["result"] is None
    assert done["n"] == listed[0]["n"] == cancel(served, name).json()["n"] == 2


def test_a_request_in_flight_can_be_cancelled_by_its_id(served):
    served.cluster.hold()
    answers = []
    thread = threading.Thread(target=lambda: answers.append(served.draw()))
    thread.start()
    until(lambda: served.cluster.submitted)
    name = served.get("/v1/requests").json()["data"][0]["id"]
    assert cancel(served, name).json()["status"] == "cancelled"
    thread.join(10)
    assert error(answers[0], 409)["code"] == "request_cancelled"
    assert served.cluster.cancelled == served.cluster.submitted
    assert cancel(served, name).json()["status"] == "cancelled"


def test_cancelling_what_is_over_changes_nothing(served):
    name = detached(served)
    until(lambda: state(served, name)["status"] == "completed")
    assert cancel(served, name).json()["status"] == "completed"
    assert state(served, name)["result"]
    assert not served.cluster.cancelled


def test_a_failed_request_says_why(served):
    name = detached(served, prompt="broken")
    until(lambda: state(served, name)["status"] == "failed")
    assert state(served, name)["error"]["code"] == "generation_failed"
    assert "the brush broke" in state(served, name)["error"]["message"]


def test_another_tenants_request_is_as_unknown_as_none(served):
    served.cluster.hold()
    name = detached(served)
    other = [
        error(served.get(f"/v1/requests/{name}", key=BOB), 404),
        error(cancel(served, name, key=BOB), 404),
        error(served.get("/v1/requests/imgreq_nothing"), 404),
        error(cancel(served, "imgreq_nothing"), 404),
    ]
    assert all(each == other[0] for each in other)
    assert served.get("/v1/requests", key=BOB).json()["data"] == []
    assert state(served, name)["status"] == "queued"
    assert not served.cluster.cancelled
    cancel(served, name)


def test_ids_and_image_names_have_192_random_bits(served):
    names = {detached(served) for _ in range(20)}
    assert len(names) == 20
    assert all(len(name.removeprefix("imgreq_")) == 32 for name in names)
    answer = served.draw(response_format="url", n=2)
    urls = [each["url"].rpartition("/")[2].partition(".")[0] for each in answer.json()["data"]]
    assert urls[0] != urls[1]
    assert all(len(url) == 32 for url in urls)


def disconnecting(served, **fields):
    """Send a request, read nothing, and leave once it is with the cluster."""
    import json
    import socket

    host, port = served.url.removeprefix("http://").split(":")
    body = json.dumps({"prompt": "a star", **fields}).encode()
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(
            b"POST /v1/images/generations HTTP/1.1\r\nhost: x\r\n"
            b"content-type: application/json\r\nauthorization: Bearer %s\r\n"
            b"content-length: %d\r\n\r\n%s" % (ALICE.encode(), len(body), body)
        )
        until(lambda: len(served.cluster.submitted) == fields.get("n", 1))


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels(served, stream):
    served.cluster.hold()
    disconnecting(served, n=2, stream=stream)
    until(lambda: len(served.cluster.cancelled) == 2)
    assert set(served.cluster.cancelled) == set(served.cluster.submitted)
    until(lambda: served.jobs.open_images == 0)


def test_a_client_that_leaves_a_detached_stream_does_not_cancel(served):
    served.cluster.hold()
    disconnecting(served, stream=True, detach=True)
    name = served.get("/v1/requests").json()["data"][0]["id"]
    served.cluster.release()
    until(lambda: state(served, name)["status"] == "completed")
    assert state(served, name)["result"]
    assert not served.cluster.cancelled


def test_an_answered_image_is_not_kept_unless_it_is_fetched_by_url(served):
    before = served.jobs.shelf.nbytes
    assert picture(served.draw())
    assert served.jobs.shelf.nbytes == before
    served.draw(response_format="url")
    assert served.jobs.shelf.nbytes > before
