"""The ControlNets of a FLUX.1 workflow: found, checked against each other, and composed.

Several add up as in `diffusers.FluxMultiControlNetModel`: their residuals are summed in their order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...errors import LoadError
from ...rules import Range
from ..controlnets import Net, check_class, check_shared, find_nets
from ..folder import DiffusersFolder
from ..input_image import InputImage, InputImages
from ..per_controlnet import Bounds, Modes, Scales, is_inside, nth, windows
from .composing import FluxBase
from .controlnet_parts import CONTROLNET, FluxControlNet, VaeEncoder, prepare_image
from .parts import DOUBLES, MAX_CONTROLNETS, SINGLES

# What residuals, latents and prompts have in common: a ControlNet must have the transformer's.
_SHARED = (
    "in_channels",
    "num_attention_heads",
    "attention_head_dim",
    "joint_attention_dim",
    "pooled_projection_dim",
)


class Controls:
    """The ControlNets of a workflow, in order.

    images, modes, scales, bounds: the rules of the parameters; modes: None where no ControlNet has any.
    fixed: parameters that neither they nor the transformer take, and what they are for good.
    """

    def __init__(self, base: FluxBase, nets: list[Net]):
        self._base = base
        self._nets = nets
        first = nets[0]
        count, several = len(nets), len(nets) > 1
        self.images: Any = InputImages(count, count) if several else InputImage()
        self.scales: Any = Scales(count) if several else Range(-10, 10)
        self.bounds = Bounds(count)
        limits = tuple(net.config.get("num_mode") for net in nets)
        self.modes: Any = None
        if any(limits):
            self.modes = Modes(limits) if several else Range(0, limits[0] - 1)
        self.fixed: dict[str, Any] = {}
        if not base.guided and not first.config.get("guidance_embeds"):
            self.fixed["guidance_scale"] = None
        if self.modes is None:
            self.fixed["control_mode"] = None
        # FluxMultiControlNetModel adds to what the first gives: without its singles there are none.
        self._has_singles = bool(first.config.get("num_single_layers"))
        # It zips the residuals: the shortest count, run or not.
        singles = [n for net in nets if (n := net.config.get("num_single_layers"))]
        self._lengths = None
        if several:
            self._lengths = min(net.config["num_layers"] for net in nets), min(singles, default=0)

    def hints(
        self,
        control_image: Any,
        state: Any,
        num_images: int,
        height: int,
        width: int,
        like: Any,
    ) -> tuple[list[Any], Any]:
        """Inside a workflow: what each ControlNet takes, and the generator's state after the draws."""
        encoder = VaeEncoder(self._base.source, **self._base.options)
        hints = []
        for number, net in enumerate(self._nets):
            image = self._of(control_image, number)
            if _takes_pixels(net):
                factor = self._base.vae_scale_factor
                hints.append(prepare_image(image, num_images, height, width, factor, like))
            else:
                encoded = encoder(image, state, num_images, height, width)
                hints.append(encoded.control_latents)
                state = encoded.next_state
        return hints, state

    def composer(
        self,
        hints: list[Any],
        control_mode: Any,
        conditioning_scale: Any,
        steps: range,
        start: Any,
        end: Any,
    ) -> Callable[[int, dict[str, Any]], dict[str, Any]]:
        """Inside a workflow: composes a step's ControlNets and gives what the transformer takes of them.

        start, end: of the windows, see `Bounds`.
        """
        base = self._base
        wanted = windows(start, end, len(self._nets))
        nets = [FluxControlNet(net.source, **net.options(base.options)) for net in self._nets]

        def compose(step: int, common: dict[str, Any]) -> dict[str, Any]:
            inputs: dict[str, Any] = {}
            for number, (net, hint) in enumerate(zip(nets, hints, strict=True)):
                if not is_inside(wanted[number], step - steps.start, len(steps)):
                    continue
                inputs["controlnet_blocks_repeat"] = _takes_pixels(self._nets[0])
                inputs["residuals_lengths"] = self._lengths
                has_modes = bool(self._nets[number].config.get("num_mode"))
                made = net(
                    **common,
                    control=hint,
                    control_mode=self._of(control_mode, number) if has_modes else None,
                    conditioning_scale=self._of(conditioning_scale, number),
                )
                inputs[DOUBLES[number]] = made.controlnet_block_samples
                if self._has_singles and self._nets[number].config.get("num_single_layers"):
                    inputs[SINGLES[number]] = made.controlnet_single_block_samples
            return inputs

        return compose

    def _of(self, values: Any, number: int) -> Any:
        return nth(values, number) if len(self._nets) > 1 else values


def find_controls(
    base: FluxBase, folder: DiffusersFolder, controlnets: tuple[str, ...]
) -> Controls:
    """The ControlNets of these folders or hub ids; of none: the one that the folder holds.

    LoadError unless all are of the supported class, fit the transformer and go together.
    """
    nets = find_nets(folder, controlnets, MAX_CONTROLNETS)
    for net in nets:
        check_class(net, CONTROLNET, ", several as a list of their folders: controlnet=[...]")
        check_shared(net, base.transformer_config, _SHARED)
        if not net.config.get("num_layers"):
            raise LoadError(f"{net.source!r}: the ControlNet has no double blocks; copy it again")
        _check_alike(nets[0], net)
    return Controls(base, nets)


def _takes_pixels(net: Net) -> bool:
    return net.config.get("conditioning_embedding_channels") is not None


def _check_alike(first: Net, other: Net) -> None:
    """LoadError for two that the pipeline would not run together: it asks the first how to call all."""
    for what, one, two in (
        ("takes pixels", _takes_pixels(first), _takes_pixels(other)),
        (
            "has a guidance embedding",
            bool(first.config.get("guidance_embeds")),
            bool(other.config.get("guidance_embeds")),
        ),
    ):
        if one != two:
            yes, no = (first, other) if one else (other, first)
            raise LoadError(
                f"ControlNet {yes.source!r} {what}, {no.source!r} does not; run them in two workflows"
            )
