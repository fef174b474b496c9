"""Token continuity for three families of chat formats: golden prompts, and whatever hypothesis thinks of.

What holds for every request: the prompt of a continued history is its tokens so far, to the id, and then a bridge that
says only what is new; any other prompt is the rendering of its messages. And what the model said stays what it sampled.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings, strategies as st

from agentlightning.gateway.history.session import Session
from agentlightning.gateway.history.tree import Prompt, Turn, path_ids, unrecorded
from agentlightning.rendering import RenderersRendering
from agentlightning.rendering.messages import Message, with_tool_names
from tests.gateway.conftest import CALC
from tests.gateway.families import FAMILIES, Family, rendering_of

GOLDEN = Path(__file__).parent / "golden"
ALL = sorted(FAMILIES)

SYSTEM: Message = {"role": "system", "content": "Be exact."}
USER: Message = {"role": "user", "content": "What is 2 + 3?"}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


@dataclass(frozen=True)
class Said:
    """What a model is to say."""

    content: str = ""
    reasoning: str | None = None
    calls: tuple[dict[str, Any], ...] = ()

    def text(self, family: Family) -> str:
        """In the family's own syntax, up to and including the token that ends it."""
        calls = [(json.dumps(c), c) for c in self.calls]
        if family.name.startswith("qwen3"):
            thought = "" if self.reasoning is None else f"<think>\n{self.reasoning}\n</think>\n\n"
            written = [f'<tool_call>\n{{"name": "calc", "arguments": {j}}}\n</tool_call>' for j, _ in calls]
            return thought + "\n".join([*([self.content] if self.content else []), *written]) + "<|im_end|>"
        if family.name.startswith("llama3"):
            said = f'{{"name": "calc", "parameters": {calls[0][0]}}}' if calls else self.content
            return said + "<|eot_id|>"
        thought = "" if self.reasoning is None else f"<|channel|>analysis<|message|>{self.reasoning}<|end|>"
        header = "" if self.reasoning is None else "<|start|>assistant"
        if calls:
            return f"{thought}{header} to=functions.calc<|channel|>commentary json<|message|>{calls[0][0]}<|call|>"
        return f"{thought}{header}<|channel|>final<|message|>{self.content}<|return|>"


@dataclass
class Talk:
    """A client and its model on one session. The model samples letter by letter, as no tokenizer would encode."""

    family: Family
    session: Session
    tools: list[Any] | None = None
    name: str = "c"
    count: int = 0
    prompts: list[Prompt] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)

    @property
    def rendering(self) -> RenderersRendering:
        return rendering_of(self.family.name)

    def ask(self, messages: list[Message], said: Said, *, stop: bool = True) -> Message:
        """One call; the answer as a client sends it back. `stop=False`: cut off before its end."""
        self.count += 1
        name = f"{self.name}{self.count}"
        prompt = self.session.plan(messages, self.tools, f"{name}/p")
        self.check(prompt, messages)
        ids = self.sampled(said, stop)
        parsed = self.rendering.parse(ids, path_ids(prompt.piece), self.tools)
        message: Message = {"role": "assistant", "content": parsed.content}
        if parsed.reasoning:
            message["reasoning_content"] = parsed.reasoning
        if parsed.tool_calls:
            message["tool_calls"] = [
                {"id": f"{name}.{i}", "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                for i, c in enumerate(parsed.tool_calls)
            ]
        numbers = np.arange(len(ids), dtype=np.float32) + 1000 * self.count
        turn = self.session.commit(
            prompt,
            message,
            name,
            segment_id=f"{name}/r",
            ids=ids,
            logprobs=numbers,
            plain_logprobs=numbers,
            versions=(),
        )
        self.prompts.append(prompt)
        self.turns.append(turn)
        return message

    def check(self, prompt: Prompt, messages: list[Message]) -> None:
        """The invariant of every prompt."""
        ids = path_ids(prompt.piece).tolist()
        if prompt.parent is None:
            assert ids == self.rendering.render(with_tool_names(messages), self.tools).tolist()
            return
        before = path_ids(prompt.parent.response).tolist()
        assert ids[: len(before)] == before
        assert prompt.divergence is None
        bridge = self.rendering.decode(ids[len(before) :])
        new = messages[prompt.new_from :]
        if any(m["role"] == "assistant" for m in new):  # put in by the client, never sampled
            assert ids == self.rendering.render(with_tool_names(messages), self.tools).tolist()
        for m in new:
            assert _written(m, self.family) in bridge

    def sampled(self, said: Said, stop: bool = True) -> Any:
        """The text in single letters; special tokens whole."""
        text = said.text(self.family)
        ids: list[int] = []
        at = 0
        marks = [*self.family.special, *self.family.marks]
        while at < len(text):
            part = next((m for m in marks if text.startswith(m, at)), text[at])
            ids += self.rendering.encode(part).tolist()
            at += len(part)
        return np.array(ids if stop else ids[:-1], np.int32)


def _written(message: Message, family: Family) -> str:
    """What a bridge must hold of a message."""
    text = message["content"]
    if message["role"] == "tool" and not family.name.startswith("qwen3"):
        return json.dumps(text, ensure_ascii=False)
    return text.strip()


def results(message: Message, *texts: str) -> list[Message]:
    return [
        {"role": "tool", "content": text, "tool_call_id": call["id"]}
        for call, text in zip(message["tool_calls"], texts, strict=True)
    ]


# ---- golden talks --------------------------------------------------------------------------------------------------


def many_turns(family: Family) -> list[Talk]:
    talk = Talk(family, Session(rendering_of(family.name)))
    history = [SYSTEM, USER]
    for number in range(3):
        answer = talk.ask(history, Said(f"It is {number}."))
        history = [*history, answer, user(f"And {number} more?")]
    return [talk]


def thinking(family: Family) -> list[Talk]:
    """Two calls of a tool with thoughts, an answer with one, and the next question, at which templates drop them."""
    talk = Talk(family, Session(rendering_of(family.name)), [CALC])
    thought = "Let me calc." if family.thinks else None
    history = [SYSTEM, USER]
    for number in range(2):
        answer = talk.ask(history, Said(reasoning=thought, calls=({"a": number, "b": 3},)))
        answer = {k: v for k, v in answer.items() if k != "reasoning_content"}  # as most clients send it back
        history = [*history, answer, *results(answer, "5")]
    answer = talk.ask(history, Said("Five.", reasoning=thought))
    talk.ask([*history, answer, user("Sure?")], Said("Yes."))
    return [talk]


def parallel_tools(family: Family) -> list[Talk]:
    talk = Talk(family, Session(rendering_of(family.name)), [CALC])
    calls = tuple({"a": n, "b": n} for n in range(3 if family.parallel else 1))
    asks = talk.ask([USER], Said(calls=calls))
    talk.ask([USER, asks, *results(asks, *[f"{2 * n}" for n in range(len(calls))])], Said("0, 2, 4."))
    return [talk]


def sub_agents(family: Family) -> list[Talk]:
    """A planner with a tool and a writer without one take turns in one session."""
    session = Session(rendering_of(family.name))
    planner, writer = Talk(family, session, [CALC], "p"), Talk(family, session, None, "w")
    plan, work = [SYSTEM, USER], [{"role": "system", "content": "You write."}, USER]
    for number in range(2):
        asks = planner.ask(plan, Said(calls=({"a": number, "b": 1},)))
        plan = [*plan, asks, *results(asks, "1")]
        work = [*work, writer.ask(work, Said(f"Line {number}.")), user("on")]
    return [planner, writer]


def rewritten(family: Family) -> list[Talk]:
    """A summary in place of the first question and answer, then a system prompt of its own."""
    talk = Talk(family, Session(rendering_of(family.name)))
    first = talk.ask([SYSTEM, USER], Said("Five."))
    second = talk.ask([SYSTEM, USER, first, user("And 7 + 8?")], Said("Fifteen."))
    talk.ask([SYSTEM, user("Earlier: sums."), second, user("Go on.")], Said("No."))
    talk.ask([{"role": "system", "content": "Be vague."}, USER, first, user("So?")], Said("Well."))
    return [talk]


def cut_off(family: Family) -> list[Talk]:
    """An answer that ran into its limit, and goes on."""
    talk = Talk(family, Session(rendering_of(family.name)))
    half = talk.ask([USER], Said("It is fi"), stop=False)
    talk.ask([USER, half, user("Go on.")], Said("ve."))
    return [talk]


TALKS = {f.__name__: f for f in (many_turns, thinking, parallel_tools, sub_agents, rewritten, cut_off)}


def told(talks: list[Talk]) -> list[dict[str, Any]]:
    """Talks as a golden file keeps them: per call, which it continues, the tokens that it adds, and their text."""
    rows = []
    for talk in talks:
        for prompt, turn in zip(talk.prompts, talk.turns, strict=True):
            start = 0 if prompt.parent is None else prompt.parent.response.end
            added = path_ids(prompt.piece)[start:]
            rows.append(
                {
                    "call": turn.call_id,
                    "continues": prompt.parent.call_id if prompt.parent else None,
                    "diverges": prompt.divergence and [prompt.divergence.cause, prompt.divergence.tokens_lost],
                    "added": talk.rendering.decode(added),
                    "added_ids": _line(added),
                    "sampled": talk.rendering.decode(turn.response.segment.ids),
                    "sampled_ids": _line(turn.response.segment.ids),
                }
            )
    return rows


def _line(ids: Any) -> str:
    return " ".join(map(str, ids.tolist()))


@pytest.mark.parametrize("talk", sorted(TALKS))
@pytest.mark.parametrize("name", ALL)
def test_golden(name: str, talk: str) -> None:
    """Compared with the file; AGL_WRITE_GOLDEN=1 writes it anew, for a reader to check."""
    found = told(TALKS[talk](FAMILIES[name]))
    file = GOLDEN / f"{name}.json"
    kept = json.loads(file.read_text()) if file.exists() else {}
    if os.environ.get("AGL_WRITE_GOLDEN"):
        kept[talk] = found
        file.write_text(json.dumps(kept, indent=1, ensure_ascii=False, sort_keys=True) + "\n")
    assert found == kept[talk]


# ---- any talk ------------------------------------------------------------------------------------------------------

TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="<{"), max_size=10)
"""What a model says: no format's own syntax."""
WORDS = st.one_of(TEXT, st.sampled_from(["<|im_end|>", "<think>", "</tool_call>", "<|eot_id|>x", "<|call|>", '"\\n"']))
"""What users and tools say: anything."""


@dataclass(frozen=True)
class Step:
    """One call on one of the histories so far, and what its client does with the answer."""

    history: int
    content: str
    reasoning: str | None
    calls: tuple[str, ...]
    stop: bool
    rewrite: str
    """How the client rewrites the history before it asks; mostly not at all."""
    keeps_reasoning: bool
    own_ids: bool
    reserialises: bool
    reply: str
    user_too: bool
    """Whether a question follows the results of tools at once."""


STEPS = st.lists(
    st.builds(
        Step,
        history=st.integers(0, 5),
        content=TEXT,
        reasoning=st.none() | TEXT.filter(str.strip),
        calls=st.lists(TEXT, max_size=3).map(tuple),
        stop=st.integers(0, 4).map(bool),
        rewrite=st.sampled_from(["", "", "", "", "system", "answer", "compact"]),
        keeps_reasoning=st.booleans(),
        own_ids=st.booleans(),
        reserialises=st.booleans(),
        reply=WORDS,
        user_too=st.booleans(),
    ),
    min_size=1,
    max_size=8,
)


@dataclass(frozen=True)
class History:
    messages: list[Message]
    turn: Turn | None = None
    new_from: int = 0


def rewrite(history: History, how: str) -> History:
    messages = list(history.messages)
    if how == "system":
        messages[0] = {"role": "system", "content": messages[0]["content"] + "!"}
    elif how == "answer" and history.turn is not None:
        messages[history.new_from - 1] = {"role": "assistant", "content": "I said no such thing."}
        messages = [m for m in messages[: history.new_from] if m["role"] != "tool"] + [USER]
    elif how == "compact" and history.turn is not None:
        messages = [messages[0], user("Before: sums."), *messages[-1:]]
        messages = messages if messages[-1]["role"] == "user" else messages[:2]
    else:
        return history
    return History(messages)


def sent_back(answer: Message, step: Step) -> Message:
    """An answer as the client repeats it."""
    answer = dict(answer)
    if not step.keeps_reasoning:
        answer.pop("reasoning_content", None)
    if "tool_calls" in answer:
        calls = []
        for number, call in enumerate(answer["tool_calls"]):
            function = dict(call["function"])
            if step.reserialises:
                given = json.loads(function["arguments"])
                function["arguments"] = json.dumps(dict(reversed(given.items())), indent=1)
            own = f"own-{number}-{call['id']}" if step.own_ids else call["id"]
            calls.append({"id": own, "type": "function", "function": function})
        answer["tool_calls"] = calls
    return answer


def extended(history: History, answer: Message, turn: Turn, step: Step) -> History:
    messages = [*history.messages, sent_back(answer, step)]
    new_from = len(messages)
    if "tool_calls" in answer:
        messages += results(messages[-1], *[step.reply] * len(answer["tool_calls"]))
    if step.user_too or "tool_calls" not in answer:
        messages.append(user(step.reply))
    return History(messages, turn, new_from)


@pytest.mark.quick_with("llama3-template", "qwen3")
@pytest.mark.parametrize("name", ALL)
@settings(
    max_examples=40,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)
@given(steps=STEPS, with_tools=st.booleans())
def test_any_talk(name: str, steps: list[Step], with_tools: bool) -> None:
    family = FAMILIES[name]
    talk = Talk(family, Session(rendering_of(name)), [CALC] if with_tools else None)
    histories = [History([SYSTEM, USER])]
    segments: list[Any] = []
    for number, step in enumerate(steps):
        history = rewrite(histories[step.history % len(histories)], step.rewrite)
        calls = step.calls[: None if family.parallel else 1] if with_tools else ()
        said = Said(
            content="" if calls else f"{step.content} no. {number}",
            reasoning=step.reasoning if family.thinks else None,
            calls=tuple({"a": text, "n": f"{number}.{i}"} for i, text in enumerate(calls)),
        )
        answer = talk.ask(history.messages, said, stop=step.stop)
        prompt, turn = talk.prompts[-1], talk.turns[-1]
        assert (
            path_ids(turn.response).tolist() == path_ids(prompt.piece).tolist() + talk.sampled(said, step.stop).tolist()
        )
        asks_anew = any(m["role"] == "user" for m in history.messages[history.new_from :])
        if history.turn is not None and step.stop and not (history.turn.reasoned and asks_anew):
            assert prompt.parent is history.turn, "a history that was only extended is continued"
        histories.append(extended(history, answer, turn, step))
        segments += unrecorded(turn.response)
    trained = [s for s in segments if s.logprobs is not None]
    assert len({s.segment_id for s in segments}) == len(segments)
    assert [s.ids.tolist() for s in trained] == [t.response.segment.ids.tolist() for t in talk.turns]
