"""SFT on chats: the tokens that are learned are the ones the model would have to sample; DPO's pairs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import agentlightning as agl
from agentlightning.algorithm.credit.assignment import credit
from agentlightning.algorithm.credit.units import CreditRule
from agentlightning.algorithm.episode import Earned
from agentlightning.algorithm.sampling.examples import chat_episode, check_examples, messages_of, pair_episodes, pair_of
from agentlightning.errors import ConfigError
from agentlightning.models import resolve_model
from agentlightning.rendering import load_rendering

from .test_credit import episode

CHAT = [
    {"role": "system", "content": "Be exact."},
    {"role": "user", "content": "2 + 3?"},
    {"role": "assistant", "content": "The answer is 5."},
    {"role": "user", "content": "And 1?"},
    {"role": "assistant", "content": "The answer is 6."},
]


def test_every_assistant_message_is_learned_and_nothing_else() -> None:
    rendering = load_rendering(resolve_model("calc"))
    found = chat_episode(rendering, {"messages": CHAT}, "c")
    assert found.reward == 1.0
    assert [rendering.decode(c.response_ids) for c in found.calls] == [
        "The answer is 5.<|im_end|>",
        "The answer is 6.<|im_end|>",
    ]
    for i, call in zip((2, 4), found.calls, strict=True):
        assert np.array_equal(call.prompt_ids, rendering.render(CHAT[:i], None))
    (batch,) = credit([found], CreditRule(advantage="all"))
    assert [c.advantages.tolist() for c in batch] == [[1.0] * len(c.call.response_ids) for c in batch]


def test_a_tool_call_is_learned_as_the_model_writes_it() -> None:
    rendering = load_rendering(resolve_model("calc"))
    function = {"name": "calc", "arguments": '{"a": 2, "op": "+", "b": 3}'}
    asked = {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": function}]}
    tool = {"type": "function", "function": {"name": "calc", "parameters": {"type": "object", "properties": {}}}}
    (call,) = chat_episode(rendering, {"messages": [*CHAT[:2], asked], "tools": [tool]}, "c").calls
    parsed = rendering.parse(call.response_ids, call.prompt_ids, [tool])
    assert [(c.name, c.arguments) for c in parsed.tool_calls] == [("calc", '{"a": 2, "op": "+", "b": 3}')]


def test_reasoning_is_learned_too_also_before_and_after_a_tool() -> None:
    rendering = load_rendering(resolve_model("calc"))
    call = {"id": "1", "type": "function", "function": {"name": "calc", "arguments": '{"a": 2}'}}
    tool = {"type": "function", "function": {"name": "calc", "parameters": {"type": "object", "properties": {}}}}
    chat = [
        {"role": "user", "content": "2 + 3?"},
        {"role": "assistant", "content": "", "reasoning_content": "I had better call.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "5"},
        {"role": "assistant", "content": "It is 5.", "reasoning_content": "There it is."},
        {"role": "user", "content": "Thanks!"},
        {"role": "assistant", "content": "Welcome."},
    ]
    calls = chat_episode(rendering, {"messages": chat, "tools": [tool]}, "c").calls
    found = [rendering.parse(c.response_ids, c.prompt_ids, [tool]) for c in calls]
    assert [p.reasoning for p in found] == ["I had better call.", "There it is.", None]
    assert [p.content for p in found] == ["", "It is 5.", "Welcome."]
    assert found[0].tool_calls
    assert rendering.decode(calls[2].response_ids) == "Welcome.<|im_end|>", "no empty reasoning"
    for i, one in zip((1, 3, 5), calls, strict=True):
        assert np.array_equal(one.prompt_ids, rendering.render(chat[:i], [tool]))


def test_a_message_without_weight_is_context() -> None:
    rendering = load_rendering(resolve_model("calc"))
    chat = [m | ({"weight": 0} if i == 2 else {}) for i, m in enumerate(CHAT)]
    (call,) = chat_episode(rendering, {"messages": chat}, "c").calls
    assert np.array_equal(call.prompt_ids, rendering.render(CHAT[:4], None))
    with pytest.raises(ConfigError):
        chat_episode(rendering, {"messages": [*CHAT[:2], CHAT[2] | {"weight": 0}]}, "c")
    with pytest.raises(ConfigError):
        chat_episode(rendering, {"messages": [*CHAT[:2], CHAT[2] | {"weight": 0.5}]}, "c")


def test_a_preference_is_a_pair_of_rollouts_that_learns_its_answers_alone() -> None:
    rendering = load_rendering(resolve_model("calc"))
    good, bad = ({"role": "assistant", "content": text} for text in ("It is 6.", "It is 7."))
    example = {"input": {"messages": CHAT[:4]}, "preferred_output": [good], "non_preferred_output": [bad]}
    found = pair_episodes(rendering, example, "p")
    assert [e.reward for e in found] == [1.0, 0.0]
    assert [rendering.decode(c.response_ids) for e in found for c in e.calls] == [
        "It is 6.<|im_end|>",
        "It is 7.<|im_end|>",
    ]
    (batch,) = credit(found, agl.DPO(model="calc", source="pairs").credit_rule())
    assert [(c.group, set(c.advantages.tolist())) for c in batch] == [(0, {1.0}), (0, {-1.0})]


@pytest.mark.parametrize(
    "wrong",
    [
        {"preferred_output": None},
        {"preferred_output": []},
        {"non_preferred_output": "7"},
        {"non_preferred_output": [{"role": "user", "content": "7"}]},
        {"input": None},
        {"input": {"messages": "hi"}},
    ],
)
def test_what_is_no_preference_is_refused_with_its_number(wrong: dict[str, object]) -> None:
    good = {"input": {"messages": CHAT[:2]}, "preferred_output": CHAT[2:3], "non_preferred_output": CHAT[4:]}
    assert check_examples([good], pair_of, "preferences") is None
    with pytest.raises(ConfigError, match="number 2"):
        check_examples([good, good | wrong], pair_of, "preferences")


@pytest.mark.parametrize("content", [None, float("nan"), 7])
@pytest.mark.parametrize("role", ["user", "assistant", "tool"])
def test_a_message_without_a_text_is_refused_with_its_number(role: str, content: object) -> None:
    bad = [*CHAT[:2], {"role": role, "content": content}, *CHAT[2:3]]
    with pytest.raises(ConfigError, match="number 2"):
        check_examples([CHAT, bad], messages_of, "chats")


def test_calls_of_tools_stand_instead_of_a_text() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    check_examples([[*CHAT[:2], {"role": "assistant", "content": None, "tool_calls": [call]}]], messages_of, "chats")


def test_what_is_no_chat_is_refused() -> None:
    with pytest.raises(ConfigError, match="nothing to learn"):
        chat_episode(load_rendering(resolve_model("calc")), CHAT[:2], "c")
    with pytest.raises(ConfigError, match="must be a chat"):
        chat_episode(load_rendering(resolve_model("calc")), {"messages": ["hello"]}, "c")
    with pytest.raises(ConfigError, match="'rollouts', 'chats' or 'run'"):
        agl.SFT(model="calc", source="books")  # pyright: ignore[reportArgumentType]


def test_dpo_pairs_the_best_with_the_worst_and_each_pair_counts_the_same() -> None:
    rule = agl.DPO(model="calc").credit_rule()
    rewards = {"g": (0.5, 1.0, 0.0), "h": (1.0, 1.0, 0.0), "flat": (1.0, 1.0, 1.0)}
    episodes = [episode(g, [(r, 1)], name=f"{g}{i}") for g, rs in rewards.items() for i, r in enumerate(rs)]
    (batch,) = credit(episodes, rule)
    signs = {c.call.info.rollout_id: set(c.advantages.tolist()) for c in batch}
    assert signs == {"g1": {1.0}, "g2": {-1.0}, "h0": {1.0}, "h2": {-1.0}}
    pair_weights = [sum(float(c.weights.sum()) for c in batch if c.group == g) for g in (0, 1)]
    assert pair_weights == pytest.approx([0.5, 0.5])


def test_a_pair_is_of_rollouts_with_something_to_learn() -> None:
    """The best one never called the model: half a pair would only push the other half down."""
    rule = agl.DPO(model="calc").credit_rule()
    silent, good, bad = (
        episode("g", [(r, 0)], tokens=n, name=name)
        for name, r, n in (("silent", 1.0, ()), ("good", 0.5, (2,)), ("bad", 0.0, (2,)))
    )
    assert credit([silent, bad], rule) == []
    (batch,) = credit([silent, good, bad], rule)
    assert {c.call.info.call_id: c.advantages[0] for c in batch} == {"good-0": 1.0, "bad-0": -1.0}


def test_agents_that_are_rewarded_apart_have_pairs_of_their_own() -> None:
    rule = agl.DPO(model="calc").credit_rule()
    episodes = []
    for name, a, b in (("x", 1.0, 0.5), ("y", 0.5, 1.0), ("z", 0.0, 0.0)):
        one = episode("g", [(0.5, 1)], tokens=(2, 2), agents=("A", "B"), name=name)
        episodes.append(replace(one, rewards=[Earned(a, 1, "A"), Earned(b, 1, "B")]))
    (batch,) = credit(episodes, rule)
    pairs = {(c.group, c.call.info.agent): [] for c in batch}
    for c in batch:
        pairs[c.group, c.call.info.agent].append((c.call.info.call_id, float(c.advantages[0])))
    assert pairs == {(0, "A"): [("x-0", 1.0), ("z-0", -1.0)], (1, "B"): [("y-1", 1.0), ("z-1", -1.0)]}
    assert sum(float(c.weights.sum()) for c in batch) == pytest.approx(1.0)
