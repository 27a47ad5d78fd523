"""Several images of one request: which seeds they have, and that they come as one batch would."""

from __future__ import annotations

import pytest
import torch
from PIL import Image

from st2i_dask.catalogue.spread import draw_images, gather, nth_seed


@pytest.mark.parametrize(
    ("seed", "number", "expected"),
    [(0, 0, 0), (5, 2, 7), (-1, 1, 0), (2**64 - 1, 0, 2**64 - 1), (2**64 - 1, 1, 0)],
)
def test_seeds_follow_each_other_and_stay_legal(seed, number, expected):
    assert nth_seed(seed, number) == expected
    torch.Generator("cpu").manual_seed(nth_seed(seed, number))


def test_tensors_are_stacked_and_pictures_listed():
    tensors = [torch.full((3, 2, 2), float(n)) for n in range(3)]
    assert torch.equal(gather(tensors), torch.stack(tensors))
    pictures = [Image.new("RGB", (2, 2), (n, 0, 0)) for n in range(2)]
    assert gather(pictures) == pictures


def test_one_draw_for_a_batch_and_one_per_image_when_spread():
    drawn = []

    def draw(seed, images):
        drawn.append((seed, images))
        return torch.full((3, 2, 2), float(seed))

    draw_images(draw, 7, 3, spread=False)
    draw_images(draw, 7, 1, spread=True)
    assert drawn == [(7, 3), (7, 1)]
    drawn.clear()
    assert draw_images(draw, 7, 3, spread=True)[:, 0, 0, 0].tolist() == [7.0, 8.0, 9.0]
    assert drawn == [(7, 1), (8, 1), (9, 1)]
