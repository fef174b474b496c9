"""`why` names what is wrong with a run and what to try, and says nothing of runs that are well."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import pytest_asyncio

from agentlightning.adapter.conversations import conversations
from agentlightning.algorithm.episode import Episode
from agentlightning.doctor import Diagnosis, Severity, diagnose, gather, why
from agentlightning.doctor.in_rollouts import difficulty
from agentlightning.doctor.in_texts import _looks_like_a_call  # pyright: ignore[reportPrivateUsage]
from agentlightning.errors import ConfigError
from agentlightning.store import InMemoryLightningStore
from agentlightning.types import Outcome, Rollout, Span
from agentlightning.types.call import MEDIA, LeftOut
from agentlightning.types.names import CALL_ID, LEFT_OUT
from agentlightning.types.reward import reward_attributes

from .recorded import Recording, Said, Told, write


@pytest_asyncio.fixture
async def store() -> AsyncIterator[InMemoryLightningStore]:
    store = InMemoryLightningStore()
    yield store
    await store.close()


def groups(make: Callable[[int, int], Told], n: int = 8, size: int = 4) -> list[list[Told]]:
    """`make(group, member)` for each sibling of so many groups; a group's task is its number unless it says another."""
    made = [[make(g, m) for m in range(size)] for g in range(n)]
    return [[replace(t, task=g) if t.task == 0 else t for t in group] for g, group in enumerate(made)]


def steps(n: int = 12, **metrics: Any) -> list[dict[str, Any]]:
    """Rows of a run that learns; a metric is a number, or a function of the step's share of the run."""
    usual: dict[str, Any] = {
        "reward": lambda t: 0.2 + 0.5 * t,
        "updates": 1,
        "entropy": lambda t: 0.5 - 0.2 * t,
        "clip_fraction": 0.01,
        "kl_old": 1e-3,
        "grad_norm": 0.2,
        "learning_rate": 1e-5,
        "logprob_gap_max": 1e-6,
    }
    noise = np.random.default_rng(0)
    rows = []
    for step in range(n):
        row: dict[str, Any] = {k: v(step / n) if callable(v) else v for k, v in (usual | metrics).items()}
        rows.append({**row, "reward": row["reward"] + 0.02 * float(noise.standard_normal())})
    return rows


def mixed(g: int, m: int) -> Told:
    """Siblings differ."""
    return Told(reward=float((g + m) % 3 == 0), task=g)


WELL = Recording(groups=groups(mixed), steps=steps())
FLAT = steps(36, reward=0.3)
OPENAI = {
    "gen_ai.operation.name": "chat",
    "gen_ai.response.id": "x",
    "server.address": "api.openai.com",
    "gen_ai.output.messages": '[{"role": "assistant", "parts": [{"type": "text", "content": "4"}]}]',
}
FAILS = "The agent returned None and emitted no reward. Return a number"
BUSY = "The provider of 'judge' answered 429."
LONG = "A prompt of 900 tokens did not fit the context of 512."


def failing(outcome: Outcome, error: str) -> list[list[Told]]:
    return groups(lambda g, m: Told(outcome=outcome, error=error, calls=()))


def told(**values: Any) -> list[list[Told]]:
    """Siblings that differ in their rewards, and are otherwise so."""
    return groups(lambda g, m: replace(mixed(g, m), **values))


def broke(cause: str) -> list[list[Told]]:
    first = Said(prompt=range(100), ids=range(100, 110))
    second = Said(prompt=[*range(20), *range(500, 590)], cause=cause)
    return told(calls=(first, second))


def loops(g: int, m: int) -> Told:
    return replace(mixed(g, m), calls=(Said(ids=(g, 8, m, 5) * 6),))


def by_tokens(g: int, m: int) -> Said:
    """Its prompt has an answer of each earlier group, of which no text is known."""
    before = [100 * n + k for n in range(g) for k in range(12)]
    return Said(prompt=[1, 2, 3, *before], ids=[*range(100 * g, 100 * g + 12), 7000 + m])


def copies(g: int, m: int) -> Said:
    """Its answer begins as the example does that all prompts have, among more and more others."""
    example = [*range(50, 62)]
    return Said(prompt=[1, 2, 3, *example, *range(300, 300 + 20 * g)], ids=[*example, 7000 + 10 * g + m])


def noisy(signal: float) -> list[dict[str, Any]]:
    """Rewards that do not rise, and a gradient that was measured in every fourth step."""
    measured = {"gradient_signal": signal, "gradient_noise": 1.0, "gradient_cosine": 0.02}
    return [row | (measured if n % 4 == 0 else {}) for n, row in enumerate(FLAT)]


SICK: dict[str, tuple[str, str, Recording]] = {
    "mostly noise": ("gradient_noise", "tasks_per_step", Recording(groups=groups(mixed), steps=noisy(0.03))),
    "nothing but noise": ("gradient_noise", "tasks_per_step", Recording(groups=groups(mixed), steps=noisy(-0.01))),
    "no reward": ("no_reward", "Return a number", Recording(groups=failing(Outcome.AGENT_ERROR, FAILS))),
    "NaN": (
        "reward_not_finite",
        "division by zero",
        Recording(groups=failing(Outcome.AGENT_ERROR, "The reward 'r' is nan; a reward must be a finite number.")),
    ),
    "raises": ("rollouts_fail", "agl show --failed", Recording(groups=failing(Outcome.AGENT_ERROR, "KeyError: 'q'"))),
    "times out": ("rollouts_fail", "timeout_seconds", Recording(groups=failing(Outcome.TIMEOUT, "stopped after 60 s"))),
    "judge": ("rollouts_fail", "Mend the grader", Recording(groups=failing(Outcome.JUDGE_ERROR, "judge is down"))),
    "infra": ("rollouts_fail", "not the agent's failure", Recording(groups=failing(Outcome.INFRA_ERROR, "no store"))),
    "keeps answers": (
        "answers_kept",
        "functools.cache",
        Recording(groups=groups(lambda g, m: replace(mixed(g, m), calls=(Said(),) if m < 2 else ()))),
    ),
    "keeps its history": (
        "history_kept",
        "empty history",
        Recording(groups=groups(lambda g, m: replace(mixed(g, m), calls=(Said(history=["The answer is 4."] * g),)))),
    ),
    "keeps its history, by its tokens": (
        "history_kept",
        "empty history",
        Recording(groups=groups(lambda g, m: replace(mixed(g, m), calls=(by_tokens(g, m),)))),
    ),
    "two rewards": (
        "rewarded_twice",
        "primary_key",
        Recording(groups=groups(lambda g, m: replace(mixed(g, m), spans=(reward_attributes(0.25),)))),
    ),
    "several answers": (
        "several_answers",
        "Leave n out",
        Recording(groups=groups(lambda g, m: replace(mixed(g, m), calls=(Said(answers=2),)))),
    ),
    "never asks": ("never_called", "base_url=llm.endpoint", Recording(groups=told(calls=()))),
    "asks another": (
        "calls_not_captured",
        "base_url=llm.endpoint",
        Recording(groups=told(calls=(), spans=(OPENAI,))),
    ),
    "no tokens": ("token_ids_missing", "token ids", Recording(groups=told(calls=(Said(ids=()),)))),
    "only a judge is asked": ("nothing_trained", "llm.model", Recording(groups=told(calls=(Said(trained=False),)))),
    "constant": ("constant_reward", "Check the reward", Recording(groups=groups(lambda g, m: Told(reward=1.0)))),
    "too hard": (
        "too_hard",
        "easier tasks",
        Recording(groups=groups(lambda g, m: Told(reward=float(g == 0 and m == 0)), n=10), steps=steps(reward=0.1)),
    ),
    "too easy": (
        "too_easy",
        "harder tasks",
        Recording(
            groups=[
                *groups(lambda g, m: Told(reward=1.0), n=10),
                *groups(lambda g, m: Told(reward=0.1 * m), n=3),
            ]
        ),
    ),
    "all or nothing": (
        "no_variance",
        "dynamic_sampling",
        Recording(groups=groups(lambda g, m: Told(reward=float(g % 2)), n=10)),
    ),
    "too long": ("prompts_too_long", "max_context", Recording(groups=told(outcome=Outcome.TRUNCATED, error=LONG))),
    "longer than the model can": (
        "prompts_too_long",
        "The model can do no more: shorten",
        Recording(
            groups=told(outcome=Outcome.TRUNCATED, error="This model's maximum context length is 1024 tokens."),
            settings={"max_context": 4096},
        ),
    ),
    "a loop that does not end": (
        "prompts_too_long",
        "had asked the model 6 times by then",
        Recording(groups=told(outcome=Outcome.TRUNCATED, error=LONG, calls=(Said(),) * 6)),
    ),
    "refused": ("prompts_too_long", "max_context", Recording(groups=told(refused=LONG))),
    "ended by a limit": ("truncated", "Raise the limit", Recording(groups=told(outcome=Outcome.TRUNCATED))),
    "cut off": ("answers_cut_off", "Raise max_tokens", Recording(groups=told(calls=(Said(finish_reason="length"),)))),
    "stops at once": (
        "empty_answers",
        "Leave stop out",
        Recording(groups=told(calls=(Said(ids=(7,), text="", settings={"stop": ["\n"]}),))),
    ),
    "asks for nothing": (
        "nothing_trained",
        "Leave max_tokens out",
        Recording(groups=told(calls=(Said(ids=(), finish_reason="length", settings={"max_tokens": 0}),))),
    ),
    "settled": ("same_answers", "entropy_coef=0.01", Recording(groups=told(calls=(Said(ids=(4, 5, 6)),)))),
    "cool": (
        "same_answers",
        "temperature=1.0",
        Recording(groups=told(calls=(Said(ids=(4, 5, 6), temperature=0.3),))),
    ),
    "greedy": (
        "greedy_sampling",
        "temperature=1.0",
        Recording(groups=told(calls=(Said(ids=(4, 5, 6), temperature=0.0),))),
    ),
    "greedy, and all rewards are the same": (
        "greedy_sampling",
        "temperature=1.0",
        Recording(groups=groups(lambda g, m: Told(reward=0.0, calls=(Said(ids=(4, 5, 6), temperature=0.0),)))),
    ),
    "rates the task": (
        "reward_ignores_answer",
        "mend the reward",
        Recording(groups=groups(lambda g, m: Told(reward=g / 8)), steps=steps(updates=0)),
    ),
    "one task": ("one_task", "Give more tasks", Recording(groups=told(task="the only one"))),
    "429, and the attempt fails": (
        "rollouts_fail",
        "lower concurrency",
        Recording(
            groups=groups(
                lambda g, m: Told(outcome=Outcome.INFRA_ERROR, error=BUSY) if m % 2 else replace(mixed(g, m), task=g)
            )
        ),
    ),
    "429, and the attempt is made again": (
        "attempts_repeated",
        "lower concurrency",
        Recording(groups=groups(lambda g, m: replace(mixed(g, m), tried=(BUSY,) if m % 2 else ()))),
    ),
    "429, and the agent goes on without an answer": (
        "calls_fail_unseen",
        "Let the agent raise",
        Recording(
            groups=groups(
                lambda g, m: Told(reward=0.0, failed_calls=(BUSY,)) if m % 2 else replace(mixed(g, m), task=g)
            )
        ),
    ),
    "every call fails, and the agent returns 0": (
        "calls_fail_unseen",
        "lower concurrency",
        Recording(groups=groups(lambda g, m: Told(reward=0.0, calls=(), failed_calls=(BUSY, BUSY)))),
    ),
    "babbles": ("repeated_phrases", "overlong_tokens", Recording(groups=groups(loops))),
    "unparsed": (
        "tool_calls_unparsed",
        "renderer=",
        Recording(groups=told(calls=(Said(tools=True, text='<tool_call>{"name": "calc", "argum'),))),
    ),
    "json as text": (
        "tool_calls_unparsed",
        "max_tokens",
        Recording(groups=told(calls=(Said(tools=True, text='{"name": "calc", "arguments": {"a": 1}}'),))),
    ),
    "tools fail": (
        "tools_fail",
        "by hand",
        Recording(groups=told(calls=(Said(tools=True, tool={}), Said(results=["Error: no argument a"])))),
    ),
    "empty": ("empty_answers", "--full", Recording(groups=told(calls=(Said(text=""),)))),
    "rate 0": (
        "learning_rate_zero",
        "Leave learning_rate out",
        replace(WELL, steps=steps(learning_rate=0.0)),
    ),
    "rate far too low": (
        "rate_far_off",
        "Leave learning_rate out",
        replace(WELL, steps=FLAT, settings={"model": "calc", "learning_rate": 1e-6}),
    ),
    "nothing learned": ("no_updates", "group_size", replace(WELL, steps=steps(updates=0))),
    "NaN loss": (
        "not_finite",
        "resume from a checkpoint",
        replace(WELL, steps=steps(loss=float("nan"))),
    ),
    "flat": ("not_rising", "three times the learning_rate", replace(WELL, steps=FLAT)),
    "fell": (
        "reward_fell",
        "best checkpoint",
        replace(WELL, steps=steps(36, reward=lambda t: 0.7 if t < 0.6 else 0.3)),
    ),
    "clipped": ("clipping", "learning_rate", replace(WELL, steps=steps(clip_fraction=0.4))),
    "collapsed": (
        "entropy_collapse",
        "entropy_coef",
        replace(WELL, steps=steps(reward=0.3, entropy=lambda t: 0.8 if t < 0.3 else 0.005)),
    ),
    "exploded": (
        "entropy_explosion",
        "lower learning_rate",
        replace(WELL, steps=steps(reward=0.3, entropy=lambda t: 0.5 if t < 0.3 else 4.0)),
    ),
    "far": ("steps_too_large", "max_staleness", replace(WELL, steps=steps(kl_old=0.5))),
    "halved": ("steps_too_large", "to a third", replace(WELL, steps=steps(halvings=2.0))),
    "stale": ("stale_samples", "max_staleness", replace(WELL, steps=steps(corrected_to_zero=0.6))),
    "gap": ("engine_gap", "correction='token'", replace(WELL, steps=steps(logprob_gap_max=9e-4))),
    "spike": (
        "gradient_spike",
        "max_grad_norm",
        replace(WELL, steps=steps(grad_norm=lambda t: 0.1 if t < 0.9 else 90.0)),
    ),
    "overfits": (
        "overfitting",
        "validated best",
        replace(
            WELL,
            steps=steps(
                val_reward=lambda t: 0.9 if t < 0.4 else 0.2,
                val_low=lambda t: 0.8 if t < 0.4 else 0.1,
                val_high=lambda t: 0.96 if t < 0.4 else 0.3,
            ),
        ),
    ),
    "an edit": ("prefix_break_history_edited", "Only add messages", Recording(groups=broke("history_edited"))),
    "reasoning": (
        "prefix_break_reasoning_stripped",
        "reasoning_content",
        Recording(groups=broke("reasoning_stripped")),
    ),
    "other tools": ("prefix_break_tools_changed", "same tools", Recording(groups=broke("tools_changed"))),
}


@pytest.mark.parametrize("name", SICK)
async def test_the_cause_and_the_fix_are_named(store: InMemoryLightningStore, name: str) -> None:
    code, fix, recording = SICK[name]
    found = await why(store, await write(store, recording))
    first = next((f for f in found.findings if f.code == code), None)
    assert first is not None, [f.code for f in found.findings]
    assert fix in first.fix
    assert first.words
    assert first.severity is not Severity.NOTE
    assert found.findings.index(first) == 0, f"something else came first: {[f.code for f in found.findings]}"
    assert first.words in found.verdict


def letters(text: str) -> list[int]:
    return [ord(character) for character in text]


def text_of(ids: Sequence[int]) -> str:
    return "".join(map(chr, ids))


AT = "You are a clerk. It is {}. Be brief. " + "Answer in one word. " * 4


def clocked(time: str, *more: str) -> tuple[Said, ...]:
    """A call whose system prompt has the time in it; and what came of it is asked about at other times."""
    first = Said(prompt=letters(AT.format(time)), ids=letters("yes"))
    return first, *(Said(prompt=letters(f"{AT.format(t)} yes. Sure?"), cause="system_prompt_changed") for t in more)


async def test_a_clock_in_the_system_prompt_breaks_histories(store: InMemoryLightningStore) -> None:
    recording = Recording(groups=told(calls=clocked("2026-03-01 10:31:07", "2026-03-01 10:31:09")))
    first = (await why(store, await write(store, recording), decode=text_of)).findings[0]
    assert first.code == "prefix_break_clock"
    assert "'7. Be brief" in first.words
    assert "'9. Be brief" in first.words
    assert "last user message" in first.fix
    assert first.evidence["tokens_lost_per_step"] > 0


async def test_a_clock_in_the_prompts_of_siblings_is_found_where_each_calls_once(store: InMemoryLightningStore) -> None:
    def agent(g: int, m: int) -> Told:
        return replace(mixed(g, m), calls=[replace(said, ids=None) for said in clocked(f"10:3{m}:0{m}")])

    recording = Recording(groups=groups(agent))
    found = await why(store, await write(store, recording), decode=text_of)
    assert [f.code for f in found.findings] == ["prompts_not_shared"]
    assert "a clock or a random id" in found.findings[0].words
    on_purpose = [
        [
            replace(told, calls=(Said(prompt=letters(f"Hint {'abcd'[m]}. " + "Go on. " * 9)),))
            for m, told in enumerate(g)
        ]
        for g in groups(mixed)
    ]
    found = await why(store, await write(store, Recording(groups=on_purpose)), decode=text_of)
    assert found.healthy, "other examples for each sibling may be meant"


async def test_calls_that_a_client_made_again_cost_time_only(store: InMemoryLightningStore) -> None:
    calls = [replace(t, failed_calls=(BUSY,)) for group in groups(mixed) for t in group]
    recording = Recording(groups=[calls])
    evidence = await gather(store, await store.get_run_by_id(await write(store, recording)))
    answered = {
        rollout_id: [
            *spans,
            spans[-1].model_copy(update={"attributes": {**_JUDGE, CALL_ID: "later"}, "start_time": 1e12}),
        ]
        for rollout_id, spans in evidence.spans.items()
    }
    found = diagnose(replace(evidence, spans=answered))
    assert [(f.code, f.severity) for f in found.findings] == [("calls_retried", "warning")]
    assert "lower concurrency" in found.findings[0].fix


_JUDGE = {"gen_ai.request.model": "judge", "gen_ai.operation.name": "chat"}


async def test_an_agent_that_asks_for_temperature_0_is_told_what_is_sampled(store: InMemoryLightningStore) -> None:
    recording = replace(WELL, groups=told(calls=(Said(asked=0.0),)))
    found = await why(store, await write(store, recording))
    assert [(f.code, f.severity) for f in found.findings] == [("temperature_changed", "note")]
    assert "asks for temperature 0, and training samples at 1" in found.findings[0].words
    assert found.healthy, "siblings differ: nothing is wrong"


LISTED = {
    *("flat_groups", "dropped", "truncated", "masked", "failed", "outcomes", "prefix_breaks", "prompt_tokens_lost"),
    *("clip_fraction", "entropy", "kl_old", "correction_mean", "effective_sample_size", "logprob_gap_max"),
    *("grad_norm", "signal_to_noise", "reward_by_difficulty", "same_answers", "repeated_phrases"),
    *("length_reward_correlation", "rewarded_without_tools", "sampled_tokens_per_rollout"),
}


async def test_every_quantity_is_measured_of_a_healthy_run_too(store: InMemoryLightningStore) -> None:
    """What a reader of `agl why` may ask for, whether anything is wrong with it or not."""

    def told_of(g: int, m: int) -> Told:
        tool = {"a": 1} if m % 2 else None
        ids = range(100 * g, 100 * g + 5 + m)
        said = Said(ids=ids, tools=True, tool=tool), Said(prompt=(1, 9), cause="history_edited")
        ends = Outcome.TIMEOUT if (g, m) == (0, 0) else Outcome.TRUNCATED if (g, m) == (1, 0) else Outcome.OK
        return replace(mixed(g, m), calls=said, outcome=ends)

    noise = {"gradient_signal": 1.0, "gradient_noise": 1.0, "gradient_cosine": 0.5}
    measured_too = {"correction_mean": 1.0, "effective_sample_size": 0.9, "dropped": 2, **noise}
    recording = Recording(groups=groups(told_of), steps=steps(**measured_too))
    measured = (await why(store, await write(store, recording))).measured
    assert {name for name in LISTED if measured.get(name) is None} == set()
    assert measured["masked"] == measured["failed"] == measured["truncated"] == 1 / 32
    assert measured["prompt_tokens_lost"] == pytest.approx(0.2), "one of the two tokens of each second prompt"
    assert 0 < measured["rewarded_without_tools"] < 1


def hack(early: Sequence[list[Told]], late: Sequence[list[Told]]) -> Recording:
    """A run that is long enough for its first rollouts to be read apart from its last ones."""
    return Recording(groups=[*early, *late], steps=steps())


@pytest.mark.slow
async def test_a_reward_that_pays_for_length_is_smelt(store: InMemoryLightningStore) -> None:
    def long(length: int) -> Callable[[int, int], Told]:
        return lambda g, m: Told(
            reward=float(m > 1) - (5 if g == 0 else 0),
            calls=(Said(ids=range(1000 * g + m, 1000 * g + length + 21 * m)),),
        )

    recording = hack(groups(long(20), n=24), groups(long(200), n=96))
    codes = [f.code for f in (await why(store, await write(store, recording))).findings]
    assert "length_pays" in codes


@pytest.mark.slow
async def test_a_reward_that_comes_without_the_tools_is_smelt(store: InMemoryLightningStore) -> None:
    def using(tool: dict[str, Any] | None) -> Callable[[int, int], Told]:
        return lambda g, m: Told(reward=float(m > 1), calls=(Said(tools=True, tool=tool),))

    recording = hack(groups(using({"a": 1}), n=24), groups(using(None), n=96))
    codes = [f.code for f in (await why(store, await write(store, recording))).findings]
    assert codes == ["reward_without_tools"]


HEALTHY: dict[str, tuple[Recording, str]] = {
    "learns": (WELL, "It is learning"),
    "has learned": (
        Recording(
            groups=[*groups(mixed, n=2), *groups(lambda g, m: Told(reward=1.0, calls=(Said(ids=(4, 5)),)), n=14)],
            steps=steps(40, reward=lambda t: min(0.98, 0.3 + t), entropy=lambda t: 0.04 * (1 - t), updates=1),
        ),
        "It has learned",
    ),
    "has just begun": (Recording(groups=WELL.groups[:4], steps=steps(2)), "too few"),
    "some fail": (
        Recording(
            groups=groups(
                lambda g, m: Told(outcome=Outcome.AGENT_ERROR, error="E") if (g, m) == (0, 0) else mixed(g, m)
            ),
            steps=steps(),
        ),
        "It is learning",
    ),
    "answers as the examples in its prompts do": (
        Recording(groups=groups(lambda g, m: replace(mixed(g, m), calls=(copies(g, m),))), steps=steps()),
        "It is learning",
    ),
    "uses tools, several calls": (
        Recording(
            groups=told(calls=(Said(tools=True, tool={"a": 1}), Said(results=["4"], cause="new_conversation"))),
            steps=steps(),
        ),
        "It is learning",
    ),
    "negative rewards, off-policy": (
        Recording(
            groups=groups(lambda g, m: Told(reward=-float(m))),
            steps=steps(correction_mean=0.97, corrected_to_zero=0.02, reward=lambda t: -3 + 2 * t),
        ),
        "It is learning",
    ),
    "noisy, and rises": (
        replace(WELL, steps=steps(36, gradient_signal=0.05, gradient_noise=1.0, gradient_cosine=0.05)),
        "It is learning",
    ),
    "bfloat16": (
        replace(WELL, steps=steps(logprob_gap_max=0.08), settings={"dtype": "bfloat16"}),
        "It is learning",
    ),
}


@pytest.mark.parametrize("name", HEALTHY)
async def test_a_healthy_run_gets_no_false_alarm(store: InMemoryLightningStore, name: str) -> None:
    recording, words = HEALTHY[name]
    found: Diagnosis = await why(store, await write(store, recording))
    assert found.healthy, [(f.code, f.words) for f in found.findings]
    assert words in found.verdict
    assert found.measured["rollouts_read"] > 0


def test_rewards_that_are_all_alike_are_never_or_always_earned() -> None:
    for reward, name in ((0.0, "never"), (-1.0, "never"), (1.0, "always")):
        group = [Episode(Rollout(rollout_id=f"r{n}", input=1), None, reward, []) for n in range(2)]
        found = difficulty([group], reward, reward)
        assert {part for part, numbers in found.items() if numbers["groups"]} == {name}


@pytest.mark.parametrize(
    ("dialect", "rewards", "fix"),
    [
        ("responses", [0.0, 0.0, 0.0, 0.0], "response.output_text"),
        ("messages", [0.0, 0.0, 0.0, 0.0], "message.content[0].text"),
        ("messages", [1.0, 1.0, 1.0, 1.0], None),
        ("responses", [0.0, 0.0, 0.0, 1.0], None),
        ("chat", [0.0, 0.0, 0.0, 0.0], None),
    ],
)
async def test_a_text_that_is_looked_for_in_a_list(
    store: InMemoryLightningStore, dialect: str, rewards: list[float], fix: str | None
) -> None:
    run = groups(lambda g, m: Told(reward=rewards[m], calls=(Said(dialect=dialect),)))
    found = await why(store, await write(store, Recording(groups=run)))
    fixes = [f.fix for f in found.findings if f.code == "content_is_a_list"]
    assert len(fixes) == (fix is not None)
    assert all(str(fix) in words for words in fixes)


@pytest.mark.parametrize(("why_not", "severity"), [("hosted", Severity.NOTE), (MEDIA, Severity.WARNING)])
async def test_what_was_left_out_of_requests(store: InMemoryLightningStore, why_not: str, severity: Severity) -> None:
    left = [
        LeftOut("reasoning.summary", "no summaries are made here", "harmless"),
        LeftOut("tools[]", why_not, "unavailable"),
    ]
    told_of = {LEFT_OUT: msgspec.json.encode(left).decode()}
    run_id = await write(store, Recording(groups=groups(lambda g, m: Told(reward=float(m % 2), spans=(told_of,)))))
    (found,) = [f for f in (await why(store, run_id)).findings if f.code == "left_out"]
    assert (found.severity, found.evidence["fields"]) == (severity, {one.field: one.why for one in left})
    assert "tools[]" in found.words


async def test_a_run_that_is_not_there_is_refused(store: InMemoryLightningStore) -> None:
    with pytest.raises(ConfigError, match="There is no run 'nope'"):
        await why(store, "nope")


async def test_an_empty_store_is_nothing_to_worry_about(store: InMemoryLightningStore) -> None:
    assert [f.code for f in (await why(store)).findings] == ["nothing_ran"]


@pytest.mark.parametrize(("losses", "says"), [((2.0, 0.5), "learns the examples"), ((2.0, 2.1), "not fallen yet")])
async def test_a_run_that_learns_examples_is_judged_by_its_loss(
    store: InMemoryLightningStore, losses: tuple[float, float], says: str
) -> None:
    """Its rollouts are validations: that all of them earned the same stands in the way of nothing."""
    first, last = losses
    rows = [{"loss": first + (last - first) * n / 11, "updates": 1, "learning_rate": 1e-4} for n in range(12)]
    recording = Recording(groups=told(reward=0.0), steps=rows, settings={"source": "chats"})
    found = await why(store, await write(store, recording))
    assert [f.code for f in found.findings if f.fix] == []
    assert says in found.verdict
    assert found.measured["loss_last"] == pytest.approx(last)
    assert found.measured["reward_last"] is None
    assert found.measured["groups"] == 0


async def test_rewards_of_a_distilled_run_are_no_matter(store: InMemoryLightningStore) -> None:
    recording = Recording(groups=groups(lambda g, m: Told(reward=1.0)), settings={"credit": "teacher"})
    found = await why(store, await write(store, recording))
    assert "constant_reward" not in [f.code for f in found.findings]


def test_names_of_many_tools_are_looked_for_in_a_long_answer_at_once() -> None:
    span = Span.from_attributes(rollout_id="r", attempt_id="a", attributes={"gen_ai.operation.name": "chat"})
    tools = [{"function": {"name": f"t{i}"}} for i in range(20_000)]
    (talk,) = conversations([span])
    long = '"arguments": 1, "t' * 100_000
    began = time.process_time()
    for text, is_call in ((long, False), (long + '19999"', True)):
        assert _looks_like_a_call(replace(talk, tools=tools, answer={"content": text})) is is_call
    assert time.process_time() - began < 2
