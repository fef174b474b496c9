"""Triplets that an agent returned: they say which calls are trained, each with its own reward. Pure.

A triplet means a call of the attempt: by `metadata["response_id"]` or `["call_id"]`, or because its token ids are the
call's. One that means none is trained from its own token ids if it brings the log-probs they were sampled with
(`metadata["logprobs"]`, and in a run of several policies `["policy"]`). Calls that no triplet means are not trained.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from agentlightning.types import Call, CallInfo, Span, Triplet
from agentlightning.types.arrays import Float32Array, Int32Array, np
from agentlightning.types.names import TRIPLET, TRIPLET_JSON

logger = logging.getLogger(__name__)


def given_triplets(spans: Sequence[Span]) -> list[tuple[Span, Triplet]]:
    """The triplets among an attempt's spans, in order. What cannot be read as one is said and left out."""
    found: list[tuple[Span, Triplet]] = []
    for span in (s for s in spans if s.name == TRIPLET):
        try:
            found.append((span, Triplet.model_validate_json(span.attributes[TRIPLET_JSON])))
        except (KeyError, ValidationError) as error:
            logger.warning("A triplet of rollout %s cannot be read: %s", span.rollout_id, error)
    return found


def calls_as_given(calls: Sequence[Call], given: Sequence[tuple[Span, Triplet]]) -> tuple[list[Call], list[int | None]]:
    """The calls, trained only where a triplet says so, with those of its own at the end; and each triplet's call."""
    taken: list[Call] = list(calls)
    which: list[int | None] = []
    for span, triplet in given:
        index = next((i for i, c in enumerate(calls) if i not in which and _means(triplet, c)), None)
        if index is None and (own := _own_call(span, triplet)) is not None:
            taken.append(own)
            index = len(taken) - 1
        if index is None:
            logger.warning(
                "A triplet of rollout %s is not trained: no call of its attempt has its response_id or its token ids, "
                "and it brings no prompt and response of its own as token ids with finite metadata['logprobs'].",
                span.rollout_id,
            )
        which.append(index)
    meant = {i for i in which if i is not None}
    return [c if i in meant else replace(c, info=replace(c.info, trained=False)) for i, c in enumerate(taken)], which


def _means(triplet: Triplet, call: Call) -> bool:
    named = triplet.metadata.get("response_id"), triplet.metadata.get("call_id")
    if any(named):
        return call.info.response_id == named[0] or call.info.call_id == named[1]
    response, prompt = _ids(triplet.response), _ids(triplet.prompt)
    same = response is not None and np.array_equal(response, call.response_ids)
    return same and (prompt is None or np.array_equal(prompt, call.prompt_ids))


def _ids(part: Any) -> Int32Array | None:
    """The token ids of a prompt or response; None where there are none, or something else."""
    return _array(part.get("token_ids") if isinstance(part, dict) else None, np.int32)


def _array(values: Any, dtype: Any) -> Any:
    try:
        found = None if values is None else np.array(values, dtype=dtype)
    except (TypeError, ValueError, OverflowError):
        return None
    return found if found is not None and found.ndim == 1 else None


def _own_call(span: Span, triplet: Triplet) -> Call | None:
    prompt, response = _ids(triplet.prompt), _ids(triplet.response)
    own: Float32Array | None = _array(triplet.metadata.get("logprobs"), np.float32)
    if prompt is None or response is None or own is None or not len(prompt) or len(own) != len(response):
        return None
    if not np.isfinite(own).all() or min(prompt.min(), response.min(initial=0)) < 0:
        return None
    return made_call(
        span.span_id,
        span.rollout_id,
        span.attempt_id,
        prompt,
        response,
        own,
        policy=triplet.metadata.get("policy", "given"),
        agent=triplet.metadata.get("agent_name"),
        ended=span.end_time or 0.0,
        started=span.start_time or 0.0,
    )


def made_call(
    call_id: str,
    rollout_id: str,
    attempt_id: str,
    prompt: Int32Array,
    response: Int32Array,
    logprobs: Float32Array,
    *,
    policy: str = "policy",
    agent: str | None = None,
    started: float = 0.0,
    ended: float = 0.0,
) -> Call:
    """A trained call that no engine of ours sampled; `logprobs` has one value per response token, at temperature 1."""
    info = CallInfo(
        call_id=call_id,
        response_id=call_id,
        rollout_id=rollout_id,
        attempt_id=attempt_id,
        choice=0,
        policy=policy,
        trained=True,
        agent=agent,
        parent_call_id=None,
        model="given",
        dialect="given",
        finish_reason="stop",
        start_time=started,
        end_time=ended,
        temperature=1.0,
    )
    return Call(info, prompt, response, logprobs, logprobs, ())
