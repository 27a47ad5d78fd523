"""From what a client asks to the requests of a workflow: names, sizes, seeds, uploaded images."""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dask.tokenize import tokenize

from ..errors import ComposeError, St2iError
from ..previews import PreviewTask, preview_tasks, previewed
from ..request import Request
from ..workflow import Workflow
from .adapters import adapters
from .limits import Limits
from .models import Models
from .problems import ApiError, of_exception
from .schema import EditRequest, GenerationRequest

logger = logging.getLogger("st2i.serve")

#: What clients call parameters, and what workflows may call them; the first that there is counts.
_NAMES: dict[str, tuple[str, ...]] = {
    "prompt": ("prompt",),
    "negative_prompt": ("negative_prompt",),
    "num_inference_steps": ("num_steps", "num_inference_steps"),
    "guidance_scale": ("guidance_scale",),
    "true_cfg_scale": ("true_cfg_scale",),
    "strength": ("strength",),
    "lora": ("lora", "loras"),
    "image": ("image", "images", "input_image", "reference_images"),
    "mask": ("mask_image", "mask"),
}

# What a client must not set by `parameters`: how many images there are, what they are, which files are
# read for them.
_RESERVED = frozenset({"num_images", "spread", "output_type", "prompt", "seed", "lora", "loras"})


@dataclass(frozen=True)
class Wanted:
    """All that is needed to draw a client's request. requests: one an image. previews: of the one."""

    model: str
    requests: list[Request]
    seeds: list[int | None]
    output_format: str
    compression: int | None
    as_url: bool
    quality: str
    previews: list[PreviewTask]


def wanted(
    model: str,
    workflow: Workflow,
    asked: GenerationRequest | EditRequest,
    tenant: str,
    limits: Limits,
    uploads: Mapping[str, Any] | None = None,
    loras: Mapping[str, str] | None = None,
) -> Wanted:
    """Everything checked; ApiError for what the workflow does not take. Composes: may take a moment.

    uploads: PIL images by API name (image: one or a list, mask). loras: adapters' sources by name.
    """
    known = {parameter.name for parameter in workflow.parameters}
    said: dict[str, str] = {}  # by the workflow's name, the client's
    more = dict(uploads or {})
    if asked.lora is not None:
        more["lora"] = adapters(asked.lora, loras or {})
    values = _named(workflow, asked, more, known, said)
    values.update(_sized(workflow, asked.size, known, said, limits))
    count = asked.n or 1
    if count > limits.images:
        raise ApiError(
            400, f"n is {count}, limit {limits.images}; ask again for more", code="invalid_value",
            param="n",
        )  # fmt: skip
    if len(asked.prompt) > limits.prompt_chars:
        raise ApiError(
            400,
            f"prompt has {len(asked.prompt)} characters, limit {limits.prompt_chars}; shorten it",
            code="string_above_max_length",
            param="prompt",
        )
    seeds: list[int | None] = [None] * count
    if "seed" in known:
        first = secrets.randbits(32) if asked.seed is None else asked.seed
        seeds = [first + n if first + n < 2**64 else first + n - 2**64 for n in range(count)]
    elif asked.seed is not None:
        raise _not_taken(workflow, "seed", known)
    elif count > 1:
        raise ApiError(
            400,
            f"workflow {workflow.name!r} has no seed: its images would be the same; ask for n=1",
            code="invalid_value",
            param="n",
        )
    each = [{**values, **({} if seed is None else {"seed": seed})} for seed in seeds]
    previews: list[PreviewTask] = []
    try:
        requests = [workflow.request(tenant, **one) for one in each]
        if asked.partial_images:
            shown = _previewed(workflow, asked.partial_images, each)
            if shown is not None:
                requests = [shown.request(tenant, **each[0])]
                previews = preview_tasks(shown, requests[0], **each[0])
    except St2iError as error:
        raise of_exception(error, {**{name: name for name in known}, **said}) from None
    for request in requests:
        for task in request.tasks.values():
            tokenize(task)  # Dask keeps it, and would compute it on the event loop
    return Wanted(
        model,
        requests,
        seeds,
        asked.output_format or "png",
        asked.output_compression,
        asked.response_format == "url",
        asked.quality or "auto",
        previews,
    )


def extra_names(models: Models, body: Any) -> set[str]:
    """What a client may give as `parameters` to the model that its body names."""
    try:
        model = models.get(body.get("model"))
    except (ApiError, AttributeError, TypeError):
        return set()  # no object, or of no model
    # A snapshot: tasks are added in threads.
    workflows = [model.workflow, *list(model.tasks.values())]
    return {p.name for workflow in workflows for p in workflow.parameters} - _RESERVED


def _previewed(workflow: Workflow, count: int, each: list[dict[str, Any]]) -> Workflow | None:
    """None where nothing is between the steps: partial images are what there is of so many."""
    if len(each) > 1:
        raise ApiError(
            400,
            f"partial_images={count} with n={len(each)}; they are for one image: ask for n=1",
            code="invalid_value",
            param="partial_images",
        )
    try:
        return previewed(workflow, count, **each[0])
    except ComposeError as error:
        logger.info("no partial images: %s", error)
        return None


def _named(
    workflow: Workflow,
    asked: GenerationRequest | EditRequest,
    uploads: Mapping[str, Any],
    known: set[str],
    said: dict[str, str],
) -> dict[str, Any]:
    values: dict[str, Any] = {}
    given = {**{name: getattr(asked, name, None) for name in _NAMES}, **uploads}
    for name, value in given.items():
        if value is None:
            continue
        own = next((own for own in _NAMES[name] if own in known), None)
        if own is None:
            raise _not_taken(workflow, name, known)
        values[own], said[own] = value, name
    for name, value in _extra(asked).items():
        if name in _RESERVED:
            raise ApiError(
                400,
                f"parameters.{name} is for a field of the request itself, such as n or seed",
                code="invalid_value",
                param=f"parameters.{name}",
            )
        if name not in known:
            raise _not_taken(workflow, f"parameters.{name}", known)
        if name in values:
            raise ApiError(
                400,
                f"{said.get(name, name)} and parameters.{name} say the same; give one",
                code="invalid_value",
                param=f"parameters.{name}",
            )
        values[name], said[name] = value, f"parameters.{name}"
    return values


def _extra(asked: GenerationRequest | EditRequest) -> dict[str, Any]:
    extra: Any = asked.parameters
    if isinstance(extra, str):
        try:
            extra = json.loads(extra or "{}")
        except (ValueError, RecursionError):
            extra = None
        if not isinstance(extra, dict):
            raise ApiError(
                400,
                'parameters is no JSON object; write {"name": value}',
                code="invalid_value",
                param="parameters",
            )
    return extra or {}


def _sized(
    workflow: Workflow, size: str | None, known: set[str], said: dict[str, str], limits: Limits
) -> dict[str, int]:
    if size in (None, "auto"):
        return {}
    assert size is not None
    if not {"width", "height"} <= known:
        raise _not_taken(workflow, "size", known)
    width, height = map(int, size.split("x"))
    if not 0 < width * height <= limits.output_pixels:
        raise ApiError(
            400,
            f"size={size} is out of range; allowed: 1 to {limits.output_pixels:,} pixels in all",
            code="invalid_value",
            param="size",
        )
    said["width"] = said["height"] = "size"
    return {"width": width, "height": height}


def _not_taken(workflow: Workflow, name: str, known: set[str]) -> ApiError:
    return ApiError(
        400,
        f"workflow {workflow.name!r} does not take {name}; it takes: {', '.join(sorted(known))}",
        code="unknown_parameter",
        param=name,
    )
