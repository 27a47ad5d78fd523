"""Results: metadata that stays with the image, pixels that are checked, Diffusers' rounding."""

from __future__ import annotations

import copy
import io
import json
import math
import pickle

import numpy as np
import pytest
from PIL import Image

from st2i_dask.errors import OutputError
from st2i_dask.image import GeneratedImage, check_pixels, finish, read_metadata, to_image

ABOUT = {
    "workflow": "flux",
    "version": "0123456789abcdef",
    "prompt": "a small yellow star",
    "seed": 2**64 - 1,
    "steps": 4,
    "tenant": "alice@example.org",
    "parameters": {"num_steps": 4, "guidance_scale": 3.5},
}
PROMPTS = {
    "latin-1": "un café, naïve façade",
    "line breaks": "two\nlines\tand a tab\r\n",
    "other alphabets": "кошка и 猫 🐈 \u202e",
    "very long latin-1": "x" * 200_000,
    "very long": "猫" * 200_000,
    "nul": "a\x00b",
    "nul and not latin-1": "a\x00猫",
}


def picture(**about):
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 255, (24, 40, 3), dtype=np.uint8)
    return finish(Image.fromarray(pixels), {**ABOUT, **about})


# ---------------------------------------------------------------- metadata


def test_finish_adds_the_size_and_leaves_other_values_alone():
    image = picture()
    assert isinstance(image, GeneratedImage)
    assert image.metadata == {**ABOUT, "size": "40x24"}
    array = np.zeros(3)
    assert finish(array, ABOUT) is array
    assert finish(None, ABOUT) is None


def test_metadata_is_a_copy():
    image = picture()
    image.metadata["prompt"] = "changed"
    assert image.metadata["prompt"] == ABOUT["prompt"]


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_metadata_and_pixels_survive_pickling(protocol):
    image = picture()
    again = pickle.loads(pickle.dumps(image, protocol))
    assert type(again) is GeneratedImage
    assert again.metadata == image.metadata
    assert again.tobytes() == image.tobytes()


def test_metadata_survives_dask_and_a_deep_copy():
    from distributed.protocol import deserialize, serialize

    image = picture()
    for again in (deserialize(*serialize(image)), copy.deepcopy(image)):
        assert again.metadata == image.metadata
        assert again.tobytes() == image.tobytes()


def test_the_info_of_the_original_is_kept():
    original = Image.new("RGB", (2, 2))
    original.info["dpi"] = (72, 72)
    image = GeneratedImage.of(original, ABOUT)
    assert image.info["dpi"] == (72, 72)
    assert "st2i" not in original.info


def test_conversions_are_plain_images_and_can_be_saved():
    image = picture()
    for derived in (image.resize((8, 8)), image.convert("L"), image.crop((0, 0, 4, 4))):
        derived.save(io.BytesIO(), "PNG")
    palette = GeneratedImage.of(image.quantize(4), ABOUT)
    assert palette.convert("RGB").getpixel((3, 3)) == image.quantize(4).convert("RGB").getpixel(
        (3, 3)
    )


# ---------------------------------------------------------------- files


@pytest.mark.parametrize("kind", PROMPTS)
def test_a_saved_png_says_how_it_was_made(tmp_path, kind):
    image = picture(prompt=PROMPTS[kind])
    path = tmp_path / "image.png"
    image.save(path)
    read = read_metadata(path)
    assert read["prompt"] == PROMPTS[kind]
    assert read["workflow"] == "flux"
    assert read["size"] == "40x24"
    assert int(read["seed"]) == 2**64 - 1
    assert json.loads(read["parameters"]) == ABOUT["parameters"]
    with Image.open(path) as reopened:
        assert reopened.tobytes() == image.tobytes()


def save_to_path(image, path):
    image.save(path)


def save_to_text(image, path):
    image.save(str(path))


def save_to_bytes(image, path):
    image.save(bytes(path))


def save_with_format(image, path):
    image.save(path, "png")


def save_to_open_file(image, path):
    with path.open("wb") as file:
        image.save(file)


def save_to_buffer(image, path):
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", optimize=True)
    path.write_bytes(buffer.getvalue())


def save_to_named_buffer(image, path):
    buffer = io.BytesIO()
    buffer.name = "picture.png"
    image.save(buffer)
    path.write_bytes(buffer.getvalue())


@pytest.mark.parametrize(
    "save",
    [
        *(save_to_path, save_to_text, save_to_bytes, save_with_format),
        *(save_to_open_file, save_to_buffer, save_to_named_buffer),
    ],
)
def test_every_way_of_saving_a_png_keeps_the_metadata(tmp_path, save):
    path = tmp_path / "image.PNG"
    save(picture(), path)
    assert read_metadata(path)["prompt"] == ABOUT["prompt"]


def test_other_formats_and_own_text_chunks_work(tmp_path):
    from PIL.PngImagePlugin import PngInfo

    image = picture()
    image.save(tmp_path / "image.jpg", quality=90)
    image.save(io.BytesIO(), format="JPEG")
    image.save(tmp_path / "image.webp")
    with Image.open(tmp_path / "image.jpg") as reopened:
        assert reopened.size == (40, 24)
    assert read_metadata(tmp_path / "image.jpg") == {}
    own = PngInfo()
    own.add_text("mine", "yes")
    image.save(tmp_path / "own.png", pnginfo=own)
    assert read_metadata(tmp_path / "own.png") == {"mine": "yes"}


def test_an_unknown_format_is_pillows_own_error(tmp_path):
    with pytest.raises(ValueError, match="unknown file extension"):
        picture().save(tmp_path / "image.nowhere")
    with pytest.raises(ValueError, match="unknown file extension"):
        picture().save(io.BytesIO())


# ---------------------------------------------------------------- pixels


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "bfloat16"])
def test_numbers_that_are_none_are_refused(bad, dtype):
    torch = pytest.importorskip("torch")
    values = torch.tensor([[bad, 0.5, bad]], dtype=getattr(torch, dtype))
    with pytest.raises(OutputError) as caught:
        check_pixels(values, lowest=0.0, where="the VAE")
    assert str(caught.value) == (
        "the VAE produced 2 of 3 pixels that are NaN or infinite; another dtype (bfloat16 or "
        "float32 instead of float16) usually cures it"
    )


@pytest.mark.parametrize(
    ("value", "lowest"), [(0.0, 0.0), (-0.0, 0.0), (-0.5, 0.0), (-1.0, -1.0), (-3.0, -1.0)]
)
def test_black_is_refused(value, lowest):
    with pytest.raises(OutputError, match="the VAE produced an all-black image; the model's"):
        check_pixels(np.full((1, 3, 4, 4), value), lowest=lowest, where="the VAE")


@pytest.mark.parametrize(("value", "lowest"), [(1e-6, 0.0), (-0.999, -1.0), (1.0, 0.0), (9.0, 0.0)])
def test_one_pixel_above_black_is_enough(value, lowest):
    values = np.full((3, 4, 4), lowest, np.float32)
    values[2, 3, 1] = value
    check_pixels(values, lowest=lowest, where="the VAE")


def test_any_layout_and_gradients_are_read():
    torch = pytest.importorskip("torch")
    values = torch.full((1, 3, 4, 4), -1.0, requires_grad=True).to(
        memory_format=torch.channels_last
    )
    with pytest.raises(OutputError, match="all-black"):
        check_pixels(values, lowest=-1.0, where="the VAE")
    check_pixels(np.ones((4, 4, 3)).transpose(2, 0, 1)[:, ::2], lowest=0.0, where="the VAE")


# ---------------------------------------------------------------- to_image


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("batched", [True, False])
def test_rounding_is_diffusers_own(dtype, batched):
    torch = pytest.importorskip("torch")
    processing = pytest.importorskip("diffusers.image_processor")
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(1, 3, 64, 48, generator=generator).to(getattr(torch, dtype))
    values[0, 0, 0, :6] = torch.tensor([-1.0, 1.0, 0.0, 1 / 255, 254 / 255, 0.5 / 255])
    processor = processing.VaeImageProcessor(do_resize=False)
    (expected,) = processor.postprocess(values.clone(), output_type="pil")
    denormalised = values * 0.5 + 0.5
    ours = to_image(denormalised if batched else denormalised[0])
    assert (ours.mode, ours.size) == ("RGB", (48, 64))
    assert ours.tobytes() == expected.tobytes()


def test_halves_round_to_even_and_extremes_are_cut():
    values = np.zeros((3, 1, 4), np.float32)
    values[0] = [[0.5 / 255, 1.5 / 255, 7.0, -7.0]]
    assert list(np.asarray(to_image(values))[0, :, 0]) == [0, 2, 255, 0]


@pytest.mark.parametrize("shape", [(3,), (1, 4), (4, 4, 3), (1, 4, 4), (2, 3, 4, 4), (4, 4, 4)])
def test_a_wrong_shape_is_refused(shape):
    with pytest.raises(OutputError) as caught:
        to_image(np.ones(shape))
    assert str(caught.value) == f"to_image got shape {shape}; wanted (3, H, W) or (1, 3, H, W)"


def test_to_image_refuses_nan_and_black():
    with pytest.raises(OutputError, match="to_image produced 48 of 48 pixels that are NaN"):
        to_image(np.full((3, 4, 4), math.nan))
    with pytest.raises(OutputError, match="to_image produced an all-black image"):
        to_image(np.zeros((3, 4, 4)))
