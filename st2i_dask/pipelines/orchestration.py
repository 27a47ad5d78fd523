"""The Dask task of a request: it follows the pipeline's own code on a worker.

The scheduler imports this file too; it must stay cheap to import.
"""

from __future__ import annotations

from typing import Any

from ..errors import AttachError
from ..invocation import WORKER_PLUGIN

#: The task annotation by which the scheduler knows an orchestrator. Its value is a dict: tenant,
#: workflow.
ORCHESTRATION = "st2i_pipeline"


async def orchestrate(key: str, request: bytes) -> Any:
    """Entry point. Runs on the worker's event loop and takes no thread of its executor.

    request: a pickled `PipelineRequest`.
    """
    from distributed import get_worker

    worker = get_worker()
    plugin = worker.plugins.get(WORKER_PLUGIN)
    if plugin is None or plugin.orchestrators is None:
        raise AttachError(
            f"worker {worker.address} does not serve: its {WORKER_PLUGIN} plugin "
            f"{'is missing' if plugin is None else 'did not start'}; see the worker's log, then "
            "call st2i.attach(client, device='cpu') or with the device it has"
        )
    return await plugin.orchestrators.run(key, request)
