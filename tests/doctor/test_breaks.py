"""Breaks of token histories: the first difference is shown, and the cause is told from it."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from agentlightning.algorithm.episode import Episode
from agentlightning.doctor import find_breaks
from agentlightning.doctor.breaks import ADVICE, break_findings, common
from agentlightning.doctor.evidence import Evidence
from agentlightning.types import Rollout
from agentlightning.types.call import Call, Divergence
from tests.algorithm.test_credit import make_call


def tokens(text: str) -> list[int]:
    return [ord(character) for character in text]


def text_of(ids: Sequence[int]) -> str:
    """Each token is a character; those from 10,000 on are two."""
    return "".join(chr(i) if i < 10_000 else chr(i - 10_000) * 2 for i in ids)


def call(number: int, prompt: Sequence[int], response: Sequence[int], cause: str | None = None) -> Call:
    made = make_call(number, len(response), (), None, None, "r")
    divergence = Divergence(0, 0, cause) if cause else None
    return replace(
        made,
        info=replace(made.info, divergence=divergence),
        prompt_ids=np.array(prompt, np.int32),
        response_ids=np.array(response, np.int32),
    )


def broken(first: tuple[Sequence[int], Sequence[int]], second: Sequence[int], cause: str) -> Episode:
    calls = [call(0, *first), call(1, second, tokens("x"), cause)]
    return Episode(Rollout(rollout_id="r", input=1), None, 1.0, calls)


HEAD = "system: be brief. "
ASKED = f"{HEAD}user: add assistant: "
CALLS = '{"name": "add", "arguments": {"a": 2, "b": "é"}}'

CASES = {
    "a date": (
        "system_prompt_changed",
        "clock",
        "It is 2026-03-01. Go on, user",
        "",
        "It is 2026-03-02. Go on, user x",
    ),
    "the time": ("history_edited", "clock", "Now: 10:31:07 user: hello", "", "Now: 10:31:09 user: hello"),
    "an id": ("system_prompt_changed", "clock", "id 3f2b91c0-77aa user", "", "id 9c41d2ee-77aa user"),
    "a hash": (
        "system_prompt_changed",
        "clock",
        "Version cc_version=2.1.331.779; Be brief. Use the tools.",
        "",
        "Version cc_version=2.1.331.129; Be brief. Use the tools. Now",
    ),
    "another prompt": ("system_prompt_changed", "system_prompt_changed", f"{HEAD}user", "", "system: be kind. user"),
    "json": ("history_edited", "tool_json", ASKED, CALLS, ASKED + '{"arguments":{"a":2,"b":"\\u00e9"},"name":"add"} 4'),
    "reasoning": ("reasoning_stripped", "reasoning_stripped", ASKED, "<think>well</think>4", f"{ASKED}4 user: ok"),
    "thinking": ("tokenizer_seam", "reasoning_stripped", ASKED, "<think>well</think>4", f"{ASKED}4 user: ok"),
    "edited": ("history_edited", "history_edited", ASKED, "five", f"{ASKED}four user: ok"),
    "tools": ("tools_changed", "tools_changed", ASKED, "five", "tools: sub user"),
    "summary": ("compaction", "compaction", f"{ASKED} long", "five", f"{HEAD}summary: it was long"),
    "cut": ("cut_to_fit", "cut_to_fit", f"{ASKED} long", "five", "user: 9"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_cause_is_told_from_what_differs(name: str) -> None:
    told, cause, prompt, response, now = CASES[name]
    (found,) = find_breaks([broken((tokens(prompt), tokens(response)), tokens(now), told)], text_of)
    assert found.cause == cause
    assert found.advice == ADVICE[cause]
    assert found.position == common(np.array(tokens(prompt + response)), np.array(tokens(now)))
    whole = prompt + response
    assert found.was == whole[found.position : found.position + 24]
    assert found.now == now[found.position : found.position + 24]
    assert whole[: found.position].endswith(found.before)
    assert found.tokens_lost == min(len(whole), len(now)) - found.position


def test_the_same_text_in_other_tokens_is_a_seam() -> None:
    first = tokens(ASKED), tokens("aabb")
    (found,) = find_breaks(
        [broken(first, [*tokens(ASKED), 10_000 + ord("a"), *tokens("bb")], "history_edited")], text_of
    )
    assert found.cause == "tokenizer_seam"


def test_the_nearest_of_several_calls_is_compared() -> None:
    calls = [
        call(0, tokens("other agent"), tokens("1")),
        call(1, tokens(ASKED), tokens("five")),
        call(2, tokens("other agent too"), tokens("1"), "new_conversation"),
        call(3, tokens(f"{ASKED}four"), tokens("1"), "history_edited"),
    ]
    (found,) = find_breaks([Episode(Rollout(rollout_id="r", input=1), None, 1.0, calls)], text_of)
    assert (found.after_call_id, found.was, found.now) == ("r-1", "ive", "our")


def by_definition(calls: Sequence[Call]) -> list[tuple[str, str, int, bool]]:
    """Each broken call, the earlier one it shares most with, how much, and whether it is a conversation beside it."""
    found: list[tuple[str, str, int, bool]] = []
    for number, one in enumerate(calls):
        of_policy = [c for c in calls[:number] if c.info.policy == one.info.policy]
        if one.info.divergence is None or one.info.divergence.cause == "new_conversation" or not of_policy:
            continue
        shared = [common(np.concatenate((c.prompt_ids, c.response_ids)), one.prompt_ids) for c in of_policy]
        left = of_policy[shared.index(max(shared))]
        history = [*left.prompt_ids, *left.response_ids]
        goes_on = any(
            [*c.prompt_ids[: len(history)]] == history for c in calls[number + 1 :] if c.info.policy == left.info.policy
        )
        agents = {one.info.agent, left.info.agent} - {None}
        found.append((one.info.call_id, left.info.call_id, max(shared), goes_on or len(agents) == 2))
    return found


@pytest.mark.parametrize("seed", range(100))
def test_random_calls_are_laid_beside_the_nearest_of_all(seed: int) -> None:
    chance = random.Random(seed)
    calls: list[Call] = []
    for number in range(40):
        before = chance.choice(calls) if calls and chance.random() < 0.6 else None
        start = [] if before is None else [*before.prompt_ids, *before.response_ids]
        prompt = [*start[: chance.randint(0, len(start))], *chance.choices([0, 1, 256, -1], k=chance.randint(0, 2))]
        cause = chance.choice(["history_edited", "new_conversation", None])
        made = call(number, prompt, chance.choices([0, 1, 256], k=chance.randint(0, 2)), cause)
        policy, agent = chance.choice("ab"), chance.choice([None, None, "x", "y"])
        calls.append(replace(made, info=replace(made.info, policy=policy, agent=agent)))
    found = find_breaks([Episode(Rollout(rollout_id="r", input=1), None, 1.0, calls)])
    assert [(b.call_id, b.after_call_id, b.position, b.cause == "sub_agent") for b in found] == by_definition(calls)


def test_thousands_of_broken_calls_take_no_time_with_their_square() -> None:
    calls = [call(n, [*range(1_000), n, *range(1_000)], [1], "history_edited") for n in range(4_000)]
    began = time.process_time()
    assert len(find_breaks([Episode(Rollout(rollout_id="r", input=1), None, 1.0, calls)])) == 3_999
    assert time.process_time() - began < 10


def test_without_a_tokenizer_the_gateways_cause_stands() -> None:
    (found,) = find_breaks([broken((tokens(ASKED), tokens("five")), tokens("user"), "compaction")])
    assert (found.cause, found.was, found.now) == ("compaction", "", "")


def apart(cause: str, *, agents: tuple[str | None, str | None], goes_on: bool) -> Episode:
    """A second conversation that begins as the first one did; afterwards the first may go on."""
    calls = [
        call(0, tokens(ASKED), tokens("five")),
        call(1, tokens(f"{HEAD}user: look it up assistant: "), tokens("it is 4"), cause),
        *([call(2, tokens(f"{ASKED}five user: 4? "), tokens("yes"))] if goes_on else []),
    ]
    named = [replace(c, info=replace(c.info, agent=agents[min(n, 1)])) for n, c in enumerate(calls)]
    return Episode(Rollout(rollout_id="r", input=1), None, 1.0, named)


@pytest.mark.parametrize("cause", ["history_edited", "compaction", "system_prompt_changed"])
def test_a_sub_agent_is_told_from_an_edit(cause: str) -> None:
    """By its name, or because the conversation that it left goes on."""
    for episode in (
        apart(cause, agents=(None, None), goes_on=True),
        apart(cause, agents=("main", "searcher"), goes_on=False),
    ):
        (found,) = find_breaks([episode], text_of)
        assert found.cause == "sub_agent"
        assert "nothing to mend" in found.advice
        assert not list(break_findings(Evidence(episodes=[episode]), text_of)), "it is no fault"
    (found,) = find_breaks([apart(cause, agents=("main", "main"), goes_on=False)], text_of)
    assert found.cause == cause
