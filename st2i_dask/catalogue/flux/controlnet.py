"""FLUX.1 with a ControlNet, bit-identical to `diffusers.FluxControlNetPipeline`.

The ControlNet's residuals are callback inputs of the transformer and are published block by block: both
run at once on two workers. In steps outside the control window the pipeline adds zeros; here the
ControlNet is not run at all.
"""

from typing import Annotated, Any, Literal

from ...errors import LoadError
from ...parameters import Data, Static
from ...rules import Prompt, Range
from ...workflow import Workflow, workflow
from ..denoising import scheduler_step, seeded, timestep
from ..folder import DiffusersFolder, check_dtype, read_component
from ..input_image import InputImage
from ..narrowed import without
from ..pictures import finish_pixels
from .controlnet_parts import (
    CONTROLNET,
    DOUBLES,
    SINGLES,
    FluxControlNet,
    VaeEncoder,
    prepare_controlled,
    prepare_image,
)
from .parts import (
    ClipText,
    FluxTransformer,
    T5Text,
    TokenCounter,
    VaeDecoder,
    text_ids,
)
from .text_to_image import MAX_SEQUENCE_LENGTH, side_rule

# What residuals, latents and prompts have in common: the ControlNet must have the transformer's.
_SHARED = (
    "in_channels",
    "num_attention_heads",
    "attention_head_dim",
    "joint_attention_dim",
    "pooled_projection_dim",
)


def flux_controlnet_workflow(
    folder: DiffusersFolder,
    *,
    name: str,
    dtype: str | None = None,
    controlnets: tuple[str, ...] = (),
    num_steps: int | None = None,
    height: int | None = None,
    width: int | None = None,
    guidance_scale: float = 7.0,
    max_sequence_length: int = MAX_SEQUENCE_LENGTH,
    sizes: tuple[int, ...] | None = None,
) -> Workflow:
    """The workflow of a FLUX.1 folder with a ControlNet. Defaults are the pipeline's own.

    controlnets: folder or hub id of the ControlNet; none: the folder holds one (it is one of a
        FluxControlNetPipeline).
    sizes: the only sides in pixels that the model draws well; None: any that the pipeline takes.
    """
    check_dtype(dtype)
    options = {"dtype": dtype} if dtype else {}
    if len(controlnets) > 1:
        raise LoadError(
            f"{folder.source!r} takes one ControlNet at a time here, not {len(controlnets)}"
        )
    controlnet = controlnets[0] if controlnets else None
    if controlnet is None:
        config = folder.config("controlnet")
        control_net = FluxControlNet(folder.source, part="controlnet", **options)
    else:
        component = read_component(controlnet)
        config = dict(component.config)
        control_net = FluxControlNet(component.source, **options)
    transformer_config = folder.config("transformer")
    _check_fit(controlnet or folder.source, config, transformer_config)

    vae_scale_factor = 2 ** (len(folder.config("vae")["block_out_channels"]) - 1)
    channels = transformer_config["in_channels"] // 4
    scheduler = folder.index["scheduler"][1], folder.scheduler_config
    takes_pixels = config.get("conditioning_embedding_channels") is not None
    has_singles = bool(config.get("num_single_layers"))
    guided = bool(transformer_config.get("guidance_embeds"))
    modes = config.get("num_mode")

    clip = ClipText(folder.source, **options)
    t5 = T5Text(folder.source, **options)
    transformer = FluxTransformer(folder.source, **options)
    encoder = VaeEncoder(folder.source, **options)
    decoder = VaeDecoder(folder.source, **options)

    side: Any = side_rule(sizes, vae_scale_factor)
    default_side = 128 * vae_scale_factor  # FluxControlNetPipeline.default_sample_size
    tokens = TokenCounter(folder)

    def compose(
        prompt: Annotated[str, Prompt(max_tokens="max_sequence_length", count=tokens)],
        control_image: Annotated[Any, InputImage()],
        control_mode: Annotated[Data[int], Range(0, (modes or 1) - 1)],
        seed: int = 0,
        num_steps: Annotated[int, Range(1, 1000)] = num_steps or (28 if guided else 4),
        height: Annotated[int, side] = height or default_side,
        width: Annotated[int, side] = width or default_side,
        guidance_scale: Annotated[float, Range(0, 100)] = guidance_scale,
        controlnet_conditioning_scale: Annotated[float, Range(-10, 10)] = 1.0,
        control_guidance_start: Annotated[Static[float], Range(0, 1)] = 0.0,
        control_guidance_end: Annotated[Static[float], Range(0, 1)] = 1.0,
        max_sequence_length: Annotated[int, Range(1, MAX_SEQUENCE_LENGTH)] = max_sequence_length,
        output_type: Static[Literal["pil", "pt"]] = "pil",
    ) -> Any:
        """FLUX.1 with a ControlNet, text and control image to image."""
        pooled = clip(prompt)
        embeds = t5(prompt, max_sequence_length)
        if takes_pixels:
            control = prepare_image(control_image, height, width, vae_scale_factor, embeds)
            state = seeded(seed)
        else:
            encoded = encoder(control_image, seed, height, width)
            control, state = encoded.control_latents, encoded.generator_state
        latents, image_ids, schedule = prepare_controlled(
            embeds, state, num_steps, height, width, channels, vae_scale_factor, *scheduler
        )
        ids = text_ids(embeds, pooled)
        for step in range(num_steps):
            common = dict(
                latents=latents,
                timestep=timestep(schedule, step, latents),
                guidance_scale=guidance_scale,
                pooled_prompt_embeds=pooled,
                prompt_embeds=embeds,
                text_ids=ids,
                image_ids=image_ids,
            )
            residuals = {}
            # As the pipeline compares: it scales by zero what is outside.
            before = step / num_steps < control_guidance_start
            after = (step + 1) / num_steps > control_guidance_end
            if not before and not after:
                made = control_net(
                    **common,
                    control=control,
                    control_mode=control_mode,
                    conditioning_scale=controlnet_conditioning_scale,
                )
                residuals = {DOUBLES: made.controlnet_block_samples}
                if has_singles:
                    residuals[SINGLES] = made.controlnet_single_block_samples
            noise_pred = transformer(**common, **residuals, controlnet_blocks_repeat=takes_pixels)
            latents, schedule = scheduler_step(schedule, step, noise_pred, latents)
        pixels = decoder(latents, height, width)
        return finish_pixels(pixels, output_type, vae_scale_factor * 2, "the FLUX VAE")

    fixed: dict[str, Any] = {}
    if not guided and not config.get("guidance_embeds"):
        fixed["guidance_scale"] = None
    if not modes:
        fixed["control_mode"] = None
    made: Workflow = workflow(name=name, replace=True)(without(compose, fixed))
    return made


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
    if not config.get("num_layers"):
        raise LoadError(f"{source!r}: the ControlNet has no double blocks; copy it again")
