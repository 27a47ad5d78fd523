"""What a family denoises a given picture from, as ModelFns around its VAE: their inputs and outputs."""

from __future__ import annotations

from .part import PipelinePart


class FromPicture(PipelinePart):
    """A picture to noisy latents of the first step.

    settings: of the request's scheduler, see the family's `make_scheduler`.
    """

    parts = frozenset({"vae"})
    given: tuple[str, ...] = ("image",)
    made: tuple[str, ...] = ("latents",)

    def setup_io(self) -> None:
        for name in (*self.given, "seed", "num_images", "channels", "height", "width", "settings"):
            self.add_input(name)
        for name in self.made:
            self.add_output(name)


class FromMaskedPicture(FromPicture):
    """As `FromPicture`, with what is needed to keep the picture where the mask is dark: the mask is 1
    where it is drawn anew."""

    given = ("image", "mask_image")
    made = ("latents", "noise", "image_latents", "mask")
