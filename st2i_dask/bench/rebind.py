"""Rebind: microseconds to make a layer's parameters views of a buffer, and placeholders again.

A layer is a double block of a FLUX transformer, 32 parameters; sizes do not matter, no byte is copied.
The rival is what PyTorch offers for it: `load_state_dict(assign=True)` with views made beforehand. Rounds
alternate, medians are compared.

Then what all of it costs a request that finds everything resident: a denoising step of about 50 ms with a
lease and its hooks, against the same step of the same model, in memory of the same kind, without them.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ._transformers import Shape, Transformer, one_thread, read, save, step

ROUNDS = 200
REQUESTS = 100
#: About 50 ms a step; as many layers as FLUX.1 has.
SHAPE = Shape(layers=(19, 38), heads=8, tokens=64)


def run(rounds: int = ROUNDS, requests: int = REQUESTS, shape: Shape = SHAPE) -> dict[str, float]:
    """`request_overhead`: what a lease adds to a step, as a share of it; `step_ms`: the step.

    `bind_us`, `unbind_us` of one skeleton, and `us_per_layer`, the larger: one rebinding.

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
        **_request(requests, shape),
    }


def _request(requests: int, shape: Shape) -> dict[str, float]:
    """CPU seconds of the thread that computes: a step on a shared machine is interrupted now and then,
    and one after the other is compared, since the machine's speed drifts."""
    import torch

    from worker_plugin.layer_table import LayerTable
    from worker_plugin.layers import divide
    from worker_plugin.loader import aligned
    from worker_plugin.weights import WeightStore

    with tempfile.TemporaryDirectory() as folder, one_thread():
        path = Path(folder) / "model"
        save(path, 0, shape)
        given = shape.inputs(0)
        plain = read(path)
        state = {name: parameter.clone() for name, parameter in plain.named_parameters()}
        layers = divide(plain)
        table = LayerTable(layers)
        table.register(layers)
        for number, nbytes in enumerate(table.nbytes):
            table.bind(number, aligned(nbytes))
        with torch.no_grad():
            for name, parameter in plain.named_parameters():
                parameter.copy_(state[name])
        store, function = WeightStore(memory=1 << 34), Transformer(str(path))
        ratios, seconds = [], []
        for _ in range(requests):
            start = time.thread_time()
            expected = step(plain, given)
            between = time.thread_time()
            with store.lease(function, bucket="1") as lease:
                output = function.execute(lease.components, given=given)["velocity"]
            end = time.thread_time()
            assert torch.equal(output, expected)
            if lease.held:  # the first ones load and measure
                seconds.append(between - start)
                ratios.append((end - between) / (between - start))
        store.close()
    return {
        "request_overhead": round(statistics.median(ratios) - 1, 4),
        "step_ms": round(1e3 * statistics.median(seconds), 1),
    }


def _double_block() -> Any:
    from diffusers.models.transformers.transformer_flux import FluxTransformerBlock

    return FluxTransformerBlock(dim=32, num_attention_heads=2, attention_head_dim=16)
