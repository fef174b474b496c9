"""What an agent sends and nobody here knows is left out, wherever it stands: the tokens are those without it, it is
recorded once, and the answer's header names it. Strict gateways refuse it.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from agentlightning.gateway import Gateway
from agentlightning.gateway.dialects import DIALECTS
from agentlightning.gateway.sampling.served import as_served
from agentlightning.gateway.serving.switches import PROGRAMS
from agentlightning.rendering import RenderersRendering
from agentlightning.rendering.messages import with_tool_names
from agentlightning.store import InMemoryLightningStore
from agentlightning.types import RolloutMode
from agentlightning.types.call import MEDIA, left_out_of
from agentlightning.types.names import LEFT_OUT
from tests.gateway.conftest import CALC, Site, calculator
from tests.gateway.families import rendering_of
from tests.gateway.scripted import ScriptedEngine
from tests.gateway.test_mutations import BODIES

USER: Any = {"role": "user", "content": "What is 2 + 3?"}
BY_NAME = {dialect.name: dialect for dialect in DIALECTS}
PATHS = {"chat": "/chat/completions", "responses": "/responses", "messages": "/messages"}
MINE = {
    "args",
    "response",
    "responseSchema",
    "parameters",
    "input_schema",
    "schema",
    "input",
    "metadata",
    "logit_bias",
    "arguments",
    "cache_control",
}
"""Fields whose content is the user's own, or has no effect. `input` holds items where it is a list."""
HARMLESS = {"safetySettings"}
"""Fields that have no effect on tokens, into which nobody looks."""

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
NEW = st.text(max_size=12).map(lambda name: f"new_{name}")
NAMED = st.dictionaries(NEW, JSON.filter(lambda value: value is not None), min_size=1, max_size=2)
"""A thing of the Gemini API, which tells by its fields what it is."""
THING = st.fixed_dictionaries({"type": NEW}, optional={"name": JSON, "strict": JSON, "function": JSON, "text": JSON})


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    """The objects of a request that belong to the wire format."""
    if isinstance(value, dict):
        yield value
        for name, inner in value.items():
            if name not in HARMLESS and (name not in MINE or isinstance(inner, list)):
                yield from _objects(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _objects(inner)


def _lists(dialect: str, body: dict[str, Any]) -> list[list[Any]]:
    """The lists of a request to which kinds of things are added over time: tools, items, blocks."""
    found: list[list[Any]] = [body["tools"]] if "tools" in body else []
    if dialect == "responses":
        found.append(body["input"])
    if dialect == "gemini":
        return found + [content["parts"] for content in body["contents"]]
    return found + [m["content"] for m in body.get("messages", ()) if isinstance(m["content"], list)]


def changed(data: st.DataObject, name: str, plain: dict[str, Any]) -> dict[str, Any]:
    """The request with unknown fields and kinds in random places."""
    body = copy.deepcopy(plain)
    for found in data.draw(st.lists(st.sampled_from(list(_objects(body))), max_size=4)):
        found[data.draw(NEW)] = data.draw(JSON.filter(lambda value: value is not None))
    for found in data.draw(st.lists(st.sampled_from(_lists(name, body)), max_size=3)) if _lists(name, body) else ():
        found.insert(data.draw(st.integers(0, len(found))), data.draw(NAMED if name == "gemini" else THING))
    return body


@pytest.mark.parametrize("name", BODIES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_unknown_fields_and_kinds_anywhere_change_nothing(name: str, data: st.DataObject) -> None:
    plain = BY_NAME[name].parse(BODIES[name], {})
    body = changed(data, name, BODIES[name])
    request = BY_NAME[name].parse(body, {})
    for field in request.__struct_fields__:
        if field not in ("private", "left_out", "strict"):  # strict: paths, which have positions in them
            assert getattr(request, field) == getattr(plain, field)
    assert request.strict.keys() == plain.strict.keys()
    known = {one.field for one in plain.left_out}
    assert body == BODIES[name] or {one.field for one in request.left_out} > known or name == "completions"
    if request.messages:
        rendering = rendering_of("qwen3")
        ids = [rendering.render(with_tool_names(r.messages), r.tools).tolist() for r in (request, plain)]
        assert ids[0] == ids[1]


async def post(site: Site, path: str, body: dict[str, Any], *, large: bool = False) -> tuple[int, str | None, Any]:
    data = json.dumps({"model": "policy", **body}) + " " * (2**18 if large else 0)
    async with (
        aiohttp.ClientSession(headers={"authorization": f"Bearer {site.key}"}) as http,
        http.post(site.base_url + path, data=data, headers={"content-type": "application/json"}) as answer,
    ):
        text = await answer.text()
        told = answer.headers.get("x-agl-left-out")
    return answer.status, told, text if body.get("stream") else json.loads(text)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), name=st.sampled_from(sorted(PATHS)), stream=st.booleans())
async def test_over_http_they_change_no_token_either(site: Site, data: st.DataObject, name: str, stream: bool) -> None:
    """Every answer is a 200, and the prompt's tokens are those of the plain request."""
    place = await site.another()
    held = ("response_format", "text", "output_config")  # the engine of these tests follows no schema
    plain = {**{k: v for k, v in BODIES[name].items() if k not in held}, "model": "policy", "stream": stream}
    for body in (plain, changed(data, name, plain)):
        status, _, answer = await post(place, PATHS[name], body)
        assert status == 200, answer
    calls = await place.close()
    assert len(calls) == 2
    assert calls[0].prompt_ids.tolist() == calls[1].prompt_ids.tolist()


PLAIN: dict[str, dict[str, Any]] = {
    "chat": {"messages": [USER], "tools": [CALC], "max_tokens": 50},
    "responses": {"input": [USER], "tools": [{"type": "function", **CALC["function"]}]},
    "messages": {
        "messages": [USER],
        "max_tokens": 50,
        "tools": [{"name": "calc", "input_schema": CALC["function"]["parameters"]}],
    },
}
HOSTED: dict[str, list[dict[str, Any]]] = {
    "chat": [{"type": "web_search"}, {"type": "mcp", "server_label": "x"}],
    "responses": [
        {"type": "web_search", "external_web_access": False},
        {"type": "mcp", "server_label": "x"},
        {"type": "brand_new", "strict": True},
    ],
    "messages": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 5}, {"type": "new_20990101"}],
}


@pytest.mark.parametrize("large", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", PLAIN)
async def test_what_is_left_out_is_told_and_recorded_once(
    store: InMemoryLightningStore, rendering: RenderersRendering, name: str, stream: bool, large: bool
) -> None:
    engine = ScriptedEngine(rendering, calculator)
    plain = {**PLAIN[name], "stream": stream}
    asked = {**plain, "tools": [*HOSTED[name], *plain["tools"]], "brand_new": {"a": 1}, "metadata": {}}
    names = {*(f"tools[]:{tool['type']}" for tool in HOSTED[name]), "brand_new"}
    async with Gateway(store, engine, rendering) as gateway:
        claimed = await store.start_rollout(input={}, mode=RolloutMode.TRAIN)
        site = Site(store, engine, gateway, claimed.rollout_id, claimed.attempt.attempt_id)
        for body, told in ((plain, set[str]()), (asked, names), (asked, names)):
            status, header, answer = await post(site, PATHS[name], body, large=large)
            assert status == 200, answer
            assert set(header.split(", ") if header else ()) == told
        calls = await site.close()
        site.check_exact(calls)
    assert len({tuple(call.prompt_ids.tolist()) for call in calls}) == 1
    assert len([s for s in await site.spans() if LEFT_OUT in s.attributes]) == 1
    kinds = {one.field: one.kind for one in left_out_of(await site.spans())}
    assert kinds.keys() - {"metadata"} == names
    assert kinds["brand_new"] == "unknown"


@pytest.mark.parametrize("large", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", PLAIN)
async def test_a_strict_gateway_refuses_it(
    store: InMemoryLightningStore, rendering: RenderersRendering, name: str, large: bool
) -> None:
    engine = ScriptedEngine(rendering, calculator)
    async with Gateway(store, engine, rendering, strict_requests=True) as gateway:
        claimed = await store.start_rollout(input={}, mode=RolloutMode.TRAIN)
        site = Site(store, engine, gateway, claimed.rollout_id, claimed.attempt.attempt_id)
        assert (await post(site, PATHS[name], {**PLAIN[name], "metadata": {}}))[0] == 200
        for more in ({"brand_new": 1}, {"tools": HOSTED[name]}):
            status, _, answer = await post(site, PATHS[name], {**PLAIN[name], **more}, large=large)
            assert status == 400
            assert f"'{next(iter(more))}" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("name", "choice"),
    [
        ("chat", {"type": "mcp", "mcp": {}}),
        ("chat", "required"),
        ("responses", {"type": "web_search"}),
        ("responses", {"type": "function", "name": "no_such_one"}),
        ("messages", {"type": "any"}),
        ("messages", {"type": "tool", "name": "web_search"}),
    ],
)
async def test_a_choice_of_a_tool_that_was_left_out_leaves_the_choice_to_the_model(
    site: Site, name: str, choice: Any
) -> None:
    body = {**PLAIN[name], "tools": HOSTED[name], "tool_choice": choice}
    status, header, answer = await post(site, PATHS[name], body)
    assert status == 200, answer
    assert "tool_choice" in str(header)


IMAGES: dict[str, Any] = {
    "chat": {"messages": [{**USER, "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
    "responses": {"input": [{**USER, "content": [{"type": "input_image", "image_url": "data:,"}]}]},
    "messages": {"messages": [{**USER, "content": [{"type": "image", "source": {}}]}]},
}


@pytest.mark.parametrize("name", PLAIN)
async def test_a_few_words_stand_where_an_image_was(site: Site, name: str, caplog: pytest.LogCaptureFixture) -> None:
    header: Any = None
    for _ in range(2):
        status, header, answer = await post(site, PATHS[name], {**PLAIN[name], **IMAGES[name]})
        assert status == 200, answer
    (warned,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "image" in warned
    assert MEDIA in warned
    assert "image" in str(header)
    call, _ = await site.close()
    assert "left out: it is no text" in site.engine.rendering.decode(call.prompt_ids)


@pytest.mark.parametrize(("family", "can"), [("qwen3", True), ("llama3", False)])
def test_one_call_at_a_time_is_left_out_where_the_chat_format_cannot_have_it(family: str, can: bool) -> None:
    request = BY_NAME["chat"].parse({"model": "m", **PLAIN["chat"], "parallel_tool_calls": False}, {})
    served = as_served(request, rendering_of(family))
    assert served.parallel_tool_calls is not can
    assert [one.field for one in served.left_out] == ([] if can else ["parallel_tool_calls"])


@pytest.mark.parametrize(
    ("agent", "path", "more", "switch"),
    [
        ("claude-cli/2.1.331 (external)", "/messages", {"thread": "x"}, "CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS=1"),
        ("codex_exec/0.169.0 (Debian)", "/responses", {"tools": [{"type": "web_search"}]}, "-c web_search=disabled"),
        ("codex_exec/0.169.0 (Debian)", "/responses", {"prompt": {"id": "x"}}, None),
        ("somebody/1.0", "/responses", {"tools": [{"type": "web_search"}]}, None),
    ],
)
async def test_a_known_program_is_told_its_own_switch(
    store: InMemoryLightningStore,
    rendering: RenderersRendering,
    agent: str,
    path: str,
    more: dict[str, Any],
    switch: str | None,
) -> None:
    """In the answer, and in the record, where its user reads it."""
    engine = ScriptedEngine(rendering, calculator)
    async with Gateway(store, engine, rendering, strict_requests=True) as gateway:
        claimed = await store.start_rollout(input={})
        site = Site(store, engine, gateway, claimed.rollout_id, claimed.attempt.attempt_id)
        asks: dict[str, Any] = {"messages": [{"role": "user", "content": "?"}], "max_tokens": 9}
        body = {"model": "policy", **(asks if path == "/messages" else {"input": "?"}), **more}
        headers = {"user-agent": agent, "authorization": f"Bearer {site.key}"}
        async with (
            aiohttp.ClientSession() as client,
            client.post(site.base_url + path, json=body, headers=headers) as answer,
        ):
            text = await answer.text()
            assert answer.status == 400, text
        refused = (await gateway.close_attempt(site.rollout_id, site.attempt_id)).refused or ""
    switches = {how for program in PROGRAMS for how in program.switches.values()}
    for said in (text, refused):
        found = [how for how in switches if how in said]
        assert (len(found), all(switch in how for how in found if switch)) == (int(switch is not None), True), said
