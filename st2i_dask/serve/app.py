"""The application: routes of the OpenAI images API and of requests, models and workflows."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException

from . import answers, routes
from .guard import Guard
from .jobs import Cluster, Jobs
from .keys import KeyRing
from .limits import Limits
from .models import Models
from .problems import ApiError, answer, of_validation
from .schema import ErrorAnswer
from .service import Service
from .wanted import extra_names

#: Statuses that any route may answer with; each has an error object.
_REFUSALS = (400, 401, 403, 404, 405, 408, 409, 413, 429, 500, 503, 504)


def make_app(
    cluster: Cluster,
    models: Models,
    keys: KeyRing,
    limits: Limits | None = None,
    *,
    public_url: str | None = None,
    opening: Callable[[Jobs], contextlib.AbstractAsyncContextManager[Any]] | None = None,
) -> FastAPI:
    """The ASGI application.

    public_url: what URLs of images begin with; by default what the client called the server.
    opening: held while the application runs; it connects the cluster.
    """
    limits = limits or Limits()
    jobs = Jobs(cluster, limits, several=len(keys.tenants) > 1)
    service = Service(cluster, models, limits, jobs, public_url)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            if opening is not None:
                await stack.enter_async_context(opening(jobs))
            stack.push_async_callback(service.close)
            yield

    app = FastAPI(
        title="st2i",
        summary="Text-to-image workflows on a Dask cluster, by the OpenAI images API.",
        version="1",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        responses={status: {"model": ErrorAnswer} for status in _REFUSALS},
    )
    app.state.service = service
    app.add_middleware(Guard, keys=keys, limits=limits, full=jobs.full)
    app.add_exception_handler(HTTPException, _of_http)

    async def _of_validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return answer(of_validation(list(error.errors()), extra_names(models, error.body)))

    app.add_exception_handler(RequestValidationError, _of_validation)
    routes.add(app, HTTPBearer(auto_error=False, description="An API key."))
    for route in app.routes:
        if isinstance(route, APIRoute):
            route.operation_id = route.name
    app.openapi = lambda: answers.openapi(app)  # type: ignore[method-assign]
    return app


async def _of_http(request: Request, error: Exception) -> Response:
    if isinstance(error, ApiError):
        return answer(error)
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    codes = {404: "not_found", 405: "method_not_allowed"}
    message = {404: f"there is nothing at {request.url.path[:200]!r}"}.get(
        error.status_code, str(error.detail)
    )
    code = codes.get(error.status_code, "invalid_request")
    return answer(ApiError(error.status_code, message, code=code, headers=headers))
