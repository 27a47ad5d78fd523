"""Pictures as parameters that keep their own size: what FLUX.2 Klein looks at, and what it paints in.

They travel as uint8 (height, width, 3). A larger one than a megapixel is shrunk on the client already,
as the pipelines do it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from ...errors import ParameterError
from ...rules import NOTHING
from ..input_image import InputImage

#: Pixels that a picture has at most after shrinking.
MAX_AREA = 1024 * 1024


@dataclass(frozen=True)
class OwnSizeImage:
    """Rule: one RGB PIL image. least: pixels of each side. slimmest: the largest aspect ratio."""

    least: int
    slimmest: float | None = None

    def check(self, name: str, value: Any, values: Mapping[str, Any] = NOTHING) -> None:
        if not isinstance(value, Image.Image):
            raise ParameterError(
                f"{name} has type {type(value).__name__}, wanted {self.describe()}; open a file "
                "with PIL.Image.open(path), use PIL.Image.fromarray(array) for 8-bit pixels"
            )
        InputImage().check(name, value, values)
        width, height = value.size
        if min(shrunk(value.size)) < self.least:
            raise ParameterError(
                f"{name} has {width}x{height} pixels, wanted at least {self.least} a side; "
                "enlarge it"
            )
        if self.slimmest is not None and max(width / height, height / width) > self.slimmest:
            raise ParameterError(
                f"{name} has {width}x{height} pixels, a ratio of "
                f"{max(width / height, height / width):.1f}; allowed: up to {self.slimmest:g}; crop it"
            )

    def carry(self, name: str, value: Any, values: Mapping[str, Any]) -> np.ndarray:
        size = shrunk(value.size)
        if size != value.size:
            value = value.resize(size, Image.Resampling.LANCZOS)
        try:
            return np.array(value)
        except OSError as error:
            raise ParameterError(
                f"{name}={value!r} cannot be read: {error}; open the whole file again"
            ) from error

    def describe(self) -> str:
        limits = f"at least {self.least} pixels a side"
        if self.slimmest is not None:
            limits += f", aspect ratio up to {self.slimmest:g}"
        return f"one RGB PIL image, {limits}"


@dataclass(frozen=True)
class ReferenceImages:
    """Rule: a list of 1 to `most` RGB PIL images; one may come without a list.

    Limits are the pipeline's own (Flux2ImageProcessor.check_image_input).
    """

    most: int = 10
    each: OwnSizeImage = OwnSizeImage(least=64, slimmest=8)

    def check(self, name: str, value: Any, values: Mapping[str, Any] = NOTHING) -> None:
        images = _listed(value)
        if not 1 <= len(images) <= self.most:
            raise ParameterError(f"{name} holds {len(images)} images, wanted {self.describe()}")
        for number, image in enumerate(images):
            self.each.check(f"{name}[{number}]", image, values)

    def carry(self, name: str, value: Any, values: Mapping[str, Any]) -> list[np.ndarray]:
        return [
            self.each.carry(f"{name}[{number}]", image, values)
            for number, image in enumerate(_listed(value))
        ]

    def describe(self) -> str:
        return f"1 to {self.most} images, each {self.each.describe()}"


def shrunk(size: tuple[int, int]) -> tuple[int, int]:
    """Width and height with at most MAX_AREA pixels (Flux2ImageProcessor._resize_to_target_area)."""
    width, height = size
    if width * height <= MAX_AREA:
        return size
    scale = math.sqrt(MAX_AREA / (width * height))
    return int(width * scale), int(height * scale)


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]
