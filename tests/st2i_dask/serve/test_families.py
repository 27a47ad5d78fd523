"""Edits with a model of the catalogue: its image-to-image and inpainting workflows are found by themselves."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from st2i_dask.catalogue import tiny

from .conftest import front
from .test_edits import edit, png
from .test_generations import error, picture


@pytest.fixture(scope="module")
def served(path_as_before, tmp_path_factory):
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = tiny.save_flux(tmp_path_factory.mktemp("flux"))
    with front() as made:
        made.service.models.add("tiny-flux", str(folder))
        yield made
    torch.set_num_threads(before)


def flux(served, **fields):
    files = {"image": ("a.png", png(Image.linear_gradient("L").resize((32, 32)).convert("RGB")))}
    files.update(fields.pop("files", {}))
    fields = {
        "model": "tiny-flux",
        "size": "32x32",
        "num_inference_steps": "4",
        "seed": "1",
        **fields,
    }
    return edit(served, files, **fields)


def test_an_image_is_drawn_anew_from_another(served):
    weak, strong = (picture(flux(served, strength=strength)) for strength in ("0.3", "0.9"))
    assert weak.size == (32, 32)
    assert np.asarray(weak).std() > 1
    assert not np.array_equal(np.asarray(weak), np.asarray(strong))


def test_a_mask_is_inpainting(served):
    mask = Image.new("RGBA", (32, 32), (0, 0, 0, 255))
    mask.paste((0, 0, 0, 0), (0, 0, 16, 32))
    answer = flux(served, files={"mask": ("m.png", png(mask))})
    assert answer.status_code == 200, answer.text
    assert np.asarray(picture(answer)).std() > 1


def test_a_model_that_cannot_edit_says_so(served):
    found = error(edit(served, model="sketch"), 400)
    assert (found["code"], found["param"]) == ("unsupported_task", "model")


def test_generations_and_partial_images(served):
    answer = served.draw(model="tiny-flux", size="32x32", num_inference_steps=2, seed=3)
    assert answer.status_code == 200, answer.text
    assert np.asarray(picture(answer)).std() > 1
