"""Stable Diffusion XL with ControlNets, bit-identical to
`diffusers.StableDiffusionXLControlNetPipeline`.

Several add up as in `diffusers.MultiControlNetModel`. Their residuals are callback inputs of the UNet,
which asks for them when its own down blocks have run: on two workers both run at once. In steps outside
the control window the pipeline adds zeros; here ControlNets are not run at all.
"""

from collections.abc import Callable
from typing import Annotated, Any

from ...errors import LoadError, ParameterError
from ...parameters import Maybe, Static
from ...rules import Range
from ...workflow import Workflow, workflow
from ..both_prompts import Text
from ..controlnets import Net, check_class, check_shared, find_nets
from ..denoising import seeded
from ..folder import DiffusersFolder
from ..per_controlnet import Bounds, Scales, is_inside, nth, windows
from ..spread import draw_images
from .composing import MAX_SIDE, SDXL, Guidance, Images, Output, Start
from .controlnet_parts import CONTROLNET, SDXLControlNet, draw_latents_for, prepare_control
from .image_parts import SizedImage, SizedImages
from .parts import MAX_CONTROLNETS, RESIDUALS

# What residuals, latents and prompts have in common: a ControlNet must have the UNet's.
_SHARED = (
    "in_channels",
    "block_out_channels",
    "layers_per_block",
    "cross_attention_dim",
    "addition_embed_type",
    "addition_time_embed_dim",
    "projection_class_embeddings_input_dim",
)


class Controls:
    """The ControlNets of a workflow, in order. images, scales, bounds: the rules of the parameters."""

    def __init__(self, sdxl: SDXL, nets: list[Net]):
        self._sdxl = sdxl
        self._nets = nets
        self._several = len(nets) > 1
        limits = SizedImage(least=sdxl.factor, most=MAX_SIDE)
        self.images: Any = SizedImages(len(nets), limits, sdxl.factor) if self._several else limits
        self.scales: Any = Scales(len(nets)) if self._several else Range(-10, 10)
        self.bounds = Bounds(len(nets))

    def check_windows(self, start: Any, end: Any) -> None:
        """Inside a workflow: ParameterError for one without steps, which the pipeline refuses."""
        for first, last in windows(start, end, len(self._nets)):
            if first >= last:
                raise ParameterError(
                    f"control_guidance_start={first:g} is not below control_guidance_end={last:g}; "
                    "the pipeline wants a window"
                )

    def prepared(
        self,
        control_image: Any,
        num_images: int,
        height: int | None,
        width: int | None,
        text: Text,
    ) -> list[Any]:
        """Inside a workflow: what each ControlNet takes."""
        for_both = text.batch_scale is not None
        return [
            prepare_control(
                self._of(control_image, number),
                num_images,
                height,
                width,
                self._sdxl.factor,
                for_both,
            )
            for number in range(len(self._nets))
        ]

    def composer(
        self, control: list[Any], scale: Any, steps: range, start: Any, end: Any
    ) -> Callable[[int, int, dict[str, Any]], dict[str, Any]]:
        """Inside a workflow: composes the ControlNets of a forward and gives what the UNet takes of them.

        steps: those that are taken. start, end: of the windows, see `Bounds`.
        """
        options = self._sdxl.options
        wanted = windows(start, end, len(self._nets))
        models = [SDXLControlNet(net.source, **net.options(options)) for net in self._nets]

        def compose(step: int, forward: int, common: dict[str, Any]) -> dict[str, Any]:
            return {
                RESIDUALS[number]: model(
                    **common,
                    control=control[number],
                    conditioning_scale=self._of(scale, number),
                )
                for number, model in enumerate(models)
                if is_inside(wanted[number], step - steps.start, len(steps))
            }

        return compose

    def _of(self, values: Any, number: int) -> Any:
        return nth(values, number) if self._several else values


def sdxl_controlnet_workflow(
    folder: DiffusersFolder,
    *,
    name: str,
    dtype: str | None = None,
    controlnets: tuple[str, ...] = (),
    num_steps: int = 50,
    height: int | None = None,
    width: int | None = None,
    guidance_scale: float = 5.0,
    sizes: tuple[int, ...] | None = None,
) -> Workflow:
    """The workflow of a Stable Diffusion XL folder with ControlNets. Defaults are the pipeline's own.

    controlnets: folders or hub ids of the ControlNets; none: the folder holds one or several (it is one
        of a StableDiffusionXLControlNetPipeline). With several, control_image is a list of as many
        images and controlnet_conditioning_scale, control_guidance_start and control_guidance_end are one number
        or a list.
    height, width: None: those of the control image, rounded down to what the VAE takes.
    sizes, negative_prompt, split_guidance: as in text to image.
    """
    sdxl = SDXL(folder, dtype, begins=False)
    controls = find_controls(sdxl, controlnets)
    side = sdxl.side(sizes)

    def compose(
        *,
        prompt: Annotated[str, sdxl.prompt],
        negative_prompt: Annotated[Maybe[str | None], sdxl.negative_prompt] = None,
        control_image: Annotated[Any, controls.images],
        seed: int = 0,
        num_steps: Annotated[int, sdxl.steps] = num_steps,
        height: Annotated[Static[int | None], side] = height,
        width: Annotated[Static[int | None], side] = width,
        guidance_scale: Guidance = guidance_scale,
        controlnet_conditioning_scale: Annotated[Any, controls.scales] = 1.0,
        control_guidance_start: Annotated[Static[Any], controls.bounds] = 0.0,
        control_guidance_end: Annotated[Static[Any], controls.bounds] = 1.0,
        num_images: Images = 1,
        spread: Static[bool] = False,
        loras: Annotated[Static[Any], sdxl.loras] = (),
        split_guidance: Static[bool] = False,
        output_type: Output = "pil",
    ) -> Any:
        """Stable Diffusion XL with ControlNets, text and control images to image."""
        controls.check_windows(control_guidance_start, control_guidance_end)
        batch = 1 if spread else num_images
        text = sdxl.text(prompt, negative_prompt, batch, guidance_scale, split_guidance, loras)
        control = controls.prepared(control_image, batch, height, width, text)

        def draw(seed: Any, images: int) -> Any:
            schedule, steps = sdxl.schedule(text.like, num_steps)
            latents, state = draw_latents_for(
                control[0],
                seeded(seed),
                schedule,
                text.like,
                images,
                sdxl.channels,
                sdxl.factor,
            )
            controlled = controls.composer(
                control,
                controlnet_conditioning_scale,
                steps,
                control_guidance_start,
                control_guidance_end,
            )
            start = Start(latents, schedule, steps, state)
            return sdxl.picture(start, text, loras, output_type, each_forward=controlled)

        return draw_images(draw, seed, num_images, spread)

    made: Workflow = workflow(name=name, replace=True)(compose)
    return made


def find_controls(sdxl: SDXL, controlnets: tuple[str, ...]) -> Controls:
    """The ControlNets of these folders or hub ids; of none: those that the folder holds.

    LoadError unless all are of the supported class and fit the UNet.
    """
    folder = sdxl.folder
    nets = find_nets(folder, controlnets, MAX_CONTROLNETS, _parts(folder))
    for net in nets:
        _check_fit(net, sdxl)
    return Controls(sdxl, nets)


def _parts(folder: DiffusersFolder) -> list[str]:
    """Where a pipeline's ControlNets lie, as MultiControlNetModel.save_pretrained puts them."""
    parts = ["controlnet"]
    while (folder.path / f"controlnet_{len(parts)}").is_dir():
        parts.append(f"controlnet_{len(parts)}")
    return parts


def _check_fit(net: Net, sdxl: SDXL) -> None:
    """LoadError unless the ControlNet is of the supported class and made for such a UNet."""
    config, source = net.config, net.source
    check_class(net, CONTROLNET, ", several as a list of their folders: controlnet=[...]")
    check_shared(net, sdxl.unet_config, _SHARED, "UNet")
    # The control image is made as small as the latents.
    shrinks = 2 ** (len(config.get("conditioning_embedding_out_channels", range(4))) - 1)
    if shrinks != sdxl.factor:
        raise LoadError(
            f"{source!r}: the ControlNet makes an image {shrinks} times smaller, the VAE {sdxl.factor} "
            "times; use a ControlNet made for this model"
        )
    if config.get("global_pool_conditions"):
        raise LoadError(
            f"{source!r}: the ControlNet has global_pool_conditions, which makes the pipeline guess "
            "without a prompt; that has no workflow here"
        )
