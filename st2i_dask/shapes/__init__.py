"""The packaged model ``shapes``: its vocabulary, its prompts and the folder of its weights.

``shapes`` is a small but real text-to-image pipeline (FLUX architecture, Diffusers format). It
understands exactly one sentence,

    ``a SIZE COLOUR SHAPE on a COLOUR background``

and draws it at 64x64 pixels, so that an example or a test can ask for a picture without a download
and can decide from the pixels whether the picture is right (see :mod:`st2i_dask.shapes.judge`).

This module needs the standard library only.

>>> scene = parse("a small yellow star on a purple background")
>>> scene.shape, scene.background
('star', 'purple')
>>> len(scenes())
672
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import product
from pathlib import Path

#: Folder of the packaged pipeline, to be given to ``FluxPipeline.from_pretrained``.
PIPELINE: Path = Path(__file__).parent / "pipeline"

#: Folder of the packaged ControlNet (``FluxControlNetModel``): the shape takes the outline of a
#: silhouette, white on black.
CONTROLNET: Path = Path(__file__).parent / "controlnet"

#: The packaged LoRAs by the style that they add: a frame in the colour of the shape; a black
#: background.
STYLES: dict[str, Path] = {
    name: Path(__file__).parent / f"{name}.safetensors" for name in ("framed", "night")
}

#: Width and height of a picture, in pixels.
DEFAULT_SIZE = 64

#: Denoising steps (``num_inference_steps``) that the published accuracy is measured with.
DEFAULT_STEPS = 8

#: Prompt length in tokens, padding included: the ``max_sequence_length`` of the pipeline call.
#: The model was trained at this length and draws badly at any other.
MAX_PROMPT_TOKENS = 12

#: The two sizes, and the radius in pixels of the circle that each shape is drawn into.
SIZES: dict[str, int] = {"small": 15, "large": 26}

#: The colours, as 8-bit RGB.
COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (220, 30, 35),
    "green": (30, 160, 65),
    "blue": (40, 75, 220),
    "yellow": (245, 220, 45),
    "purple": (145, 50, 185),
    "white": (248, 248, 248),
    "black": (16, 16, 16),
    "orange": (245, 130, 25),
}

#: The shapes (drawn by :mod:`st2i_dask.shapes.render`).
SHAPES: tuple[str, ...] = ("circle", "square", "triangle", "star", "ring", "cross")


@dataclass(frozen=True)
class Scene:
    """What one prompt asks for: one shape on a plain background.

    Raises ValueError for a word outside the vocabulary, and for a shape in the colour of its
    background (nothing would be visible).
    """

    size: str
    colour: str
    shape: str
    background: str

    def __post_init__(self) -> None:
        _check_word("size", self.size, SIZES)
        _check_word("colour", self.colour, COLOURS)
        _check_word("shape", self.shape, SHAPES)
        _check_word("background", self.background, COLOURS)
        if self.colour == self.background:
            raise ValueError(
                f"a {self.colour} shape on a {self.background} background would be invisible; "
                "use two different colours"
            )

    @property
    def prompt(self) -> str:
        """The one sentence that describes this scene."""
        return f"a {self.size} {self.colour} {self.shape} on a {self.background} background"


def _check_word(role: str, word: str, known: dict | tuple[str, ...]) -> None:
    if word not in known:
        raise ValueError(f"unknown {role} {word!r}; use one of: {', '.join(known)}")


def parse(prompt: str) -> Scene:
    """The scene that ``prompt`` describes; the inverse of :attr:`Scene.prompt`.

    Case and spacing do not matter. Raises ValueError for any other sentence.

    >>> parse("A large red ring on a white background").prompt
    'a large red ring on a white background'
    """
    words = prompt.lower().split()
    if len(words) != 8 or (words[0], words[4], words[5], words[7]) != (
        "a",
        "on",
        "a",
        "background",
    ):
        raise ValueError(
            f"prompt {prompt!r} is not understood; write it as "
            "'a SIZE COLOUR SHAPE on a COLOUR background', "
            "for example 'a small yellow star on a purple background'"
        )
    return Scene(size=words[1], colour=words[2], shape=words[3], background=words[6])


def scenes() -> list[Scene]:
    """All 672 scenes, in a fixed order."""
    return [
        Scene(size, colour, shape, background)
        for size, colour, shape, background in product(SIZES, COLOURS, SHAPES, COLOURS)
        if colour != background
    ]


def gallery(n: int, seed: int = 0) -> list[str]:
    """``n`` varied prompts, the same for the same ``seed``.

    Sizes, colours, shapes and backgrounds come up about equally often, and exactly so if ``n`` is
    a multiple of 48; no prompt comes up twice within the first 96. Raises ValueError if ``n`` is
    negative.

    >>> gallery(2) == gallery(2), len(set(gallery(48)))
    (True, 48)
    """
    if n < 0:
        raise ValueError(f"n={n} prompts cannot be made; ask for n >= 0")
    rng = random.Random(seed)
    sizes, colours, shapes = list(SIZES), list(COLOURS), list(SHAPES)
    for words in (sizes, colours, shapes):
        rng.shuffle(words)
    prompts: list[str] = []
    for i in range(n):
        # A round of 48 brings each (colour, shape) pair once; the sums below are chosen so that
        # in each round every word of a kind comes up equally often, the sizes within each shape.
        turn, c = divmod(i, len(colours))
        turn, round_ = turn % len(shapes), turn // len(shapes)
        shape = shapes[(c + turn) % len(shapes)]
        size = sizes[(turn + c // 2 + round_) % len(sizes)]
        apart = 1 + (3 * turn + round_) % (len(colours) - 1)
        background = colours[(c + apart) % len(colours)]
        prompts.append(Scene(size, colours[c], shape, background).prompt)
    return prompts
