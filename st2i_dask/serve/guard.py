"""The outermost layer of the application: request ids, keys, bounds on bodies, and no bare 500."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from .keys import KeyRing
from .limits import Limits
from .problems import ApiError, answer

logger = logging.getLogger("st2i.serve")

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

#: What needs no key: health, the API's description, and images at unguessable paths.
_OPEN = ("/healthz", "/openapi.json", "/images/")

#: Paths whose body is a form with files.
UPLOADS = frozenset({"/v1/images/edits"})


class Guard:
    """ASGI middleware. `scope["state"]` gets request_id and holder.

    full: why nothing more can be taken in now, or None; asked before a body is read.
    """

    def __init__(
        self, app: Any, keys: KeyRing, limits: Limits, full: Callable[[], ApiError | None]
    ) -> None:
        self.app, self.keys, self.limits, self.full = app, keys, limits, full

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = new_id()
        scope.setdefault("state", {})["request_id"] = request_id
        began, status = time.monotonic(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [(k, v) for k, v in message["headers"] if k != b"x-request-id"]
                message["headers"] = [*headers, (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            await self._guarded(scope, receive, send_with_id)
        except ApiError as error:
            if status:
                raise
            await answer(error)(scope, receive, send_with_id)
        except Exception:
            logger.exception(
                "%s %s failed [%s]",
                scope["method"],
                scope["path"],
                request_id,
                extra={"http_request": request_id},
            )
            if status:
                raise
            message = f"an error of the server; its log has it under {request_id}"
            await answer(ApiError(500, message, code="internal_error"))(
                scope, receive, send_with_id
            )
        finally:
            holder = scope["state"].get("holder")
            seconds = time.monotonic() - began
            logger.info(
                "%s %s %s %.3f s tenant=%s [%s]",
                scope["method"],
                ascii(scope["path"]),  # it may hold line ends
                status or "-",
                seconds,
                holder.tenant if holder else "-",
                request_id,
                extra={
                    "http_request": request_id,
                    "tenant": holder.tenant if holder else None,
                    "status": status or None,
                    "seconds": round(seconds, 6),
                },
            )

    async def _guarded(self, scope: Message, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        if not scope["path"].startswith(_OPEN):
            scope["state"]["holder"] = self._holder(headers.get(b"authorization", b""))
        if scope["method"] in ("POST", "PUT", "PATCH", "DELETE"):
            limit = self.limits.upload_bytes if scope["path"] in UPLOADS else self.limits.json_bytes
            length = headers.get(b"content-length", b"0")
            if length.isdigit() and int(length) > limit:
                raise _too_large(limit)
            if scope["method"] == "POST" and scope["path"].startswith("/v1/images/"):
                why = self.full()
                if why is not None:
                    raise why
            receive = _bounded(receive, limit, self.limits.body_s)
        await self.app(scope, receive, send)

    def _holder(self, authorization: bytes) -> Any:
        kind, _, key = authorization.decode("latin-1").partition(" ")
        holder = self.keys.holder(key.strip() if kind.lower() == "bearer" else "")
        if holder is None:
            raise ApiError(
                401,
                "no valid API key; send it as 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                closing=True,
                headers={"www-authenticate": "Bearer"},
            )
        return holder


def new_id() -> str:
    """What an answer's x-request-id says, and the log."""
    return f"req_{secrets.token_hex(12)}"


def _bounded(receive: Receive, limit: int, seconds: float) -> Receive:
    """`receive` that refuses a body of more bytes, or one that does not come in time."""
    left, deadline, whole = limit, time.monotonic() + seconds, False

    async def bounded() -> Message:
        nonlocal left, whole
        if whole:
            return await receive()  # a disconnect
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                message = await receive()
        except TimeoutError:
            raise ApiError(
                408,
                f"the body did not arrive within {seconds:g} s; send it again",
                code="body_timeout",
                closing=True,
            ) from None
        if message["type"] == "http.request":
            left -= len(message.get("body", b""))
            if left < 0:
                raise _too_large(limit)
            whole = not message.get("more_body", False)
        return message

    return bounded


def _too_large(limit: int) -> ApiError:
    return ApiError(
        413,
        f"the body has more than {limit:,} bytes; send smaller images, or fewer",
        code="body_too_large",
        closing=True,
    )
