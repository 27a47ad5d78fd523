"""Rebind: microseconds to make a layer's parameters views of a buffer, and placeholders again.

A layer is a double block of a FLUX transformer, 32 parameters; sizes do not matter, no byte is copied.
The rival is what PyTorch offers for it: `load_state_dict(assign=True)` with views made beforehand. Rounds
alternate, medians are compared.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

ROUNDS = 200


def run(rounds: int = ROUNDS) -> dict[str, float]:
    """`bind_us`, `unbind_us` of one skeleton, and `us_per_layer`, the larger: one rebinding.

    `views_us`: making the views, once per buffer, while the layer is copied in. `assign_us`: the rival's;
    `ratio`: `us_per_layer` over it.
    """
    import torch

    from worker_plugin.layer_table import LayerTable
    from worker_plugin.layers import divide

    module = _double_block()
    rival = _double_block()
    layers = divide(torch.nn.ModuleList([module]))
    table = LayerTable(layers)
    table.register(layers)
    buffer = torch.zeros(table.nbytes[0], dtype=torch.uint8)
    views = table.views(0, buffer)
    state = {name: tensor.clone() for name, tensor in rival.state_dict().items()}
    steps: dict[str, Callable[[], Any]] = {
        "views": lambda: table.views(0, buffer),
        "bind": lambda: table.bind(0, views),
        "unbind": lambda: table.unbind(0),
        "assign": lambda: rival.load_state_dict(state, assign=True),
    }
    times: dict[str, list[float]] = {name: [] for name in steps}
    # A model is rebound layer after layer: several times in a row, then the rival.
    order = ["views", *["bind", "unbind"] * 10, "assign"]
    for _ in range(rounds):
        for name in order:
            start = time.perf_counter()
            steps[name]()
            times[name].append(time.perf_counter() - start)
    us = {name: 1e6 * statistics.median(values) for name, values in times.items()}
    slower = max(us["bind"], us["unbind"])
    return {
        "parameters": len(layers[0].parameters),
        "us_per_layer": round(slower, 2),
        "bind_us": round(us["bind"], 2),
        "unbind_us": round(us["unbind"], 2),
        "views_us": round(us["views"], 2),
        "assign_us": round(us["assign"], 2),
        "ratio": round(slower / us["assign"], 4),
    }


def _double_block() -> Any:
    from diffusers.models.transformers.transformer_flux import FluxTransformerBlock

    return FluxTransformerBlock(dim=32, num_attention_heads=2, attention_head_dim=16)
