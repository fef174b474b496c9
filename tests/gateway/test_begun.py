"""Answers that the client began: the model goes on from its text, and the next turn from both, token for token."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.gateway.conftest import Site
from tests.gateway.families import FAMILIES, rendering_of

ASK: Any = {"role": "user", "content": "Well?"}
BEGUN = "The  answer:"
PATHS = {"chat": "/chat/completions", "messages": "/messages", "gemini": "beta/models/policy:generateContent"}


def body(dialect: str, turns: list[tuple[str, str]], begins: bool = True) -> dict[str, Any]:
    """A conversation, of which the client begins the last answer."""
    if dialect == "gemini":
        names = {"user": "user", "assistant": "model"}
        return {"contents": [{"role": names[role], "parts": [{"text": text}]} for role, text in turns]}
    found: dict[str, Any] = {"messages": [{"role": role, "content": text} for role, text in turns], "max_tokens": 50}
    if dialect == "chat":
        found |= {"continue_final_message": begins, "add_generation_prompt": not begins}
    return found


def text_in(dialect: str, answer: Any) -> str:
    if dialect == "gemini":
        return answer["candidates"][0]["content"]["parts"][0]["text"]
    return answer["content"][0]["text"] if dialect == "messages" else answer["choices"][0]["message"]["content"]


async def ask(site: Site, dialect: str, turns: list[tuple[str, str]], begins: bool = True) -> str:
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {site.key}"}) as client:
        sent = {"model": "policy", **body(dialect, turns, begins)}
        answer = await client.post(f"{site.base_url}{PATHS[dialect]}", json=sent)
    assert answer.status_code == 200, answer.text
    assert "x-agl-left-out" not in answer.headers
    return text_in(dialect, answer.json())


def goes_on(prompt: str, _params: object) -> str:
    return " it  is 5." if prompt.endswith(BEGUN) else "So."


@pytest.fixture
def script() -> Any:
    return goes_on


@pytest.mark.parametrize("dialect", PATHS)
async def test_the_model_goes_on_from_it_and_the_next_turn_from_both(site: Site, dialect: str) -> None:
    begun = [("user", "Well?"), ("assistant", BEGUN)]
    said = await ask(site, dialect, begun)
    assert said == " it  is 5.", "what the model added, and nothing else"
    assert await ask(site, dialect, begun) == said, "again"
    await ask(site, dialect, [("user", "Well?"), ("assistant", BEGUN + said), ("user", "So?")], begins=False)
    first, again, after = await site.close()
    site.check_exact([first, again, after])
    prompt = site.engine.rendering.decode(first.prompt_ids)
    assert prompt.endswith(f"<|im_start|>assistant\n{BEGUN}")
    assert again.prompt_ids.tolist() == first.prompt_ids.tolist()
    assert after.info.parent_call_id in (first.info.call_id, again.info.call_id)
    assert after.info.divergence is None
    known = [*first.prompt_ids.tolist(), *first.response_ids.tolist()]
    assert after.prompt_ids.tolist()[: len(known)] == known


@pytest.mark.parametrize("begun", [BEGUN, "Spaces ", "a five b", "<|im_end|>"])
async def test_it_is_streamed_as_it_is_answered(site: Site, begun: str) -> None:
    site.engine.script = lambda _prompt, _params: " it  is five and six"
    messages: Any = [ASK, {"role": "assistant", "content": begun}]
    fields = {"continue_final_message": True}
    async with site.client() as client:
        whole: Any = await client.chat.completions.create(
            model="policy", messages=messages, extra_body=fields, stop=["five"]
        )
        stream: Any = await client.chat.completions.create(
            model="policy", messages=messages, extra_body=fields, stop=["five"], stream=True
        )
        pieces = [c.choices[0].delta.content or "" async for c in stream if c.choices]
    assert "".join(pieces) == whole.choices[0].message.content
    assert whole.choices[0].message.content.strip() == "it  is"
    (end,) = site.engine.rendering.encode("<|im_end|>").tolist()
    assert (await site.close())[0].prompt_ids.tolist().count(end) == 1, "the user's turn, and no text"


WRONG: list[Any] = [
    [{"role": "assistant", "content": "x"}],
    [ASK, {"role": "assistant", "content": ""}],
    [ASK, {"role": "assistant", "content": "x", "reasoning_content": "y"}],
    [ASK],
]


@pytest.mark.parametrize("messages", WRONG)
async def test_what_cannot_be_gone_on_from_is_refused(site: Site, messages: Any) -> None:
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {site.key}"}) as client:
        sent = {"model": "policy", "messages": messages, "continue_final_message": True}
        answer = await client.post(f"{site.base_url}/chat/completions", json=sent)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] in ("messages", "continue_final_message")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_format_says_how_an_answer_begins_or_that_it_does_not_know(family: str) -> None:
    rendering = rendering_of(family)
    prompt = rendering.render([ASK], None)
    begun = rendering.begin(prompt, "the answer is")
    assert (begun is None) == family.startswith("gpt-oss")
    if begun is None:
        return
    ids = [*begun.tolist(), *rendering.encode(" you").tolist(), rendering.stop_token_ids[0]]
    parsed = rendering.parse(rendering.encode(rendering.decode(ids)), prompt, None)
    assert parsed.content == "the answer is you"
