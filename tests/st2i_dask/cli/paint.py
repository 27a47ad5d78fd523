"""A workflow file as people write them for --workflow FILE.py:NAME. Quick: it needs no torch."""

import time
from typing import Annotated, Any, Literal

import numpy as np

import st2i_dask as st2i


class Paint(st2i.ModelFn):
    """Noise that depends on all inputs; some prompts fail, some take their time."""

    def setup_io(self) -> None:
        for name in ("prompt", "seed", "steps", "width", "height", "strength"):
            self.add_input(name)
        self.add_output("pixels")

    def execute(self, model_components: Any, **inputs: Any) -> dict[str, Any]:
        prompt = inputs["prompt"]
        if "broken" in prompt:
            raise RuntimeError(f"the brush broke at {prompt!r}")
        if "slow" in prompt:
            time.sleep(0.3)
        text = f"{prompt} {inputs['steps']} {inputs['strength']}".encode()
        rng = np.random.default_rng([inputs["seed"], *text])
        return {"pixels": rng.random((3, inputs["height"], inputs["width"]), np.float32)}


_paint = Paint()


@st2i.workflow(replace=True)
def paint(
    prompt: Annotated[str, st2i.Prompt(max_chars=60)],
    seed: int = 0,
    num_steps: Annotated[int, st2i.Range(1, 50)] = 2,
    width: Annotated[int, st2i.Multiple(8, 8, 64)] = 16,
    height: Annotated[int, st2i.Multiple(8, 8, 64)] = 16,
    strength: Annotated[float, st2i.Range(0, 1)] = 0.5,
    medium: Literal["oil", "chalk"] = "oil",
) -> Any:
    """Noise as pictures."""
    return st2i.to_image(_paint(prompt, seed, num_steps, width, height, strength))


@st2i.workflow(replace=True)
def plain(prompt: str) -> Any:
    """Takes a prompt and nothing else."""
    return st2i.to_image(_paint(prompt, 0, 1, 16, 16, 0.0))


@st2i.workflow(replace=True)
def numbers(prompt: str, seed: int = 0) -> Any:
    """Returns an array, no image."""
    return _paint(prompt, seed, 1, 16, 16, 0.0)


@st2i.workflow(replace=True)
def batch(prompt: str, seed: int = 0, num_images: int = 1) -> Any:
    """Takes the number of pictures that come at once."""
    return st2i.to_image(_paint(prompt, seed, num_images, 16, 16, 0.0))
