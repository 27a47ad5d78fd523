"""Images as parameters: every refusal, and what arrives is what the pipeline would have been given."""

from __future__ import annotations

import io
import pickle

import numpy as np
import pytest
import torch
from PIL import Image

from st2i_dask.catalogue.input_image import InputImage, restore
from st2i_dask.errors import ParameterError

RULE = InputImage()
SIZE = {"height": 32, "width": 48}


def noise(*shape, kind=np.float32):
    return np.random.default_rng(0).random(shape).astype(kind)


def picture(height=32, width=48):
    return Image.fromarray((noise(height, width, 3) * 255).astype(np.uint8))


def travelled(value, values=SIZE):
    RULE.check("image", value, values)
    carried = RULE.carry("image", value, values)
    assert type(carried) is np.ndarray
    assert carried.flags.c_contiguous
    arrived = pickle.loads(pickle.dumps(carried))
    arrived.flags.writeable = False  # as Dask hands it over
    return restore(arrived)


def preprocessed(image):
    """What FluxControlNetPipeline makes of it, for a VAE of factor 2."""
    from diffusers import FluxControlNetPipeline
    from diffusers.image_processor import VaeImageProcessor

    class Helper:
        image_processor = VaeImageProcessor(vae_scale_factor=4)

    return FluxControlNetPipeline.prepare_image(
        Helper(), image, SIZE["width"], SIZE["height"], 1, 1, "cpu", torch.float32
    )


@pytest.mark.parametrize(
    "image",
    [
        picture(),
        picture(20, 70),
        picture(200, 100),
        picture(33, 49),
        picture(1, 1),
        noise(32, 48, 3),
        noise(1, 40, 20, 3),
        noise(64, 64, 3, kind=np.float64),
        noise(48, 32, 3).transpose(1, 0, 2),
        torch.from_numpy(noise(1, 3, 32, 48)) * 2 - 1,
        torch.from_numpy(noise(1, 3, 48, 32)).transpose(2, 3),
        (torch.from_numpy(noise(1, 3, 32, 48)) * 2 - 1).bfloat16(),
        torch.full((1, 3, 32, 48), 1e-30, dtype=torch.bfloat16),
        # Without a negative value it is taken for one in [0, 1], and scaled in its own dtype.
        torch.from_numpy(noise(1, 3, 32, 48)).bfloat16(),
        torch.zeros(1, 3, 32, 48, dtype=torch.float64, requires_grad=True),
    ],
)
def test_what_arrives_is_prepared_to_the_same_bits(image):
    ours, theirs = preprocessed(travelled(image)), preprocessed(image)
    assert ours.shape == (1, 3, 32, 48)
    assert torch.equal(ours, theirs.detach())


@pytest.mark.parametrize(
    "image", [noise(8, 8, 3), noise(1, 8, 8, 3), torch.zeros(1, 3, 8, 8), Image.new("RGB", (8, 8))]
)
def test_changing_the_image_afterwards_changes_nothing(image):
    carried = RULE.carry("image", image, {})
    before = carried.copy()
    if isinstance(image, Image.Image):
        image.putpixel((0, 0), (1, 2, 3))
    else:
        image[:] = 1
    assert np.array_equal(carried, before)


def test_a_large_picture_is_made_small_before_it_travels():
    assert RULE.carry("image", picture(200, 100), SIZE).shape == (32, 48, 3)
    assert RULE.carry("image", picture(20, 30), SIZE).shape == (20, 30, 3)
    assert RULE.carry("image", picture(200, 100), {}).shape == (200, 100, 3)


def test_what_would_be_too_much_to_send_is_refused():
    rule = InputImage(max_bytes=1000)
    rule.carry("image", picture(10, 10), SIZE)
    with pytest.raises(ParameterError) as caught:
        rule.carry("image", noise(10, 10, 3), SIZE)
    assert str(caught.value) == (
        "image is too large: 1,200 bytes would travel with the request, limit 1,000; resize it to "
        "the picture's size first"
    )


def spoiled(value, array=None):
    array = noise(32, 48, 3) if array is None else array
    array[3, 4, 1] = value
    return array


@pytest.mark.parametrize(
    ("image", "message"),
    [
        ("cat.png", "image has type str, wanted one RGB image"),
        (b"\x89PNG", "open a file with PIL.Image.open(path)"),
        ([picture()], "image has type list"),
        (5, "image has type int"),
        (picture().convert("L"), "image has mode 'L', wanted 'RGB'; use image.convert('RGB')"),
        (picture().convert("RGBA"), "image has mode 'RGBA'"),
        (picture().convert("P"), "image has mode 'P'"),
        (Image.new("RGB", (0, 5)), "image has size 0x5; give it pixels"),
        (noise(32, 48), "an array of shape (32, 48), wanted (height, width, 3); stack"),
        (noise(3, 32, 48), "shape (3, 32, 48), wanted (height, width, 3)"),
        (noise(2, 32, 48, 3), "shape (2, 32, 48, 3)"),
        (noise(0, 48, 3), "shape (0, 48, 3)"),
        (noise(32, 48, 4), "shape (32, 48, 4)"),
        (np.asarray(picture()), "an array of uint8, wanted floats in [0, 1]; pass PIL.Image.from"),
        (np.full((4, 4, 3), "x"), "an array of <U1"),
        (np.zeros((4, 4, 3), object), "an array of object"),
        (spoiled(np.nan), "image holds 1 of 4608 values that are NaN or infinite; repair"),
        (spoiled(np.inf), "image holds 1 of 4608 values that are NaN or infinite"),
        (spoiled(-0.5), "values from -0.5 to"),
        (spoiled(255.0), "to 255; allowed: 0 to 1; divide by"),
        (torch.zeros(3, 32, 48), "shape (3, 32, 48), wanted (1, 3, 32, 48): tensors are taken as"),
        (torch.zeros(1, 3, 48, 32), "wanted (1, 3, 32, 48)"),
        (torch.zeros(2, 3, 32, 48), "wanted (1, 3, 32, 48)"),
        (torch.zeros(1, 4, 32, 48), "wanted (1, 3, 32, 48)"),
        (torch.zeros(1, 3, 32, 48, dtype=torch.uint8), "torch.uint8, wanted floats in [-1, 1]"),
        (torch.full((1, 3, 32, 48), torch.nan), "image holds 4608 of 4608 values that are NaN"),
        (torch.full((1, 3, 32, 48), 2.0), "values from 2 to 2; allowed: -1 to 1; use 2 * x - 1"),
    ],
)
def test_refusals_say_what_is_wanted(image, message):
    with pytest.raises(ParameterError) as caught:
        RULE.check("image", image, SIZE)
    assert message in str(caught.value)


def test_a_picture_that_breaks_off_is_refused():
    whole = io.BytesIO()
    picture(64, 64).save(whole, "PNG")
    broken = Image.open(io.BytesIO(whole.getvalue()[:2000]))
    RULE.check("image", broken, SIZE)
    with pytest.raises(ParameterError, match=r"image=.* cannot be read: .*; open the whole file"):
        RULE.carry("image", broken, SIZE)


def test_a_tensor_of_any_size_passes_where_no_size_is_asked_for():
    RULE.check("image", torch.zeros(1, 3, 8, 20), {})
    with pytest.raises(ParameterError, match=r"wanted \(1, 3, 8, 0\)"):
        RULE.check("image", torch.zeros(1, 3, 8, 0), {})
