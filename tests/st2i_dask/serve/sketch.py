"""Workflows for the server's tests. Quick: they need no torch, and say when they may go on."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np

import st2i_dask as st2i
from st2i_dask.catalogue.input_image import InputImage, MaskImage


class Start(st2i.ModelFn):
    """Noise of the prompt and the seed, (3, height, width) in [0, 1]."""

    def setup_io(self) -> None:
        for name in ("prompt", "seed", "width", "height"):
            self.add_input(name)
        self.add_output("pixels")

    def execute(self, model_components: Any, **inputs: Any) -> dict[str, Any]:
        rng = np.random.default_rng([inputs["seed"] % 2**64, *inputs["prompt"].encode()])
        shape = (3, inputs["height"], inputs["width"])
        return {"pixels": rng.random(shape, np.float32) * 0.9 + 0.05}


class Stroke(st2i.ModelFn):
    """A step. Prompts with "wait FILE" hold until the file is there; "broken" ones fail at the second;
    "slow" ones take 0.1 s; every step adds a line to "count FILE"."""

    def setup_io(self) -> None:
        for name in ("prompt", "pixels", "step"):
            self.add_input(name)
        self.add_output("drawn")

    def execute(self, model_components: Any, **inputs: Any) -> dict[str, Any]:
        words = inputs["prompt"].split()
        if "broken" in words and inputs["step"] == 1:
            raise RuntimeError("the brush broke")
        if "slow" in words:
            time.sleep(0.1)
        for word, name in itertools.pairwise(words):
            if word == "count":
                with Path(name).open("a") as file:
                    file.write(f"{inputs['step']}\n")
            if word == "wait":
                deadline = time.monotonic() + 30
                while not Path(name).exists() and time.monotonic() < deadline:
                    time.sleep(0.01)
        return {"drawn": inputs["pixels"] * np.float32(0.95)}


class Develop(st2i.ModelFn):
    """What makes pixels of what was drawn."""

    def setup_io(self) -> None:
        self.add_input("drawn")
        self.add_output("pixels")

    def execute(self, model_components: Any, **inputs: Any) -> dict[str, Any]:
        return {"pixels": inputs["drawn"]}


_start, _stroke, _develop = Start(), Stroke(), Develop()

Side = Annotated[int, st2i.Multiple(8, 8, 1024)]


@st2i.workflow(replace=True)
def sketch(
    prompt: Annotated[str, st2i.Prompt(max_chars=2000)],
    negative_prompt: str = "",
    seed: int = 0,
    num_steps: Annotated[int, st2i.Range(1, 50)] = 3,
    width: Side = 16,
    height: Side = 16,
    strength: Annotated[float, st2i.Range(0, 1)] = 0.5,
    medium: Literal["oil", "chalk"] = "oil",
) -> Any:
    """Noise as pictures."""
    pixels = _start(prompt, seed, width, height)
    for step in range(num_steps):
        pixels = _stroke(prompt, pixels, step)
    return st2i.to_image(_develop(pixels))


class Copy(st2i.ModelFn):
    """The image, inverted where the mask is white, (3, height, width)."""

    def setup_io(self) -> None:
        self.add_input("prompt")
        self.add_input("image")
        self.add_input("mask", optional=True)
        self.add_output("pixels")

    def execute(self, model_components: Any, **inputs: Any) -> dict[str, Any]:
        image = np.asarray(inputs["image"]).astype(np.float32) / 255
        if inputs["mask"] is not None:
            where = np.asarray(inputs["mask"])[..., None] > 127
            image = np.where(where, 1 - image, image)
        return {"pixels": image.transpose(2, 0, 1)}


_copy = Copy()


@st2i.workflow(replace=True)
def retouch(
    prompt: str,
    image: Annotated[Any, InputImage()],
    mask_image: Annotated[Any, MaskImage()] = None,
    seed: int = 0,
) -> Any:
    """The image again."""
    return st2i.to_image(_copy(prompt, image, mask_image))


@st2i.workflow(replace=True)
def unseeded(prompt: str) -> Any:
    """Takes a prompt and nothing else."""
    return st2i.to_image(_start(prompt, 0, 16, 16))


@st2i.workflow(replace=True)
def numbers(prompt: str, seed: int = 0) -> Any:
    """Returns an array, no image."""
    return _start(prompt, seed, 16, 16)
