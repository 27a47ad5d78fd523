"""Z-Image with a ControlNet, bit-identical to `ZImageControlNetPipeline`; with inpainting, to
`ZImageControlNetInpaintPipeline`.

The ControlNet's residuals are callback inputs of the transformer and are published layer by layer: both
run at once on two workers.
"""

from __future__ import annotations

from typing import Any

from ...errors import LoadError
from ...workflow import Workflow
from ..controlnets import Net, check_class, check_shared, find_nets
from ..folder import DiffusersFolder
from .composing import CONTROL, CONTROLLED_INPAINTING, ControlOf, z_image
from .controlnet_parts import CONTROLNET, ControlEncoder, InpaintingControlEncoder, ZImageControlNet

# What residuals and tokens have in common: the ControlNet must have the transformer's.
_SHARED = ("dim", "n_heads", "all_patch_size", "all_f_patch_size")


def z_image_controlnet_workflow(
    folder: DiffusersFolder,
    *,
    name: str,
    dtype: str | None = None,
    controlnets: tuple[str, ...] = (),
    sizes: tuple[int, ...] | None = None,
    **defaults: Any,
) -> Workflow:
    """The workflow of a Z-Image folder with a ControlNet; other arguments as of `z_image_workflow`.

    controlnets: folder or hub id of the ControlNet; none: the folder holds one (it is one of a
        ZImageControlNetPipeline).
    """
    about = "Z-Image with a ControlNet, text and control image to image."
    control_of = _control_of(folder, controlnets, inpainting=False)
    return z_image(
        folder,
        CONTROL,
        defaults,
        name=name,
        about=about,
        dtype=dtype,
        sizes=sizes,
        control_of=control_of,
    )


def z_image_controlnet_inpainting_workflow(
    folder: DiffusersFolder,
    *,
    name: str,
    dtype: str | None = None,
    controlnets: tuple[str, ...] = (),
    sizes: tuple[int, ...] | None = None,
    **defaults: Any,
) -> Workflow:
    """Inpainting by a ControlNet that is given picture and mask (version 2.0 of the union model);
    arguments as of `z_image_controlnet_workflow`."""
    about = "Z-Image with a ControlNet, the light part of a mask drawn anew in an image."
    control_of = _control_of(folder, controlnets, inpainting=True)
    return z_image(
        folder,
        CONTROLLED_INPAINTING,
        defaults,
        name=name,
        about=about,
        dtype=dtype,
        sizes=sizes,
        control_of=control_of,
    )


def _control_of(
    folder: DiffusersFolder, controlnets: tuple[str, ...], *, inpainting: bool
) -> ControlOf:
    (net,) = find_nets(folder, controlnets, 1)
    _check_fit(net, folder.config("transformer"), inpainting)
    # It has layers of the transformer too: without `base`, those of the same folder.
    more = {} if net.part else {"base": folder.source}
    config = net.config

    def control_of(
        options: dict[str, Any],
        with_adapters: dict[str, Any],
        control_image: Any,
        image: Any,
        mask_image: Any,
        height: int,
        width: int,
        num_images: int,
    ) -> Any:
        controlnet = ZImageControlNet(net.source, **with_adapters, **more)
        size = height, width, num_images
        if inpainting:
            encode = InpaintingControlEncoder(folder.source, **options)
            control = encode(control_image, image, mask_image, *size)
        else:
            encoder = ControlEncoder(folder.source, **options)
            control = encoder(control_image, *size, config["control_in_dim"])

        def step(common: dict[str, Any], conditioning_scale: Any) -> dict[str, Any]:
            residuals = controlnet(**common, control=control, conditioning_scale=conditioning_scale)
            return {"residuals": residuals, "places": config["control_layers_places"]}

        return step

    return control_of


def _check_fit(net: Net, transformer: dict[str, Any], inpainting: bool) -> None:
    """LoadError unless the ControlNet is of the supported class and made for such a transformer."""
    config, source = net.config, net.source
    check_class(net, CONTROLNET)
    check_shared(net, transformer, _SHARED)
    places = config.get("control_layers_places") or []
    beyond = [place for place in places if place >= transformer["n_layers"]]
    if 0 not in places or beyond:
        raise LoadError(
            f"{source!r}: the ControlNet adds to layers {places}, the transformer has layers 0 to "
            f"{transformer['n_layers'] - 1}; use a ControlNet made for this model"
        )
    channels, wanted = config.get("control_in_dim") or 0, transformer["in_channels"]
    if inpainting and channels != 2 * wanted + 1:
        raise LoadError(
            f"{source!r}: the ControlNet takes {channels} channels, inpainting gives it "
            f"{2 * wanted + 1} (control image, mask, picture); use a version 2.0"
        )
    if channels < wanted:
        raise LoadError(
            f"{source!r}: the ControlNet takes {channels} channels, the control image has {wanted}; "
            "use a ControlNet made for this model"
        )
