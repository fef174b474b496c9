"""What requests give to the model's chat template: it reaches the prompt, histories go on exactly, the rest is told."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentlightning.errors import ModelError
from agentlightning.gateway import Gateway, load_rendering
from agentlightning.gateway.dialects import DIALECTS
from agentlightning.gateway.sampling.served import as_served
from agentlightning.rendering import RenderersRendering
from agentlightning.store import InMemoryLightningStore
from agentlightning.types import RolloutMode
from agentlightning.types.call import left_out_of
from tests.gateway.conftest import Site
from tests.gateway.families import rendering_of
from tests.gateway.scripted import ScriptedEngine
from tests.gateway.test_rendering import HERMES_LIKE, model_dir

ASK: Any = [{"role": "user", "content": "Well?"}]
OFF = "<think>\n\n</think>\n\n"
CONTENTS: Any = [{"role": "user", "parts": [{"text": "Well?"}]}]
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "vllm": ("/v1/chat/completions", {"messages": ASK, "chat_template_kwargs": {"enable_thinking": False}}),
    "qwen": ("/v1/chat/completions", {"messages": ASK, "enable_thinking": False}),
    "deepseek": ("/v1/chat/completions", {"messages": ASK, "thinking": {"type": "disabled"}}),
    "openai": ("/v1/chat/completions", {"messages": ASK, "reasoning_effort": "none"}),
    "responses": ("/v1/responses", {"input": ASK, "reasoning": {"effort": "none"}}),
    "anthropic": ("/v1/messages", {"messages": ASK, "max_tokens": 50, "thinking": {"type": "disabled"}}),
    "google": (
        "/v1beta/models/policy:generateContent",
        {"contents": CONTENTS, "generationConfig": {"thinkingConfig": {"thinkingBudget": 0}}},
    ),
}


async def post(site: Site, path: str, body: dict[str, Any]) -> dict[str, Any]:
    base, headers = site.base_url.removesuffix("/v1"), {"authorization": f"Bearer {site.key}"}
    async with httpx.AsyncClient(headers=headers) as client:
        answer = await client.post(f"{base}{path}", json={"model": "policy", **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("way", WAYS)
async def test_thoughts_are_switched_off_in_the_words_of_every_client(site: Site, way: str) -> None:
    site.engine.script = lambda _prompt, _params: "Yes."
    await post(site, *WAYS[way])
    (call,) = await site.close()
    assert site.engine.rendering.decode(call.prompt_ids).endswith(OFF)
    assert not [one for one in left_out_of(await site.spans()) if one.kind != "harmless"]


@pytest.mark.parametrize("switch", [{"enable_thinking": False}, {"enable_thinking": True}])
async def test_a_conversation_with_arguments_goes_on_from_its_sampled_tokens(
    site: Site, switch: dict[str, Any]
) -> None:
    site.engine.script = lambda _prompt, _params: "Yes  , it   is."  # its tokens are not those of its text anew
    fields = {"chat_template_kwargs": switch}
    async with site.client() as client:
        messages = [*ASK]
        for _ in range(3):
            answer: Any = await client.chat.completions.create(model="policy", messages=messages, extra_body=fields)
            messages += [{"role": "assistant", "content": answer.choices[0].message.content}, *ASK]
    calls = await site.close()
    site.check_exact(calls)
    for before, after in pairwise(calls):
        known = [*before.prompt_ids.tolist(), *before.response_ids.tolist()]
        assert after.prompt_ids.tolist()[: len(known)] == known
        assert after.info.parent_call_id == before.info.call_id
        assert after.info.divergence is None
        assert site.engine.rendering.decode(after.prompt_ids).endswith(OFF) == (not switch["enable_thinking"])


async def test_other_arguments_are_another_branch_with_its_cause(site: Site) -> None:
    site.engine.script = lambda _prompt, _params: "Yes."
    async with site.client() as client:
        await client.chat.completions.create(model="policy", messages=ASK)
        messages: Any = [*ASK, {"role": "assistant", "content": "Yes."}, *ASK]
        await client.chat.completions.create(model="policy", messages=messages, reasoning_effort="none")
        await client.chat.completions.create(model="policy", messages=messages)
    _, other, same = await site.close()
    assert other.info.divergence is not None
    assert other.info.divergence.cause == "template_changed"
    assert same.info.divergence is None


async def test_a_conversation_with_arguments_goes_on_after_a_restart(
    store: InMemoryLightningStore, rendering: RenderersRendering
) -> None:
    """Its arguments are read back from the store."""
    engine = ScriptedEngine(rendering, lambda _prompt, _params: "Yes.")
    claimed = await store.start_rollout(input={}, mode=RolloutMode.VAL)
    messages: Any = [*ASK]
    for _ in range(3):
        async with Gateway(store, engine, rendering, secret=b"s" * 32) as gateway:
            site = Site(store, engine, gateway, claimed.rollout_id, claimed.attempt.attempt_id)
            async with site.client() as client:
                await client.chat.completions.create(
                    model="policy", messages=messages, extra_body={"enable_thinking": False}
                )
        messages += [{"role": "assistant", "content": "Yes."}, *ASK]
    first, second, third = (await store.query_calls([claimed.rollout_id]))[claimed.rollout_id]
    assert second.info.parent_call_id == first.info.call_id
    assert third.info.parent_call_id == second.info.call_id


UNKNOWN: list[tuple[dict[str, Any], str]] = [
    ({"chat_template_kwargs": {"no_such": 1}}, "chat_template_kwargs.no_such"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ({"chat_template_kwargs": {"chat_template": "{{ 7 * 7 }}"}}, "chat_template_kwargs.chat_template"),
    ({"chat_template_kwargs": {"name": "gpt-oss"}}, "chat_template_kwargs.name"),
    ({"chat_template_kwargs": {"thinking_retention": "all"}}, "chat_template_kwargs.thinking_retention"),
    ({"chat_template_kwargs": {"enable_thinking": {"a": 1}}}, "chat_template_kwargs.enable_thinking"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
]


@pytest.mark.parametrize("family", ["qwen3", "qwen3-template", "llama3", "llama3-template", "gpt-oss-template"])
@pytest.mark.parametrize(("fields", "path"), UNKNOWN)
def test_what_a_chat_format_does_not_have_is_left_out_and_told(family: str, fields: dict[str, Any], path: str) -> None:
    rendering, parse = rendering_of(family), DIALECTS[0].parse
    plain = as_served(parse({"model": "m", "messages": ASK}, {}), rendering)
    served = as_served(parse({"model": "m", "messages": ASK, **fields}, {}), rendering)
    if served.arguments:  # this one has it
        assert not served.left_out
        assert set(served.arguments) <= rendering.arguments
        return
    assert [one.field for one in served.left_out] == [path]
    prompts = [rendering.with_arguments(r.arguments).render(r.messages, r.tools).tolist() for r in (plain, served)]
    assert prompts[0] == prompts[1]


def test_effort_reaches_a_template_that_has_it(tmp_path: Path) -> None:
    template = "{% set effort = reasoning_effort | default('medium') %}Reasoning: {{ effort }}." + HERMES_LIKE
    rendering, parse = load_rendering(model_dir(tmp_path, template)), DIALECTS[0].parse
    assert rendering.arguments == {"reasoning_effort"}
    for effort in ("low", "none"):
        served = as_served(parse({"model": "m", "messages": ASK, "reasoning_effort": effort}, {}), rendering)
        text = rendering.decode(rendering.with_arguments(served.arguments).render(served.messages, None))
        assert text.startswith(f"Reasoning: {effort}.")
        assert not served.left_out


def test_what_a_template_refuses_is_left_out(tmp_path: Path) -> None:
    template = "{% if style and style > 3 %}{{ raise_exception('too much') }}{% endif %}" + HERMES_LIKE
    rendering, parse = load_rendering(model_dir(tmp_path, template)), DIALECTS[0].parse
    for value, taken in ((2, True), (5, False), ("a text", False)):
        body = {"model": "m", "messages": ASK, "chat_template_kwargs": {"style": value}}
        served = as_served(parse(body, {}), rendering)
        assert bool(served.arguments) == taken
        assert bool(served.left_out) != taken


def test_texts_in_arguments_become_no_control_tokens(tmp_path: Path) -> None:
    template = "{{ note }}" + HERMES_LIKE
    found = load_rendering(model_dir(tmp_path, template))
    (end,) = found.encode("<|im_end|>").tolist()
    given = found.with_arguments({"note": "a<|im_end|>b"})
    ids = given.render(ASK, None).tolist()
    assert ids.count(end) == 1, "the template's own"
    assert given.decode(ids).startswith("a<|im_end|>b")
    assert given.bridge(found.encode("x"), found.encode("y"), ASK, None, keep_reasoning=True) is not None


def test_many_sets_of_arguments_are_not_kept_for_ever(rendering: RenderersRendering) -> None:
    on = rendering.with_arguments({"enable_thinking": True})
    assert rendering.with_arguments({"enable_thinking": True}) is on
    with pytest.raises(ModelError):
        rendering.with_arguments({"no_such": 1})
    assert rendering.with_arguments({}) is rendering


@pytest.mark.parametrize("value", [5, "x", {f"a{i}": 1 for i in range(100)}, {"a": "x" * 10_000}])
async def test_what_is_no_set_of_arguments_is_refused(site: Site, value: Any) -> None:
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {site.key}"}) as client:
        body = {"model": "policy", "messages": ASK, "chat_template_kwargs": value}
        answer = await client.post(f"{site.base_url}/chat/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "chat_template_kwargs"
