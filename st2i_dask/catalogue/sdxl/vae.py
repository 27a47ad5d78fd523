"""The VAE of the SDXL workflows, also where it computes in float32 while the pipeline does not."""

from functools import cached_property
from typing import Any

from ...model_fn import ModelFn
from ..denoising import resumed
from ..folder import load_parts
from ..part import PipelinePart


class VaeEncoder(PipelinePart):
    """Pixels (1, 3, height, width) to latents drawn from their distribution, and the generator's state
    after the draw.

    pixels: as the pipeline's image processor gives them. like: of the pipeline's dtype. centred:
    whether latents are shifted and scaled by a mean and deviation that the VAE's configuration gives.
    """

    parts = frozenset({"vae"})

    def setup_io(self) -> None:
        self.add_input("pixels")
        self.add_input("generator_state")
        self.add_input("like")
        self.add_input("centred")
        self.add_output("latents")
        self.add_output("generator_state_after")

    def run(self, pipeline: Any, **inputs: Any) -> dict[str, Any]:
        vae, generator = pipeline.vae, resumed(inputs["generator_state"])
        dtype = inputs["like"].dtype
        # Where the VAE computes in float32, the pipelines round to their dtype first.
        pixels = inputs["pixels"].to(device=vae.device, dtype=dtype).to(vae.dtype)
        latents = vae.encode(pixels).latent_dist.sample(generator).to(dtype)
        mean, std = _mean_and_std(vae, latents)
        if inputs["centred"] and mean is not None:
            latents = (latents - mean) * vae.config.scaling_factor / std
        else:
            latents = vae.config.scaling_factor * latents
        return {"latents": latents, "generator_state_after": generator.get_state()}


class VaeDecoder(PipelinePart):
    """Latents to pixels in about [-1, 1], (images, 3, height, width)."""

    parts = VaeEncoder.parts

    def setup_io(self) -> None:
        self.add_input("latents")
        self.add_output("pixels")

    def run(self, pipeline: Any, **inputs: Any) -> dict[str, Any]:
        vae = pipeline.vae
        latents = inputs["latents"].to(vae.dtype)
        mean, std = _mean_and_std(vae, latents)
        if mean is not None:
            latents = latents * std / vae.config.scaling_factor + mean
        else:
            latents = latents / vae.config.scaling_factor
        pixels = vae.decode(latents, return_dict=False)[0]
        if pipeline.watermark is not None:  # where the package for it is installed
            pixels = pipeline.watermark.apply_watermark(pixels)
        return {"pixels": pixels}


class _UpcastVae(ModelFn):
    """The VAE in float32, its weights rounded to the pipeline's dtype before. One for both ways."""

    @cached_property
    def model_key(self) -> str:
        return f"{__name__}.upcast|{self.model_path}|{self._options_json}"

    def load_model(self, model_path: str | None) -> dict[str, Any]:
        import torch

        pipeline = load_parts(str(model_path), {"vae"}, self.options.get("dtype"))
        pipeline.vae.to(dtype=torch.float32)
        return {"pipeline": pipeline}


class UpcastVaeEncoder(_UpcastVae):
    __doc__ = VaeEncoder.__doc__

    setup_io = VaeEncoder.setup_io

    def execute(self, model_components: Any, **inputs: Any) -> Any:
        return VaeEncoder.run(self, model_components["pipeline"], **inputs)  # type: ignore[arg-type]


class UpcastVaeDecoder(_UpcastVae):
    __doc__ = VaeDecoder.__doc__

    setup_io = VaeDecoder.setup_io

    def execute(self, model_components: Any, **inputs: Any) -> Any:
        return VaeDecoder.run(self, model_components["pipeline"], **inputs)  # type: ignore[arg-type]


def _mean_and_std(vae: Any, latents: Any) -> tuple[Any, Any]:
    """Of latents, (1, 4, 1, 1), as the VAE's configuration gives them; None unless it gives both."""
    import torch

    given = [getattr(vae.config, name, None) for name in ("latents_mean", "latents_std")]
    if None in given:
        return None, None
    mean, std = (
        torch.tensor(values).view(1, 4, 1, 1).to(latents.device, latents.dtype) for values in given
    )
    return mean, std
