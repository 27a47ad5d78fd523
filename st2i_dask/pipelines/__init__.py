"""Any Diffusers pipeline, unmodified, as a workflow.

The shape. A request is one Dask task, the *orchestrator*: on a worker, in a thread outside of the
executor, it runs the pipeline's own `__call__` with *hollow* components: right class, configuration,
dtype and device, no weights. Whatever the pipeline calls on a component (a text encoder, the
transformer or UNet, a ControlNet, the VAE's encode and decode) becomes an invocation of a ModelFn; all
code between such calls is the pipeline's own and runs as it stands, so images are equal bit for bit.

* The orchestrator's task secedes at once: it holds no executor, neither running nor waiting. A few at a
  time run on a worker, those of the tenants that have fewest there first.
* A component call is a request of one position for the fair policy: queued, placed, charged to the
  tenant and cancelled like any invocation. How many there will be is unknown, so the policy sees the
  path of one call at a time.
* Tensors stay on workers. Arguments of some size are keys on the orchestrator's worker, the same tensor
  in later calls the same key; results are pulled to where the glue is. Small ones are in the task.
* Results of calls stay until the request is over. Their keys follow from their numbers: when the
  orchestrator's worker is lost, Dask runs its task elsewhere, and it goes through the glue again with
  the results that are still there; only what is lost is called again. When the worker of a call is
  lost, Dask runs the call elsewhere.
* A cancelled future stops its orchestrator, its call and all that they keep.

Random draws are the pipeline's own, from `Generator("cpu").manual_seed(seed)`. Draws that it makes from
torch's global generators give what they give after `torch.manual_seed(seed)`: the orchestrator has a
global state of its own, put in place while it runs; only one runs at a time in a process.

Tested, each against the classic call: FluxPipeline, FluxControlNetPipeline, StableDiffusionPipeline,
StableDiffusionXLPipeline, StableDiffusion3ControlNetPipeline, PixArtSigmaPipeline, SanaPipeline,
AuraFlowPipeline, Lumina2Pipeline, Flux2KleinPipeline, ZImageControlNetPipeline,
FluxImg2ImgPipeline.

Not for: models that are no torch modules, quantised ones, adapters, and pipelines that compute with a
component's weights outside of it; the latter say so. A text encoder that gives all its hidden states
sends them all, and keeps them until the request is over.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .pipeline_workflow import PipelineWorkflow


def from_pipeline(
    pipeline: Any, *, name: str | None = None, dtype: str | None = None
) -> PipelineWorkflow:
    """The workflow of any Diffusers text-to-image pipeline.

    pipeline: a folder with model_index.json (visible under the same path on every worker), a hub id, or
        a pipeline object that was loaded from one of these; workers load its models from there. Of an
        object, its class, scheduler and settings count, and that it goes without a component.
    name: the workflow's name; by default the folder's.
    dtype: "float32", "bfloat16" or "float16"; by default the one of the object, or of the weights.

    Only configuration is read here. LoadError when it cannot serve, and why.
    """
    from .source_check import source_of

    source = source_of(pipeline, dtype)
    return PipelineWorkflow(source, name or Path(source.source).name)
