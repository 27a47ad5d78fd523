"""The families of pipelines that have workflows here, by the pipeline class that a folder names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ..errors import LoadError
from ..quoting import quoted
from ..workflow import Workflow
from .flux.controlnet import flux_controlnet_workflow
from .flux.controlnet_image_to_image import flux_controlnet_image_workflow
from .flux.image_to_image import flux_image_workflow, flux_inpainting_workflow
from .flux.text_to_image import flux_workflow
from .flux2_klein.inpainting import klein_inpainting_workflow
from .flux2_klein.text_to_image import klein_edit_workflow, klein_workflow
from .qwen_image.controlnet import qwen_image_controlnet_workflow
from .qwen_image.image_to_image import (
    qwen_image_image_workflow,
    qwen_image_inpainting_workflow,
)
from .qwen_image.text_to_image import qwen_image_workflow
from .sd3.controlnet import sd3_controlnet_workflow
from .sd3.image_to_image import sd3_image_workflow
from .sd3.inpainting import sd3_inpainting_workflow
from .sd3.text_to_image import sd3_workflow
from .sdxl.controlnet import sdxl_controlnet_workflow
from .sdxl.controlnet_image_to_image import sdxl_controlnet_image_workflow
from .sdxl.image_to_image import sdxl_image_workflow
from .sdxl.inpainting import sdxl_inpainting_workflow
from .sdxl.text_to_image import sdxl_workflow
from .z_image.controlnet import (
    z_image_controlnet_inpainting_workflow,
    z_image_controlnet_workflow,
)
from .z_image.image_to_image import z_image_image_workflow, z_image_inpainting_workflow
from .z_image.text_to_image import z_image_workflow

TEXT, IMAGE, INPAINT = "text-to-image", "image-to-image", "inpainting"

#: Takes (folder, name=, dtype=, **defaults); one that is controlled `controlnets=` too, the folders or
#: hub ids of ControlNets in place of those that the folder may hold.
Builder = Callable[..., Workflow]


@dataclass(frozen=True)
class Family:
    """pipelines: its classes, and the task of each. builders: by task, without a ControlNet and with."""

    pipelines: Mapping[str, str]
    plain: Mapping[str, Builder]
    controlled: Mapping[str, Builder] = field(default_factory=dict)


FAMILIES = (
    Family(
        pipelines={
            "FluxPipeline": TEXT,
            "FluxImg2ImgPipeline": IMAGE,
            "FluxInpaintPipeline": INPAINT,
            "FluxControlNetPipeline": TEXT,
            "FluxControlNetImg2ImgPipeline": IMAGE,
        },
        plain={TEXT: flux_workflow, IMAGE: flux_image_workflow, INPAINT: flux_inpainting_workflow},
        controlled={TEXT: flux_controlnet_workflow, IMAGE: flux_controlnet_image_workflow},
    ),
    Family(
        pipelines={"Flux2KleinPipeline": TEXT, "Flux2KleinInpaintPipeline": INPAINT},
        plain={
            TEXT: klein_workflow,
            IMAGE: klein_edit_workflow,
            INPAINT: klein_inpainting_workflow,
        },
    ),
    Family(
        pipelines={
            "StableDiffusion3Pipeline": TEXT,
            "StableDiffusion3Img2ImgPipeline": IMAGE,
            "StableDiffusion3InpaintPipeline": INPAINT,
            "StableDiffusion3ControlNetPipeline": TEXT,
        },
        plain={TEXT: sd3_workflow, IMAGE: sd3_image_workflow, INPAINT: sd3_inpainting_workflow},
        controlled={TEXT: sd3_controlnet_workflow},
    ),
    Family(
        pipelines={
            "StableDiffusionXLPipeline": TEXT,
            "StableDiffusionXLImg2ImgPipeline": IMAGE,
            "StableDiffusionXLInpaintPipeline": INPAINT,
            "StableDiffusionXLControlNetPipeline": TEXT,
            "StableDiffusionXLControlNetImg2ImgPipeline": IMAGE,
        },
        plain={TEXT: sdxl_workflow, IMAGE: sdxl_image_workflow, INPAINT: sdxl_inpainting_workflow},
        controlled={TEXT: sdxl_controlnet_workflow, IMAGE: sdxl_controlnet_image_workflow},
    ),
    Family(
        pipelines={
            "ZImagePipeline": TEXT,
            "ZImageImg2ImgPipeline": IMAGE,
            "ZImageInpaintPipeline": INPAINT,
            "ZImageControlNetPipeline": TEXT,
            "ZImageControlNetInpaintPipeline": INPAINT,
        },
        plain={
            TEXT: z_image_workflow,
            IMAGE: z_image_image_workflow,
            INPAINT: z_image_inpainting_workflow,
        },
        controlled={
            TEXT: z_image_controlnet_workflow,
            INPAINT: z_image_controlnet_inpainting_workflow,
        },
    ),
    Family(
        pipelines={
            "QwenImagePipeline": TEXT,
            "QwenImageImg2ImgPipeline": IMAGE,
            "QwenImageInpaintPipeline": INPAINT,
            "QwenImageControlNetPipeline": TEXT,
        },
        plain={
            TEXT: qwen_image_workflow,
            IMAGE: qwen_image_image_workflow,
            INPAINT: qwen_image_inpainting_workflow,
        },
        controlled={TEXT: qwen_image_controlnet_workflow},
    ),
)


def find(source: str, pipeline_class: str, task: str | None, controlled: bool) -> Builder:
    """What builds the workflow of a folder. LoadError if there is none; it lists what there is.

    source: what the error calls the folder. task: None: the one of the pipeline class.
    """
    for family in FAMILIES:
        if pipeline_class in family.pipelines:
            break
    else:
        known = ", ".join(name for family in FAMILIES for name in family.pipelines)
        raise LoadError(
            f"{source!r} is a {pipeline_class}; there are workflows for {known}; "
            "st2i.from_pipeline takes any other"
        )
    builders = family.controlled if controlled else family.plain
    task = task or family.pipelines[pipeline_class]
    if task not in builders:
        what = " with a ControlNet" if controlled else ""
        raise LoadError(
            f"{source!r}: a {pipeline_class} has no workflow for task={quoted(task)}{what}; "
            f"it has: {', '.join(builders) or 'none'}"
        )
    return builders[task]
