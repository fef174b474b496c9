"""Requests that were refused leave a span with the reason, like those that were answered."""

from __future__ import annotations

import time
import uuid

from agentlightning.gateway.attempts import LiveAttempt
from agentlightning.gateway.exchange import Refusal
from agentlightning.gateway.recording.recorder import Recorder
from agentlightning.gateway.recording.records import Place, refusal_span

_LONGEST_NAME = 256


def record_refusal(
    recorder: Recorder, live: LiveAttempt, place: Place, model: str, refusal: Refusal, start: float
) -> None:
    """Count the request among the attempt's failed ones, and write its span."""
    live.mark_refused(refusal.message)
    model = model[:_LONGEST_NAME]
    call_id, end = f"refused-{uuid.uuid4().hex}:0", time.time()
    recorder.put(live.key, lambda: refusal_span(*live.key, place, call_id, model, refusal.message, start, end))
