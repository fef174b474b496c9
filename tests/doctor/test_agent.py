"""The doctor's look at an agent before training, and its part in `fit`: what is said, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from agentlightning.algorithm.credit.units import CreditRule
from agentlightning.algorithm.parts.preflight import Preflight
from agentlightning.doctor import Evidence, Plan, examine, gather
from agentlightning.doctor.preflight import objections
from agentlightning.errors import AgentError
from agentlightning.metrics import Reporter, Sink
from agentlightning.models.shape import ModelShape
from agentlightning.runner.blocking import INSTEAD
from agentlightning.store import InMemoryLightningStore
from agentlightning.types import Outcome, Span
from agentlightning.types.names import OTHER_ENDPOINT

from .recorded import Recording, Said, Told, write
from .test_why import SICK, WELL, failing, groups, told

SHAPE = ModelShape(hidden=4096, layers=32, parameters=7_000_000_000, max_context=4096)
ELSE = {"url.full": "https://api.openai.com/v1/chat/completions", "user_agent.original": "OpenAI/Python 2.1"}


async def evidence_of(recording: Recording) -> Evidence:
    store = InMemoryLightningStore()
    try:
        await write(store, recording)
        return replace(await gather(store), steps=())
    finally:
        await store.close()


async def test_an_agent_that_is_ready_gets_no_false_alarm() -> None:
    found = examine(await evidence_of(WELL), Plan())
    assert found.healthy, [f.code for f in found.findings]
    assert "ready" in found.verdict
    assert found.measured["projected_seconds_per_step"] >= found.measured["seconds_per_rollout"]


async def test_what_training_takes_is_told_before_it_is_tried() -> None:
    evidence = await evidence_of(replace(WELL, groups=told(calls=(Said(prompt=range(3900)),))))
    found = examine(evidence, Plan(shape=SHAPE, memory=16 << 30, max_context=4096))
    (first, second) = found.findings
    assert first.code == "does_not_fit"
    assert "lora_rank=16" in first.fix
    assert second.code == "near_the_limit"
    assert found.measured["longest_row_tokens"] == 3903
    assert found.measured["longest_row_bytes"] == 32 * 4096 * 3903 * (8 + 8 + 16) * 4
    assert not examine(evidence, Plan(shape=SHAPE, memory=1 << 40)).findings


async def test_slow_and_blocking_agents_are_told() -> None:
    evidence = await evidence_of(WELL)
    late = [
        replace(e, attempt=e.attempt.model_copy(update={"end_time": e.attempt.start_time + 900}))
        for e in evidence.episodes
        if e.attempt
    ]
    what = "The async agent blocks its event loop at a.py, line 3."
    said = f"{what} {INSTEAD}"
    found = examine(replace(evidence, episodes=late), Plan(rollouts_per_step=256), blocked=[said], unfinished=3)
    assert {f.code for f in found.findings} == {"too_slow", "slow_steps", "blocks_the_loop"}
    assert [(f.words, f.fix) for f in found.findings if f.code == "blocks_the_loop"] == [(what, INSTEAD)]
    nothing = examine(Evidence(), Plan(), unfinished=16, phases={"in a tool": 12, "claimed, nothing recorded yet": 4})
    assert [(f.code, f.severity) for f in nothing.findings] == [("too_slow", "problem")]
    assert "(12 in a tool; 4 claimed, nothing recorded yet)" in nothing.findings[0].words
    assert "needs a timeout" in nothing.findings[0].fix
    endless = examine(Evidence(), Plan(), unfinished=2, phases={"in a call": 2}, calls_so_far=[40, 50])
    assert "(2 in a call; 45 calls of the model each by then)" in endless.findings[0].words
    assert "a limit of its turns" in endless.findings[0].fix


async def test_an_agent_of_which_nothing_was_seen_is_not_called_ready() -> None:
    found = examine(Evidence(), Plan())
    assert [(f.code, f.severity) for f in found.findings] == [("too_slow", "problem")]
    assert "No rollout began" in found.verdict


async def test_the_client_and_the_address_of_calls_that_go_elsewhere_are_named() -> None:
    evidence = await evidence_of(Recording(groups=told(calls=())))
    elsewhere = {
        e.rollout.rollout_id: [
            Span.from_attributes(name=OTHER_ENDPOINT, attributes=ELSE, rollout_id="r", attempt_id="a")
        ]
        for e in evidence.episodes
    }
    found = examine(replace(evidence, spans=elsewhere), Plan())
    assert found.findings[0].code == "calls_not_captured"
    assert "OpenAI/Python 2.1" in found.findings[0].words
    assert "https://api.openai.com/v1" in found.findings[0].words
    asked = examine(replace(evidence, spans=elsewhere, provider=True), Plan())
    assert "calls_not_captured" not in [f.code for f in asked.findings], "it is asked on purpose"


# ---- inside of fit ---------------------------------------------------------------------------------------------------


class Listener(Sink):
    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warn(self, text: str) -> None:
        self.warnings.append(text)


async def first_step(recording: Recording, **more: Any) -> list[str]:
    """What `fit` says of its first step; raises what it raises."""
    listener, evidence = Listener(), await evidence_of(recording)
    preflight = Preflight(Reporter(listener), CreditRule(), objections=objections, **more)
    preflight.check(evidence.episodes)
    preflight.check(evidence.episodes)
    return listener.warnings


GREEDY = told(calls=(Said(ids=(4, 5, 6), temperature=0.0),))
REFUSED: dict[str, tuple[str, Sequence[Sequence[Told]]]] = {
    "no call": ("never called the model", told(calls=())),
    "no tokens": ("without sampled tokens", told(calls=(Said(ids=()),))),
    "too long": ("did not fit the model's context", told(outcome=Outcome.TRUNCATED, error="did not fit the context")),
    "greedy": ("sampled at temperature 0", GREEDY),
    "all failed": ("nothing to learn from", failing(Outcome.AGENT_ERROR, "KeyError")),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_fit_refuses_what_makes_training_meaningless(name: str) -> None:
    words, rollouts = REFUSED[name]
    with pytest.raises(AgentError, match=words):
        await first_step(Recording(groups=rollouts))
    said = await first_step(Recording(groups=rollouts), goes_on=True)
    assert any(words in text for text in said), "with preflight='warn' it is said, and the run goes on"


@pytest.mark.parametrize("name", ["cut off", "babbles", "settled"])
async def test_fit_says_once_what_it_need_not_refuse(name: str) -> None:
    _, _, recording = SICK[name]
    said = await first_step(recording)
    assert len(said) == 1


async def test_fit_says_nothing_of_a_step_that_is_well() -> None:
    assert await first_step(WELL) == []
    assert await first_step(Recording(groups=groups(lambda g, m: Told(reward=float(g == m == 0))))) == []


async def test_what_an_agent_keeps_is_seen_in_the_second_step() -> None:
    """The rollouts of the first one began at the same time, with nothing to keep."""
    listener, evidence = Listener(), await evidence_of(SICK["keeps its history, by its tokens"][2])
    preflight = Preflight(Reporter(listener), CreditRule(), objections=objections)
    group = len(evidence.groups[0])
    for step in range(4):
        preflight.check(evidence.episodes[step * group : (step + 1) * group])
        assert [text for text in listener.warnings if "empty history" in text] == listener.warnings
        assert len(listener.warnings) == (step > 0)


async def test_prompts_that_became_too_long_may_hold_what_an_agent_keeps() -> None:
    """All calls of a later step are refused."""
    evidence = await evidence_of(WELL)
    refused = await evidence_of(Recording(groups=told(calls=(), refused="prompt is too long: 6763 tokens > 1024")))
    preflight = Preflight(Reporter(Listener()), CreditRule(), objections=objections)
    preflight.check(evidence.episodes)
    with pytest.raises(AgentError, match="keeps its history: begin each rollout with an empty one"):
        preflight.check(refused.episodes)
