"""Sequence parallelism: Z-Image's transformer on two executors, against one and the optimum.

Z-Image's real transformer with random weights, in two worker processes of one thread each. The same
chain of denoising steps runs with `sequence_parallel` 1 and 2, which take turns. What two executors
cannot share is timed here by itself: everything outside of the refiners of the image and the main
layers. The optimum is that part and half of the rest.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from distributed import Client

import st2i_dask as st2i
from st2i_dask.catalogue.tiny_z_image import save_z_image
from st2i_dask.catalogue.z_image.parts import ZImageTransformer

STEPS = 4
ROUNDS = 5
LAYERS = 4
HEADS = 8  # of width 64
#: Latents per side; a token is 2x2 of them.
SIDE = 56
TEXT_TOKENS = 64
# As the tiny pipeline's.
_CHANNELS = 4
_TEXT_WIDTH = 32


def run(
    steps: int = STEPS,
    rounds: int = ROUNDS,
    layers: int = LAYERS,
    heads: int = HEADS,
    side: int = SIDE,
) -> dict[str, float]:
    """Seconds per step, medians over `rounds`: `one_s`, `two_s`, `ideal_s`; `speedup` (one to two) and
    `ideal_speedup`. `members`: executors beside the leader that took part in each run on two, mean.
    """
    times: dict[int, list[float]] = {1: [], 2: []}
    with (
        tempfile.TemporaryDirectory() as folder,
        st2i.local_cluster(2, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        save(Path(folder), layers, heads)
        workflow = _steps(folder, side)
        served = _served(client, cluster)
        # Two at once, one on each worker: an executor that has to load is no member for so few steps.
        alone = {"num_steps": steps, "sequence_parallel": 1}
        client.gather([workflow.submit(client, value=rounds + n, **alone) for n in (1.0, 2.0)])
        for number in range(rounds + 1):
            results = {}
            for executors in times:
                start = time.perf_counter()
                future = workflow.submit(
                    client, num_steps=steps, sequence_parallel=executors, value=float(number)
                )
                results[executors] = future.result(timeout=600)
                if number:  # the first round warms up
                    times[executors].append((time.perf_counter() - start) / steps)
                else:
                    served.clear()
            close = abs(results[1] - results[2]) <= 1e-3 * max(1.0, abs(results[1]))
            assert close, f"sharing changed the result: {results}"
        share = _shared_share(folder, side)
    one, two = statistics.median(times[1]), statistics.median(times[2])
    return figures(one, two, share) | {"members": round(statistics.mean(served or [0]), 2)}


def figures(one_s: float, two_s: float, share: float) -> dict[str, float]:
    """The figures that `run` returns, from seconds per step; share: of a step on one executor, what
    two can share."""
    ideal_s = one_s * (1 - share) + one_s * share / 2
    return {
        "one_s": round(one_s, 4),
        "two_s": round(two_s, 4),
        "ideal_s": round(ideal_s, 4),
        "speedup": round(one_s / two_s, 3),
        "ideal_speedup": round(one_s / ideal_s, 3),
        "shared_fraction": round(share, 3),
    }


def save(path: Path, layers: int, heads: int) -> None:
    """The folder of a tiny pipeline with a large transformer (float32)."""
    import torch
    from diffusers import ZImageTransformer2DModel

    save_z_image(path)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformer = ZImageTransformer2DModel(
            in_channels=_CHANNELS,
            dim=64 * heads,
            n_layers=layers,
            n_refiner_layers=1,
            n_heads=heads,
            n_kv_heads=heads,
            cap_feat_dim=_TEXT_WIDTH,
            axes_dims=[16, 24, 24],
            axes_lens=[1024, 256, 256],
        )
    transformer.save_pretrained(path / "transformer", safe_serialization=True)


class Total(st2i.ModelFn):
    """The sum of a tensor, in its own task: nothing else depends on the last step."""

    def setup_io(self) -> None:
        self.add_input("latents")
        self.add_output("total")

    def execute(self, model_components: Any, **inputs: Any) -> dict[str, float]:
        return {"total": float(inputs["latents"].double().abs().sum())}


@st2i.glue(outputs=3)
def start(value: float, side: int) -> tuple[Any, ...]:
    """Latents, time and a prompt's embeddings: nothing has to be encoded."""
    import torch

    generator = torch.Generator().manual_seed(int(value))
    latents = torch.randn(1, _CHANNELS, side, side, generator=generator)
    return (
        latents,
        torch.full((1,), 0.5),
        torch.randn(TEXT_TOKENS, _TEXT_WIDTH, generator=generator),
    )


@st2i.glue
def moved(latents: Any, predicted: Any, steps: int) -> Any:
    """Latents after a step."""
    return latents - predicted.squeeze(2) / steps


def _steps(folder: str, side: int) -> Any:
    def chain(value: float, num_steps: int, sequence_parallel: int) -> Any:
        transformer = ZImageTransformer(folder, dtype="float32")
        transformer.gang = sequence_parallel
        latents, time, embeds = start(value, side)
        for _ in range(num_steps):
            made = transformer(latents=latents, timestep=time, prompt_embeds=embeds)
            latents = moved(latents, made, num_steps)
        return Total()(latents)

    return st2i.workflow(chain, name="bench-sequence", replace=True)


def _served(client: Client, cluster: Any) -> list[int]:
    """How many members took part in each run that had some, from now on."""
    from scheduler_plugin import events as ev

    st2i.attach(client)
    policy = cluster.scheduler.plugins["st2i-scheduler"].policy
    handle, found = policy.handle, []

    def handling(event: Any) -> Any:
        if isinstance(event, ev.Completed) and event.members is not None:
            found.append(event.members)
        return handle(event)

    policy.handle = handling
    return found


def _shared_share(folder: str, side: int) -> float:
    """Of a forward here in one thread, the share of time in layers that a gang can share."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        part = ZImageTransformer(folder, dtype="float32")
        components = part.load_model(folder)
        transformer = components["pipeline"].transformer
        latents, time_, embeds = start(1.0, side)
        given = dict.fromkeys(part.inputs)
        given.update(latents=latents, timestep=time_, prompt_embeds=embeds)
        spent = [0.0]
        for layer in (*transformer.noise_refiner, *transformer.layers):
            layer.register_forward_pre_hook(
                lambda layer, args: spent.__setitem__(0, spent[0] - time.perf_counter())
            )
            layer.register_forward_hook(
                lambda layer, args, made: spent.__setitem__(0, spent[0] + time.perf_counter())
            )
        shares = []
        with torch.no_grad():
            for _ in range(3):
                spent[0], begin = 0.0, time.perf_counter()
                part.execute(components, **given)
                shares.append(spent[0] / (time.perf_counter() - begin))
        return statistics.median(shares)
    finally:
        torch.set_num_threads(before)
