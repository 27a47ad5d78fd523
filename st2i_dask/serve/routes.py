"""The routes."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import Depends, FastAPI, Path, Request, Response
from fastapi.security import HTTPBearer
from pydantic import BaseModel
from starlette.responses import StreamingResponse

from .answers import failure, images_answer, model_answer, request_answer
from .edits import EDIT_BODY, read_edit
from .events import events
from .jobs import Job
from .pictures import MEDIA
from .problems import ApiError
from .schema import (
    EditRequest,
    GenerationRequest,
    Health,
    ImagesAnswer,
    ModelAnswer,
    ModelList,
    RequestAnswer,
    RequestList,
    WorkflowRequest,
)
from .service import Service, tenant_of
from .wanted import Wanted, wanted

#: Header of answers that are about a request: its id.
REQUEST_HEADER = "x-st2i-request"

# Written when the client has gone; it reads nothing.
_GONE = 499

# One event; its data is a JSON text.
_EVENT = {
    "type": "object",
    "required": ["event", "data"],
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
}
_STREAM = {"text/event-stream": {"schema": _EVENT}}
_IMAGES: dict[int | str, dict[str, Any]] = {
    200: {"content": _STREAM, "description": "The images, or with stream=true events."},
    202: {"model": RequestAnswer, "description": "With detach=true: where the request stands."},
}


def add(app: FastAPI, bearer: HTTPBearer) -> None:
    """Add all routes. bearer: for the description; keys are checked before."""
    service: Service = app.state.service
    keyed = [Depends(bearer)]

    @app.get("/healthz")
    async def health() -> Health:
        """Whether the cluster is there."""
        if not service.cluster.up:
            raise ApiError(503, "the scheduler is away; connecting again", code="scheduler_lost",
                           retry_after=2)  # fmt: skip
        return Health(status="ok", open_images=service.jobs.open_images)

    @app.get("/v1/models", dependencies=keyed)
    async def list_models() -> ModelList:
        """All models; the first is the default."""
        return ModelList(data=[model_answer(model) for model in service.models])

    @app.get("/v1/models/{model}", dependencies=keyed)
    async def get_model(model: str) -> ModelAnswer:
        """One model and what its workflow takes."""
        return model_answer(service.models.get(model))

    @app.post(
        "/v1/images/generations",
        dependencies=keyed,
        response_model=ImagesAnswer,
        responses=_IMAGES,
    )
    async def generate_images(request: Request, body: GenerationRequest) -> Any:
        """Images from a prompt."""
        return await _draw(service, request, body, "image_generation")

    @app.post(
        "/v1/images/edits",
        dependencies=keyed,
        response_model=ImagesAnswer,
        responses=_IMAGES,
        openapi_extra={"requestBody": EDIT_BODY},
    )
    async def edit_images(request: Request) -> Any:
        """Images from a prompt and images; a form with files."""
        body, uploads = await read_edit(request, service)
        return await _draw(service, request, body, "image_edit", uploads)

    @app.post("/v1/workflows", dependencies=keyed, status_code=201)
    async def register_workflow(request: Request, body: WorkflowRequest) -> ModelAnswer:
        """Add a model. Its source must be there already, where the operator allows; needs an admin's key."""
        if not tenant_of(request).admin:
            raise ApiError(403, "this key may not register workflows; ask the operator for one that "
                           "may", code="not_allowed")  # fmt: skip
        made = await service.load(lambda: service.models.register(body.id, body.source, body.dtype))
        return model_answer(made)

    @app.get("/v1/requests", dependencies=keyed)
    async def list_requests(request: Request) -> RequestList:
        """Your newest requests, at most 100, without their results."""
        found = service.jobs.of(tenant_of(request).tenant)
        await service.jobs.refresh(found)
        return RequestList(
            data=list(
                await asyncio.gather(*(request_answer(service, request, job) for job in found))
            )
        )

    @app.get("/v1/requests/{request_id}", dependencies=keyed)
    async def get_request(request: Request, request_id: str = _ID) -> RequestAnswer:
        """Where a request of yours stands, and its images once they are there."""
        job = service.jobs.get(tenant_of(request).tenant, request_id)
        return await request_answer(service, request, job, result=True)

    @app.delete("/v1/requests/{request_id}", dependencies=keyed)
    async def cancel_request(request: Request, request_id: str = _ID) -> RequestAnswer:
        """Cancel a request of yours: it ends at the next step. One that is over stays as it is."""
        job = service.jobs.get(tenant_of(request).tenant, request_id)
        service.jobs.cancel(job)
        await asyncio.wait_for(job.ended.wait(), 30)
        return await request_answer(service, request, job)

    @app.get("/images/{name}", response_class=Response, responses={200: {"content": _FILES}})
    async def get_image(name: str) -> Response:
        """An image, at a path that only its owner was told."""
        kept = service.jobs.shelf.get(name)
        if kept is None:
            raise ApiError(404, "there is no such image; it may be too old", code="image_not_found")
        headers = {"cache-control": "private, max-age=3600", "x-content-type-options": "nosniff"}
        return Response(kept.data, media_type=kept.media_type, headers=headers)


_ID = Path(max_length=100)
_FILES = {kind: {"schema": {"type": "string", "format": "binary"}} for kind in MEDIA.values()}


async def _draw(
    service: Service,
    request: Request,
    body: GenerationRequest | EditRequest,
    kind: str,
    uploads: dict[str, Any] | None = None,
) -> Any:
    """Check, submit, and answer as the client asked: images, events, or at once."""
    tenant = tenant_of(request).tenant
    service.jobs.check_room(tenant, body.n or 1)
    _check_stream(body)
    model = service.models.get(body.model)
    workflow = model.workflow
    if uploads is not None and not _takes_images(workflow):
        task = "inpainting" if "mask" in uploads else "image-to-image"
        workflow = await service.load(lambda: service.models.for_task(model, task))
    want: Wanted = await service.check(
        lambda: wanted(
            model.name, workflow, body, tenant, service.limits, uploads, service.models.loras
        )
    )
    job = service.jobs.start(tenant, want)
    headers = {REQUEST_HEADER: job.id}
    if body.stream:
        stream = events(service, request, job, kind, detached=bool(body.detach))
        return StreamingResponse(
            stream, media_type="text/event-stream", headers={**headers, "cache-control": "no-store"}
        )
    if body.detach:
        return _json(await request_answer(service, request, job), 202, headers)
    await _ended(service, request, job)
    if job.files is None:
        raise failure(job)
    made = await asyncio.to_thread(images_answer, service, request, job)
    if not want.as_url:
        service.jobs.drop(job)
    return _json(made, 200, headers)


async def _ended(service: Service, request: Request, job: Job) -> None:
    """Wait for its end; a client that leaves cancels it."""
    gone = asyncio.ensure_future(_disconnected(request))
    ended = asyncio.ensure_future(job.ended.wait())
    try:
        await asyncio.wait({gone, ended}, return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():
            service.jobs.cancel(job)
            raise ApiError(_GONE, "the client has gone", code="client_closed_request")
    except asyncio.CancelledError:  # the server ends
        service.jobs.cancel(job)
        raise
    finally:
        for waiting in (gone, ended):
            waiting.cancel()
        await asyncio.gather(gone, ended, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _check_stream(body: GenerationRequest | EditRequest) -> None:
    if body.partial_images and not body.stream:
        raise ApiError(400, "partial_images needs stream=true", code="invalid_value",
                       param="partial_images")  # fmt: skip
    if body.stream and body.response_format == "url":
        raise ApiError(
            400,
            "response_format=url with stream=true: events carry images as b64_json; leave out one",
            code="invalid_value",
            param="response_format",
        )


def _takes_images(workflow: Any) -> bool:
    names = {parameter.name for parameter in workflow.parameters}
    return bool(names & {"image", "images", "input_image", "reference_images"})


def _json(answer: BaseModel, status: int, headers: dict[str, str]) -> Response:
    return Response(
        answer.model_dump_json(exclude_none=False).encode(),
        status,
        headers,
        media_type="application/json",
    )
