"""A workflow with every stage that a request can be cancelled at, each as slow as a test wants.

What runs writes a journal: a line when it begins and one when it ends, whatever way.
"""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any, Literal

import torch

import st2i_dask as st2i

#: Seconds of one call at the stage that is asked for; elsewhere it takes none.
SECONDS = {"encode": 0.6, "load": 0.8, "denoise": 0.15, "control": 1.2, "decode": 0.6}


@contextlib.contextmanager
def noted(journal: str, stage: str) -> Any:
    def write(what: str) -> None:
        if journal:
            with Path(journal).open("a") as file:
                file.write(json.dumps([stage, what, time.monotonic()]) + "\n")

    write("begin")
    try:
        yield
    finally:
        write("end")


class Stage(st2i.ModelFn):
    """options: stage (the slow one), journal (a file)."""

    name_ = ""

    def work(self) -> Any:
        if self.options["stage"] == self.name_:
            time.sleep(SECONDS[self.name_])


class Encode(Stage):
    name_ = "encode"

    def setup_io(self) -> None:
        self.add_input("prompt")
        self.add_output("embeds")

    def execute(self, model_components: Any, prompt: str) -> dict[str, Any]:
        with noted(self.options["journal"], "encode"):
            self.work()
            if self.options["stage"] == "hold":  # until the file is there
                deadline = time.monotonic() + 60
                while not Path(prompt).exists() and time.monotonic() < deadline:
                    time.sleep(0.01)
        return {"embeds": 0.5}


class Control(Stage):
    """The producer of a callback input."""

    name_ = "control"

    def setup_io(self) -> None:
        self.add_input("latents")
        self.add_output("residual")

    def execute(self, model_components: Any, latents: Any) -> dict[str, Any]:
        with noted(self.options["journal"], "control"):
            self.work()
        return {"residual": latents}


class Denoise(Stage):
    name_ = "denoise"

    def setup_io(self) -> None:
        self.add_input("latents")
        self.add_input("residual", optional=True, callback=True)
        self.add_output("noise")

    def load_model(self, model_path: str | None) -> dict[str, Any]:
        if self.options["stage"] == "load":
            with noted(self.options["journal"], "load"):
                time.sleep(SECONDS["load"])
        return {}

    def execute(self, model_components: Any, latents: Any, residual: Any) -> dict[str, Any]:
        with noted(self.options["journal"], "denoise"):
            self.work()
            if residual is not None:
                residual.result()
        return {"noise": latents * 0.9}


class Decode(Stage):
    name_ = "decode"

    def setup_io(self) -> None:
        self.add_input("latents")
        self.add_output("pixels")

    def execute(self, model_components: Any, latents: Any) -> dict[str, Any]:
        with noted(self.options["journal"], "decode"):
            self.work()
        return {"pixels": latents.repeat(3, 1, 1)}


@st2i.glue
def noise(embeds: float, seed: int) -> Any:
    """64 KiB: it lies in an arena."""
    return torch.full((1, 128, 128), embeds + seed % 7 / 100)


@st2i.workflow(replace=True)
def stages(
    prompt: str = "x",
    seed: int = 0,
    num_steps: int = 3,
    stage: Literal["encode", "load", "control", "denoise", "decode", "hold", "quick"] = "quick",
    journal: st2i.Static[str] = "",
) -> Any:
    """All stages in their order; stage: which one is slow."""
    options = {"stage": stage, "journal": journal}
    denoise, control = Denoise(**options), Control(**options)
    embeds = Encode(**options)(prompt)
    latents = noise(embeds, seed)
    for _ in range(num_steps):
        residual = control(latents) if stage == "control" else None
        latents = denoise(latents, residual)
    return st2i.to_image(Decode(**options)(latents))
