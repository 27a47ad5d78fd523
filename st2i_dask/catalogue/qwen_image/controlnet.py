"""Qwen-Image with a ControlNet, bit-identical to `diffusers.QwenImageControlNetPipeline`.

The ControlNet's residuals are callback inputs of the transformer, with both prompts, and are published
block by block: all three forwards run at once on three workers. In steps outside the control window the
pipeline adds zeros; here the ControlNet is not run at all.
"""

from __future__ import annotations

from typing import Any

from ...errors import LoadError
from ...workflow import Workflow
from ..folder import DiffusersFolder, read_component
from .composing import CONTROL, qwen_image
from .controlnet_parts import CONTROLNET, RESIDUALS, ControlEncoder, QwenImageControlNet

# What residuals, latents and prompts have in common: the ControlNet must have the transformer's.
_SHARED = ("in_channels", "num_attention_heads", "attention_head_dim", "joint_attention_dim")


def qwen_image_controlnet_workflow(
    folder: DiffusersFolder,
    *,
    name: str,
    dtype: str | None = None,
    controlnets: tuple[str, ...] = (),
    sizes: tuple[int, ...] | None = None,
    **defaults: Any,
) -> Workflow:
    """The workflow of a Qwen-Image folder with a ControlNet; other arguments as of
    `qwen_image_workflow`.

    controlnets: folder or hub id of the ControlNet; none: the folder holds one (it is one of a
        QwenImageControlNetPipeline).
    """
    if len(controlnets) > 1:
        raise LoadError(
            f"{folder.source!r}: Qwen-Image takes one ControlNet at a time, not {len(controlnets)}"
        )
    if controlnets:
        component = read_component(controlnets[0])
        source, config, part = component.source, dict(component.config), {}
    else:
        source, config, part = folder.source, folder.config("controlnet"), {"part": "controlnet"}
    _check_fit(controlnets[0] if controlnets else source, config, folder.config("transformer"))

    def control_of(
        options: dict[str, Any],
        control_image: Any,
        seed: Any,
        height: int,
        width: int,
        num_images: int,
    ) -> Any:
        controlnet = QwenImageControlNet(source, **options, **part)
        encoder = ControlEncoder(folder.source, **options)
        encoded: Any = encoder(control_image, seed, height, width, num_images)

        def step(common: dict[str, Any], conditioning_scale: Any) -> dict[str, Any]:
            residuals = controlnet(
                **common,
                control=encoded.control_latents,
                conditioning_scale=conditioning_scale,
            )
            return {RESIDUALS: residuals}

        return encoded.generator_state, step

    return qwen_image(
        folder,
        CONTROL,
        defaults,
        name=name,
        about="Qwen-Image with a ControlNet, text and control image to image.",
        dtype=dtype,
        sizes=sizes,
        control_of=control_of,
    )


def _check_fit(source: str, config: dict[str, Any], transformer: dict[str, Any]) -> None:
    """LoadError unless the ControlNet is of the supported class and made for such a transformer."""
    if config.get("_class_name") != CONTROLNET:
        raise LoadError(
            f"{source!r}: the ControlNet is a {config.get('_class_name')}; supported: {CONTROLNET}, "
            "one at a time"
        )
    for name in _SHARED:
        if config.get(name) != transformer.get(name):
            raise LoadError(
                f"{source!r}: the ControlNet has {name}={config.get(name)}, the transformer "
                f"{transformer.get(name)}; use a ControlNet made for this model"
            )
    if config.get("extra_condition_channels"):
        raise LoadError(
            f"{source!r}: the ControlNet is made for inpainting (extra_condition_channels="
            f"{config['extra_condition_channels']}), which has no workflow; use another one"
        )
    if not config.get("num_layers"):
        raise LoadError(f"{source!r}: the ControlNet has no blocks; copy it again")
