"""The workflows of the paper's two settings (table 1), by name: five basic ones, and twenty with adapters.

The paper names the base models; which ControlNets and LoRAs go with them is chosen here, from those that
are published for these models. Weights are fetched from the hub when a workflow is used; for a machine
without them, or without a GPU, the same families are built tiny, with random weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import LoadError
from ..workflow import Workflow, workflow
from . import load
from .narrowed import with_defaults


@dataclass(frozen=True)
class Entry:
    """source, controlnet, lora: hub ids. num_steps: as the model is made for. tiny: builds its family."""

    source: str
    num_steps: int
    tiny: str
    controlnet: str | None = None
    lora: str | None = None


_SD35 = Entry("stabilityai/stable-diffusion-3.5-large", 28, "sd3")
_Z_IMAGE = Entry("Tongyi-MAI/Z-Image", 50, "z_image")
_TURBO = Entry("Tongyi-MAI/Z-Image-Turbo", 8, "z_image")
_FLUX = Entry("black-forest-labs/FLUX.1-dev", 28, "flux")
_SCHNELL = Entry("black-forest-labs/FLUX.1-schnell", 4, "schnell")
_KLEIN = Entry("black-forest-labs/FLUX.2-klein-9B", 4, "flux2_klein")

_S1 = {"sd35": _SD35, "z-image": _Z_IMAGE, "turbo": _TURBO, "flux-dev": _FLUX, "klein": _KLEIN}
_CONTROLNETS = {
    "sd35-canny": (_SD35, "stabilityai/stable-diffusion-3.5-large-controlnet-canny"),
    "sd35-depth": (_SD35, "stabilityai/stable-diffusion-3.5-large-controlnet-depth"),
    "z-image-control": (_Z_IMAGE, "alibaba-pai/Z-Image-Fun-Controlnet-Union-2.1"),
    "turbo-control": (_TURBO, "alibaba-pai/Z-Image-Turbo-Fun-Controlnet-Union"),
    "flux-canny": (_FLUX, "InstantX/FLUX.1-dev-Controlnet-Canny"),
    "flux-depth": (_FLUX, "Shakker-Labs/FLUX.1-dev-ControlNet-Depth"),
}
_LORAS = {
    "sd35-lora-0": (_SD35, "Shakker-Labs/SD3.5-LoRA-Linear-Red-Light"),
    "z-image-lora-1": (_Z_IMAGE, "FutureAILab/Z-Image"),
    "turbo-lora-2": (_TURBO, "tarn59/pixel_art_style_lora_z_image_turbo"),
    "turbo-lora-3": (_TURBO, "Mushaa/Z-Image-Turbo.lora"),
    "flux-dev-lora-4": (_FLUX, "XLabs-AI/flux-RealismLora"),
    "flux-dev-lora-5": (_FLUX, "Shakker-Labs/FLUX.1-dev-LoRA-add-details"),
    "schnell-lora-6": (_SCHNELL, "hugovntr/flux-schnell-realism"),
    "klein-lora-7": (_KLEIN, "mejadapur/flux2-klein-lora"),
}

#: By the setting's name and the workflow's.
SETTINGS: Mapping[str, Mapping[str, Entry]] = {
    "S1": _S1,
    "S2": {
        **_S1,
        "schnell": _SCHNELL,
        **{name: replace(base, controlnet=it) for name, (base, it) in _CONTROLNETS.items()},
        **{name: replace(base, lora=it) for name, (base, it) in _LORAS.items()},
    },
}


def load_setting(name: str, *, tiny: str | Path | None = None) -> dict[str, Workflow]:
    """The workflows of setting "S1" or "S2" by name, with the steps that each model is made for.

    tiny: a folder, visible under the same path on every worker, where tiny models with random weights
        are built in place of the published ones (once; pictures of 64x64 noise in 2 steps).

    LoadError for another name; with published models also where the hub cannot be reached.
    """
    entries = SETTINGS.get(name)
    if entries is None:
        raise LoadError(f"no setting is called {name!r}; there are {', '.join(SETTINGS)}")
    if tiny is None:
        return {key: _workflow(key, entry, entry.source) for key, entry in entries.items()}
    root = Path(tiny).absolute()
    return {key: _tiny(key, entry, root) for key, entry in entries.items()}


def _workflow(name: str, entry: Entry, source: str, **defaults: Any) -> Workflow:
    defaults = {"num_steps": entry.num_steps, **defaults}
    made = load(source, name=name, controlnet=entry.controlnet, **defaults)
    if entry.lora is not None:
        changed = with_defaults(made.function, {"loras": [(entry.lora, 1.0)]})
        made = workflow(name=name, replace=True)(changed)
    return made


def _tiny(name: str, entry: Entry, root: Path) -> Workflow:
    build, control, defaults = _BUILDERS[entry.tiny]
    folder = root / entry.tiny
    if not (folder / "model_index.json").is_file():
        build(folder)
    if entry.controlnet is not None:
        path = root / f"{entry.tiny}-control"
        if not (path / "config.json").is_file():
            assert control is not None, f"{entry.tiny} has no ControlNet"
            control(path)
        entry = replace(entry, controlnet=str(path))
    if entry.lora is not None:
        path = root / f"{name}.safetensors"
        if not path.is_file():
            _build_lora(folder, path, seed=list(_LORAS).index(name))
        entry = replace(entry, lora=str(path))
    entry = replace(entry, num_steps=2)
    return _workflow(name, entry, str(folder), height=64, width=64, **defaults)


def _build_lora(folder: Path, path: Path, seed: int) -> None:
    import diffusers

    from .tiny_lora import save_lora

    save_lora(path, diffusers.DiffusionPipeline.from_pretrained(folder), seed=seed)


def _flux(path: Path) -> None:
    from . import tiny

    tiny.save_flux(path)


def _schnell(path: Path) -> None:
    from . import tiny

    tiny.save_flux(path, guidance=False)


def _flux_control(path: Path) -> None:
    from . import tiny

    tiny.flux_controlnet().controlnet.save_pretrained(path)


def _sd3(path: Path) -> None:
    from . import tiny_sd3

    tiny_sd3.save_sd3(path)


def _sd3_control(path: Path) -> None:
    from . import tiny_sd3

    tiny_sd3.save_sd3_control(path)


def _z_image(path: Path) -> None:
    from . import tiny_z_image

    tiny_z_image.save_z_image(path)


def _z_image_control(path: Path) -> None:
    from . import tiny_z_image

    tiny_z_image.z_image_controlnet().save_pretrained(path)


def _klein(path: Path) -> None:
    from . import tiny_flux2_klein

    tiny_flux2_klein.save_flux2_klein(path)


_Build = Callable[[Path], None]
#: What builds the model and its ControlNet, and defaults of the workflow.
_BUILDERS: Mapping[str, tuple[_Build, _Build | None, dict[str, Any]]] = {
    "flux": (_flux, _flux_control, {}),
    "schnell": (_schnell, None, {}),
    "sd3": (_sd3, _sd3_control, {}),
    "z_image": (_z_image, _z_image_control, {}),
    "flux2_klein": (_klein, None, {"text_encoder_out_layers": (0, 1, 2)}),
}
