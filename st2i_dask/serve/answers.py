"""From jobs and models to the answers of the API, and the API's own description."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.requests import Request

from .jobs import Job
from .models import Model
from .problems import ApiError
from .schema import (
    ErrorBody,
    ImageAnswer,
    ImagesAnswer,
    ModelAnswer,
    ParameterAnswer,
    Progress,
    RequestAnswer,
)
from .service import Service


def images_answer(service: Service, request: Request, job: Job) -> ImagesAnswer:
    """The result of a job that is completed. ApiError 404 when its images are gone."""
    wanted = job.wanted
    kept = files(service, job)
    if wanted.as_url:
        found = [{"url": service.url(request, name)} for name in job.files or ()]
    else:
        found = [{"b64_json": base64.b64encode(data).decode()} for data in kept]
    width, height = job.sizes[0]
    return ImagesAnswer(
        id=job.id,
        created=int(job.created),
        model=wanted.model,
        output_format=wanted.output_format,  # type: ignore[arg-type]
        quality=wanted.quality,
        size=f"{width}x{height}",
        data=[
            ImageAnswer(**each, seed=seed) for each, seed in zip(found, wanted.seeds, strict=True)
        ],
    )


def files(service: Service, job: Job) -> list[bytes]:
    """The images of a job that is completed. ApiError 404 when they are gone."""
    kept = [service.jobs.shelf.get(name) for name in job.files or ()]
    if not kept or None in kept:
        raise ApiError(404, "the images were kept for a while, and are gone", code="result_gone")
    return [file.data for file in kept if file is not None]


async def request_answer(
    service: Service, request: Request, job: Job, *, result: bool = False
) -> RequestAnswer:
    """Where a job stands; with its result, if asked for and there."""
    status, said = await service.jobs.state(job)
    whole: ImagesAnswer | None = None
    if result and status == "completed":
        with contextlib.suppress(ApiError):  # they are gone
            whole = await asyncio.to_thread(images_answer, service, request, job)
    return RequestAnswer(
        id=job.id,
        status=status,  # type: ignore[arg-type]
        model=job.wanted.model,
        n=len(job.names),
        created=int(job.created),
        queue_position=said["place"],
        estimated_wait_s=said["wait_s"],
        progress=Progress(done=said["done"], total=said["total"]),
        result=whole,
        error=ErrorBody(**job.error.body()) if status == "failed" and job.error else None,
    )


def failure(job: Job) -> ApiError:
    """Why a job that has ended has no images."""
    if job.error is not None:
        return job.error
    return ApiError(
        409, "the request was cancelled before its images were there", code="request_cancelled"
    )


def model_answer(model: Model) -> ModelAnswer:
    return ModelAnswer(
        id=model.name,
        created=model.created,
        workflow=model.workflow.name,
        parameters=[
            ParameterAnswer(name=p.name, kind=p.kind.value, about=p.describe())
            for p in model.workflow.parameters
        ],
    )


def openapi(app: FastAPI) -> dict[str, Any]:
    """The API's description. FastAPI adds 422, which is never answered here."""
    if app.openapi_schema is None:
        schema = get_openapi(
            title=app.title, version=app.version, summary=app.summary, routes=app.routes
        )
        for path in schema["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            schema["components"]["schemas"].pop(name, None)
        app.openapi_schema = schema
    return app.openapi_schema
