"""Stable Diffusion 3 with ControlNets, bit-identical to `diffusers.StableDiffusion3ControlNetPipeline`.

Several add up as in `diffusers.SD3MultiControlNetModel`. Their residuals are callback inputs of the
transformer and are published block by block: all run at once on several workers. In steps outside the
control window the pipeline adds zeros; here ControlNets are not run at all.

The pipeline draws the control images' latents from torch's global generator, which no request has for
itself. Here they come from a CPU generator of their own with the request's seed, image after image:
what the pipeline gives after `torch.manual_seed(seed)`.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any

from ...errors import LoadError
from ...parameters import Static
from ...rules import Range
from ...workflow import Workflow, workflow
from ..both_prompts import Text
from ..controlnets import Net, check_class, check_equal, check_shared, find_nets
from ..denoising import seeded
from ..folder import DiffusersFolder
from ..input_image import InputImage, InputImages
from ..per_controlnet import Bounds, Scales, is_inside, nth, windows
from ..spread import draw_images
from .composing import SD3, Guidance, Images, Length, Output
from .controlnet_parts import CONTROLNET, SD3ControlNet, half_of, prepare_control
from .parts import MAX_CONTROLNETS, RESIDUALS, VaeEncoder, draw_latents

# Sides are multiples of it, whatever the VAE (StableDiffusion3ControlNetPipeline.check_inputs).
_SIDES = 8
# What latents and prompts have in common: a ControlNet must have the transformer's.
_SHARED_WITHOUT_PROMPT = ("patch_size", "pooled_projection_dim")
_SHARED = (*_SHARED_WITHOUT_PROMPT, "joint_attention_dim")


class Controls:
    """The ControlNets of a workflow, in order. images, scales, bounds: the rules of the parameters."""

    def __init__(self, sd3: SD3, nets: list[Net]):
        self._sd3 = sd3
        self._nets = nets
        self._several = len(nets) > 1
        count = len(nets)
        self.images: Any = InputImages(count, count) if self._several else InputImage()
        self.scales: Any = Scales(count) if self._several else Range(-10, 10)
        self.bounds = Bounds(count)
        # The pipeline asks the first how to call all.
        self._zeros = bool(nets[0].config.get("force_zeros_for_pooled_projection", True))
        # SD3MultiControlNetModel zips: the shortest counts.
        self._length = min(net.config["num_layers"] for net in nets) if self._several else None

    @property
    def configs(self) -> list[Mapping[str, Any]]:
        return [net.config for net in self._nets]

    def latents(
        self, control_image: Any, seed: Any, num_images: int, height: int, width: int, text: Text
    ) -> list[list[Any]]:
        """Inside a workflow: latents of each control image, for each forward of a step."""
        encoder = VaeEncoder(self._sd3.folder.source, **self._sd3.options)
        state, made = seeded(seed), []
        for_both = text.batch_scale is not None or len(text.forwards) > 1
        for number in range(len(self._nets)):
            pixels = prepare_control(
                self._of(control_image, number),
                num_images,
                height,
                width,
                self._sd3.factor,
                for_both,
            )
            # InstantX's ControlNets, which get zeros, take latents without a shift.
            encoded = encoder(pixels, state, shifted=not self._zeros)
            state = encoded.generator_state_after
            if len(text.forwards) > 1:
                made.append([half_of(encoded.latents, half) for half in (0, 1)])
            else:
                made.append([encoded.latents])
        return made

    def composer(
        self, latents: list[list[Any]], scale: Any, num_steps: int, start: Any, end: Any
    ) -> Callable[[int, int, dict[str, Any]], dict[str, Any]]:
        """Inside a workflow: composes the ControlNets of a forward and gives what the transformer takes
        of them.

        start, end: of the windows, see `Bounds`.
        """
        models = [self._model(net) for net in self._nets]
        wanted = windows(start, end, len(models))

        def compose(step: int, forward: int, common: dict[str, Any]) -> dict[str, Any]:
            inputs: dict[str, Any] = {}
            for number, (model, net) in enumerate(zip(models, self._nets, strict=True)):
                if not is_inside(wanted[number], step, num_steps):
                    continue
                inputs["residuals_length"] = self._length
                embeds = common["prompt_embeds"] if _reads_prompt(net) else None
                inputs[RESIDUALS[number]] = model(
                    **{**common, "prompt_embeds": embeds},
                    zero_pooled=self._zeros,
                    control=latents[number][forward],
                    conditioning_scale=self._of(scale, number),
                )
            return inputs

        return compose

    def _model(self, net: Net) -> SD3ControlNet:
        options = net.options(self._sd3.options)
        if net.config.get("use_pos_embed") is False:
            options["base"] = self._sd3.folder.source
        return SD3ControlNet(net.source, **options)

    def _of(self, values: Any, number: int) -> Any:
        return nth(values, number) if self._several else values


def sd3_controlnet_workflow(
    folder: DiffusersFolder,
    *,
    name: str,
    dtype: str | None = None,
    controlnets: tuple[str, ...] = (),
    num_steps: int = 28,
    height: int | None = None,
    width: int | None = None,
    guidance_scale: float = 7.0,
    max_sequence_length: int = 256,
    sizes: tuple[int, ...] | None = None,
) -> Workflow:
    """The workflow of a Stable Diffusion 3 folder with ControlNets. Defaults are the pipeline's own.

    controlnets: folders or hub ids of the ControlNets; none: the folder holds one (it is one of a
        StableDiffusion3ControlNetPipeline). With several, control_image is a list of as many images
        and controlnet_conditioning_scale, control_guidance_start and control_guidance_end are one number
        or a list.
    sizes, split_guidance: as in text to image.
    """
    sd3 = SD3(folder, dtype, shifts=False)
    controls = find_controls(sd3, controlnets)
    side = sd3.side(sizes, *controls.configs, multiple=_SIDES)

    def compose(
        *,
        prompt: Annotated[str, sd3.prompt],
        negative_prompt: Annotated[str, sd3.negative_prompt] = "",
        control_image: Annotated[Any, controls.images],
        seed: int = 0,
        num_steps: Annotated[int, sd3.steps] = num_steps,
        height: Annotated[int, side] = height or sd3.default_side,
        width: Annotated[int, side] = width or sd3.default_side,
        guidance_scale: Guidance = guidance_scale,
        controlnet_conditioning_scale: Annotated[Any, controls.scales] = 1.0,
        control_guidance_start: Annotated[Static[Any], controls.bounds] = 0.0,
        control_guidance_end: Annotated[Static[Any], controls.bounds] = 1.0,
        num_images: Images = 1,
        spread: Static[bool] = False,
        loras: Annotated[Static[Any], sd3.loras] = (),
        split_guidance: Static[bool] = False,
        max_sequence_length: Length = max_sequence_length,
        output_type: Output = "pil",
    ) -> Any:
        """Stable Diffusion 3 with ControlNets, text and control images to image."""
        batch = 1 if spread else num_images
        text = sd3.text(
            prompt,
            negative_prompt,
            batch,
            max_sequence_length,
            guidance_scale,
            split_guidance,
            loras,
        )

        def draw(seed: Any, images: int) -> Any:
            control = controls.latents(control_image, seed, images, height, width, text)
            latents = draw_latents(seed, text.like, images, height, width, sd3.channels, sd3.factor)
            schedule, steps = sd3.schedule(text.like, num_steps, height, width)
            controlled = controls.composer(
                control,
                controlnet_conditioning_scale,
                len(steps),
                control_guidance_start,
                control_guidance_end,
            )
            return sd3.picture(
                latents, schedule, steps, text, loras, output_type, each_forward=controlled
            )

        return draw_images(draw, seed, num_images, spread)

    made: Workflow = workflow(name=name, replace=True)(compose)
    return made


def find_controls(sd3: SD3, controlnets: tuple[str, ...]) -> Controls:
    """The ControlNets of these folders or hub ids; of none: the one that the folder holds.

    LoadError unless all are of the supported class, fit the transformer and go together.
    """
    nets = find_nets(sd3.folder, controlnets, MAX_CONTROLNETS)
    for net in nets:
        _check_fit(net, sd3.transformer_config)
        if _reads_prompt(net) != _reads_prompt(nets[0]):
            reads, does_not = (net, nets[0]) if _reads_prompt(net) else (nets[0], net)
            raise LoadError(
                f"ControlNet {reads.source!r} reads the prompt, {does_not.source!r} does not; the "
                "pipeline cannot run them together, run them in two workflows"
            )
    return Controls(sd3, nets)


def _reads_prompt(net: Net) -> bool:
    return net.config.get("joint_attention_dim") is not None


def _check_fit(net: Net, transformer: Mapping[str, Any]) -> None:
    """LoadError unless the ControlNet is of the supported class and made for such a transformer."""
    config, source = net.config, net.source
    check_class(net, CONTROLNET, ", several as a list of their folders: controlnet=[...]")
    check_shared(net, transformer, _SHARED if _reads_prompt(net) else _SHARED_WITHOUT_PROMPT)
    check_equal(net, "in_channels", config.get("in_channels"), transformer["in_channels"])
    check_equal(net, "a width of", _width(config), _width(transformer))
    if extra := config.get("extra_conditioning_channels"):
        raise LoadError(
            f"{source!r}: the ControlNet takes {extra} channels beside the image's latents (it is made "
            "for inpainting), which StableDiffusion3ControlNetPipeline does not give it"
        )
    if not config.get("num_layers"):
        raise LoadError(f"{source!r}: the ControlNet has no blocks; copy it again")


def _width(config: Mapping[str, Any]) -> int:
    return int(config["attention_head_dim"] * (config["num_attention_heads"] or 0))
