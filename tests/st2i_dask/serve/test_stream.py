"""stream=true: server-sent events."""

from __future__ import annotations

import base64
import io
import json

import numpy as np
import pytest
from PIL import Image

from .conftest import ALICE
from .test_generations import error


def events(served, **fields):
    """(event, data) pairs, comments left out."""
    found = []
    body = {"prompt": "a star", "stream": True, **fields}
    headers = {"authorization": f"Bearer {ALICE}"}
    with served.http.stream("POST", "/v1/images/generations", json=body, headers=headers) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["x-st2i-request"].startswith("imgreq_")
        for block in "".join(answer.iter_text()).split("\n\n"):
            lines = [line for line in block.split("\n") if line and not line.startswith(":")]
            if lines:
                kind, data = lines
                found.append(
                    (kind.removeprefix("event: "), json.loads(data.removeprefix("data: ")))
                )
    return found


def test_every_image_is_an_event(served):
    found = events(served, n=2, seed=4, output_format="jpeg")
    assert [kind for kind, _ in found] == ["image_generation.completed"] * 2
    for number, (kind, data) in enumerate(found):
        assert data["type"] == kind
        assert data["seed"] == 4 + number
        assert data["usage"]["total_tokens"] == 0
        image = Image.open(io.BytesIO(base64.b64decode(data["b64_json"])))
        assert (image.format, image.size) == ("JPEG", (16, 16))


def test_a_failure_is_an_event(served):
    [(kind, data)] = events(served, prompt="broken")
    assert kind == "error"
    assert data["error"]["code"] == "generation_failed"


def test_what_is_wrong_is_refused_before_the_stream(served):
    assert error(served.draw(stream=True, n=20), 400)["param"] == "n"
    for fields in (
        {"partial_images": 1},
        {"partial_images": 4, "stream": True},
        {"partial_images": 1, "stream": True, "n": 2},
    ):
        assert error(served.draw(**fields), 400)["param"] == "partial_images"


def test_events_have_no_urls(served):
    refused = error(served.draw(stream=True, response_format="url"), 400)
    assert refused["param"] == "response_format"
    assert "b64_json" in refused["message"]
    form = {"prompt": "a star", "model": "retouch", "stream": "true", "response_format": "url"}
    file = io.BytesIO()
    Image.new("RGB", (16, 16)).save(file, "PNG")
    files = {"image": ("a.png", file.getvalue(), "image/png")}
    answer = served.post("/v1/images/edits", data=form, files=files)
    assert error(answer, 400)["param"] == "response_format"
    assert not served.cluster.submitted


@pytest.mark.parametrize("fields", [{"num_inference_steps": 1}, {"model": "unseeded"}])
def test_partial_images_are_none_where_nothing_is_between_steps(served, fields):
    found = events(served, partial_images=2, **fields)
    assert [kind for kind, _ in found] == ["image_generation.completed"]


def image_of(data):
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data["b64_json"]))), np.float32)


@pytest.mark.parametrize(("steps", "count", "shown"), [(4, 3, [1, 2, 3]), (4, 1, [2]), (2, 3, [1])])
def test_partial_images_are_the_picture_after_earlier_steps(served, steps, count, shown):
    """A step of the sketch takes 5 % of the light."""
    found = events(served, seed=1, num_inference_steps=steps, partial_images=count)
    *partial, (last, final) = found
    assert last == "image_generation.completed"
    assert [kind for kind, _ in partial] == ["image_generation.partial_image"] * len(shown)
    assert [data["partial_image_index"] for _, data in partial] == list(range(len(shown)))
    [(_, alone)] = events(served, seed=1, num_inference_steps=steps)
    assert final["b64_json"] == alone["b64_json"]  # pixels and metadata
    for step, (_, data) in zip(shown, partial, strict=True):
        light = image_of(data).mean() / image_of(final).mean()
        assert light == pytest.approx(0.95 ** (step - steps), abs=0.01)
