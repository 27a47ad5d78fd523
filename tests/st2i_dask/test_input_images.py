"""Lists of images and masks as parameters: what travels, and every refusal."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from st2i_dask.catalogue.input_image import InputImages, MaskImage, restore
from st2i_dask.errors import ParameterError

SIZE = {"height": 32, "width": 48}
PICTURES = [Image.new("RGB", (48, 32), (n, 0, 0)) for n in range(4)]
TWO = InputImages(2, 3)


def test_each_of_a_list_travels():
    TWO.check("images", PICTURES[:3], SIZE)
    carried = TWO.carry("images", tuple(PICTURES[:3]), SIZE)
    assert [restore(array) for array in carried] == PICTURES[:3]


def test_one_comes_without_a_list():
    rule = InputImages(1, 4)
    rule.check("images", PICTURES[0], SIZE)
    assert [restore(array) for array in rule.carry("images", PICTURES[0], SIZE)] == PICTURES[:1]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (PICTURES[:1], "images holds 1 images, wanted a list of 2 to 3 RGB images"),
        (PICTURES, "images holds 4 images"),
        ([], "images holds 0 images"),
        ([PICTURES[0], "b.png"], r"images\[1\] has type str"),
        ([PICTURES[0].convert("L"), PICTURES[1]], r"images\[0\] has mode 'L'"),
        ([np.full((4, 4, 3), 2.0), PICTURES[1]], r"images\[0\] holds values from 2 to 2"),
    ],
)
def test_refusals_name_the_image(value, message):
    with pytest.raises(ParameterError, match=message):
        TWO.check("images", value, SIZE)


def test_together_they_are_limited():
    each = PICTURES[0].width * PICTURES[0].height * 3
    with pytest.raises(ParameterError, match="images is too large: 9,216 bytes"):
        InputImages(2, 3, max_bytes=9000).carry("images", PICTURES[:2], SIZE)
    InputImages(2, 3, max_bytes=2 * each).carry("images", PICTURES[:2], SIZE)


def test_a_number_is_described_as_one():
    assert InputImages(2, 2).describe() == "a list of 2 RGB images"


@pytest.mark.parametrize("size", [(48, 32), (100, 90), (20, 16)])
@pytest.mark.parametrize("mode", ["L", "RGB", "1", "RGBA", "P"])
def test_a_mask_of_any_mode_is_what_the_pipeline_makes_of_it(mode, size):
    from diffusers.image_processor import VaeImageProcessor

    colours = np.random.default_rng(0).integers(0, 256, (*size[::-1], 4), dtype=np.uint8)
    mask = Image.fromarray(colours).convert("RGB" if mode == "P" else "RGBA").convert(mode)
    rule = MaskImage()
    rule.check("mask_image", mask, SIZE)
    arrived = restore(rule.carry("mask_image", mask, SIZE))
    processor = VaeImageProcessor(
        vae_scale_factor=8, do_normalize=False, do_binarize=True, do_convert_grayscale=True
    )
    ours, theirs = (processor.preprocess(each, height=32, width=48) for each in (arrived, mask))
    assert ours.equal(theirs)
    assert 0 < ours.mean() < 1


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.zeros((4, 4)), "mask_image has type ndarray, wanted one PIL image, white where"),
        (Image.new("L", (0, 3)), "mask_image has size 0x3"),
    ],
)
def test_a_mask_is_refused(value, message):
    with pytest.raises(ParameterError, match=message):
        MaskImage().check("mask_image", value, SIZE)


def test_a_large_mask_is_refused():
    with pytest.raises(ParameterError, match="mask_image is too large: 1,536 bytes"):
        MaskImage(max_bytes=1000).carry("mask_image", Image.new("L", (48, 32)), SIZE)
