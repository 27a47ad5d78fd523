"""What goes wrong, in the shape that clients of the OpenAI API read: status, and an error object."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import Response

from ..errors import LimitError, ParameterError, said
from ..quoting import MOST

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
}

# How a request must begin again, seconds; clients of the OpenAI API wait that long.
RETRY_S = 2


class ApiError(HTTPException):
    """A refusal or failure with its HTTP status.

    param: the parameter it is about. code: what programs look at. retry_after: seconds; the same
    request may succeed then. closing: the connection cannot be used again (its body was not read).
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after: int | None = None,
        closing: bool = False,
        headers: dict[str, str] | None = None,
    ):
        headers = dict(headers or {})
        if retry_after is not None:
            headers["retry-after"] = str(retry_after)
        if closing:
            headers["connection"] = "close"
        super().__init__(status, message, headers)
        self.code, self.param = code, param

    def body(self) -> dict[str, Any]:
        """The error object."""
        kind = _TYPES.get(self.status_code)
        if kind is None:
            kind = "server_error" if self.status_code >= 500 else "invalid_request_error"
        return {
            "message": str(self.detail),
            "type": kind,
            "param": self.param,
            "code": self.code,
        }


def answer(error: ApiError) -> Response:
    """The response that tells the error."""
    # ASCII: a message may quote text that UTF-8 cannot hold.
    content = json.dumps({"error": error.body()}).encode()
    return Response(content, error.status_code, error.headers, media_type="application/json")


def of_exception(error: BaseException, names: dict[str, str] | None = None) -> ApiError:
    """Any failure of a request as an ApiError.

    names: by the workflow's parameter, what the client calls it.
    """
    if isinstance(error, ApiError):
        return error
    text = " ".join(str(error).split())[:2000]
    if isinstance(error, LimitError):
        return ApiError(429, text, code="rate_limit_exceeded", retry_after=RETRY_S)
    if isinstance(error, ParameterError):
        return ApiError(400, text, code="invalid_value", param=_parameter(text, names or {}))
    if isinstance(error, TimeoutError):
        message = "the request was not done in time and is cancelled; ask for less, or try later"
        return ApiError(504, message, code="timeout", retry_after=RETRY_S)
    why = said(error)[:2000]
    return ApiError(500, f"no image could be made: {why}", code="generation_failed")


def of_lost_scheduler() -> ApiError:
    """The connection to the scheduler broke; what was in flight is gone."""
    return ApiError(
        503,
        "the cluster's scheduler went away and the request with it; send it again",
        code="scheduler_lost",
        retry_after=RETRY_S,
    )


def of_validation(errors: list[Any], extra: Collection[str] = ()) -> ApiError:
    """From the errors of pydantic: the first one, named as the client wrote it. extra: what may be
    given as `parameters`."""
    first = errors[0] if errors else {"loc": (), "msg": "not valid", "type": "value_error"}
    where = [str(part) for part in first["loc"] if part not in ("body", "query", "path", "header")]
    param = ".".join(where)[:MOST] or None
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is no JSON: {_reason(first)}", code="invalid_json")
    if first["type"] == "extra_forbidden":
        code, message = "unknown_parameter", f"Unknown parameter: {param!r}."
        if param in extra:
            message += (
                f" The workflow has it: put it under 'parameters': {{{json.dumps(param)}: ...}}."
            )
    elif first["type"] == "missing":
        code, message = "missing_required_parameter", f"Missing required parameter: {param!r}."
    else:
        code, message = "invalid_value", f"{param}: {first['msg']}"
    return ApiError(400, message, code=code, param=param)


def _reason(first: Any) -> str:
    return str((first.get("ctx") or {}).get("error", first["msg"]))


def _parameter(text: str, names: dict[str, str]) -> str | None:
    """Which of the workflow's parameters a message is about: the first that it names."""
    said = re.sub(r"^workflow '[^']*': ", "", text)
    for word in re.findall(r"[A-Za-z_]\w*", said[:200]):
        if word in names:
            return names[word]
    return None
