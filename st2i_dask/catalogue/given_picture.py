"""Glue for pictures and masks that a request brings along, as most pipelines' image processors make them."""

from __future__ import annotations

from typing import Any

from ..glue import glue
from .input_image import restore


@glue
def prepare_pixels(image: Any, height: int | None, width: int | None, factor: int) -> Any:
    """The image (1, 3, height, width) in about [-1, 1], float32 unless it is a tensor of another dtype.

    Without sizes in its own, rounded down to a multiple of `factor`.
    """
    from diffusers.image_processor import VaeImageProcessor

    processor = VaeImageProcessor(vae_scale_factor=factor)
    return processor.preprocess(restore(image), height=height, width=width)


@glue
def to_float(pixels: Any) -> Any:
    """As the inpainting pipelines have them."""
    import torch

    return pixels.to(dtype=torch.float32)


@glue
def prepare_mask(mask_image: Any, height: int, width: int, factor: int) -> Any:
    """The mask (1, 1, height, width): 1 where the picture is drawn anew, 0 elsewhere."""
    from diffusers.image_processor import VaeImageProcessor

    # As the inpainting pipelines' __init__ makes it.
    processor = VaeImageProcessor(
        vae_scale_factor=factor, do_normalize=False, do_binarize=True, do_convert_grayscale=True
    )
    return processor.preprocess(
        restore(mask_image), height=height, width=width, resize_mode="default"
    )


@glue
def outside(pixels: Any, mask: Any) -> Any:
    """The image without what is drawn anew."""
    return pixels * (mask < 0.5)
