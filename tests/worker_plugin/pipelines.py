"""Tiny FLUX pipelines whose transformer has weight, the images they must give, and clusters for them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dask
import pytest
import torch
from distributed import Client

import st2i_dask as st2i
from st2i_dask.catalogue import tiny

from .aligned import align

TIMEOUT = 120
MIB = 1 << 20
# Workers run one torch thread each; the reference must sum in the same order.
torch.set_num_threads(1)


class Pipeline:
    """A FluxPipeline, its folder, and images of it.

    layers: double and single blocks; a double block of width 16 * heads is the largest layer.
    """

    def __init__(self, path: Path, *, layers: tuple[int, int], heads: int, seed: int = 0):
        pipeline = tiny.flux(layers=layers, heads=heads, seed=seed)
        pipeline.save_pretrained(path, safe_serialization=True)
        align(path)
        pipeline.set_progress_bar_config(disable=True)
        self.path, self._pipeline = path, pipeline
        blocks = pipeline.transformer.transformer_blocks[0].parameters()
        self.largest = sum(p.numel() * p.element_size() for p in blocks)

    @property
    def file(self) -> Path:
        """The transformer's weights."""
        return self.path / "transformer" / "diffusion_pytorch_model.safetensors"

    @property
    def nbytes(self) -> int:
        """Of the transformer's file."""
        return self.file.stat().st_size

    def submit(self, client: Client, seed: int = 0, *, steps: int = 2, **options: Any) -> Any:
        return st2i.load(self.path).submit(client, **_parameters(seed, steps), **options)

    def expected(self, seed: int = 0, *, steps: int = 2) -> Any:
        """(3, 32, 32) float32: what the unmodified pipeline draws."""
        parameters = _parameters(seed, steps)
        generator = torch.Generator("cpu").manual_seed(parameters.pop("seed"))
        parameters["num_inference_steps"] = parameters.pop("num_steps")
        return self._pipeline(**parameters, generator=generator).images[0]

    def check(self, future: Any, seed: int = 0, *, steps: int = 2) -> None:
        """The image of the future is the pipeline's, bit for bit."""
        ours = future.result(timeout=TIMEOUT)
        assert torch.equal(ours, self.expected(seed, steps=steps))
        assert ours.std() > 0.01, "a constant picture would prove nothing"

    def forget(self) -> None:
        """Give up the reference, its memory and its mappings."""
        self._pipeline = None


def _parameters(seed: int, steps: int) -> dict[str, Any]:
    return dict(
        prompt=f"cat {seed}", seed=seed, num_steps=steps, height=32, width=32, output_type="pt"
    )


@contextmanager
def cluster(cache: Path, n_workers: int = 2, **options: Any) -> Iterator[Client]:
    """Worker processes that keep digests and profiles in a folder of their own."""
    # LocalCluster gives up a worker that is down again 15 s after it was lost.
    config = {
        "distributed.scheduler.validate": True,
        "distributed.deploy.lost-worker-timeout": "1h",
    }
    with (
        pytest.MonkeyPatch.context() as patch,
        dask.config.set(config),
    ):
        patch.setenv("ST2I_CACHE", str(cache))
        with (
            st2i.local_cluster(n_workers, dashboard_address=":0", **options) as made,
            Client(made) as client,
        ):
            yield client


def check_stores(client: Client) -> None:
    """What every worker's store says of itself agrees."""

    def check(dask_worker: Any) -> None:
        dask_worker.plugins["st2i-worker"].executor.models._check()

    client.run(check)


def rows(client: Client, name: str = "FluxTransformer") -> list[dict[str, Any]]:
    """Of `st2i.models`, those of one ModelFn."""
    return [row for row in st2i.models(client) if row["model"].startswith(f"{name}(")]


def pids(client: Client) -> dict[str, int]:
    """By worker's address."""
    found: dict[str, int] = client.run(os.getpid)
    return found


def own_memory(pid: int) -> int:
    """Bytes of a process that are no file's: its heap, and what it has touched of arenas."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    found = dict(line.split(":", 1) for line in lines)
    return sum(int(found[name].split()[0]) << 10 for name in ("RssAnon", "RssShmem"))


def mapped(pid: int, file: Path) -> dict[str, int]:
    """Bytes of a process's mappings of a file, by the names of /proc/PID/smaps: Rss, Pss, Private_Dirty,
    Anonymous and others."""
    found: dict[str, int] = {}
    inside = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        name, _, rest = line.partition(":")
        if " " in name or "-" in name:  # the header of a mapping
            inside = line.endswith(str(file))
        elif inside and rest.endswith(" kB"):
            found[name] = found.get(name, 0) + (int(rest.split()[0]) << 10)
    return found
