"""Several images of one request, drawn together or each by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..glue import glue

#: Images of one request.
MAX_IMAGES = 16


def draw_images(draw: Callable[[Any, int], Any], seed: Any, num_images: int, spread: bool) -> Any:
    """Inside a workflow: the images of a request.

    draw: composes so many images from a seed; whatever does not depend on these is composed before.
    spread: False: one batch from one generator, as `num_images_per_prompt` of the pipeline. True: image
        i is what the pipeline gives for it alone with seed + i; the images run on as many executors.
    """
    if num_images == 1 or not spread:
        return draw(seed, num_images)
    return gather([draw(nth_seed(seed, number), 1) for number in range(num_images)])


@glue
def nth_seed(seed: int, number: int) -> int:
    """The seed of an image; after the largest one (2**64 - 1) comes 0."""
    return seed + number if seed + number < 2**64 else seed + number - 2**64


@glue
def gather(images: list[Any]) -> Any:
    """As one batch would give them: a list of PIL images, or a tensor (images, 3, height, width)."""
    if not hasattr(images[0], "detach"):
        return list(images)
    import torch

    return torch.stack(images)
