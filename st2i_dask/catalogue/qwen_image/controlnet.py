"""Qwen-Image with a ControlNet, bit-identical to `diffusers.QwenImageControlNetPipeline`.

The ControlNet's residuals are callback inputs of the transformer, with both prompts, and are published
block by block: all three forwards run at once on three workers. In steps outside the control window the
pipeline adds zeros; here the ControlNet is not run at all.
"""

from __future__ import annotations

from typing import Any

from ...errors import LoadError
from ...workflow import Workflow
from ..controlnets import Net, check_class, check_shared, find_nets
from ..folder import DiffusersFolder
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
    (net,) = find_nets(folder, controlnets, 1)
    _check_fit(net, folder.config("transformer"))

    def control_of(
        options: dict[str, Any],
        control_image: Any,
        seed: Any,
        height: int,
        width: int,
        num_images: int,
    ) -> Any:
        controlnet = QwenImageControlNet(net.source, **net.options(options))
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


def _check_fit(net: Net, transformer: dict[str, Any]) -> None:
    """LoadError unless the ControlNet is of the supported class and made for such a transformer."""
    config, source = net.config, net.source
    check_class(net, CONTROLNET, ", one at a time")
    check_shared(net, transformer, _SHARED)
    if config.get("extra_condition_channels"):
        raise LoadError(
            f"{source!r}: the ControlNet is made for inpainting (extra_condition_channels="
            f"{config['extra_condition_channels']}), which has no workflow; use another one"
        )
    if not config.get("num_layers"):
        raise LoadError(f"{source!r}: the ControlNet has no blocks; copy it again")
