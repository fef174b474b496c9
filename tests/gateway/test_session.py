"""Token continuity: what is continued is continued exactly, what is not says why. Pure, with real tokens."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from agentlightning.gateway import load_rendering
from agentlightning.gateway.history.session import Session
from agentlightning.gateway.history.tree import Prompt, Turn, path_ids, unrecorded
from agentlightning.models import resolve_model
from agentlightning.rendering import RenderersRendering
from agentlightning.rendering.messages import Message
from tests.gateway.conftest import CALC, call_text

SYSTEM: Message = {"role": "system", "content": "Be exact."}
USER: Message = {"role": "user", "content": "What is 2 + 3?"}
RENDERING = load_rendering(resolve_model("calc"))


class Talk:
    """A client's side of a session: it asks, the model says `text`, in tokens nobody would have encoded that way."""

    def __init__(self, session: Session, rendering: RenderersRendering = RENDERING, tools: Any = None) -> None:
        self.session = session
        self.rendering = rendering
        self.tools = tools
        self.count = 0

    def ask(self, messages: list[Message], text: str, *, ids: str = "") -> tuple[Prompt, Turn, Message]:
        """Returns the prompt, the turn, and the message as a client would send it back."""
        self.count += 1
        name = f"c{self.count}"
        prompt = self.session.plan(messages, self.tools, f"{name}/p")
        response = self.odd_tokens(text)
        parsed = self.rendering.parse(response, path_ids(prompt.piece), self.tools)
        message: Message = {"role": "assistant", "content": parsed.content}
        if parsed.reasoning:
            message["reasoning_content"] = parsed.reasoning
        if parsed.tool_calls:
            message["tool_calls"] = [
                {"id": f"{ids or name}.{i}", "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                for i, c in enumerate(parsed.tool_calls)
            ]
        flat = np.zeros(len(response), np.float32)
        turn = self.session.commit(
            prompt,
            message,
            name,
            segment_id=f"{name}/r",
            ids=response,
            logprobs=flat,
            plain_logprobs=flat,
            versions=(),
        )
        return prompt, turn, message

    def odd_tokens(self, text: str) -> Any:
        """One token per character where that is possible: a valid sampling of `text` that encoding would not give."""
        parts = [self.rendering.encode(part) for part in _pieces(text)]
        return np.concatenate([*parts, np.array([self.rendering.stop_token_ids[0]], np.int32)])


def _pieces(text: str) -> list[str]:
    """Characters, but added tokens whole."""
    parts, at = [], 0
    added = ("<tool_call>", "</tool_call>", "<think>", "</think>")
    while at < len(text):
        token = next((t for t in added if text.startswith(t, at)), text[at])
        parts.append(token)
        at += len(token)
    return parts


def whole(turn: Turn) -> list[int]:
    return path_ids(turn.response).tolist()


def ids_of(prompt: Prompt) -> list[int]:
    return path_ids(prompt.piece).tolist()


def result(content: str, call_id: str = "c1.0") -> Message:
    return {"role": "tool", "content": content, "tool_call_id": call_id}


def test_a_conversation_is_continued_token_by_token() -> None:
    talk = Talk(Session(RENDERING), tools=[CALC])
    messages = [SYSTEM, USER]
    for turn_number in range(5):
        prompt, turn, message = talk.ask(messages, call_text(turn_number, 3))
        assert prompt.divergence is None
        messages = [*messages, message, result(str(turn_number), message["tool_calls"][0]["id"])]
        following = talk.session.plan(messages, [CALC], f"next{turn_number}")
        before = whole(turn)
        assert ids_of(following)[: len(before)] == before
        bridge = RENDERING.decode(ids_of(following)[len(before) :])
        response = f"<tool_response>\n{turn_number}\n</tool_response>"
        assert bridge == f"\n<|im_start|>user\n{response}<|im_end|>\n<|im_start|>assistant\n"


def test_new_users_messages_continue_too_when_nothing_was_thought() -> None:
    talk = Talk(Session(RENDERING))
    _, turn, message = talk.ask([SYSTEM, USER], "Five.")
    prompt = talk.session.plan([SYSTEM, USER, message, {"role": "user", "content": "Sure?"}], None, "x")
    assert ids_of(prompt)[: len(whole(turn))] == whole(turn)
    assert prompt.parent is turn


def test_reasoning_is_kept_within_a_tool_cycle_and_dropped_as_the_template_does_after_it() -> None:
    talk = Talk(Session(RENDERING), tools=[CALC])
    _, first, message = talk.ask([SYSTEM, USER], "<think>\nHm.\n</think>\n\n" + call_text(2, 3))
    silent = {k: v for k, v in message.items() if k != "reasoning_content"}  # most clients drop it
    messages = [SYSTEM, USER, silent, result("5", message["tool_calls"][0]["id"])]
    within, second, answer = talk.ask(messages, "Five.")
    assert ids_of(within)[: len(whole(first))] == whole(first)
    after = talk.session.plan([*messages, answer, USER], [CALC], "x")
    assert after.parent is None
    assert after.divergence is not None
    assert after.divergence.cause == "reasoning_stripped"
    shared = after.divergence.position
    assert ids_of(after)[:shared] == whole(second)[:shared]
    assert after.divergence.tokens_lost == min(len(whole(second)), len(ids_of(after))) - shared


def test_interleaved_sub_agents_find_their_own_branches() -> None:
    session = Session(RENDERING)
    planner, worker = Talk(session, tools=[CALC]), Talk(session)
    worker.count = 100
    plan: list[Message] = [SYSTEM, USER]
    work: list[Message] = [{"role": "system", "content": "You write."}, USER]
    for number in range(3):
        for talk, messages, text in ((planner, plan, call_text(number, 1)), (worker, work, f"Line {number}.")):
            prompt, turn, message = talk.ask(messages, text)
            if number:
                assert prompt.parent is not None
                assert prompt.divergence is None
            messages.append(message)
            messages.append(
                result("1", message["tool_calls"][0]["id"])
                if "tool_calls" in message
                else {"role": "user", "content": "on"}
            )
            assert ids_of(session.plan(messages, talk.tools, f"{talk.count}/q"))[: len(whole(turn))] == whole(turn)


def test_siblings_with_the_same_prompt_share_it_and_are_told_apart_by_their_call_ids() -> None:
    talk = Talk(Session(RENDERING), tools=[CALC])
    first, one, said_one = talk.ask([SYSTEM, USER], call_text(2, 3))
    second, two, said_two = talk.ask([SYSTEM, USER], call_text(2, 3))
    assert first.piece is second.piece
    for turn, said in ((one, said_one), (two, said_two)):
        prompt = talk.session.plan([SYSTEM, USER, said, result("5", said["tool_calls"][0]["id"])], [CALC], "x")
        assert prompt.parent is turn


def test_a_client_with_ids_of_its_own_still_continues() -> None:
    talk = Talk(Session(RENDERING), tools=[CALC])
    _, turn, said = talk.ask([SYSTEM, USER], call_text(2, 3))
    said["tool_calls"][0]["id"] = "theirs"
    said["tool_calls"][0]["function"]["arguments"] = '{"b":3,"a":2}'
    prompt = talk.session.plan([SYSTEM, USER, said, result("5", "theirs")], [CALC], "x")
    assert prompt.parent is turn


@pytest.mark.parametrize(
    "cause", ["system_prompt_changed", "tools_changed", "compaction", "history_edited", "new_conversation"]
)
def test_a_rewritten_history_branches_and_says_why(cause: str) -> None:
    talk = Talk(Session(RENDERING), tools=[CALC])
    _, _, asked = talk.ask([SYSTEM, USER], call_text(2, 3))
    got = result("5", asked["tool_calls"][0]["id"])
    _, last, answer = talk.ask([SYSTEM, USER, asked, got], "Five it is.")
    more: Message = {"role": "user", "content": "And 7 + 8?"}
    edited: Message = {"role": "assistant", "content": "I changed my mind."}
    summary: Message = {"role": "user", "content": "Earlier: sums."}
    messages: list[Message] = {
        "system_prompt_changed": [
            {"role": "system", "content": "Be exact, now."},
            USER,
            asked,
            got,
            answer,
            more,
        ],
        "tools_changed": [SYSTEM, USER, asked, got, answer, more],
        "compaction": [SYSTEM, summary, answer, more],
        "history_edited": [SYSTEM, USER, asked, got, edited, more],
        "new_conversation": [{"role": "system", "content": "You write poems."}, {"role": "user", "content": "A rose."}],
    }[cause]
    prompt = talk.session.plan(messages, None if cause == "tools_changed" else [CALC], "x")
    assert prompt.parent is None
    assert prompt.divergence is not None
    assert prompt.divergence.cause == cause
    shared = prompt.divergence.position
    assert ids_of(prompt) == RENDERING.render(messages, None if cause == "tools_changed" else [CALC]).tolist()
    if cause == "new_conversation":
        assert prompt.divergence.tokens_lost == 0
    else:
        assert 0 < shared < len(whole(last))
        assert prompt.divergence.tokens_lost > 0


def test_rendering_anew_as_a_plain_server_would() -> None:
    talk = Talk(Session(RENDERING, rerender=True), tools=[CALC])
    _, _, asked = talk.ask([SYSTEM, USER], call_text(2, 3))
    messages = [SYSTEM, USER, asked, result("5", asked["tool_calls"][0]["id"])]
    prompt = talk.session.plan(messages, [CALC], "x")
    assert ids_of(prompt) == RENDERING.render(messages, [CALC]).tolist()
    assert prompt.divergence is not None
    assert prompt.divergence.cause == "tokenizer_seam"


def test_segments_hold_each_token_once() -> None:
    talk = Talk(Session(RENDERING), tools=[CALC])
    messages: list[Message] = [SYSTEM, USER]
    stored, last = [], None
    for number in range(20):
        _, last, message = talk.ask(messages, call_text(number, 1))
        stored += unrecorded(last.response)
        messages = [*messages, message, result("ok", message["tool_calls"][0]["id"])]
    assert last is not None
    assert sum(len(s.ids) for s in stored) == len(whole(last))
    assert len({s.segment_id for s in stored}) == len(stored)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.text(min_size=1, max_size=12), st.booleans()), min_size=1, max_size=12))
def test_every_request_gets_a_prompt_that_reads_as_its_messages(steps: list[tuple[int, str, bool]]) -> None:
    """Whatever clients do, prompts decode to what rendering gives, and continued tokens are untouched."""
    talk = Talk(Session(RENDERING))
    histories: list[list[Message]] = [[SYSTEM, USER]]
    for which, text, edit in steps:
        history = histories[which % len(histories)]
        if edit:
            history = [{**history[0], "content": history[0]["content"] + "!"}, *history[1:]]
        prompt, turn, message = talk.ask(history, text)
        assert RENDERING.decode(ids_of(prompt)).endswith("<|im_start|>assistant\n")
        if prompt.parent is not None:
            before = whole(prompt.parent)
            assert ids_of(prompt)[: len(before)] == before
        assert whole(turn)[: len(ids_of(prompt))] == ids_of(prompt)
        histories.append([*history, message, {"role": "user", "content": text}])


def test_a_model_without_a_renderer_shares_what_its_template_keeps(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(resolve_model("calc")) / name, tmp_path)
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% if m.role == 'assistant' %}<|im_end|>{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    rendering = load_rendering(str(tmp_path), renderer="default")
    session = Session(rendering)
    talk = Talk(session, rendering)
    prompt, turn, message = talk.ask([USER], "5")
    following = session.plan([USER, message, {"role": "user", "content": "Sure?"}], None, "x")
    assert following.parent is turn, "the template renders the answer as it was sampled"
    assert ids_of(following)[: len(whole(turn))] == whole(turn)
    assert prompt.divergence is None


def test_the_same_answer_after_different_thoughts_continues_the_thought_that_is_sent_back() -> None:
    """As agents do that ask several times and go on with one: the answers are equal, the reasoning is not."""
    talk = Talk(Session(RENDERING), tools=[CALC])
    turns = [talk.ask([SYSTEM, USER], f"<think>\n{thought}\n</think>\n\nIt is 5.") for thought in ("one", "two", "ten")]
    for _, turn, message in turns:
        prompt = talk.session.plan([SYSTEM, USER, message, result("5")], [CALC], f"{turn.call_id}/next")
        assert prompt.parent is turn
        assert ids_of(prompt)[: len(whole(turn))] == whole(turn)
    without = {"role": "assistant", "content": "It is 5."}
    prompt = talk.session.plan([SYSTEM, USER, without, result("6")], [CALC], "none/p")
    assert prompt.parent is turns[-1][1], "a client that leaves it out continues the last one"
    edited = {**without, "reasoning_content": "other"}
    assert talk.session.plan([SYSTEM, USER, edited, result("7")], [CALC], "edited/p").parent is None


LONG = "You are a careful assistant that answers questions about sums. Use the tool for each of them. "
PROMPTS: dict[str, tuple[str, str]] = {
    "a clock at the beginning": (f"It is 10:05. {LONG}", f"It is 11:37. {LONG}"),
    "a clock at the end": (f"{LONG}It is 10:05.", f"{LONG}It is 11:37."),
    "something added": (LONG, f"{LONG}{'Remember that the user likes short answers. ' * 9}"),
    "a title": (LONG, "You are a title generator. You output only the title of a conversation, nothing else at all."),
    "something added in front": (LONG, f"{'Remember that the user likes short answers. ' * 9}{LONG}"),
    "a sub-agent with the same end": (f"You plan. {'Think well. ' * 30}{LONG}", f"You search for the files. {LONG}"),
    "a team member": (LONG, "You check what others have computed, and say in one word whether it can be right."),
}
EDITED = ("a clock at the beginning", "a clock at the end", "something added", "something added in front")


@pytest.mark.parametrize("with_history", [False, True], ids=["its first request", "with the whole history"])
@pytest.mark.parametrize("name", PROMPTS)
def test_another_agents_system_prompt_is_not_an_edited_one(name: str, with_history: bool) -> None:
    """A title call, a team member and one that is handed over to are conversations of their own: they lose nothing."""
    was, now = ({"role": "system", "content": text} for text in PROMPTS[name])
    talk = Talk(Session(RENDERING))
    _, _, answer = talk.ask([was, USER], "It is 5.")
    more: list[Message] = [answer, {"role": "user", "content": "Sure?"}] if with_history else []
    prompt = talk.session.plan([now, USER, *more], None, "next/p")
    assert prompt.divergence is not None
    assert prompt.divergence.cause == ("system_prompt_changed" if name in EDITED else "new_conversation")
    assert (prompt.divergence.tokens_lost > 0) is (name in EDITED)


def test_no_more_is_lost_than_a_prompt_has_to_be_computed_anew() -> None:
    """However long the history is that it left: a prompt that shares all of its tokens loses none."""
    talk = Talk(Session(RENDERING))
    _, turn, _ = talk.ask([SYSTEM, USER], "It is 5. " * 40)
    prompt = talk.session.plan([SYSTEM, USER, {"role": "assistant", "content": "It is 9."}, USER], None, "edit/p")
    assert prompt.divergence is not None
    assert prompt.divergence.cause == "history_edited"
    assert prompt.divergence.tokens_lost == len(ids_of(prompt)) - prompt.divergence.position < len(whole(turn))


def test_a_system_prompt_that_is_left_out_is_a_changed_one() -> None:
    """As with the Responses API, where instructions hold for one request only."""
    talk = Talk(Session(RENDERING))
    _, _, message = talk.ask([SYSTEM, USER], "It is 5.")
    prompt = talk.session.plan([USER, message, {"role": "user", "content": "Sure?"}], None, "next/p")
    assert prompt.divergence is not None
    assert prompt.divergence.cause == "system_prompt_changed"
