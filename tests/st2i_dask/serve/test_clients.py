"""The official openai client, and curl."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import shutil
import subprocess
import threading

import openai
import pytest
from PIL import Image

from .conftest import ALICE
from .test_edits import png
from .test_requests import until


@pytest.fixture(scope="module")
def client(module_front):
    with openai.OpenAI(
        base_url=f"{module_front.url}/v1", api_key=ALICE, max_retries=0, timeout=30
    ) as made:
        yield made


def image_of(text):
    return Image.open(io.BytesIO(base64.b64decode(text)))


def test_generate(served, client):
    made = client.images.generate(
        model="sketch",
        prompt="a star",
        n=2,
        size="32x16",
        quality="high",
        output_format="webp",
        output_compression=80,
        background="opaque",
        moderation="low",
        user="u1",
        extra_body={"seed": 11, "num_inference_steps": 2, "parameters": {"medium": "chalk"}},
    )
    assert (made.size, made.quality, made.output_format) == ("32x16", "high", "webp")
    assert made.usage.total_tokens == 0
    assert [image.seed for image in made.data] == [11, 12]
    assert image_of(made.data[0].b64_json).size == (32, 16)


def test_legacy_arguments(served, client):
    made = client.images.generate(prompt="a star", response_format="url", style="vivid")
    assert made.data[0].url.startswith(served.url)
    assert made.data[0].b64_json is None


def test_stream(served, client):
    kinds = []
    for event in client.images.generate(prompt="a star", stream=True):
        kinds.append(event.type)
        assert image_of(event.b64_json).size == (16, 16)
        assert event.usage.total_tokens == 0
    assert kinds == ["image_generation.completed"]


def test_a_failing_stream_raises(served, client):
    with pytest.raises(openai.APIError, match="the brush broke"):
        list(client.images.generate(prompt="broken", stream=True))


def test_edit(served, client):
    made = client.images.edit(
        model="retouch", image=("a.png", png()), mask=("m.png", png()), prompt="again", n=1
    )
    assert image_of(made.data[0].b64_json).size == (16, 16)
    several = client.images.edit(model="retouch", image=[("a.png", png())], prompt="again")
    assert several.data


def test_edit_as_a_stream(served, client):
    events = list(
        client.images.edit(model="retouch", image=("a.png", png()), prompt="again", stream=True)
    )
    assert [event.type for event in events] == ["image_edit.completed"]


def test_models(served, client):
    assert "sketch" in [model.id for model in client.models.list()]
    assert client.models.retrieve("sketch").owned_by == "st2i"


def test_errors_are_the_clients_own_classes(served, client):
    with pytest.raises(openai.BadRequestError) as wrong:
        client.images.generate(prompt="a star", size="17x17")
    assert (wrong.value.code, wrong.value.param) == ("invalid_value", "size")
    assert wrong.value.request_id.startswith("req_")
    with pytest.raises(openai.NotFoundError) as unknown:
        client.images.generate(prompt="a star", model="gpt-image-9")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    served.cluster.caps["alice"] = 1
    with pytest.raises(openai.RateLimitError):
        client.images.generate(prompt="a star", n=2)
    served.cluster.up = False
    with pytest.raises(openai.InternalServerError):
        client.images.generate(prompt="a star")


def test_the_client_tries_again_what_can_succeed_then(served, client):
    served.cluster.up = False
    timer = threading.Timer(0.5, lambda: setattr(served.cluster, "up", True))
    timer.start()
    assert client.with_options(max_retries=3).images.generate(prompt="a star").data
    timer.join()


def test_an_asynchronous_client_that_is_cancelled_cancels(served):
    async def main():
        async with openai.AsyncOpenAI(
            base_url=f"{served.url}/v1", api_key=ALICE, max_retries=0
        ) as client:
            task = asyncio.create_task(client.images.generate(prompt="a star", n=3))
            while len(served.cluster.submitted) < 3:
                await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    served.cluster.hold()
    asyncio.run(main())
    until(lambda: len(served.cluster.cancelled) == 3)


@pytest.fixture
def curl(served):
    if shutil.which("curl") is None:
        pytest.skip("there is no curl")

    def run(path, *arguments):
        done = subprocess.run(
            [
                *("curl", "-sS", "-m", "30", "-i", served.url + path),
                *("-H", f"Authorization: Bearer {ALICE}", *arguments),
            ],
            capture_output=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        answer = done.stdout.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
        top, _, body = answer.partition(b"\r\n\r\n")
        return top.decode(), body.decode()

    return run


def test_curl_generates(served, curl):
    body = json.dumps({"prompt": "a star", "seed": 3})
    top, answer = curl("/v1/images/generations", "-H", "Content-Type: application/json", "-d", body)
    assert "200 OK" in top
    assert "x-request-id: req_" in top
    assert image_of(json.loads(answer)["data"][0]["b64_json"]).text["seed"] == "3"


def test_curl_edits(served, curl, tmp_path):
    (tmp_path / "a.png").write_bytes(png())
    top, answer = curl(
        "/v1/images/edits",
        *("-F", "model=retouch", "-F", "prompt=again", "-F", "seed=4"),
        *("-F", f"image[]=@{tmp_path}/a.png;type=image/png"),
    )
    assert "200 OK" in top
    assert json.loads(answer)["data"][0]["seed"] == 4


def test_curl_streams(served, curl):
    body = json.dumps({"prompt": "a star", "stream": True})
    top, answer = curl(
        "/v1/images/generations", "-N", "-H", "Content-Type: application/json", "-d", body
    )
    assert "content-type: text/event-stream" in top
    assert "event: image_generation.completed" in answer
