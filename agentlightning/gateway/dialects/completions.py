"""OpenAI Completions: a raw prompt, as text or as tokens. Text is sent as it was sampled, nothing is parsed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import msgspec

from agentlightning.gateway.dialects.base import (
    Answered,
    Body,
    Dialect,
    StreamWriter,
    openai_error,
    prompt_logprobs,
    prompt_rows,
    sse,
    token_name,
)
from agentlightning.gateway.dialects.fields import (
    Reading,
    between,
    given_settings,
    prompt_logprobs_of,
    required,
    streaming_usage,
    typed,
)
from agentlightning.gateway.dialects.guided import guided_schema
from agentlightning.gateway.dialects.tables.chat import STREAM_OPTIONS
from agentlightning.gateway.dialects.tables.completions import FIELDS, NESTED
from agentlightning.gateway.dialects.template import template_of
from agentlightning.gateway.exchange import Answer, CallRequest, Choice, Delta, Refusal
from agentlightning.gateway.sampling.settings import check_settings
from agentlightning.rendering import Rendering

_SETTINGS = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "logit_bias")
SETTINGS = {
    name: name for name in (*_SETTINGS, "max_tokens", "stop", "seed", "stop_token_ids", "min_tokens", "ignore_eos")
}

MOST_CHOICES = 128
"""Of all prompts of a request together."""
_DEFAULT_MAX_TOKENS = 16
"""Of this API, unlike the newer ones."""


class CompletionsDialect(Dialect):
    """`POST /completions`."""

    name = "completions"
    title = "Completions"
    paths = ("/completions",)
    id_prefix = "cmpl-"
    fields = FIELDS
    nested = NESTED
    client_params = "openai.types.completion_create_params:CompletionCreateParamsNonStreaming"

    def parse(self, body: Body, answered: Answered) -> CallRequest:
        reading = Reading()
        reading.check(body, FIELDS)
        streaming = typed(body, "stream_options", dict, {})
        reading.check(streaming, STREAM_OPTIONS, "stream_options")
        settings = {"max_tokens": _DEFAULT_MAX_TOKENS, **given_settings(body, SETTINGS)}
        check_settings(settings)
        logprobs = body.get("logprobs")
        n, prompts = between(body, "n", 1, 1, MOST_CHOICES), _prompts(body.get("prompt"))
        if n * len(prompts) > MOST_CHOICES:
            raise Refusal(
                f"'prompt' and 'n' together ask for {n * len(prompts)} answers; a request may have {MOST_CHOICES}.",
                code="invalid_value",
                param="prompt",
            )
        return CallRequest(
            dialect=self.name,
            model=required(body, "model", str),
            messages=[],
            prompt=prompts[0],
            prompts=prompts if len(prompts) > 1 else [],
            n=n,
            stream=typed(body, "stream", bool, False),
            include_usage=typed(streaming, "include_usage", bool, False),
            logprobs=logprobs is not None,
            top_logprobs=between(body, "logprobs", 0, 0, 20),
            return_token_ids=typed(body, "return_token_ids", bool, False),
            echo=typed(body, "echo", bool, False),
            prompt_logprobs=prompt_logprobs_of(body),
            tokens_as_ids=typed(body, "return_tokens_as_token_ids", bool, False),
            skips_special=typed(body, "skip_special_tokens", bool, False),
            schema=guided_schema(body, reading),
            asked=settings,
            shows_stop=typed(body, "include_stop_str_in_output", bool, False),
            template=template_of(body, reading),
            left_out=reading.left_out,
        )

    def respond(self, request: CallRequest, reply: Answer, rendering: Rendering) -> bytes:
        body: dict[str, Any] = {
            **_head(reply.response_id, reply.created, reply.model),
            "choices": [_choice(request, choice, _text(request, choice), rendering) for choice in reply.choices],
            "usage": _usage(reply),
        }
        if request.return_token_ids:
            body["prompt_token_ids"] = reply.prompt_ids.tolist()
            for at, choice in enumerate(body["choices"]):  # as vLLM has them
                choice["prompt_token_ids"] = reply.prompts[at // request.n].tolist()
        return msgspec.json.encode(body)

    def writer(self, request: CallRequest, response_id: str, created: int, rendering: Rendering) -> StreamWriter:
        return _CompletionsWriter(request, response_id, created, rendering)

    def refuse(self, refusal: Refusal) -> bytes:
        return msgspec.json.encode(openai_error(refusal))

    def asking_for_usage(self, body: Body) -> Body:
        return streaming_usage(body)

    def gather(self, events: Sequence[Body]) -> dict[str, Any]:
        names = ("id", "model", "usage")
        return {name: event[name] for event in events for name in names if event.get(name) is not None}


class _CompletionsWriter:
    """Chunks of text; the tokens and log-probs of a choice come with its last one."""

    def __init__(self, request: CallRequest, response_id: str, created: int, rendering: Rendering) -> None:
        self._request = request
        self._rendering = rendering
        self._head = _head(response_id, created, request.model)

    def start(self, prompt_tokens: int) -> bytes:
        return b""

    def delta(self, delta: Delta) -> bytes:
        if not delta.content:
            return b""
        choice = {"index": delta.index, "text": delta.content, "logprobs": None, "finish_reason": None}
        return sse({**self._head, "choices": [choice]})

    def choice(self, choice: Choice) -> bytes:
        return sse({**self._head, "choices": [_choice(self._request, choice, "", self._rendering)]})

    def finish(self, reply: Answer) -> bytes:
        usage = sse({**self._head, "choices": [], "usage": _usage(reply)}) if self._request.include_usage else b""
        return usage + b"data: [DONE]\n\n"

    def fail(self, refusal: Refusal) -> bytes:
        return sse(openai_error(refusal))


def _prompts(given: Any) -> list[str | list[int]]:
    """The prompts of a request: one, or a list of them. Each is a text or a list of tokens."""
    prompts = [given] if isinstance(given, str) or _is_tokens(given) else given
    if isinstance(prompts, list) and prompts and all((isinstance(p, str) and p) or _is_tokens(p) for p in prompts):
        return prompts
    messages = (
        " Messages go to /v1/chat/completions."
        if isinstance(prompts, list) and prompts and isinstance(prompts[0], dict)
        else ""
    )
    raise Refusal(
        "'prompt' must be a text or a list of token ids, or a list of such; none may be empty." + messages,
        code="invalid_type",
        param="prompt",
    )


def _is_tokens(prompt: Any) -> bool:
    if not isinstance(prompt, list) or not prompt:
        return False
    return all(isinstance(t, int) and not isinstance(t, bool) and 0 <= t < 2**31 for t in prompt)


def _head(response_id: str, created: int, model: str) -> dict[str, Any]:
    return {"id": response_id, "object": "text_completion", "created": created, "model": model}


def _choice(request: CallRequest, choice: Choice, text: str, rendering: Rendering) -> dict[str, Any]:
    found: dict[str, Any] = {
        "index": choice.index,
        "text": text,
        "logprobs": _logprobs(choice, request, rendering) if request.logprobs else None,
        "finish_reason": choice.finish_reason,
    }
    if request.return_token_ids:
        found["token_ids"] = choice.ids.tolist()
    if request.prompt_logprobs is not None:
        found["prompt_logprobs"] = prompt_rows(choice, request, rendering)
    return found


def _text(request: CallRequest, choice: Choice) -> str:
    """What an answer says, after its prompt where that is repeated."""
    return (choice.prompt.text if request.echo and choice.prompt is not None else "") + choice.content


def _logprobs(choice: Choice, request: CallRequest, rendering: Rendering) -> dict[str, Any]:
    name = partial(token_name, request, rendering)
    rows: list[tuple[int, float | None, list[tuple[int, float]] | None]] = []
    if request.echo and choice.prompt is not None:  # nothing is before its first token
        rows = [(int(choice.prompt.ids[0]), None, None), *prompt_logprobs(choice.prompt, request.top_logprobs)]
    others = [list[tuple[int, float]]()] * len(choice.ids)
    if choice.top_ids is not None and choice.top_logprobs is not None:
        pairs = zip(choice.top_ids.tolist(), choice.top_logprobs.tolist(), strict=True)
        others = [list(zip(ids, values, strict=True)) for ids, values in pairs]
    rows += zip(choice.ids.tolist(), choice.logprobs.tolist(), others, strict=True)
    lengths = [len(rendering.token_text(token)) for token, _, _ in rows]
    top = [None if pairs is None else {name(i): p for i, p in pairs} for _, _, pairs in rows]
    return {
        "tokens": [name(token) for token, _, _ in rows],
        "token_logprobs": [logprob for _, logprob, _ in rows],
        "top_logprobs": top if request.top_logprobs else None,
        "text_offset": [0, *accumulate(lengths)][: len(rows)],
    }


def _usage(reply: Answer) -> dict[str, Any]:
    prompt, completion = reply.prompt_tokens, reply.response_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
