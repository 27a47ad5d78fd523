"""Server-sent events: `stream=true`."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request

from .answers import failure, files
from .jobs import Job
from .schema import Usage
from .service import Service

# Seconds of silence after which a comment is sent, so that nothing between takes the line for dead.
_QUIET_S = 10.0


async def events(
    service: Service, request: Request, job: Job, kind: str, *, detached: bool
) -> AsyncIterator[bytes]:
    """The events of a job: previews as they come, then one for every image, or an error.

    kind: image_generation or image_edit. detached: the job goes on when the client leaves.
    """
    ended = asyncio.ensure_future(job.ended.wait())
    preview: asyncio.Future[Any] = asyncio.ensure_future(job.previews.get())
    try:
        yield b": the request is taken\n\n"
        while not (ended.done() and not preview.done()):
            done, _ = await asyncio.wait(
                {ended, preview}, timeout=_QUIET_S, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                yield b": waiting\n\n"
            if preview in done:
                index, file = preview.result()
                preview = asyncio.ensure_future(job.previews.get())
                partial = {"partial_image_index": index}
                yield await asyncio.to_thread(_image, job, f"{kind}.partial_image", file, partial)
        if job.files is None:
            yield _event("error", {"type": "error", "error": failure(job).body()})
            return
        for number, file in enumerate(files(service, job)):
            more: dict[str, Any] = {"usage": Usage().model_dump(), "seed": job.wanted.seeds[number]}
            yield await asyncio.to_thread(_image, job, f"{kind}.completed", file, more)
    finally:
        ended.cancel()
        preview.cancel()
        if not detached:
            service.jobs.cancel(job)
            service.jobs.drop(job)


def _image(job: Job, kind: str, file: bytes, more: dict[str, Any]) -> bytes:
    width, height = job.sizes[0] if job.sizes else (0, 0)
    return _event(
        kind,
        {
            "type": kind,
            "b64_json": base64.b64encode(file).decode(),
            "created_at": int(job.created),
            "size": f"{width}x{height}" if job.sizes else "auto",
            "quality": job.wanted.quality,
            "background": "opaque",
            "output_format": job.wanted.output_format,
            **more,
        },
    )


def _event(kind: str, data: dict[str, Any]) -> bytes:
    return f"event: {kind}\ndata: {json.dumps(data)}\n\n".encode()
