"""stream=true: server-sent events."""

from __future__ import annotations

import base64
import io
import json

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
    assert error(served.draw(partial_images=1), 400)["param"] == "partial_images"
