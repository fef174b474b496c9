"""Answers that say what went wrong and what to do next (RFC 9457)."""

from __future__ import annotations

from starlette.responses import Response

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


def problem(status: int, detail: str) -> Response:
    body = wire.Problem(title=TITLES.get(status, "Refused"), status=status, detail=detail)
    return Response(body.model_dump_json(), status_code=status, media_type=PROBLEM)
