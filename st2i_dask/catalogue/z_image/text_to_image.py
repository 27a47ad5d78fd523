"""Z-Image and Z-Image-Turbo text to image, bit-identical to `diffusers.ZImagePipeline`.

Both are the same pipeline: Turbo's pictures are drawn with few steps and guidance_scale=0, which leaves
the negative prompt out. A folder does not say which it is, so the defaults are the pipeline's.
"""

from __future__ import annotations

from typing import Any

from ...workflow import Workflow
from ..folder import DiffusersFolder
from .composing import z_image


def z_image_workflow(
    folder: DiffusersFolder,
    *,
    name: str,
    dtype: str | None = None,
    sizes: tuple[int, ...] | None = None,
    **defaults: Any,
) -> Workflow:
    """The workflow of a ZImagePipeline folder.

    Guidance is one forward with both prompts, as in the pipeline. With split_guidance it is two, which
    run at once on two executors; the pictures then differ in their last bits.

    defaults: values of its parameters in place of the pipeline's own. sizes: the only sides in pixels
    that the model draws well; None: any that the pipeline takes.
    """
    about = "Z-Image, text to image."
    return z_image(folder, (), defaults, name=name, about=about, dtype=dtype, sizes=sizes)
