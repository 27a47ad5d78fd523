"""Qwen-Image from a given picture, bit-identical to `QwenImageImg2ImgPipeline` and
`QwenImageInpaintPipeline`."""

from __future__ import annotations

from typing import Any

from ...workflow import Workflow
from ..folder import DiffusersFolder
from .composing import IMAGE, INPAINTING, qwen_image


def qwen_image_image_workflow(
    folder: DiffusersFolder,
    *,
    name: str,
    dtype: str | None = None,
    sizes: tuple[int, ...] | None = None,
    **defaults: Any,
) -> Workflow:
    """Image to image with a Qwen-Image folder; arguments as of `qwen_image_workflow`."""
    about = "Qwen-Image, text and image to image."
    return qwen_image(folder, IMAGE, defaults, name=name, about=about, dtype=dtype, sizes=sizes)


def qwen_image_inpainting_workflow(
    folder: DiffusersFolder,
    *,
    name: str,
    dtype: str | None = None,
    sizes: tuple[int, ...] | None = None,
    **defaults: Any,
) -> Workflow:
    """Inpainting with a Qwen-Image folder; arguments as of `qwen_image_workflow`."""
    about = "Qwen-Image, the light part of a mask drawn anew in an image."
    return qwen_image(
        folder, INPAINTING, defaults, name=name, about=about, dtype=dtype, sizes=sizes
    )
