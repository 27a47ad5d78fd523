"""Clients that do not behave: what they get, and that nobody else notices."""

from __future__ import annotations

import json
import socket
import threading
import time

import pytest

from st2i_dask.serve.limits import Limits

from .conftest import ALICE, BOB, front
from .test_generations import error
from .test_requests import detached, until

LIMITS = Limits(
    header_s=0.5,
    body_s=0.5,
    write_s=0.5,
    json_bytes=10_000,
    upload_bytes=100_000,
    header_bytes=16_000,
    connections=40,
    open_images=8,
    results_bytes=12_000_000,
)


@pytest.fixture(scope="module")
def module_front(path_as_before):
    with front(LIMITS) as made:
        yield made


def connect(served):
    host, port = served.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def head(path="/v1/images/generations", method="POST", **headers):
    lines = [f"{method} {path} HTTP/1.1", "host: x", f"authorization: Bearer {ALICE}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def read_all(connection):
    """Until the server closes; a test's time-out is a failure."""
    data = b""
    while True:
        try:
            piece = connection.recv(65536)
        except ConnectionResetError:
            return data
        if not piece:
            return data
        data += piece


def answer_of(data):
    """Status, headers and error object of a raw answer."""
    top, _, body = data.partition(b"\r\n\r\n")
    lines = top.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines[1:])
    assert headers["x-request-id"].startswith("req_")
    return int(lines[0].split()[1]), headers, json.loads(body)["error"]


@pytest.mark.parametrize(
    "sent",
    [b"", b"P", b"POST /v1/images/generations HTTP/1.1\r\nhost: x\r\n", b"\x16\x03\x01\x02\x00"],
)
def test_headers_that_do_not_come_are_not_waited_for(served, sent):
    with connect(served) as connection:
        connection.sendall(sent)
        began = time.monotonic()
        data = read_all(connection)
        assert time.monotonic() - began < 5
    if data:
        status, headers, found = answer_of(data)
        assert (status, headers["connection"], found["code"]) == (400, "close", "invalid_http")


def test_a_second_request_that_does_not_come_is_not_waited_for(served):
    with connect(served) as connection:
        connection.sendall(head("/v1/models", "GET") + b"GET /v1/mod")
        began = time.monotonic()
        assert read_all(connection).startswith(b"HTTP/1.1 200")
        assert time.monotonic() - began < 5


def test_a_half_sent_body_is_not_waited_for(served):
    with connect(served) as connection:
        connection.sendall(head(content_length=100, content_type="application/json") + b'{"prompt"')
        status, headers, found = answer_of(read_all(connection))
    assert (status, headers["connection"], found["code"]) == (408, "close", "body_timeout")
    assert not served.cluster.submitted


def test_a_body_that_trickles_is_not_waited_for(served):
    with connect(served) as connection:
        connection.sendall(head(content_length=100, content_type="application/json"))

        def trickle():
            for _ in range(50):
                try:
                    connection.sendall(b" ")
                except OSError:
                    return
                time.sleep(0.05)

        thread = threading.Thread(target=trickle)
        thread.start()
        began = time.monotonic()
        assert answer_of(read_all(connection))[0] == 408
        assert time.monotonic() - began < 2
        thread.join(10)


def test_a_form_that_stops_half_way_is_not_waited_for(served):
    kind = "multipart/form-data; boundary=b"
    with connect(served) as connection:
        connection.sendall(head("/v1/images/edits", content_length=5000, content_type=kind))
        connection.sendall(
            b'--b\r\ncontent-disposition: form-data; name="image"; filename="a"\r\n\r\nx'
        )
        assert answer_of(read_all(connection))[0] == 408


@pytest.mark.parametrize("path", ["/v1/images/generations", "/v1/images/edits"])
def test_a_huge_body_is_refused_before_it_is_sent(served, path):
    with connect(served) as connection:
        connection.sendall(head(path, content_length=10**12, expect="100-continue"))
        status, headers, found = answer_of(read_all(connection))
    assert (status, headers["connection"], found["code"]) == (413, "close", "body_too_large")


def test_a_huge_body_that_does_not_say_so(served):
    chunk = b"2000\r\n" + b" " * 0x2000 + b"\r\n"
    with connect(served) as connection:
        connection.sendall(head(transfer_encoding="chunked", content_type="application/json"))
        try:
            for _ in range(200):
                connection.sendall(chunk)
        except OSError:
            pass
        data = read_all(connection)
    assert not data or answer_of(data)[0] == 413
    assert not served.cluster.submitted


@pytest.mark.parametrize(
    "headers",
    [
        {"x_long": "y" * 20_000},
        {f"x_{n}": "y" * 100 for n in range(300)},
        {"content_length": "-1"},
        {"content_length": "1, 2"},
        {"transfer_encoding": "gzip, chunked, x"},
    ],
)
def test_headers_that_are_wrong_or_huge(served, headers):
    with connect(served) as connection:
        connection.sendall(head(**headers))
        assert answer_of(read_all(connection))[0] in (400, 501)


def test_a_reader_that_does_not_read_is_cut_off(served):
    """Its connection goes, and so does what was written for it."""
    body = json.dumps({"prompt": "a", "n": 2, "size": "1024x1024"}).encode()
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    host, port = served.url.removeprefix("http://").split(":")
    connection.settimeout(10)
    connection.connect((host, int(port)))
    with connection:
        request = head(content_length=len(body), content_type="application/json")
        connection.sendall(request + body)
        until(lambda: served.jobs.open_images == 0 and len(served.cluster.submitted) == 2)
        time.sleep(2)
        data = read_all(connection)
    length = int(data.partition(b"content-length: ")[2].partition(b"\r\n")[0])
    assert len(data) < length


def test_connections_have_a_limit(served):
    kept = [connect(served) for _ in range(LIMITS.connections)]
    try:
        until(lambda: refused(served))
    finally:
        for connection in kept:
            connection.close()
    until(lambda: served.get("/healthz").status_code == 200)


def refused(served):
    with connect(served) as connection:
        connection.sendall(head("/v1/models", "GET", connection="close"))
        data = read_all(connection)
    return data.startswith(b"HTTP/1.1 503") and answer_of(data)[2]["code"] == "overloaded"


def test_a_tenant_may_take_half_of_what_is_free_and_the_rest_is_for_others(served):
    served.cluster.hold()
    try:
        names = [detached(served, n=2), detached(served, n=2)]
        answer = served.draw()
        assert error(answer, 429)["code"] == "rate_limit_exceeded"
        assert int(answer.headers["retry-after"]) >= 1
        assert served.draw(key=BOB, n=2, detach=True).status_code == 202
    finally:
        served.cluster.release()
    until(lambda: served.jobs.open_images == 0)
    assert len(names) == 2


def test_overload_is_503_with_retry_after(served):
    served.cluster.hold()
    try:
        for key in (ALICE, BOB, "st2i-admin"):
            while served.draw(key=key, detach=True).status_code == 202:
                pass
        answer = served.draw(key=BOB, n=5)
        assert error(answer, 503)["code"] == "overloaded"
        assert int(answer.headers["retry-after"]) >= 1
        assert served.jobs.open_images <= LIMITS.open_images
    finally:
        served.cluster.release()
    until(lambda: served.jobs.open_images == 0)


def test_kept_images_have_a_limit_of_bytes(served):
    for seed in range(8):
        answer = served.draw(response_format="url", n=2, size="512x512", seed=seed)
        assert answer.status_code == 200, answer.text
    assert 0 < served.jobs.shelf.nbytes <= LIMITS.results_bytes
    assert served.get(answer.json()["data"][0]["url"], key=None).status_code == 200


def test_a_scheduler_that_is_away_is_503(served):
    served.cluster.up = False
    answer = served.draw()
    assert error(answer, 503)["code"] == "scheduler_lost"
    assert int(answer.headers["retry-after"]) >= 1
    assert error(served.get("/healthz", key=None), 503)


def test_a_request_that_takes_too_long_is_504_and_cancelled(path_as_before):
    with front(Limits(request_s=0.3)) as made:
        made.cluster.hold()
        assert error(made.draw(), 504)["code"] == "timeout"
        assert made.cluster.cancelled == made.cluster.submitted
        made.cluster.release()


def test_an_error_of_the_server_itself_has_its_shape(served, monkeypatch):
    def breaks(*args):
        raise KeyError("secret")

    monkeypatch.setattr(served.service.models, "get", breaks)
    answer = served.draw()
    found = error(answer, 500)
    assert found["code"] == "internal_error"
    assert "secret" not in answer.text
    assert answer.headers["x-request-id"] in found["message"]
