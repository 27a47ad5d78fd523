"""Qwen-Image text to image, bit-identical to `diffusers.QwenImagePipeline`."""

from __future__ import annotations

from typing import Any

from ...workflow import Workflow
from ..folder import DiffusersFolder
from .composing import qwen_image


def qwen_image_workflow(
    folder: DiffusersFolder,
    *,
    name: str,
    dtype: str | None = None,
    sizes: tuple[int, ...] | None = None,
    **defaults: Any,
) -> Workflow:
    """The workflow of a QwenImagePipeline folder.

    As in the pipeline there is guidance where a negative prompt is given, be it empty, and true_cfg_scale
    is above 1. A step is then two forwards, which run at once on two executors.

    defaults: values of its parameters in place of the pipeline's own. sizes: the only sides in pixels
    that the model draws well; None: any that the pipeline takes.
    """
    about = "Qwen-Image, text to image."
    return qwen_image(folder, (), defaults, name=name, about=about, dtype=dtype, sizes=sizes)
