"""Google's Gemini API: `generateContent`, streamed or not, and its counting of tokens.

The model and the kind of answer stand in the path and not in the body; `located` puts them there. Objects may have
their fields in camelCase or snake_case, as the API takes both.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qs, quote

import msgspec

from agentlightning.gateway.dialects.base import Answered, Body, Dialect, StreamWriter
from agentlightning.gateway.dialects.fields import Reading, begun_answer, between, required, typed
from agentlightning.gateway.dialects.gemini.replies import Writer, candidate_of, error_of, tail_of, usage_of
from agentlightning.gateway.dialects.gemini.requests import (
    MOST_CHOICES,
    MOST_TOP_LOGPROBS,
    answer_of,
    answer_schema_of,
    calling_of,
    messages_of,
    named,
    settings_of,
    system_of,
    thought_of,
    tools_of,
)
from agentlightning.gateway.dialects.tables.gemini import FIELDS, GENERATION, NESTED, THINKING
from agentlightning.gateway.exchange import Answer, CallRequest, Refusal
from agentlightning.rendering import Rendering
from agentlightning.rendering.messages import Message

_PLACES = ("", "/publishers/{publisher}", "/projects/{project}/locations/{location}/publishers/{publisher}")
"""Before /models/…, at the Gemini API and at Vertex AI."""
_LOCATED = re.compile(r".*?/models/(?P<model>.+):(?P<method>\w+)")
_STREAMED = "streamGenerateContent"


class GeminiDialect(Dialect):
    """`POST /models/{model}:generateContent`, `:streamGenerateContent`, `:countTokens`."""

    name = "gemini"
    title = "Gemini"
    paths = tuple(f"{at}/models/{{model}}:{method}" for at in _PLACES for method in ("generateContent", _STREAMED))
    counting_paths = tuple(f"{at}/models/{{model}}:countTokens" for at in _PLACES)
    id_prefix = "gem_"
    fields = FIELDS
    nested = NESTED
    conversation_fields = ("contents", "systemInstruction", "system_instruction", "tools")
    keep_alive = b"\n"
    """Google's clients take any other line that is not data for an answer."""

    def located(self, body: Body, path: str, query: str) -> Body:
        found = _LOCATED.fullmatch(path)
        assert found is not None, "its paths are of this form"
        model = found["model"].removeprefix("models/")
        alt = parse_qs(query).get("alt", ["json"])[0]
        return {**body, "model": model, "stream": found["method"] == _STREAMED, "alt": alt}

    def addressed(self, path: str, body: Body) -> tuple[str, Body]:
        sent = {name: value for name, value in body.items() if name not in ("model", "stream", "alt")}
        found = _LOCATED.fullmatch(path)
        assert found is not None, "its paths are of this form"
        query = "?alt=sse" if body.get("alt") == "sse" else ""
        return f"/models/{quote(str(body['model']))}:{found['method']}{query}", sent

    def parse(self, body: Body, answered: Answered) -> CallRequest:
        reading = Reading()
        given = named(body, FIELDS, "", reading)
        if given.get("generateContentRequest") is not None:  # of countTokens
            given = {**named(given["generateContentRequest"], FIELDS, "generateContentRequest", reading), **given}
        system = system_of(given.get("systemInstruction"), reading)
        tools = tools_of(typed(given, "tools", list, []), reading)
        config = named(given.get("generationConfig") or {}, GENERATION, "generationConfig", reading)
        thinking = named(config.get("thinkingConfig") or {}, THINKING, "generationConfig.thinkingConfig", reading)
        choice, strict = calling_of(given.get("toolConfig") or {}, tools, reading)
        messages, begun = begun_answer([*system, *messages_of(given.get("contents"), reading)], "contents")
        return CallRequest(
            dialect=self.name,
            model=required(given, "model", str),
            messages=messages,
            tools=tools.declared or None,
            tool_choice=choice,
            strict=strict,
            n=between(config, "candidateCount", 1, 1, MOST_CHOICES),
            stream=typed(given, "stream", bool, False),
            logprobs=typed(config, "responseLogprobs", bool, False),
            top_logprobs=between(config, "logprobs", 0, 0, MOST_TOP_LOGPROBS),
            schema=answer_schema_of(config, reading),
            asked=settings_of(config),
            template=thought_of(thinking, reading),
            begun=begun,
            left_out=reading.left_out,
            private={"thoughts": typed(thinking, "includeThoughts", bool, False), "sse": given.get("alt") == "sse"},
        )

    def respond(self, request: CallRequest, reply: Answer, rendering: Rendering) -> bytes:
        candidates = [candidate_of(request, choice, rendering) for choice in reply.choices]
        usage = usage_of(len(reply.prompt_ids), reply.cached_tokens, reply.choices, rendering)
        return msgspec.json.encode(
            {"candidates": candidates, "usageMetadata": usage, **tail_of(request, reply.response_id)}
        )

    def writer(self, request: CallRequest, response_id: str, created: int, rendering: Rendering) -> StreamWriter:
        return Writer(request, response_id, rendering)

    def media_type(self, request: CallRequest) -> str:
        return super().media_type(request) if request.private["sse"] else "application/json; charset=utf-8"

    def refuse(self, refusal: Refusal) -> bytes:
        return msgspec.json.encode(error_of(refusal))

    def counted(self, tokens: int) -> bytes:
        return msgspec.json.encode({"totalTokens": tokens})

    def credentials(self, api_key: str | None) -> dict[str, str]:
        return {"x-goog-api-key": api_key} if api_key else {}

    def settings(self, body: Body) -> Body:
        request = named(body, FIELDS, "", Reading())
        config = named(request.get("generationConfig") or {}, GENERATION, "generationConfig", Reading())
        return {"n": config.get("candidateCount"), "max_tokens": config.get("maxOutputTokens")}

    def in_openai_terms(self, answer: Body) -> dict[str, Any]:
        usage = answer.get("usageMetadata")
        if not isinstance(usage, dict):
            return dict(answer)
        sampled = [usage.get(name) or 0 for name in ("candidatesTokenCount", "thoughtsTokenCount")]
        counts = {
            "prompt_tokens": usage.get("promptTokenCount"),
            "completion_tokens": sum(sampled),
            "prompt_tokens_details": {"cached_tokens": usage.get("cachedContentTokenCount")},
        }
        return {**answer, "id": answer.get("responseId"), "model": answer.get("modelVersion"), "usage": counts}

    def answer_message(self, answer: Body) -> Message | None:
        return answer_of(answer["candidates"][0]["content"], "candidates[0].content")

    def gather(self, events: Sequence[Body]) -> dict[str, Any]:
        whole: dict[str, Any] = {}
        parts: list[Any] = []
        for event in events:
            whole |= {name: event[name] for name in event if name != "candidates"}
            for candidate in event.get("candidates") or ():
                if candidate.get("index", 0) == 0:
                    parts += (candidate.get("content") or {}).get("parts") or ()
                    first = {name: value for name, value in candidate.items() if name != "content"}
                    whole["candidates"] = [{**first, "content": {"role": "model", "parts": parts}}]
        return whole
