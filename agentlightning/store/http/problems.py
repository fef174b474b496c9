"""Answers that say what went wrong and what to do next (RFC 9457)."""

from __future__ import annotations

from starlette.responses import Response

from agentlightning.errors import ConflictError, NotFoundError, StoreUnavailableError
from agentlightning.store.http import wire

PROBLEM = "application/problem+json"
TITLES = {
    404: "Not found",
    405: "Not that way",
    408: "Too slow",
    409: "Conflict",
    413: "Too large",
    422: "Not acceptable as it is",
    429: "Too many requests",
    503: "Not available",
    500: "Internal error",
}
_CODES = {
    404: NotFoundError.code,
    405: "method_not_allowed",
    408: "request_timeout",
    409: ConflictError.code,
    413: "too_large",
    429: "too_many_requests",
    503: StoreUnavailableError.code,
    500: "internal",
}
"""For programs, where no error of ours was raised. Others are "refused"."""


def problem(status: int, detail: str, code: str | None = None) -> Response:
    body = describe(status, detail, code)
    return Response(body.model_dump_json(), status_code=status, media_type=PROBLEM)


def describe(status: int, detail: str, code: str | None = None) -> wire.Problem:
    """The problem document; `code` is that of the error that was raised."""
    code = code or _CODES.get(status, "refused")
    return wire.Problem(title=TITLES.get(status, "Refused"), status=status, code=code, detail=detail)
