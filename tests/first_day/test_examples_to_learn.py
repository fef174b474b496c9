"""Examples that are learned as they stand: what is wrong with one is said before a model is loaded, with its number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.algorithm.sampling.examples import messages_of, pair_of
from agentlightning.errors import ConfigError
from tests.first_day.day import agl as typed, answers

ASKED = {"role": "user", "content": "1+1"}
SAID = {"role": "assistant", "content": "2"}
OTHER = {"role": "assistant", "content": "3"}


def refused(read: Any, example: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        read(example)
    return str(raised.value)


def pair(preferred: list[Any], other: list[Any]) -> dict[str, Any]:
    return {"input": {"messages": [ASKED]}, "preferred_output": preferred, "non_preferred_output": other}


@pytest.mark.parametrize("first", [[SAID], [SAID, ASKED], [SAID, ASKED, SAID], [{**SAID, "weight": 1}, ASKED, OTHER]])
def test_a_chat_that_begins_with_the_assistant(first: list[Any]) -> None:
    assert "begins with the assistant" in refused(messages_of, {"messages": first})
    messages_of({"messages": [{**SAID, "weight": 0}, ASKED, SAID]})
    messages_of({"messages": [{"role": "system", "content": "Answer."}, SAID]})


@pytest.mark.parametrize(
    ("role", "meant"),
    [("human", "user"), ("gpt", "assistant"), ("User", "user"), ("bot", "assistant"), ("observation", "tool")],
)
def test_other_names_of_roles(role: str, meant: str) -> None:
    chat = {"messages": [{"role": role, "content": "a"}, SAID]}
    assert f"Write {meant} for {role}." in refused(messages_of, chat)
    assert "Write" not in refused(messages_of, {"messages": [{"role": "narrator", "content": "a"}, SAID]})


@pytest.mark.parametrize("blank", ["", " ", "\n"])
def test_messages_as_a_text_of_json(blank: str) -> None:
    said = refused(messages_of, {"messages": blank + json.dumps([ASKED, SAID])})
    assert "write json.loads(…) of it" in said


@pytest.mark.parametrize("answer", [[SAID], [SAID, {"role": "tool", "content": "4", "tool_call_id": "a"}, OTHER]])
def test_two_equal_answers(answer: list[Any]) -> None:
    assert "Both answers are the same" in refused(pair_of, pair(answer, [*answer]))
    pair_of(pair([SAID], [OTHER]))


@pytest.mark.parametrize("row", [{"prompt": "1+1", "chosen": "2", "rejected": "3"}, {"chosen": [SAID], "rejected": []}])
def test_the_preferences_of_other_trainers(row: dict[str, Any]) -> None:
    assert "what was chosen as preferred_output" in refused(pair_of, row)
    assert "--algorithm DPO" in refused(messages_of, row)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "1+1", "chosen": "2"}, "It lacks rejected"),
        ({"input": {"messages": [ASKED]}, "non_preferred_output": [OTHER]}, "It lacks preferred_output"),
        ({"messages": [ASKED, SAID]}, "It has one answer, which --algorithm SFT learns"),
        ({"prompt": "1+1", "completion": "2"}, "It has one answer, which --algorithm SFT learns"),
    ],
)
def test_half_a_preference(row: dict[str, Any], words: str) -> None:
    assert words in refused(pair_of, row)


def test_preferences_are_learned_from_data(tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").write_text(json.dumps(pair([SAID], [OTHER])) + "\n")
    done = typed(tmp_path, "train", "--algorithm", "dpo", "--data", "pairs.jsonl", "--print-config")
    assert json.loads(done.stdout)["source"] == "pairs", done.stderr
    (tmp_path / "trl.jsonl").write_text(json.dumps({"prompt": "1+1", "chosen": "2", "rejected": "3"}) + "\n")
    done = typed(tmp_path, "train", "--algorithm", "DPO", "--data", "trl.jsonl")
    answers(done, "trl.jsonl: Of the preferences, number 1", "what was chosen as preferred_output")
    done = typed(tmp_path, "train", "--algorithm", "PPO", "--data", "pairs.jsonl")
    answers(done, "conversations, which SFT learns, or preferences, which DPO does", "PPO learns what an --agent does")


EXAMPLES = {"chats": agl.SFT, "pairs": agl.DPO}
WITHOUT_EFFECT = {
    "group_size": 4,
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 20,
    "min_p": 0.1,
    "overlong_tokens": 100,
    "dynamic_sampling": 2,
    "max_staleness": 1,
    "quorum": 0.9,
    "league": "latest",
    "advantage": "reinforce",
}


@pytest.mark.parametrize("source", EXAMPLES)
@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_settings_of_sampling_have_no_effect(source: str, name: str) -> None:
    made = EXAMPLES[source]
    with pytest.raises(ConfigError, match=f"are not sampled, so {name}=.* has no effect"):
        made(model="calc", source=source, **{name: WITHOUT_EFFECT[name]})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("source", EXAMPLES)
def test_a_run_on_examples_is_repeated_with_its_own_settings(source: str) -> None:
    first = EXAMPLES[source](model="calc", source=source)  # pyright: ignore[reportArgumentType]
    again = EXAMPLES[source](
        model="calc",
        source=source,  # pyright: ignore[reportArgumentType]
        group_size=first.group_size,
        advantage=first.advantage,
        val_temperature=0.5,
    )
    assert again.group_size == first.group_size
