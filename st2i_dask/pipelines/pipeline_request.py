"""One run of a pipeline: what travels to its orchestrator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .shell import PipelineSource


@dataclass(frozen=True)
class PipelineRequest:
    """arguments: of the pipeline's `__call__`, without generator. about: the image's metadata."""

    workflow: str
    tenant: str
    source: PipelineSource
    seed: int
    arguments: dict[str, Any]
    about: dict[str, Any]
