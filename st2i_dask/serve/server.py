"""The server: application, link to the cluster, and uvicorn."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from fastapi import FastAPI

from .app import make_app
from .connections import protocol
from .jobs import Jobs
from .keys import KeyRing
from .limits import Limits
from .link import Link
from .models import Models

# Seconds for which requests may end when the server is told to.
_GRACE_S = 10


def application(
    scheduler: str,
    models: Models,
    keys: KeyRing,
    limits: Limits,
    public_url: str | None = None,
) -> FastAPI:
    """The application for the cluster at this address."""
    link = Link(scheduler, _settings(keys))

    @contextlib.asynccontextmanager
    async def opening(jobs: Jobs) -> AsyncIterator[None]:
        await link.open(jobs.lost)
        try:
            yield
        finally:
            await link.close()

    return make_app(link, models, keys, limits, public_url=public_url, opening=opening)


def server(app: FastAPI, limits: Limits, host: str, port: int, **more: Any) -> uvicorn.Server:
    """A uvicorn server of the application that waits for no client without a bound."""
    return uvicorn.Server(
        uvicorn.Config(
            app,
            host=host,
            port=port,
            http=protocol(limits),
            ws="none",
            h11_max_incomplete_event_size=limits.header_bytes,
            timeout_graceful_shutdown=_GRACE_S,
            backlog=1024,
            server_header=False,
            access_log=False,
            **{"log_level": "warning", **more},
        )
    )


def _settings(keys: KeyRing) -> dict[str, Any]:
    return {name: value for name in ("weights", "caps") if (value := getattr(keys, name))}
