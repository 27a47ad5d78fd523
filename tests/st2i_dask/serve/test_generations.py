"""POST /v1/images/generations as clients use it."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest
from PIL import Image


def picture(answer, number=0):
    data = answer.json()["data"][number]["b64_json"]
    return Image.open(io.BytesIO(base64.b64decode(data)))


def error(answer, status):
    assert answer.status_code == status, answer.text
    assert answer.headers["x-request-id"].startswith("req_")
    found = answer.json()["error"]
    assert set(found) == {"message", "type", "param", "code"}
    return found


def test_an_image_comes_with_its_metadata(served):
    answer = served.draw(seed=7, num_inference_steps=2, size="32x24", negative_prompt="blur")
    assert answer.status_code == 200
    assert answer.headers["x-request-id"].startswith("req_")
    body = answer.json()
    assert body["size"] == "32x24"
    assert body["output_format"] == "png"
    assert body["data"][0]["seed"] == 7
    assert body["usage"]["total_tokens"] == 0
    image = picture(answer)
    assert (image.format, image.size) == ("PNG", (32, 24))
    assert image.text["prompt"] == "a star"
    assert image.text["seed"] == "7"
    assert image.text["tenant"] == "alice"
    assert image.text["steps"] == "2"
    assert np.asarray(image).std() > 10


def test_images_of_one_request_have_consecutive_seeds(served):
    three = served.draw(seed=5, n=3)
    assert [each["seed"] for each in three.json()["data"]] == [5, 6, 7]
    alone = served.draw(seed=6)
    assert np.array_equal(np.asarray(picture(three, 1)), np.asarray(picture(alone)))
    assert not np.array_equal(np.asarray(picture(three, 0)), np.asarray(picture(three, 1)))


def test_seeds_go_round_after_the_largest(served):
    answer = served.draw(seed=2**64 - 1, n=2)
    assert [each["seed"] for each in answer.json()["data"]] == [2**64 - 1, 0]


def test_without_a_seed_images_differ(served):
    one, other = served.draw(), served.draw()
    assert one.json()["data"][0]["seed"] != other.json()["data"][0]["seed"]


@pytest.mark.parametrize("kind", ["jpeg", "webp"])
def test_other_formats_and_their_compression(served, kind):
    def size(compression):
        answer = served.draw(
            seed=1, size="128x128", output_format=kind, output_compression=compression
        )
        assert picture(answer).format == kind.upper()
        return len(answer.json()["data"][0]["b64_json"])

    assert size(10) < size(90)


def test_a_url_gives_the_image_without_a_key(served):
    answer = served.draw(response_format="url", output_format="webp")
    url = answer.json()["data"][0]["url"]
    assert url.startswith(served.url)
    got = served.get(url, key=None)
    assert got.headers["content-type"] == "image/webp"
    assert Image.open(io.BytesIO(got.content)).size == (16, 16)
    assert error(served.get(url[:-8] + "aaa.webp", key=None), 404)["code"] == "image_not_found"


def test_null_means_the_default(served):
    names = ("n", "size", "quality", "output_format", "response_format", "stream", "user", "model")
    assert served.draw(**dict.fromkeys(names)).status_code == 200


def test_other_parameters_of_the_workflow(served):
    answer = served.draw(parameters={"medium": "chalk", "strength": 0.25})
    assert '"medium": "chalk"' in picture(answer).text["parameters"]


@pytest.mark.parametrize(
    ("fields", "status", "code", "param"),
    [
        ({"prompt": ""}, 400, "invalid_value", "prompt"),
        ({"prompt": "   "}, 400, "invalid_value", "prompt"),
        ({"prompt": "x" * 2001}, 400, "invalid_value", "prompt"),
        ({"prompt": "x" * 40_000}, 400, "invalid_value", "prompt"),
        ({"prompt": None}, 400, "invalid_value", "prompt"),
        ({"prompt": "\ud800"}, 400, "invalid_value", "prompt"),
        ({"prompt": ["a", "b"]}, 400, "invalid_value", "prompt"),
        ({"n": 11}, 400, "invalid_value", "n"),
        ({"n": 0}, 400, "invalid_value", "n"),
        ({"n": "2"}, 400, "invalid_value", "n"),
        ({"n": True}, 400, "invalid_value", "n"),
        ({"size": "17x16"}, 400, "invalid_value", "size"),
        ({"size": "0x16"}, 400, "invalid_value", "size"),
        ({"size": "99999x99999"}, 400, "invalid_value", "size"),
        ({"size": "big"}, 400, "invalid_value", "size"),
        ({"output_format": "gif"}, 400, "invalid_value", "output_format"),
        ({"output_compression": 101}, 400, "invalid_value", "output_compression"),
        ({"background": "transparent"}, 400, "invalid_value", "background"),
        ({"seed": 2**64}, 400, "invalid_value", "seed"),
        ({"num_inference_steps": 51}, 400, "invalid_value", "num_inference_steps"),
        ({"guidance_scale": 3.0}, 400, "unknown_parameter", "guidance_scale"),
        ({"lora": "frame"}, 400, "unknown_parameter", "lora"),
        ({"lora": "/etc/passwd"}, 400, "invalid_value", "lora"),
        ({"lora": {"name": "frame", "path": "x"}}, 400, "invalid_value", "lora"),
        ({"lora": [{"name": "frame", "scale": "1"}]}, 400, "invalid_value", "lora"),
        ({"lora": 1}, 400, "invalid_value", "lora"),
        ({"parameters": {"loras": "/etc/passwd"}}, 400, "invalid_value", "parameters.loras"),
        ({"colour": "red"}, 400, "unknown_parameter", "colour"),
        ({"parameters": {"colour": 1}}, 400, "unknown_parameter", "parameters.colour"),
        ({"parameters": {"medium": "wax"}}, 400, "invalid_value", "parameters.medium"),
        ({"parameters": {"strength": 2}}, 400, "invalid_value", "parameters.strength"),
        ({"parameters": {"seed": 1}}, 400, "invalid_value", "parameters.seed"),
        ({"parameters": {"num_steps": 1}, "num_inference_steps": 2}, 400, "invalid_value",
         "parameters.num_steps"),
        ({"model": "dall-e-2"}, 404, "model_not_found", "model"),
        ({"model": "unseeded", "seed": 1}, 400, "unknown_parameter", "seed"),
        ({"model": "unseeded", "n": 2}, 400, "invalid_value", "n"),
        ({"model": "unseeded", "size": "16x16"}, 400, "unknown_parameter", "size"),
        ({"model": "numbers"}, 500, "generation_failed", None),
        ({"prompt": "broken"}, 500, "generation_failed", None),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_with_its_parameter(served, fields, status, code, param):
    import json

    content = json.dumps({"prompt": "a star", **fields})
    answer = served.post(content=content, headers={"content-type": "application/json"})
    found = error(answer, status)
    assert (found["code"], found["param"]) == (code, param), found
    if status == 400:
        assert found["type"] == "invalid_request_error"
        assert not served.cluster.submitted


def test_a_parameter_of_the_workflow_beside_the_others_is_told_where_it_goes(served):
    said = error(served.draw(medium="chalk"), 400)
    assert said["param"] == "medium"
    assert "put it under 'parameters': {\"medium\": ...}" in said["message"]
    for other in ({"colour": 1}, {"num_images": 2}, {"medium": "chalk", "model": "dall-e-2"}):
        assert "parameters" not in error(served.draw(**other), 400)["message"]


def test_a_body_that_is_no_json(served):
    headers = {"content-type": "application/json"}
    for content in (b"{", b"\xff\xfe", b"[" * 50_000, b""):
        error(served.post(content=content, headers=headers), 400)


def test_unknown_paths_and_methods(served):
    assert error(served.get("/v1/nothing"), 404)["code"] == "not_found"
    assert error(served.get("/v1/images/generations"), 405)["code"] == "method_not_allowed"


def test_models(served):
    listed = served.get("/v1/models").json()
    assert [each["id"] for each in listed["data"]] == ["sketch", "retouch", "unseeded", "numbers"]
    one = served.get("/v1/models/sketch").json()
    assert one["object"] == "model"
    assert {"prompt", "num_steps"} <= {each["name"] for each in one["parameters"]}
    assert error(served.get("/v1/models/none"), 404)["code"] == "model_not_found"
