"""Connections: uvicorn's HTTP protocol, with a bound on each wait for a client and on their number."""

from __future__ import annotations

import asyncio
import json
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from .guard import new_id
from .limits import Limits
from .problems import RETRY_S, ApiError

# A reader must take at least so many bytes within `write_s`.
_PROGRESS = 64 * 1024


def protocol(limits: Limits) -> type[H11Protocol]:
    """The class that uvicorn makes of every connection."""

    class Bounded(H11Protocol):
        """Closes on headers that do not come, and on an answer that is not read."""

        _waiting: asyncio.TimerHandle | None = None
        _writing: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(self.connections) > limits.connections:
                message = "too many connections; try again later"
                transport.write(
                    _answer(ApiError(503, message, code="overloaded", retry_after=RETRY_S))
                )
                transport.close()
                return
            self._await_headers()

        def connection_lost(self, exc: Exception | None) -> None:
            for timer in (self._waiting, self._writing):
                if timer is not None:
                    timer.cancel()
            super().connection_lost(exc)

        def _await_headers(self) -> None:
            if self._waiting is not None:
                self._waiting.cancel()
            self._waiting = self.loop.call_later(limits.header_s, self._no_headers)

        def _no_headers(self) -> None:
            if self.cycle is None or self.cycle.response_complete:
                self.transport.close()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if not self.transport.is_closing():
                self._await_headers()

        def send_400_response(self, msg: str) -> None:
            self.transport.write(_answer(ApiError(400, msg, code="invalid_http")))
            self.transport.close()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._await_reader()

        def _await_reader(self) -> None:
            left = self.transport.get_write_buffer_size()
            self._writing = self.loop.call_later(limits.write_s, self._reader_stands, left)

        def _reader_stands(self, left: int) -> None:
            if left - self.transport.get_write_buffer_size() < _PROGRESS:
                self.transport.abort()
            else:
                self._await_reader()

        def resume_writing(self) -> None:
            super().resume_writing()
            if self._writing is not None:
                self._writing.cancel()
                self._writing = None

    return Bounded


def _answer(error: ApiError) -> bytes:
    """An answer to what is no request yet, as it goes over the wire."""
    body = json.dumps({"error": error.body()}).encode()
    headers = {
        **(error.headers or {}),
        "content-type": "application/json",
        "content-length": str(len(body)),
        "connection": "close",
        "x-request-id": new_id(),
    }
    lines = [f"HTTP/1.1 {error.status_code} {HTTPStatus(error.status_code).phrase}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body
