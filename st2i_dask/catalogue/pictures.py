"""What a workflow gives: pixels after the VAE as Diffusers gives them, checked."""

from __future__ import annotations

from typing import Any

from ..glue import glue
from ..image import check_pixels


@glue
def finish_pixels(pixels: Any, output_type: str, multiple: int, where: str) -> Any:
    """Diffusers' own post-processing of pixels (images, 3, height, width) in about [-1, 1].

    A PIL image, or with "pt" a float tensor (3, height, width); of several images a list of the one,
    or a tensor (images, 3, height, width). multiple: of the sides in pixels, as the pipeline's image
    processor has it. where: who made them, for errors.
    """
    from diffusers.image_processor import VaeImageProcessor

    for image in pixels:
        check_pixels(image, lowest=-1.0, where=where)
    made = VaeImageProcessor(vae_scale_factor=multiple).postprocess(pixels, output_type=output_type)
    return made if len(made) > 1 else made[0]
