"""The reference drawing of a scene: what the model was trained on and is judged against."""

from __future__ import annotations

import math
from dataclasses import replace

from PIL import Image, ImageDraw

from st2i_dask.shapes import COLOURS, DEFAULT_SIZE, SHAPES, SIZES, STYLES, Scene

#: Training pictures shift the shape by up to this many pixels in each direction; every shape
#: still lies inside the picture.
MAX_OFFSET = 4

#: Width in pixels of the frame that the style ``framed`` draws.
FRAME = 4

_OVERSAMPLING = 4


def coverage(shape: str, size: str, dx: float = 0, dy: float = 0) -> Image.Image:
    """How much of each pixel the shape covers, as an 8-bit grey picture (255: all of it).

    ``dx`` and ``dy`` move the shape from the centre to the right and down, in pixels; what leaves
    the picture is cut off. Raises ValueError for an unknown shape or size.
    """
    if size not in SIZES:
        raise ValueError(f"unknown size {size!r}; use one of: {', '.join(SIZES)}")
    return silhouette(shape, SIZES[size], dx, dy)


def silhouette(
    shape: str, radius: float, dx: float = 0, dy: float = 0, turn: float = 0
) -> Image.Image:
    """Like :func:`coverage`, for any ``radius`` in pixels and turned to the left by ``turn`` degrees.

    As an RGB picture it is the control image of the packaged ControlNet.
    """
    scale = _OVERSAMPLING
    canvas = Image.new("L", (DEFAULT_SIZE * scale, DEFAULT_SIZE * scale), 0)
    draw = ImageDraw.Draw(canvas)
    x, y = (DEFAULT_SIZE / 2 + dx) * scale, (DEFAULT_SIZE / 2 + dy) * scale
    r = radius * scale

    def box(half_width: float, half_height: float) -> tuple[float, float, float, float]:
        # PIL draws both ends of a box; take one off so that the box is centred.
        return (x - half_width, y - half_height, x + half_width - 1, y + half_height - 1)

    match shape:
        case "circle":
            draw.ellipse(box(r, r), fill=255)
        case "ring":
            draw.ellipse(box(r, r), fill=255)
            draw.ellipse(box(r * 0.5, r * 0.5), fill=0)
        case "square":
            draw.rectangle(box(r * 0.85, r * 0.85), fill=255)
        case "cross":
            draw.rectangle(box(r, r * 0.3), fill=255)
            draw.rectangle(box(r * 0.3, r), fill=255)
        case "triangle":
            draw.polygon(_corners(x, y + r * 0.2, [r * 1.1] * 3), fill=255)
        case "star":
            draw.polygon(_corners(x, y, [r, r * 0.42] * 5), fill=255)
        case _:
            raise ValueError(f"unknown shape {shape!r}; use one of: {', '.join(SHAPES)}")
    if turn:
        canvas = canvas.rotate(turn, Image.Resampling.BILINEAR, center=(x, y))
    return canvas.resize((DEFAULT_SIZE, DEFAULT_SIZE), Image.Resampling.BOX)


def _corners(x: float, y: float, radii: list[float]) -> list[tuple[float, float]]:
    """Corners at ``radii`` around (x, y), evenly turned, the first one straight up."""
    turn = 2 * math.pi / len(radii)
    return [(x + r * math.sin(i * turn), y - r * math.cos(i * turn)) for i, r in enumerate(radii)]


def at_night(scene: Scene) -> Scene:
    """What the style ``night`` makes of a scene: a black background; a black shape becomes white."""
    return replace(
        scene, background="black", colour="white" if scene.colour == "black" else scene.colour
    )


def render(scene: Scene, dx: float = 0, dy: float = 0, style: str | None = None) -> Image.Image:
    """The scene as a 64x64 RGB picture, its shape moved by (``dx``, ``dy``) pixels.

    ``style`` is one of :data:`st2i_dask.shapes.STYLES`, each that of a packaged LoRA.
    """
    if style not in (None, *STYLES):
        raise ValueError(f"unknown style {style!r}; use one of: {', '.join(STYLES)}")
    if style == "night":
        scene = at_night(scene)
    picture = Image.new("RGB", (DEFAULT_SIZE, DEFAULT_SIZE), COLOURS[scene.background])
    picture.paste(COLOURS[scene.colour], (0, 0), coverage(scene.shape, scene.size, dx, dy))
    if style == "framed":
        frame = Image.new("RGB", picture.size, COLOURS[scene.colour])
        inside = (FRAME, FRAME, DEFAULT_SIZE - FRAME, DEFAULT_SIZE - FRAME)
        frame.paste(picture.crop(inside), inside)
        return frame
    return picture
