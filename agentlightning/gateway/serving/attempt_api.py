"""What an attempt may ask of the gateway besides model calls: to record a reward, and (its runner) to close it.

    POST …/rollout/{id}/attempt/{id}/v1/reward   {"reward": 0.5}    for programs that cannot print their reward
    POST …/rollout/{id}/attempt/{id}/v1/close    {"opened_at": …}   for runners on other machines

A reward needs the scope REWARDS of the attempt's key, closing needs CLOSE, which agents are never given.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from agentlightning.errors import AgentError, StoreError
from agentlightning.gateway.attempts import Attempts, AttemptSummary
from agentlightning.gateway.dialects.fields import typed
from agentlightning.gateway.exchange import Refusal
from agentlightning.gateway.limits import decode
from agentlightning.gateway.recording.recorder import Recorder
from agentlightning.gateway.recording.records import trace_id_of
from agentlightning.keys import CLOSE, REWARDS, AttemptKey
from agentlightning.types import Span
from agentlightning.types.names import ANNOTATION
from agentlightning.types.reward import reward_attributes

PATHS = ("/reward", "/close")
_MOST_BYTES = 64 * 1024
POSTED_TOO = (
    "A program posted a reward, which does not count: its last line, its file or its grader gives the reward. For "
    "posted rewards set reward='http' (--reward http)."
)

logger = logging.getLogger(__name__)


class Close(Protocol):
    """`Gateway.close_attempt`."""

    async def __call__(self, rollout_id: str, attempt_id: str, *, opened_at: str | None) -> AttemptSummary: ...


class AttemptApi:
    """Answers requests to `PATHS`."""

    def __init__(self, attempts: Attempts, recorder: Recorder, close: Close) -> None:
        self._attempts = attempts
        self._recorder = recorder
        self._close = close
        self._warned = False

    async def answer(self, path: str, key: AttemptKey, body: bytes) -> Mapping[str, Any]:
        """The answer's JSON. Raises `Refusal`."""
        if len(body) > _MOST_BYTES:
            raise Refusal(f"The body is larger than {_MOST_BYTES} bytes.", status=413, code="body_too_large")
        needed = REWARDS if path == "/reward" else CLOSE
        if needed not in key.scopes:
            if needed == REWARDS and not self._warned:
                self._warned = True
                logger.warning("%s", POSTED_TOO)
            raise Refusal(
                f"This API key may not do that: it lacks the scope '{needed}'. Rewards are withheld where a grader or "
                "the program's output gives them; closing is the runner's business.",
                status=403,
                kind="permission_error",
                code="missing_scope",
            )
        if path == "/reward":
            return await self._reward(key, decode(body))
        opened_at = typed(decode(body), "opened_at", str, "") if body else ""
        try:
            return msgspec.structs.asdict(
                await self._close(key.rollout_id, key.attempt_id, opened_at=opened_at or None)
            )
        except StoreError as error:
            raise Refusal(str(error), status=503, kind="server_error", code="store_unavailable") from error

    async def _reward(self, key: AttemptKey, given: Mapping[str, Any]) -> Mapping[str, Any]:
        live = await self._attempts.get(key.rollout_id, key.attempt_id)
        await self._recorder.wait_until_writable(live.key)
        try:
            attributes = reward_attributes(given["reward"], is_json=True)
        except KeyError:
            raise Refusal('Send {"reward": number}.', code="missing_reward", param="reward") from None
        except AgentError as error:
            raise Refusal(str(error), code="invalid_reward", param="reward") from None
        span = Span.from_attributes(
            name=ANNOTATION,
            attributes=attributes,
            rollout_id=key.rollout_id,
            attempt_id=key.attempt_id,
            trace_id=trace_id_of(key.rollout_id, key.attempt_id),
        )
        self._recorder.put(live.key, lambda: span)
        live.mark_rewarded()
        return {"recorded": True}
