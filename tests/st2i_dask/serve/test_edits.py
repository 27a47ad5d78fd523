"""POST /v1/images/edits: forms with images."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from .test_generations import error, picture


def png(image=None, **options):
    file = io.BytesIO()
    image = image or Image.linear_gradient("L").resize((16, 16)).convert("RGB")
    image.save(file, options.pop("format", "PNG"), **options)
    return file.getvalue()


def edit(served, files=None, **fields):
    files = {"image": ("image.png", png())} if files is None else files
    return served.post(
        "/v1/images/edits", files=files, data={"prompt": "again", "model": "retouch", **fields}
    )


def test_an_image_is_edited(served):
    answer = edit(served, seed="3", n="1", output_format="png")
    assert answer.status_code == 200, answer.text
    assert answer.json()["data"][0]["seed"] == 3
    assert np.array_equal(np.asarray(picture(answer)), np.asarray(Image.open(io.BytesIO(png()))))


def test_a_transparent_mask_says_where(served):
    mask = Image.new("RGBA", (16, 16), (0, 0, 0, 255))
    mask.paste((0, 0, 0, 0), (0, 0, 8, 16))
    answer = edit(served, {"image": ("a.png", png()), "mask": ("m.png", png(mask))})
    before, after = np.asarray(Image.open(io.BytesIO(png()))), np.asarray(picture(answer))
    assert np.array_equal(after[:, 8:], before[:, 8:])
    assert np.array_equal(after[:, :8], 255 - before[:, :8])


def test_openai_clients_name_several_images_so(served):
    assert edit(served, [("image[]", ("a.png", png()))]).status_code == 200


@pytest.mark.parametrize("kind", ["JPEG", "WEBP"])
def test_other_formats_are_taken(served, kind):
    assert edit(served, {"image": ("a", png(format=kind))}).status_code == 200


def test_transparency_of_the_image_becomes_white(served):
    answer = edit(served, {"image": ("a.png", png(Image.new("RGBA", (16, 16), (9, 9, 9, 0))))})
    assert np.asarray(picture(answer)).min() == 255


def bomb(width=60_000, height=60_000):
    """A PNG of a few kilobytes that says it has that many pixels."""

    def chunk(kind, data):
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = zlib.compress(b"\0" * 1_000_000)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    )


def text_bomb():
    def chunk(kind, data):
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    whole = png()
    text = chunk(b"zTXt", b"k\0\0" + zlib.compress(b"a" * 200_000_000))
    return whole[:33] + text + whole[33:]


def animated():
    frames = [Image.new("RGB", (16, 16), colour) for colour in ("red", "blue")]
    return png(frames[0], format="WEBP", save_all=True, append_images=frames[1:])


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (bomb(), "image_too_large"),
        (bomb(4097, 4097), "image_too_large"),
        (text_bomb(), "invalid_image"),
        (animated(), "invalid_image"),
        (png()[:-30], "invalid_image"),
        (png(format="GIF"), "invalid_image"),
        (b"", "invalid_image"),
        (b"GIF89a" + bytes(100), "invalid_image"),
        (b"<svg/>", "invalid_image"),
    ],
)
def test_bombs_and_what_is_no_image(served, data, code):
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = error(edit(served, {"image": ("a.png", data)}), 400)
    assert (found["code"], found["param"]) == (code, "image")
    assert not served.cluster.submitted
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # KiB


FORM = {"content-type": "multipart/form-data; boundary=b"}


@pytest.mark.parametrize(
    ("content", "headers"),
    [
        (b"", FORM),
        (b"nonsense", FORM),
        (b"--b\r\n\r\nx", FORM),
        (b"--b\r\ncontent-disposition: form-data\r\n\r\nx\r\n--b--", FORM),
        (b"--b--", FORM),
        (b"", {"content-type": "multipart/form-data"}),
        (b"{}", {"content-type": "application/json"}),
        (b"prompt=x", {"content-type": "application/x-www-form-urlencoded"}),
        (b"x", {}),
    ],
)
def test_wrong_multipart(served, content, headers):
    error(served.post("/v1/images/edits", content=content, headers=headers), 400)


@pytest.mark.parametrize(
    ("files", "fields", "param"),
    [
        ([("x", (None, b"1"))], {}, "x"),
        ([("seed", (None, b"1"))], {}, "image"),
        ([("image", ("a", png()))] * 17, {}, "image"),
        ([("mask", ("a", png()))] * 2 + [("image", ("a", png()))], {}, "mask"),
        ({"picture": ("a", png())}, {}, "picture"),
        ({"image": ("a", png())}, {"n": "two"}, "n"),
        ({"image": ("a", png())}, {"n": "11"}, "n"),
        ({"image": ("a", png())}, {"colour": "red"}, "colour"),
        ({"image": ("a", png())}, {"parameters": "[1]"}, "parameters"),
        ({"image": ("a", png())}, {"parameters": "[" * 9_000}, "parameters"),
        ({"image": ("a", png())}, {"prompt": ["a", "b"]}, "prompt"),
        ({"image": ("a", png())}, {"strength": "0.5"}, "strength"),
        ({"image": ("a", png())}, {"model": "sketch"}, "model"),
    ],
)
def test_what_is_wrong_in_a_form(served, files, fields, param):
    found = error(edit(served, files, **fields), 400)
    assert found["param"] == param, found
    assert not served.cluster.submitted
