"""Requests run in this process, task after task, without a cluster."""

from __future__ import annotations

import torch

from st2i_dask.invocation import BoundTask
from st2i_dask.outputs import TaskOutputs


class _Done:
    """A producer that has ended."""

    def __init__(self, outputs):
        self._outputs = outputs

    def outputs(self):
        return self._outputs

    def items(self, export):
        return None


_components = {}


@torch.no_grad()
def run_here(workflow, **parameters):
    """The result of a request; a tensor, unless `output_type` says otherwise. Models stay loaded."""
    request = workflow.request(**{"output_type": "pt", **parameters})
    results = {}
    for key, task in request.tasks.items():
        packed, values, about, callbacks, *dependencies = task.args
        made = BoundTask(
            packed,
            values,
            about,
            [results[dependency.key] for dependency in dependencies],
            [_Done(results[callback]) for callback in callbacks],
        )
        model_fn = made.model_fn
        if model_fn.model_key not in _components:
            _components[model_fn.model_key] = model_fn.load_model(model_fn.model_path)
        result = made.evaluate(_components[model_fn.model_key])
        results[key] = result if key == request.key else TaskOutputs(result)
    return results[request.key]
