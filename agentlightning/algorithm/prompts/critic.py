"""The critic: a language model that is asked what is wrong with a prompt, and for a better one.

It is asked over the OpenAI API, by a client of the user's or over plain HTTP, or an engine of the run samples it. An
answer that does not come, or says nothing, is a value (`CriticFailure`), not an exception: the run goes on without it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

import aiohttp

from agentlightning.engine.base import Engine, SamplingParams, concat
from agentlightning.net.outgoing import UnwantedAnswer, http_session, reason_of
from agentlightning.rendering.base import Rendering

Message = Mapping[str, str]
Answer = TypeVar("Answer")
Failure = Literal["timeout", "refused", "empty", "error"]

TRIES = 3
"""Requests per question: a connection that broke, a provider that is busy."""
_BUSY = (408, 409, 429)


@dataclass(frozen=True, slots=True)
class CriticAnswer:
    """An answer of the critic's model, and the tokens that it used."""

    text: str
    input_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    """Of the input, what the provider had in its cache."""


@dataclass(frozen=True, slots=True)
class CriticFailure:
    """Why there is no answer."""

    kind: Failure
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One request to the critic."""

    model: str
    messages: Sequence[Message]
    temperature: float
    max_tokens: int
    besides: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the request; None takes one out."""

    @property
    def body(self) -> dict[str, Any]:
        fields = {
            "model": self.model,
            "messages": [dict(m) for m in self.messages],
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
            **self.besides,
        }
        return {name: value for name, value in fields.items() if value is not None}

    @property
    def expected_tokens(self) -> int:
        """A rough upper bound of the tokens of this request; four characters of English count as a token."""
        return sum(len(m["content"]) for m in self.messages) // 4 + self.max_tokens


class CriticClient(Protocol):
    """Sends one request, once; returns the body of the answer as a dictionary, or raises."""

    async def complete(self, question: Question) -> Mapping[str, Any]: ...

    async def close(self) -> None: ...


class HttpCritic:
    """Any OpenAI-compatible server, by the package's own HTTP client."""

    def __init__(self, base_url: str, api_key: str | None = None, route: str = "chat/completions") -> None:
        self._url = f"{base_url.rstrip('/')}/{route}"
        self._headers = {"authorization": f"Bearer {api_key or 'none'}"}
        self._session: aiohttp.ClientSession | None = None

    async def complete(self, question: Question) -> Mapping[str, Any]:
        if self._session is None:
            self._session = http_session(trust_env=True)
        async with self._session.post(self._url, json=question.body, headers=self._headers) as response:
            if response.status >= 400:
                raise _CriticRefused(
                    f"HTTP {response.status}: {_message(await response.text())}",
                    passing=response.status in _BUSY or response.status >= 500,
                )
            return await response.json(content_type=None)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


class ClientCritic:
    """An async OpenAI client of the user's (or anything with its `chat.completions.create`)."""

    def __init__(self, client: Any) -> None:
        self._client = client

    async def complete(self, question: Question) -> Mapping[str, Any]:
        answer = await self._client.chat.completions.create(**question.body)
        return answer if isinstance(answer, Mapping) else answer.model_dump()

    async def close(self) -> None:
        """The client is the user's."""


class EngineCritic:
    """A model that an engine samples from, with its answer held to the schema that the question asks for."""

    def __init__(self, engine: Engine, model: str, renderer: str | None) -> None:
        """`model` has the tokenizer and chat template."""
        self._engine = engine
        self._model = model
        self._renderer = renderer

    async def complete(self, question: Question) -> Mapping[str, Any]:
        rendering = await asyncio.to_thread(self._load)
        prompt = rendering.render([dict(m) for m in question.messages], None)
        left = (await self._engine.info()).max_context - len(prompt)
        if left < 1:
            raise _CriticRefused(
                f"its {len(prompt):,} tokens leave no room for an answer in max_context", passing=False
            )
        schema = (question.body.get("response_format") or {}).get("json_schema")
        reasons = rendering.starts_in_reasoning(prompt)
        params = SamplingParams(
            temperature=question.temperature,
            max_tokens=min(question.max_tokens, left),
            stop_token_ids=rendering.stop_token_ids,
            grammar=schema and rendering.grammar(schema["schema"], None, in_reasoning=reasons),
        )
        ids = concat([chunk async for chunk in self._engine.generate(prompt, params)]).ids
        text = rendering.parse(ids, prompt, None).content
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids)}
        return {"choices": [{"message": {"content": text}}], "usage": usage}

    def _load(self) -> Rendering:
        from agentlightning.models import resolve_model
        from agentlightning.rendering import load_rendering

        return load_rendering(resolve_model(self._model), self._renderer)

    async def close(self) -> None:
        """The engine is the run's."""


class _CriticRefused(Exception):
    def __init__(self, why: str, *, passing: bool) -> None:
        super().__init__(why)
        self.passing = passing
        """Whether it may be well in a moment."""


def _message(body: str) -> str:
    """What a provider's error says, without the JSON around it."""
    try:
        error = json.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return body.strip() or "no reason given"


async def ask(critic: CriticClient, question: Question, timeout: float) -> CriticAnswer | CriticFailure:
    """Ask, again where the trouble may pass. Raises nothing: a failure is a value."""
    return await complete(critic, question, timeout, _read)


async def complete(
    critic: CriticClient, question: Question, timeout: float, read: Callable[[Mapping[str, Any]], Answer]
) -> Answer | CriticFailure:
    """Ask likewise, and `read` the body of the answer; what that raises is a failure, too."""
    failure = CriticFailure("error", "it was not called")
    for number in range(TRIES):
        try:
            async with asyncio.timeout(timeout):
                return read(await critic.complete(question))
        except TimeoutError:
            failure = CriticFailure("timeout", f"no answer within {timeout:g} s")
        except Exception as error:  # whatever a client of the user's raises: the run outlives its critic
            known = isinstance(error, _CriticRefused | UnwantedAnswer | aiohttp.ClientConnectorError)
            name = "" if known else f"{type(error).__name__}: "
            failure = CriticFailure("error", f"{name}{reason_of(error)}"[:500])
            if not _passing(error):
                break
        await asyncio.sleep(0.2 * 2**number)
    return failure


def _passing(error: Exception) -> bool:
    """Whether it is worth another try: connections that broke, and what a provider says of itself."""
    if isinstance(error, UnwantedAnswer):
        return False
    if isinstance(error, _CriticRefused):
        return error.passing
    status = getattr(error, "status_code", None)  # of OpenAI's client
    return status is None or status in _BUSY or status >= 500


def _read(body: Mapping[str, Any]) -> CriticAnswer | CriticFailure:
    choice = (body.get("choices") or [{}])[0]
    message = choice.get("message") or {}
    if message.get("refusal") or choice.get("finish_reason") == "content_filter":
        return CriticFailure("refused", str(message.get("refusal") or "the provider's content filter"))
    text = message.get("content") or ""
    if not isinstance(text, str) or not text.strip():
        return CriticFailure("empty", "the answer has no text")
    usage = body.get("usage") or {}
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    written = int(usage.get("completion_tokens") or len(text) // 4)
    return CriticAnswer(text, int(usage.get("prompt_tokens") or 0), written, int(cached or 0))
