"""The result: a PIL image that knows how it was made, and says so in every PNG."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from . import _core
from .display import image_html
from .errors import NotFiniteError, OutputError
from .glue import glue

#: Key of `Image.info` that holds the metadata in memory.
_INFO = "st2i"


class GeneratedImage(Image.Image):
    """A PIL image with generation metadata. Saving it as PNG writes the metadata as text chunks.

    `metadata`: workflow, version, prompt, seed, steps, size, tenant, and the other parameters.
    In a notebook it shows itself and how it was made. Everything else is PIL's: copies and conversions
    are plain images.
    """

    # A notebook stores every form that there is: PNG, alone and in the HTML, is enough.
    _repr_jpeg_ = None

    @classmethod
    def of(cls, image: Image.Image, metadata: dict[str, Any]) -> GeneratedImage:
        made = cls()
        made.__setstate__(image.__getstate__())
        made.info = {**image.info, _INFO: dict(metadata)}
        return made

    @property
    def metadata(self) -> dict[str, Any]:
        return dict(self.info[_INFO])

    def save(self, fp: Any, format: str | None = None, **params: Any) -> None:
        """As PIL's; PNG gets the metadata as text chunks unless `pnginfo` is given."""
        name = fp if isinstance(fp, (str, bytes, os.PathLike)) else getattr(fp, "name", "")
        suffix = "" if isinstance(name, int) else Path(os.fsdecode(name)).suffix.lower()
        png = (format or "").upper() == "PNG" or (not format and suffix in (".png", ".apng"))
        if png and "pnginfo" not in params:
            params["pnginfo"] = text_chunks(self.metadata)
        super().save(fp, format, **params)

    def _repr_html_(self) -> str | None:
        png = self._repr_png_()
        return None if png is None else image_html(png, self.metadata)


def text_chunks(metadata: dict[str, Any]) -> PngInfo:
    """The metadata as PNG text; strings as they are, everything else as JSON."""
    info = PngInfo()
    for name, value in metadata.items():
        text = value if isinstance(value, str) else json.dumps(value, default=str)
        # tEXt where latin-1 holds it, iTXt (UTF-8) otherwise.
        try:
            text.encode("latin-1")
            info.add_text(name, text)
        except UnicodeEncodeError:
            info.add_itxt(name, text)
    return info


def read_metadata(path: str | Path) -> dict[str, str]:
    """The text chunks of a PNG written by `GeneratedImage.save`, as strings."""
    with Image.open(path) as image:
        return dict(getattr(image, "text", {}))


def finish(value: Any, about: dict[str, Any]) -> Any:
    """What the client gets: PIL images with metadata, or any other value as it is.

    In a list each image has its number, from 0, as `image`.
    """
    if isinstance(value, Image.Image):
        return GeneratedImage.of(value, {**about, "size": f"{value.width}x{value.height}"})
    if isinstance(value, list):
        return [finish(item, {**about, "image": number}) for number, item in enumerate(value)]
    return value


def check_pixels(values: Any, *, lowest: float, where: str) -> None:
    """OutputError if pixels are NaN, infinite, or all at `lowest` (black).

    values: float tensor or array of any shape and device; `lowest`: the value of black.
    """
    if hasattr(values, "detach"):
        values = values.detach().float().cpu().numpy()
    pixels = np.ascontiguousarray(values, dtype=np.float32)
    _, maximum, nonfinite = _core.scan(pixels)
    if nonfinite:
        raise NotFiniteError(
            f"{where} produced {nonfinite} of {pixels.size} pixels that are NaN or infinite; "
            "another dtype (bfloat16 or float32 instead of float16) usually cures it"
        )
    if maximum <= lowest:
        raise OutputError(
            f"{where} produced an all-black image; the model's numbers overflowed or its weights "
            "are wrong; try another dtype or check the model folder"
        )


@glue
def to_image(pixels: Any) -> Image.Image:
    """Glue: a float image in [0, 1], shape (3, H, W) or (1, 3, H, W), as a PIL image.

    Rounds as Diffusers does (`VaeImageProcessor`). OutputError for NaN or black.
    """
    if hasattr(pixels, "detach"):
        pixels = pixels.detach().float().cpu().numpy()
    array = np.asarray(pixels, dtype=np.float32)
    if array.ndim == 4 and array.shape[0] == 1:
        array = array[0]
    if array.ndim != 3 or array.shape[0] != 3:
        raise OutputError(
            f"to_image got shape {tuple(np.shape(pixels))}; wanted (3, H, W) or (1, 3, H, W)"
        )
    check_pixels(array, lowest=0.0, where="to_image")
    pixels = (np.clip(array, 0.0, 1.0).transpose(1, 2, 0) * 255).round().astype("uint8")
    return Image.fromarray(pixels)
