"""From what a ComfyUI workflow is made of to a workflow of the catalogue with these defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from PIL import Image

from ..catalogue import load
from ..catalogue.folder import read_folder
from ..catalogue.narrowed import with_defaults
from ..errors import LoadError
from ..workflow import Workflow, workflow
from .nodes import Control, Sampling
from .samplers import scheduler_for


def translate(
    sampling: Sampling,
    models: dict[str, str | Path],
    images: str | Path | None,
    name: str,
    dtype: str | None,
) -> Workflow:
    """The workflow, registered as `name`. LoadError as `from_comfyui`."""
    controls = _controls(sampling)
    _check_given(sampling, controls, models)
    source = str(models[sampling.model.checkpoint])
    folder = read_folder(source)
    folder_class = folder.index.get("scheduler", [None, None])[1]
    options: dict[str, Any] = {}
    scheduler = scheduler_for(str(folder_class), sampling.sampler, sampling.schedule)
    if scheduler is not None:
        options["scheduler"] = scheduler
    if sampling.latent.picture is not None:
        options["task"] = "image-to-image"
    base = load(
        source,
        name=name,
        dtype=dtype,
        controlnet=[models[control.file] for control in controls] or None,
        **options,
    )
    known = {parameter.name for parameter in base.parameters}
    values = _values(sampling, folder.pipeline_class)
    pictures = [_open(images, control.image) for control in controls]
    if len(pictures) == 1:
        values["control_image"] = pictures[0]
        values["controlnet_conditioning_scale"] = controls[0].strength
    elif pictures:
        values["control_image"] = pictures
        values["controlnet_conditioning_scale"] = [control.strength for control in controls]
    windows = [(control.start, control.end) for control in controls]
    if len(set(windows)) > 1:
        starts, ends = zip(*windows, strict=True)
        values["control_guidance_start"], values["control_guidance_end"] = list(starts), list(ends)
    elif set(windows) - {(0.0, 1.0)}:
        values["control_guidance_start"], values["control_guidance_end"] = windows[0]
    if sampling.latent.picture is not None:
        values["image"] = _open(images, sampling.latent.picture)
        values["strength"] = sampling.denoise
        if "width" in known:  # elsewhere the picture decides
            values["width"] = _multiple(values["image"].width)
            values["height"] = _multiple(values["image"].height)
    elif sampling.denoise != 1.0:
        raise LoadError(
            f"KSampler: denoise={sampling.denoise:g} with an empty latent; give it 1, or a picture "
            "through VAEEncode"
        )
    if sampling.model.loras:
        values["loras"] = [(str(models[lora.file]), lora.scale) for lora in sampling.model.loras]
    missing = sorted(values.keys() - known)
    if missing:
        raise LoadError(
            f"{source!r} ({folder.pipeline_class}): its workflow takes no {', '.join(missing)}; "
            f"it takes: {', '.join(sorted(known))}"
        )
    made: Workflow = workflow(name=name, replace=True)(with_defaults(base.function, values))
    return made


def _controls(sampling: Sampling) -> tuple[Control, ...]:
    """ControlNetApply conditions the positive text only, the advanced node both."""
    controls = sampling.positive.controls
    if sampling.negative.controls not in ((), controls):
        raise LoadError("KSampler: positive and negative have different ControlNets; give both one")
    return controls


def _check_given(
    sampling: Sampling, controls: tuple[Control, ...], models: dict[str, str | Path]
) -> None:
    wanted = [sampling.model.checkpoint]
    wanted += [control.file for control in controls]
    wanted += [lora.file for lora in sampling.model.loras]
    missing = [file for file in dict.fromkeys(wanted) if file not in models]
    if missing:
        raise LoadError(
            f"no folder or hub id is given for {', '.join(map(repr, missing))}; pass "
            f"models={{{missing[0]!r}: ...}}"
        )


def _values(sampling: Sampling, pipeline_class: str) -> dict[str, Any]:
    latent = sampling.latent
    values: dict[str, Any] = {
        "prompt": sampling.positive.text,
        "seed": sampling.seed,
        "num_steps": sampling.steps,
        **_guidance(sampling, pipeline_class),
    }
    if latent.width is not None:
        values |= {"width": latent.width, "height": latent.height}
    if latent.images != 1:
        values["num_images"] = latent.images
    # With cfg=1 ComfyUI does not run the negative text.
    if sampling.cfg != 1.0 and sampling.negative.text.strip():
        values["negative_prompt"] = sampling.negative.text
    return values


def _guidance(sampling: Sampling, pipeline_class: str) -> dict[str, Any]:
    """cfg=1 is no guidance in ComfyUI. Some families count it from 0, some have two kinds."""
    embedded = sampling.positive.guidance
    if pipeline_class.startswith("Flux") and not pipeline_class.startswith("Flux2"):
        values = {} if embedded is None else {"guidance_scale": embedded}
        return values if sampling.cfg == 1.0 else {**values, "true_cfg_scale": sampling.cfg}
    if embedded is not None:
        raise LoadError(f"FluxGuidance has no meaning for a {pipeline_class}; take it out")
    if pipeline_class.startswith("ZImage"):
        return {"guidance_scale": sampling.cfg - 1.0}
    if pipeline_class.startswith("QwenImage"):
        return {"true_cfg_scale": sampling.cfg}
    return {"guidance_scale": sampling.cfg}


def _open(folder: str | Path | None, name: str) -> Image.Image:
    # As ComfyUI writes it: "sub/picture.png [input]".
    path = Path(folder or ".") / name.removesuffix(" [input]")
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except OSError as error:
        raise LoadError(
            f"LoadImage: {str(path)!r} cannot be read ({error}); give the folder with images=..."
        ) from error


def _multiple(side: int) -> int:
    """ComfyUI cuts a picture to whole latents; models take multiples of 16."""
    return max(16, side // 16 * 16)
