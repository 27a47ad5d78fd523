"""Decides from the pixels alone whether a picture shows what its prompt asked for.

:func:`look` names what it sees without knowing the prompt; :func:`judge` compares that with a
scene. Nothing here depends on the model, so the same judge measures any pipeline, LoRA or
ControlNet that draws in the vocabulary of :mod:`st2i_dask.shapes`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from PIL import Image

from st2i_dask.shapes import COLOURS, DEFAULT_SIZE, SHAPES, SIZES, Scene
from st2i_dask.shapes.render import FRAME, coverage

#: A colour further than this from every known colour (in 8-bit RGB units) has no name. The two
#: closest known colours, yellow and orange, are 92 apart.
COLOUR_TOLERANCE = 60.0

#: Below this difference between shape and background (in 8-bit RGB units) there is no shape.
MIN_CONTRAST = 40.0

#: A silhouette that overlaps no template by this much (intersection over union) has no name.
MIN_OVERLAP = 0.7

#: Width in pixels of the frame that the background colour is read from.
_BORDER = 2

#: Templates are tried at every whole-pixel offset up to this one, in each direction.
_SEARCH = 6


@dataclass(frozen=True)
class Seen:
    """What a picture shows; None where no word of the vocabulary fits."""

    background: str | None
    colour: str | None
    size: str | None
    shape: str | None


@dataclass(frozen=True)
class Verdict:
    """Which attributes of a picture are as asked for."""

    background: bool
    colour: bool
    size: bool
    shape: bool

    @property
    def right(self) -> bool:
        """Whether all four attributes are as asked for."""
        return self.background and self.colour and self.size and self.shape


def judge(image: Image.Image, scene: Scene) -> Verdict:
    """Compare a 64x64 picture with the scene it should show; raises as :func:`look` does."""
    seen = look(image)
    return Verdict(
        background=seen.background == scene.background,
        colour=seen.colour == scene.colour,
        size=seen.size == scene.size,
        shape=seen.shape == scene.shape,
    )


def look(image: Image.Image) -> Seen:
    """Name what a 64x64 picture shows. Takes about 5 ms; the first call also makes the templates.

    Raises ValueError for a picture of another size.
    """
    pixels, ground, distance = _contrast(image)
    if distance is None:
        return Seen(background=_name_colour(ground), colour=None, size=None, shape=None)
    silhouette = distance > 0.5
    return Seen(
        background=_name_colour(ground),
        colour=_name_colour(np.median(pixels[silhouette], axis=0)),
        size=_name_size(silhouette),
        shape=_name_shape(silhouette),
    )


def overlap(image: Image.Image, outline: Image.Image) -> float:
    """Intersection over union of the drawn shape with the white of ``outline``, from 0 to 1.

    Both are 64x64 pixels; ``outline`` is a grey or black-and-white picture as
    :func:`st2i_dask.shapes.render.silhouette` draws it. Raises ValueError for another size.
    """
    distance = _contrast(image)[2]
    drawn = np.zeros((DEFAULT_SIZE, DEFAULT_SIZE), bool) if distance is None else distance > 0.5
    _check_size(outline)
    wanted = np.asarray(outline.convert("L")) >= 128
    union = int((drawn | wanted).sum())
    return int((drawn & wanted).sum()) / union if union else 1.0


def framed(image: Image.Image, scene: Scene) -> float:
    """Share of a frame :data:`FRAME` wide that is nearer to the shape's colour than the background's.

    From 0 to 1: a plain picture of the scene has next to 0.
    """
    _check_size(image)
    pixels = np.asarray(image.convert("RGB"), dtype=np.float32)
    to_shape, to_ground = (
        np.linalg.norm(pixels - np.array(COLOURS[name]), axis=-1)
        for name in (scene.colour, scene.background)
    )
    return float((to_shape < to_ground)[_border(FRAME)].mean())


def unframe(image: Image.Image) -> Image.Image:
    """The picture with the colour just inside its frame in place of the frame, to be judged."""
    _check_size(image)
    pixels = np.array(image.convert("RGB"))
    # The decoder blurs the inner edge of the frame by a pixel.
    inside = _border(FRAME + 2) & ~_border(FRAME + 1)
    pixels[_border(FRAME + 1)] = np.median(pixels[inside], axis=0)
    return Image.fromarray(pixels)


def _check_size(image: Image.Image) -> None:
    if image.size != (DEFAULT_SIZE, DEFAULT_SIZE):
        raise ValueError(
            f"the picture is {image.width}x{image.height} pixels; the judge reads "
            f"{DEFAULT_SIZE}x{DEFAULT_SIZE} only: generate at that size or resize the picture"
        )


def _border(width: int) -> np.ndarray:
    """True in the outermost ``width`` pixels of a picture."""
    border = np.ones((DEFAULT_SIZE, DEFAULT_SIZE), dtype=bool)
    border[width:-width, width:-width] = False
    return border


def _contrast(image: Image.Image) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Pixels, background colour, and each pixel's distance from it, 1 being that of the shape.

    The distance is None where there is no shape.
    """
    _check_size(image)
    pixels = np.asarray(image.convert("RGB"), dtype=np.float32)
    ground = np.median(pixels[_border(_BORDER)], axis=0)
    distance = np.linalg.norm(pixels - ground, axis=-1)
    # The smallest shape, the small star, covers 7 % of the picture: 3 % are surely inside it.
    contrast = float(np.quantile(distance, 0.97))
    return pixels, ground, distance / contrast if contrast >= MIN_CONTRAST else None


def _name_colour(rgb: np.ndarray) -> str | None:
    distances = {name: float(np.linalg.norm(rgb - known)) for name, known in COLOURS.items()}
    nearest = min(distances, key=distances.__getitem__)
    return nearest if distances[nearest] <= COLOUR_TOLERANCE else None


def _name_size(silhouette: np.ndarray) -> str | None:
    """The size whose diameter is nearest to the longer side of the silhouette."""
    # Rows and columns with a single pixel are taken for noise, or for the tip of a star.
    extent = max(int((silhouette.sum(axis=axis) >= 2).sum()) for axis in (0, 1))
    if extent == 0:
        return None
    # No shape fills its circle quite; 0.93 is the mean of the longer sides over all shapes.
    return min(SIZES, key=lambda size: abs(extent - 2 * 0.93 * SIZES[size]))


def _name_shape(silhouette: np.ndarray) -> str | None:
    """The shape whose best template, over both sizes and all offsets, overlaps most."""
    names, templates, areas = _templates()
    common = templates @ silhouette.reshape(-1).astype(np.float32)
    overlap = common / (areas + silhouette.sum() - common)
    best = int(overlap.argmax())
    return names[best] if overlap[best] >= MIN_OVERLAP else None


@lru_cache(maxsize=1)
def _templates() -> tuple[list[str], np.ndarray, np.ndarray]:
    """Name, silhouette (float32 [n, 4096], zeros and ones) and area of each of 2,028 templates."""
    names: list[str] = []
    rows: list[np.ndarray] = []
    offsets = range(-_SEARCH, _SEARCH + 1)
    for shape in SHAPES:
        for size in SIZES:
            for dx in offsets:
                for dy in offsets:
                    names.append(shape)
                    rows.append(np.asarray(coverage(shape, size, dx, dy)).reshape(-1) >= 128)
    templates = np.stack(rows).astype(np.float32)
    return names, templates, templates.sum(axis=1)
