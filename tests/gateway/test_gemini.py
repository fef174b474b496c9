"""Google's Gemini API, as its clients write it: paths that carry the model, turns of parts, streams of two forms."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from agentlightning.gateway import Gateway, Provider, SpendingLimits, TokenPrice
from agentlightning.gateway.dialects import DIALECTS
from agentlightning.gateway.dialects.gemini.requests import json_schema_of
from agentlightning.gateway.exchange import Refusal
from agentlightning.rendering import RenderersRendering
from agentlightning.store import InMemoryLightningStore
from agentlightning.types import RolloutMode
from tests.gateway.conftest import CALC, Site, call_text
from tests.gateway.scripted import ScriptedEngine
from tests.gateway.test_dialects import QUESTION, check_two_turns

DIALECT = next(dialect for dialect in DIALECTS if dialect.name == "gemini")
NUMBERS = {"a": {"type": "NUMBER"}, "b": {"type": "NUMBER"}}
DECLARED = {
    "name": "calc",
    "description": CALC["function"]["description"],
    "parameters": {"type": "OBJECT", "properties": NUMBERS},
}
ASKED = {"role": "user", "parts": [{"text": QUESTION}]}
BODY: dict[str, Any] = {
    "systemInstruction": {"parts": [{"text": "Use the tool."}]},
    "tools": [{"functionDeclarations": [DECLARED]}],
}
FORMS = ["whole", "sse", "array"]


class Client:
    """Speaks plain HTTP, by a URL and headers."""

    def __init__(self, session: aiohttp.ClientSession, base: str) -> None:
        self._session, self.base = session, base

    async def post(self, path: str, body: Any, **options: Any) -> tuple[int, Any]:
        async with self._session.post(f"{self.base}{path}", json=body, **options) as response:
            text = await response.text()
        if response.content_type == "text/event-stream":
            return response.status, [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
        return response.status, json.loads(text)

    async def get(self, path: str) -> Any:
        async with self._session.get(f"{self.base}{path}") as response:
            return await response.json()

    async def ask(self, form: str, contents: list[Any], model: str = "policy", **fields: Any) -> dict[str, Any]:
        """One answer, put together if it was streamed."""
        method = {"whole": "generateContent", "sse": "streamGenerateContent?alt=sse"}.get(form, "streamGenerateContent")
        status, found = await self.post(f"/v1beta/models/{model}:{method}", {**BODY, "contents": contents, **fields})
        assert status == 200, found
        return found if form == "whole" else DIALECT.gather(found)


@asynccontextmanager
async def client_of(site: Site, headers: dict[str, str] | None = None) -> AsyncIterator[Client]:
    async with aiohttp.ClientSession(headers={"x-goog-api-key": site.key} if headers is None else headers) as session:
        yield Client(session, site.base_url.removesuffix("/v1"))


def parts_of(answer: dict[str, Any]) -> list[dict[str, Any]]:
    return answer["candidates"][0]["content"]["parts"]


@pytest.mark.parametrize("with_id", [True, False])
@pytest.mark.parametrize("form", FORMS)
async def test_a_two_turn_agent(site: Site, form: str, with_id: bool) -> None:
    async with client_of(site) as client:
        first = await client.ask(form, [ASKED])
        (call,) = [part["functionCall"] for part in parts_of(first) if "functionCall" in part]
        assert (call["name"], call["args"]) == ("calc", {"a": 2, "b": 3})
        assert first["candidates"][0]["finishReason"] == "STOP"
        known = {"id": call["id"]} if with_id else {}
        result = {"functionResponse": {"name": "calc", "response": {"result": "5"}, **known}}
        history = [ASKED, first["candidates"][0]["content"], {"role": "user", "parts": [result]}]
        second = await client.ask(form, history)
        counted = await client.post("/v1beta/models/policy:countTokens", {**BODY, "contents": history})
    assert "".join(part["text"] for part in parts_of(second)) == "The answer is 5."
    calls = await site.close()
    check_two_turns(site, calls)
    usage = second["usageMetadata"]
    assert usage["promptTokenCount"] == len(calls[1].prompt_ids)
    assert usage["totalTokenCount"] == len(calls[1].prompt_ids) + len(calls[1].response_ids)
    assert counted[0] == 200
    assert 0 < counted[1]["totalTokens"] <= usage["promptTokenCount"]
    assert {call.info.dialect for call in calls} == {"gemini"}


@pytest.mark.parametrize("kept", ["all", "signed", "nothing", "pieces"])
@pytest.mark.parametrize("form", FORMS)
async def test_thoughts_and_several_calls_are_continued(site: Site, form: str, kept: str) -> None:
    """However a client keeps them: with the thoughts, with their signature alone, with neither, or piece by piece."""
    site.engine.script = lambda prompt, _: (
        "Both done."
        if "<tool_response>" in prompt
        else f"<think>\nHm.\n</think>\n\nLet me see.\n{call_text(1, 2)}" + call_text(3, 4)
    )
    thinking = {"thinkingConfig": {"includeThoughts": True, "thinkingBudget": -1}}
    async with client_of(site) as client:
        first = await client.ask(form, [ASKED], generationConfig=thinking)
        parts = parts_of(first)
        assert "".join(part["text"] for part in parts if part.get("thought")).strip() == "Hm."
        assert "".join(part.get("text", "") for part in parts if not part.get("thought")).strip() == "Let me see."
        calls = [part["functionCall"] for part in parts if "functionCall" in part]
        assert [call["args"] for call in calls] == [{"a": 1, "b": 2}, {"a": 3, "b": 4}]
        assert first["usageMetadata"]["thoughtsTokenCount"] > 0
        if kept in ("signed", "nothing"):
            parts = [part for part in parts if not part.get("thought")]
        if kept == "nothing":
            parts = [{name: value for name, value in part.items() if name != "thoughtSignature"} for part in parts]
        pieces = [[part] for part in parts] if kept == "pieces" else [parts]
        answers = [
            {"functionResponse": {"id": call["id"], "name": call["name"], "response": {"output": 3}}} for call in calls
        ]
        history = [ASKED, *({"role": "model", "parts": p} for p in pieces), {"role": "function", "parts": answers}]
        second = await client.ask(form, history, generationConfig=thinking)
    assert "".join(part["text"] for part in parts_of(second)) == "Both done."
    check_two_turns(site, await site.close())


async def test_a_signature_tells_siblings_apart(site: Site) -> None:
    """Two equal calls after different thoughts: each is continued by who sends its signature back, and no id."""
    thoughts = iter(["First.", "Second."])
    site.engine.script = lambda prompt, _: (
        "On." if "<tool_response>" in prompt else f"<think>\n{next(thoughts)}\n</think>\n\n{call_text(1, 2)}"
    )
    result = {"role": "user", "parts": [{"functionResponse": {"name": "calc", "response": {"result": 3}}}]}
    async with client_of(site) as client:
        answers = [await client.ask("whole", [ASKED]) for _ in range(2)]
        assert all(not part.get("thought") for answer in answers for part in parts_of(answer))
        for answer in answers:
            (part,) = parts_of(answer)
            del part["functionCall"]["id"]
            raw = base64.b64decode(part.pop("thoughtSignature"))
            part["thought_signature"] = base64.urlsafe_b64encode(raw).decode()  # as Python's client does
            await client.ask("whole", [ASKED, {"role": "model", "parts": [part]}, result])
    first, second, *later = await site.close()
    assert [call.info.parent_call_id for call in later] == [first.info.call_id, second.info.call_id]


async def test_foreign_signatures_mean_nothing(site: Site) -> None:
    for signature in (
        "skip_thought_signature_validator",
        "!",
        "",
        5,
        base64.b64encode(b"agentlightning:\xff").decode(),
    ):
        content = {"role": "model", "parts": [{"text": "Yes.", "thoughtSignature": signature}]}
        (_, said, _) = DIALECT.parse({"model": "policy", "contents": [ASKED, content, ASKED]}, {}).messages
        assert said == {"role": "assistant", "content": "Yes."}


async def test_names_in_snake_case_and_camel_case_mean_the_same(site: Site) -> None:
    camel = {
        "contents": [ASKED],
        "systemInstruction": {"parts": [{"text": "Be brief."}]},
        "tools": [{"functionDeclarations": [{"name": "calc", "parametersJsonSchema": {"type": "object"}}]}],
        "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["calc"]}},
        "generationConfig": {"maxOutputTokens": 9, "topK": 40.0, "stopSequences": ["x"], "candidateCount": 2,
                             "responseLogprobs": True, "logprobs": 3, "presencePenalty": 0.5},
    }  # fmt: skip
    snake = {
        "contents": [ASKED],
        "system_instruction": {"parts": [{"text": "Be brief."}]},
        "tools": [{"function_declarations": [{"name": "calc", "parameters_json_schema": {"type": "object"}}]}],
        "tool_config": {"function_calling_config": {"mode": "ANY", "allowed_function_names": ["calc"]}},
        "generation_config": {"max_output_tokens": 9, "top_k": 40.0, "stop_sequences": ["x"], "candidate_count": 2,
                              "response_logprobs": True, "logprobs": 3, "presence_penalty": 0.5},
    }  # fmt: skip
    first, second = (DIALECT.parse({"model": "policy", **body}, {}) for body in (camel, snake))
    assert first == second
    assert (first.n, first.logprobs, first.top_logprobs) == (2, True, 3)
    assert first.asked == {"max_tokens": 9, "top_k": 40, "stop": ("x",), "presence_penalty": 0.5}


@pytest.mark.parametrize(
    ("mode", "allowed", "said"),
    [
        ("AUTO", [], "free"),
        ("NONE", [], "free"),
        ("ANY", [], "call"),
        ("ANY", ["calc"], "call"),
        ("ANY", ["calc", "third"], "call"),
        ("VALIDATED", ["calc"], "held"),
    ],
)
async def test_calling_modes(site: Site, mode: str, allowed: list[str], said: str) -> None:
    """What is held to a form is sampled under a grammar, which has the names that are allowed and no other."""
    others = [{**DECLARED, "name": name} for name in ("other", "third")]
    config = {"functionCallingConfig": {"mode": mode, **({"allowedFunctionNames": allowed} if allowed else {})}}
    async with client_of(site) as client:
        tools = [{"functionDeclarations": [DECLARED, *others]}]
        answer = await client.ask("whole", [ASKED], tools=tools, toolConfig=config)
    (params,) = site.engine.params
    if said == "free":
        assert params.grammar is None
        assert any("functionCall" in part for part in parts_of(answer)) == (mode == "AUTO")
    else:
        assert params.grammar is not None
        for name in ("calc", "other", "third"):
            assert (name in params.grammar) == (not allowed or name in allowed), name


async def test_a_function_that_is_not_declared_cannot_be_allowed() -> None:
    config = {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["none"]}}
    with pytest.raises(Refusal) as refusal:
        DIALECT.parse({"model": "policy", "contents": [ASKED], **BODY, "toolConfig": config}, {})
    assert refusal.value.param == "toolConfig.functionCallingConfig.allowedFunctionNames"


async def test_json_answers_follow_googles_schema(site: Site) -> None:
    site.engine.script = lambda *_: '{"mood": "mild"}'
    schema = {
        "type": "OBJECT",
        "properties": {"mood": {"type": "STRING", "enum": ["mild"]}, "note": {"type": "STRING", "nullable": True}},
        "required": ["mood"],
        "propertyOrdering": ["note", "mood"],
    }
    async with client_of(site) as client:
        for config in ({"responseSchema": schema}, {"responseJsonSchema": schema}, {}):
            config = {"responseMimeType": "application/json", **config}
            answer = await client.ask("whole", [ASKED], tools=None, generationConfig=config)
            assert json.loads(parts_of(answer)[0]["text"]) == {"mood": "mild"}
    assert all(params.grammar for params in site.engine.params)


def test_schemas_in_googles_spelling() -> None:
    given = {
        "type": "OBJECT",
        "property_ordering": ["type", "items"],
        "properties": {
            "items": {"type": "ARRAY", "minItems": "1", "max_items": 3, "items": {"$ref": "#/$defs/One"}},
            "type": {"anyOf": [{"type": "STRING", "format": "enum", "enum": ["OBJECT"]}, {"type": "NULL"}]},
            "snake_name": {"type": "INTEGER", "format": "int64", "nullable": True, "description": "It.", "example": 1},
        },
        "defs": {"One": {"type": ["STRING", "NULL"]}},
        "required": ["snake_name"],
    }
    found = json_schema_of(given)
    assert found == {
        "type": "object",
        "properties": {
            "type": {"anyOf": [{"type": "string", "enum": ["OBJECT"]}, {"type": "null"}]},
            "items": {"type": "array", "minItems": 1, "maxItems": 3, "items": {"$ref": "#/$defs/One"}},
            "snake_name": {"description": "It.", "anyOf": [{"type": "integer"}, {"type": "null"}]},
        },
        "$defs": {"One": {"type": ["string", "null"]}},
        "required": ["snake_name"],
    }
    assert list(found["properties"]) == ["type", "items", "snake_name"]
    assert json_schema_of(found) == found, "a JSON schema stays what it is"
    for count in ("9" * 5000, "²", "-1"):
        assert json_schema_of({"minItems": count}) == {"minItems": count}, "it is no count, which is said elsewhere"


@pytest.mark.parametrize("form", FORMS)
async def test_candidates_logprobs_and_ends(site: Site, form: str) -> None:
    site.engine.script = lambda *_: "one STOP two"
    config = {"candidateCount": 2, "responseLogprobs": True, "logprobs": 2, "stopSequences": ["STOP"], "seed": 3}
    method = {"whole": "generateContent", "sse": "streamGenerateContent?alt=sse"}.get(form, "streamGenerateContent")
    body = {"contents": [ASKED], "generationConfig": config}
    async with client_of(site) as client:
        _, found = await client.post(f"/v1beta/models/policy:{method}", body)
        short = await client.ask("whole", [ASKED], generationConfig={"maxOutputTokens": 1})
    pieces = [found] if form == "whole" else found
    candidates = [candidate for piece in pieces for candidate in piece["candidates"]]
    calls = await site.close()
    for index, call in enumerate(calls[:2]):
        mine = [candidate for candidate in candidates if candidate["index"] == index]
        assert "".join(part["text"] for c in mine for part in c["content"]["parts"]).strip() == "one"
        results = [c["logprobsResult"] for c in mine if "logprobsResult" in c]
        chosen = [token for result in results for token in result["chosenCandidates"]]
        assert [token["tokenId"] for token in chosen] == call.response_ids.tolist()
        assert [token["logProbability"] for token in chosen] == call.plain_logprobs.tolist()
        assert all(len(row["candidates"]) == 2 for result in results for row in result["topCandidates"])
        assert [c["finishReason"] for c in mine if "finishReason" in c] == ["STOP"]
    assert pieces[-1]["usageMetadata"]["promptTokenCount"] == len(calls[0].prompt_ids)
    assert short["candidates"][0]["finishReason"] == "MAX_TOKENS"


@pytest.mark.parametrize("place", ["header", "query", "bearer", "url"])
@pytest.mark.parametrize(
    "prefix",
    ["/v1beta", "/v1", "/v1alpha", "/v1beta1/publishers/google", "/v1/projects/p/locations/l/publishers/google"],
)
async def test_keys_and_paths(site: Site, place: str, prefix: str) -> None:
    """An attempt's key counts wherever Google's clients put theirs; the URL of the attempt is enough without any."""
    headers = {"header": {"x-goog-api-key": site.key}, "bearer": {"authorization": f"Bearer {site.key}"}}.get(place, {})
    async with client_of(site, headers) as client:
        llm = site.gateway.bind(site.gateway.as_resource(), site.rollout_id, site.attempt_id)
        own = llm.endpoint if place == "url" else site.gateway.endpoint
        client.base = own.removesuffix("/v1")
        query = f"?key={site.key}" if place == "query" else ""
        status, answer = await client.post(f"{prefix}/models/policy:generateContent{query}", {"contents": [ASKED]})
    assert (status, answer.get("modelVersion")) == (200, "policy"), answer
    (call,) = await site.close()
    assert call.info.attempt_id == site.attempt_id


async def test_errors_have_googles_shape(site: Site) -> None:
    long = {"role": "user", "parts": [{"text": "word " * 5000}]}
    async with client_of(site) as client:
        for body, status, name in (
            ({"contents": []}, 400, "INVALID_ARGUMENT"),
            ({"contents": [long]}, 400, "INVALID_ARGUMENT"),
            ({"contents": [ASKED], "generationConfig": {"temperature": "hot"}}, 400, "INVALID_ARGUMENT"),
        ):
            for method in ("generateContent", "streamGenerateContent?alt=sse", "countTokens"):
                if method == "countTokens" and body["contents"] != []:
                    continue
                found, answer = await client.post(f"/v1beta/models/policy:{method}", body)
                assert (found, answer["error"]["code"], answer["error"]["status"]) == (status, status, name), answer
        client.base = site.gateway.endpoint.removesuffix("/v1")
        found, answer = await client.post(
            "/v1beta/models/policy:generateContent", {}, headers={"x-goog-api-key": "another"}
        )
        assert (found, answer["error"]["status"]) == (401, "UNAUTHENTICATED")


async def test_models_are_listed_as_google_does(site: Site) -> None:
    async with client_of(site) as client:
        listed = await client.get("/v1beta/models")
        one = await client.get("/v1beta/models/policy")
    assert "models/policy" in [model["name"] for model in listed["models"]]
    assert (one["name"], "generateContent" in one["supportedGenerationMethods"]) == ("models/policy", True)


@pytest.mark.parametrize("form", FORMS)
async def test_another_provider_is_asked_in_its_own_way(
    store: InMemoryLightningStore, rendering: RenderersRendering, form: str
) -> None:
    """A gateway behind a gateway: path, key and model are the provider's, and its tokens are counted."""
    engine = ScriptedEngine(rendering, lambda *_: "<think>\nHm.\n</think>\n\nGood evening.")
    async with Gateway(store, engine, rendering) as behind:
        far = await store.start_rollout(input={}, mode=RolloutMode.TRAIN)
        key = behind.key_for(far.rollout_id, far.attempt.attempt_id)
        base = behind.endpoint.removesuffix("/v1") + "/v1beta"
        provider = Provider(
            base_url=base, model="policy", api_key=key, price=TokenPrice(output=1.0), limits=SpendingLimits(calls=1)
        )
        async with Gateway(store, engine, rendering, models={"other": provider}) as gateway:
            near = await store.start_rollout(input={}, mode=RolloutMode.TRAIN)
            site = Site(store, engine, gateway, near.rollout_id, near.attempt.attempt_id)
            async with client_of(site) as client:
                config = {"thinkingConfig": {"includeThoughts": True}}
                answer = await client.ask(form, [ASKED], model="other", generationConfig=config)
                assert "".join(p["text"] for p in parts_of(answer) if not p.get("thought")).strip() == "Good evening."
                status, _ = await client.post("/v1beta/models/other:generateContent", {"contents": [ASKED]})
                assert status == 400, "the limit of calls is reached"
            await site.close()
            (span, *_) = [s for s in await site.spans() if "agentlightning.dialect" in s.attributes]
    used = answer["usageMetadata"]
    assert span.attributes["gen_ai.usage.input_tokens"] == used["promptTokenCount"]
    told = used["candidatesTokenCount"] + used["thoughtsTokenCount"]
    assert span.attributes["gen_ai.usage.output_tokens"] == told
    assert QUESTION in str(span.attributes["gen_ai.input.messages"])
    assert "Good evening." in str(span.attributes["gen_ai.output.messages"])
    assert span.attributes["gen_ai.response.id"] == answer["responseId"]
    assert "agentlightning.usage.estimated" not in span.attributes


async def test_large_requests_are_read_in_their_own_process(site: Site) -> None:
    labels = {f"label-{n}": "x" for n in range(3000)}
    async with client_of(site) as client:
        answer = await client.ask("array", [ASKED], labels=labels)
        status, counted = await client.post(
            "/v1beta/models/policy:countTokens",
            {"generateContentRequest": {**BODY, "contents": [ASKED]}, "labels": labels},
        )
    assert parts_of(answer)[0]["functionCall"]["name"] == "calc"
    assert (status, counted["totalTokens"]) == (200, answer["usageMetadata"]["promptTokenCount"])
    site.check_exact(await site.close())
