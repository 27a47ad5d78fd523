"""A pipeline's request in this process: orchestrator and component calls, without a cluster."""

from __future__ import annotations

import pickle
from typing import Any

import torch

from st2i_dask.invocation import BoundTask
from st2i_dask.outputs import TaskOutputs
from st2i_dask.pipelines.component_call import asked
from st2i_dask.pipelines.hollow import calling
from st2i_dask.pipelines.shell import Shells
from st2i_dask.pipelines.travel import put_together

SHELLS = Shells()
_components: dict[str, Any] = {}


class Here:
    """Carries out component calls as a worker would; keeps what was called."""

    device = torch.device("cpu")

    def __init__(self, shell: Any, source: Any):
        self._shell, self._source = shell, source
        self.calls: list[str] = []

    def call(self, component, path, method, casts, args, kwargs):
        call = asked(self._shell, self._source, component, path, method, casts, args, kwargs)
        self.calls.append(call.label)
        large = [TaskOutputs((tensor.clone(),)) for tensor in call.large()]
        task = call.task("call-0", "here", [f"argument-{n}" for n in range(len(large))])
        packed, parameters, about, _, *references = pickle.loads(pickle.dumps(task)).args
        assert [reference.key for reference in references] == [
            f"argument-{n}" for n in range(len(large))
        ]
        made = BoundTask(packed, parameters, about, large)
        model_fn = made.model_fn
        if model_fn.model_key not in _components:
            _components[model_fn.model_key] = model_fn.load_model(model_fn.model_path)
        outputs = TaskOutputs(made.evaluate(_components[model_fn.model_key]))
        form, tensors = pickle.loads(pickle.dumps(outputs)).values
        return put_together(form, tensors)


def run_pipeline_here(workflow: Any, seed: int = 0, **arguments: Any) -> tuple[Any, list[str]]:
    """What the pipeline gives as `images`, and the component calls that it took."""
    request = pickle.loads(workflow.request("here", seed, **arguments).data)
    shell = SHELLS.get(request.source)
    here = Here(shell, request.source)
    torch.manual_seed(request.seed)
    with calling(here), torch.no_grad():
        output = shell.for_request()(
            **request.arguments, generator=torch.Generator("cpu").manual_seed(request.seed)
        )
    return output[0], here.calls
