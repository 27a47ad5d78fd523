"""Z-Image from a given picture, bit-identical to `ZImageImg2ImgPipeline` and `ZImageInpaintPipeline`.

Those take pictures that have the size of the result; here any is resized to it first.
"""

from __future__ import annotations

from typing import Any

from ...workflow import Workflow
from ..folder import DiffusersFolder
from .composing import IMAGE, INPAINTING, z_image


def z_image_image_workflow(
    folder: DiffusersFolder,
    *,
    name: str,
    dtype: str | None = None,
    sizes: tuple[int, ...] | None = None,
    **defaults: Any,
) -> Workflow:
    """Image to image with a Z-Image folder; arguments as of `z_image_workflow`."""
    about = "Z-Image, text and image to image."
    defaults = {"strength": 0.6, **defaults}
    return z_image(folder, IMAGE, defaults, name=name, about=about, dtype=dtype, sizes=sizes)


def z_image_inpainting_workflow(
    folder: DiffusersFolder,
    *,
    name: str,
    dtype: str | None = None,
    sizes: tuple[int, ...] | None = None,
    **defaults: Any,
) -> Workflow:
    """Inpainting with a Z-Image folder; arguments as of `z_image_workflow`."""
    about = "Z-Image, the light part of a mask drawn anew in an image."
    return z_image(folder, INPAINTING, defaults, name=name, about=about, dtype=dtype, sizes=sizes)
