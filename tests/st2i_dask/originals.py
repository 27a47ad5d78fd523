"""Pictures, and what unmodified pipelines make of them."""

from __future__ import annotations

import functools

import numpy as np
import torch
from PIL import Image

# Workers run one torch thread each; the reference must sum in the same order.
torch.set_num_threads(1)

#: Many more tokens than the empty prompt has, and no multiple of 32.
LONG = "a wet dog that runs along a long beach in the rain"


@functools.cache
def reference(class_name, folder, dtype):
    import diffusers

    pipeline = getattr(diffusers, class_name).from_pretrained(folder, dtype=getattr(torch, dtype))
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def expected(pipeline, *, seed=0, num_steps=3, num_images=1, output_type="pt", **parameters):
    made = pipeline(
        **parameters,
        num_inference_steps=num_steps,
        num_images_per_prompt=num_images,
        output_type=output_type,
        generator=torch.Generator("cpu").manual_seed(seed),
    ).images
    return made if num_images > 1 else made[0]


def pixels(height, width, seed=0):
    return np.random.default_rng(seed).random((height, width, 3), dtype=np.float32)


def picture(height, width, seed=0):
    return Image.fromarray((pixels(height, width, seed) * 255).astype(np.uint8))


def mask(height, width):
    """A quarter of it is drawn anew."""
    light = np.zeros((height, width), dtype=np.uint8)
    light[height // 2 :, : width // 2] = 255
    return Image.fromarray(light)


def completed(parameters):
    return {**dict(prompt="a cat", num_steps=3, height=32, width=32), **parameters}


def check(ours, theirs, dtype):
    assert str(theirs.dtype) == f"torch.{dtype}"
    assert ours.shape == theirs.shape
    assert torch.equal(ours.float(), theirs.float())
    assert ours.float().std() > 0.01  # not a constant picture, which would prove nothing
