"""Load: layers from the host tier to the arena, GB/s, against a plain copy within private memory.

Ours copies from a safetensors file in the page cache to a block of the arena per layer, with all that
belongs to it: checks of the file, pages asked for, bookkeeping. The rival is `numpy.copyto` of as many
bytes from private memory to the same block. `first_touch`: ours when the process has none of the file's
pages mapped, as after a start or an eviction. Layers are a single and a double block of a FLUX
transformer in bfloat16, at two thirds of its width: 120 and 290 MiB. All other memory was touched before.
They take turns; medians over rounds.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from worker_plugin.host_heap import HostHeap
from worker_plugin.host_tier import PIECE, HostTier, Part
from worker_plugin.layer_table import LayerTable
from worker_plugin.layers import Layer, divide
from worker_plugin.mappings import FileRange, file_ranges

MIB = 1 << 20
WIDTH = 2048
ROUNDS = 9


def run(width: int = WIDTH, rounds: int = ROUNDS) -> dict[str, Any]:
    """`gb_per_s`, `copy_gb_per_s` and `ratio`: ours over the rival's, 1 is as fast; `layer_mib`.

    `first_touch_ratio`: the same for the first copy of pages that are in the page cache only.
    """
    with tempfile.TemporaryDirectory() as folder:
        return _measure(Path(folder) / "model.safetensors", width, rounds)


def _measure(path: Path, width: int, rounds: int) -> dict[str, Any]:
    table, sources = _saved_model(path, width)
    heap = HostHeap(sum(table.nbytes) + len(table.nbytes) * MIB)
    tier = HostTier(1 << 40, warm=2 * path.stat().st_size + PIECE)
    file = sources[0][0].file
    tier.acquire([file])
    blocks = [heap.allocate(nbytes) for nbytes in table.nbytes]
    arrays = [np.asarray(block.array()) for block in blocks if block is not None]
    private = [np.ones(nbytes, np.uint8) for nbytes in table.nbytes]
    parts = [
        [Part(source, slot.offset) for source, slot in zip(layer, slots, strict=True)]
        for layer, slots in zip(sources, table.slots, strict=True)
    ]

    def load() -> None:
        for layer, array in zip(parts, arrays, strict=True):
            tier.copy(layer, array.ctypes.data)

    def copy() -> None:
        for source, array in zip(private, arrays, strict=True):
            np.copyto(array, source)

    def unmap() -> None:
        with tier._using([file]) as mapped:
            mapped[file].unmap_pages(0, file.nbytes)

    seconds: dict[str, list[float]] = {"first": [], "load": [], "copy": []}
    for _ in range(rounds + 1):
        unmap()
        for name, step in (("first", load), ("copy", copy), ("load", load)):
            seconds[name].append(_seconds(step))
    tier.release([file])
    tier.close()
    nbytes = sum(table.nbytes)
    # The first round touches the arena.
    rate = {name: nbytes / statistics.median(times[1:]) / 1e9 for name, times in seconds.items()}

    def ratio(name: str) -> float:
        # Within rounds: a busy machine slows both.
        pairs = zip(seconds["copy"][1:], seconds[name][1:], strict=True)
        return round(statistics.median(copy / ours for copy, ours in pairs), 3)

    return {
        "ratio": ratio("load"),
        "gb_per_s": round(rate["load"], 2),
        "copy_gb_per_s": round(rate["copy"], 2),
        "first_touch_ratio": ratio("first"),
        "layer_mib": [round(layer / MIB, 1) for layer in table.nbytes],
    }


def _seconds(step: Callable[[], None]) -> float:
    time.sleep(0.01)  # a whole time slice ahead: a busy machine would end this one soon
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def _saved_model(path: Path, width: int) -> tuple[LayerTable, list[list[FileRange]]]:
    """The table of one single and one double block of a FLUX transformer in a file, and where the
    parameters of its layers lie there."""
    import torch
    from safetensors.torch import load_file, save_file

    with torch.device("meta"):
        model = _blocks(width)
    empty = {
        name: torch.zeros(p.shape, dtype=torch.bfloat16) for name, p in model.named_parameters()
    }
    save_file(empty, path)
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)  # written back, it is not written back while we measure
    os.close(fd)
    del empty
    model.load_state_dict(load_file(path), assign=True)
    layers = divide(model)
    sources = [_sources(layer) for layer in layers]
    table = LayerTable(layers)
    table.register(layers)
    return table, sources


def _sources(layer: Layer) -> list[FileRange]:
    found = file_ranges([parameter for _, parameter in layer.parameters])
    ranges: list[FileRange] = [part for part in found if part is not None]
    assert len(ranges) == len(found), "the file was not mapped"
    return ranges


def _blocks(width: int) -> Any:
    from diffusers.models.transformers.transformer_flux import (
        FluxSingleTransformerBlock,
        FluxTransformerBlock,
    )
    from torch import nn

    shape = dict(dim=width, num_attention_heads=width // 128, attention_head_dim=128)
    return nn.ModuleList([FluxSingleTransformerBlock(**shape), FluxTransformerBlock(**shape)])
