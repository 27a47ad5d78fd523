"""Streamed residuals: a transformer that overlaps its ControlNet, against one that waits for its end.

FLUX.1's real models with random weights on two workers of one thread each; the ControlNet has half of
the transformer's blocks, so it is about half as dear. The same chain of denoising steps runs in four
ways, which take turns:

* sequential: the residuals are an ordinary input; a step takes ControlNet + transformer + transport;
* overlapped: they are a callback input, each fetched after the block it is added to;
* the ControlNet alone, and the transformer alone, each with its own hop between steps.

Ideal is `max(controlnet_s, transformer_s)`: both run all the time and nothing waits for transport.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

from distributed import Client

import st2i_dask as st2i
from st2i_dask.catalogue import tiny
from st2i_dask.catalogue.flux.controlnet_parts import DOUBLES, SINGLES, FluxControlNet
from st2i_dask.catalogue.flux.parts import FluxTransformer
from st2i_dask.model_fn import Input

STEPS = 4
ROUNDS = 7
#: Double and single blocks of the transformer; the ControlNet has half of each.
LAYERS = (4, 8)
HEADS = 16  # of width 16
#: Of a picture of 512 x 512 pixels.
TOKENS = 1024
TEXT_TOKENS = 64

Kind = Literal["sequential", "overlapped", "controlnet", "transformer"]
KINDS: tuple[Kind, ...] = ("sequential", "overlapped", "controlnet", "transformer")


def run(
    steps: int = STEPS,
    rounds: int = ROUNDS,
    layers: tuple[int, int] = LAYERS,
    heads: int = HEADS,
    tokens: int = TOKENS,
) -> dict[str, float]:
    """Seconds per step, medians over `rounds`: `sequential_s`, `overlapped_s`, `ideal_s`.

    Also `controlnet_s` and `transformer_s`, and `hidden_fraction`: the share of what could be saved
    that is saved, (sequential - overlapped) / (sequential - ideal).
    """
    half = (layers[0] // 2, layers[1] // 2)
    times: dict[Kind, list[float]] = {kind: [] for kind in KINDS}
    with (
        tempfile.TemporaryDirectory() as folder,
        st2i.local_cluster(2, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        path = Path(folder) / "bench"
        tiny.save_flux_controlnet(path, layers=layers, heads=heads, control_layers=half)
        workflow = _steps(str(path), tokens)
        for number in range(rounds + 1):
            results = {}
            for kind in KINDS:
                start = time.perf_counter()
                future = workflow.submit(client, kind=kind, num_steps=steps, value=float(number))
                results[kind] = future.result(timeout=300)
                if number:  # the first round loads the models
                    times[kind].append((time.perf_counter() - start) / steps)
            assert results["sequential"] == results["overlapped"], "streaming changed the result"
    return figures({kind: statistics.median(found) for kind, found in times.items()})


def figures(median: dict[Kind, float]) -> dict[str, float]:
    """The figures that `run` returns, from seconds per step by kind."""
    ideal = max(median["controlnet"], median["transformer"])
    saved = median["sequential"] - median["overlapped"]
    return {
        "sequential_s": round(median["sequential"], 4),
        "overlapped_s": round(median["overlapped"], 4),
        "ideal_s": round(ideal, 4),
        "controlnet_s": round(median["controlnet"], 4),
        "transformer_s": round(median["transformer"], 4),
        "hidden_fraction": round(saved / (median["sequential"] - ideal), 3),
    }


class WaitingTransformer(FluxTransformer):
    """FluxTransformer that starts when all residuals are there."""

    def setup_io(self) -> None:
        super().setup_io()
        for name, declared in self.inputs.items():
            if declared.callback:
                self.inputs[name] = Input(name, optional=True)


class Total(st2i.ModelFn):
    """The sum of a tensor, in its own task: nothing else depends on the last step."""

    def setup_io(self) -> None:
        self.add_input("latents")
        self.add_output("total")

    def execute(self, model_components: Any, **inputs: Any) -> dict[str, float]:
        return {"total": float(inputs["latents"].double().sum())}


#: What `start` makes beside latents and control: inputs of both models.
_SHARED = ("prompt_embeds", "pooled_prompt_embeds", "text_ids", "image_ids", "timestep")


@st2i.glue(outputs=2 + len(_SHARED))
def start(value: float, tokens: int) -> tuple[Any, ...]:
    """Latents, control, and `_SHARED`, in the shapes of `tiny`: nothing has to be encoded."""
    import torch

    generator = torch.Generator().manual_seed(int(value))

    def noise(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator)

    texts = noise(1, TEXT_TOKENS, 32), noise(1, 32)
    ids = torch.zeros(TEXT_TOKENS, 3), torch.zeros(tokens, 3)
    return noise(1, tokens, 16), noise(1, tokens, 16), *texts, *ids, torch.full((1,), 500.0)


@st2i.glue
def moved(latents: Any, noise_pred: Any, steps: int) -> Any:
    """Latents after a step."""
    return latents - noise_pred / steps


@st2i.glue
def after(latents: Any, residuals: Any) -> Any:
    """The same latents, once the residuals are there."""
    return latents


def _steps(folder: str, tokens: int) -> Any:
    controlnet = FluxControlNet(folder, part="controlnet", dtype="float32")
    waiting = WaitingTransformer(folder, dtype="float32")
    transformer = FluxTransformer(folder, dtype="float32")

    def chain(value: float, kind: Kind, num_steps: int) -> Any:
        latents, control, *rest = start(value, tokens)
        shared = dict(zip(_SHARED, rest, strict=True))
        for _ in range(num_steps):
            common = {**shared, "latents": latents, "guidance_scale": 3.5}
            residuals: dict[str, Any] = {}
            if kind != "transformer":
                made = controlnet(**common, control=control, conditioning_scale=0.7)
                residuals = {DOUBLES: made[DOUBLES], SINGLES: made[SINGLES]}
            if kind == "controlnet":
                latents = after(latents, residuals)
            else:
                model = waiting if kind == "sequential" else transformer
                latents = moved(latents, model(**common, **residuals), num_steps)
        return Total()(latents)

    return st2i.workflow(chain, name="bench-stream", replace=True)
