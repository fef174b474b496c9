"""A judge over the group: a model is shown the rollouts of one task together and gives each a score from 0 to 1.

What their conversations begin with in common is written once. The judge is asked twice, the second time in the reverse
order, under ids that are new each time. Where its two answers disagree too much, or one does not come, the rollouts of
the group become `judge_error`, which trains nothing. Scores and reasons are spans of the rollouts, so whatever reads
rewards from the store finds them. The idea is RULER's, of ART.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import msgspec
from annotated_types import Ge, Le
from pydantic import PositiveFloat, PositiveInt

from agentlightning.adapter.messages import policy_conversations
from agentlightning.algorithm.episode import Sampled
from agentlightning.algorithm.part import Part, RunHooks, RunScope
from agentlightning.algorithm.prompts.comparison import RUBRIC, Answers, Scored, messages_of, read_scores, schema_of
from agentlightning.algorithm.prompts.critic import (
    CriticAnswer,
    CriticClient,
    CriticFailure,
    EngineCritic,
    HttpCritic,
    Question,
    ask,
)
from agentlightning.algorithm.records import ByName, refuse_other_kinds, refuse_out_of_bounds, value_of
from agentlightning.algorithm.sampling.rollouts import mask_as_judge_error, unless_stopped
from agentlightning.algorithm.settings import TrainingSettings
from agentlightning.errors import ConfigError, JudgeError
from agentlightning.gateway.routing.spending import TokenPrice, Usage
from agentlightning.metrics.catalogue import REWARD, Metric
from agentlightning.store.base import LightningStore
from agentlightning.types import Outcome, Span
from agentlightning.types.data import RolloutRecord
from agentlightning.types.names import ANNOTATION, JUDGED, MESSAGE_BODY, REWARDED_LATER
from agentlightning.types.reward import reward_attributes, whole_parts

KEY = "AGL_JUDGE_KEY"
"""The environment variable with the endpoint's key."""
ATTRIBUTES = "agentlightning.judge"
"""The prefix of what the judge said in a span's attributes: `.score`, `.reason`, `.agreement`,
and `.masked`, why the group teaches nothing."""
FORM_TRIES = 2
"""Questions until an answer has the form that was asked for."""
_REFUSED = re.compile(r"HTTP (400|422)\b")
_UNSUPPORTED = re.compile(r"unsupported|not support|unknown|unrecogni[sz]ed|not permitted|not allowed|deprecated", re.I)


@dataclass(frozen=True, slots=True)
class GroupVerdict:
    """What came of judging a group."""

    scores: Sequence[Scored] = ()
    """The mean score of each rollout, with the first reason; none where the judge failed."""
    agreement: float | None = None
    """Of the two answers, from -1 to 1."""
    masked: str | None = None
    """Why nothing is learned from it."""


def _text_of(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    text = content if isinstance(content, str) else "" if content is None else json.dumps(content, ensure_ascii=False)
    calls = [one.get("function") for one in message.get("tool_calls") or ()]
    made = f" calls {json.dumps(calls, ensure_ascii=False)}" if calls else ""
    return f"{message.get('role', 'user')}: {text}{made}"


@dataclass(frozen=True, kw_only=True)
class GroupJudge(ByName, Part):
    """A model scores the rollouts of a task together: `GRPO(…, group_judge=agl.GroupJudge(base_url=…, model=…))`."""

    metrics = (
        Metric(
            "judge/agreement",
            "Agreement of the judge with itself",
            REWARD,
            "",
            "The agreement of a judge's two answers, from -1 to 1: the mean rank correlation over the step's groups.",
        ),
        Metric(
            "judge/masked",
            "Groups left out for the judge",
            REWARD,
            "groups",
            "Groups that train nothing because the judge failed or disagreed with itself.",
        ),
        Metric(
            "judge/errors",
            "Groups without an answer of the judge",
            REWARD,
            "groups",
            "Groups for which the judge gave no readable answer.",
        ),
        Metric(
            "judge/tokens",
            "Tokens of the judge",
            REWARD,
            "tokens",
            "Tokens of the judge's questions and answers in the step.",
        ),
        Metric(
            "judge/cost",
            "Cost of the judge",
            REWARD,
            "price",
            "What the judge's answers cost in the step, where it has a price.",
        ),
    )

    model: str
    """The judge's name at its endpoint; without a `base_url`, what `frozen` calls the base of the run's policies."""
    base_url: str | None = None
    """The judge's OpenAI-compatible endpoint, with /v1; its key is the environment variable `AGL_JUDGE_KEY`. None: the
    run's own engine samples from `model`."""
    rubric: str | Path = RUBRIC
    """What is good: a text, or the path of a file that has it."""
    part: str = "judge"
    """The name of the score among the parts of a rollout's reward."""
    min_agreement: Annotated[float, Ge(-1), Le(1)] = 0.5
    """A group whose two answers agree by less is left out."""
    most_characters: PositiveInt = 20_000
    """Characters of one rollout that are shown, and of what all have in common."""
    max_tokens: PositiveInt = 4096
    """Tokens of one answer of the judge."""
    at_once: PositiveInt = 8
    """Groups that are judged at the same time."""
    seconds: PositiveFloat = 120.0
    """To wait for an answer, before it is asked again."""
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    """Fields of every request, such as {"reasoning_effort": "low"}; None takes one out."""
    price: TokenPrice | Mapping[str, float] | None = None
    """What the endpoint asks for a million tokens, `input` and `output`; with it the cost is a metric."""

    def __post_init__(self) -> None:
        refuse_other_kinds(self, " of a GroupJudge")
        refuse_out_of_bounds(self, " of a GroupJudge")
        if self.base_url is not None and not re.match(r"https?://", self.base_url):
            raise ConfigError(
                f"base_url of a GroupJudge is {self.base_url!r}; give an address such as 'https://api.openai.com/v1'."
            )
        for name in ("model", "part"):
            if not getattr(self, name):
                raise ConfigError(f"{name} of a GroupJudge is empty; give a name.")
        if not isinstance(self.rubric, str | Path):
            raise ConfigError(f"rubric of a GroupJudge is {self.rubric!r}; give a text, or the Path of a file.")
        if isinstance(self.rubric, str) and re.fullmatch(r"\S+\.(md|txt|rst)", self.rubric):
            raise ConfigError(
                f"rubric={self.rubric!r} is taken as a text, and is a file's name. In a script give "
                f"Path({self.rubric!r}); in a file of settings write the text itself."
            )
        if not isinstance(self.extra_body, Mapping):
            raise ConfigError(f"extra_body of a GroupJudge is {self.extra_body!r}; give fields by name.")
        if self.price is not None:  # as run.json has it
            object.__setattr__(self, "price", msgspec.structs.asdict(self._token_price(self.price)))

    @staticmethod
    def _token_price(given: Any) -> TokenPrice:
        if isinstance(given, TokenPrice):
            return given
        try:
            return msgspec.convert(given, TokenPrice)
        except msgspec.ValidationError as error:
            raise ConfigError(
                f"price of a GroupJudge is {given!r}: {error}. Give agl.TokenPrice(input=…, output=…), or its fields."
            ) from error

    @property
    def place(self) -> str:
        """Where it is asked, for people."""
        return "the run's own engine" if self.base_url is None else self.base_url

    def cost_of(self, answer: CriticAnswer) -> float:
        """What an answer cost; 0 without a price."""
        usage = Usage(input=answer.input_tokens, output=answer.output_tokens, cached=answer.cached_tokens)
        return 0.0 if self.price is None else self._token_price(self.price).of(usage)

    @property
    def rules(self) -> str:
        """The rubric's text."""
        if isinstance(self.rubric, str):
            return self.rubric
        try:
            return self.rubric.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(f"The judge's rubric cannot be read: {error}. Give the path of a text file.") from error

    def by_name(self) -> dict[str, Any]:
        """With the text of the rubric, whose file may change."""
        return {**super().by_name(), "rubric": self.rules}

    @classmethod
    def of(cls, settings: TrainingSettings) -> GroupJudge | None:
        return as_judge(value_of(settings, "group_judge"))

    @classmethod
    def check(cls, settings: TrainingSettings) -> None:
        if (part := cls.of(settings)) is None:
            return
        if settings.is_supervised or settings.credit != "broadcast" or settings.rollout_return != "final":
            raise ConfigError(
                "group_judge gives each rollout one reward: it needs an algorithm that samples and learns from "
                "rewards, credit='broadcast' and rollout_return='final'."
            )
        if part.base_url is None and part.model != settings.frozen:
            raise ConfigError(
                f"group_judge has no base_url, so its model is the base of the run's policies by the name that frozen "
                f"gives it, and frozen is {settings.frozen!r}. Give base_url=…, or train adapters and keep their base "
                f"model: GRPO(policies=['policy'], frozen={part.model!r}, "
                f"group_judge=agl.GroupJudge(model={part.model!r}))."
            )
        if part.rules.strip() == "":
            raise ConfigError("The rubric of a GroupJudge is empty; leave it out for the default one.")

    def in_run(self, run: RunScope) -> RunHooks:
        return _Judging(self, run)


def as_judge(given: GroupJudge | Mapping[str, Any] | None) -> GroupJudge | None:
    """The judge that a setting means: one, or its settings by name."""
    return None if given is None else GroupJudge.read(given, "group_judge")


class Judge:
    """Asks the model of a `GroupJudge`."""

    def __init__(self, part: GroupJudge, critic: CriticClient | None = None, without: set[str] | None = None) -> None:
        """`without`: fields of requests that the endpoint is known to refuse; what is learned of it is added."""
        self._part = part
        self._rules = part.rules
        if critic is None and part.base_url is None:
            raise ConfigError(f"The judge {part.model} has no base_url, and there is no run whose engine it could ask.")
        self._critic = critic or HttpCritic(part.base_url or "", os.environ.get(KEY))
        self._without = set[str]() if without is None else without
        self.tokens, self.cost = 0, 0.0
        """Of all questions and answers."""

    async def close(self) -> None:
        await self._critic.close()

    async def check(self) -> None:
        """Ask an easy question. Raises JudgeError where no answer of use comes."""
        await self.scores([["user: How much is 2 + 2?", "assistant: 4"]], [0], "a question before the run")

    async def answers(self, conversations: Sequence[Sequence[str]], seed: str) -> Answers:
        """Ask twice, in opposite orders that `seed` decides. Raises JudgeError; the other question is given up then."""
        order = list(range(len(conversations)))
        random.Random(seed).shuffle(order)
        try:
            async with asyncio.TaskGroup() as tasks:
                first = tasks.create_task(self.scores(conversations, order, f"{seed}/1"))
                second = tasks.create_task(self.scores(conversations, order[::-1], f"{seed}/2"))
        except ExceptionGroup as both:
            raise both.exceptions[0] from both
        return Answers(order, first.result(), second.result())

    async def verdict(self, conversations: Sequence[Sequence[str]], seed: str) -> GroupVerdict:
        """What comes of both answers."""
        try:
            found = await self.answers(conversations, seed)
        except JudgeError as error:
            return GroupVerdict(masked=str(error))
        least = self._part.min_agreement
        why = f"The judge's two answers agree by {found.agreement:.2f} only, less than min_agreement={least:g}."
        return GroupVerdict(found.scores, found.agreement, why if found.agreement < least else None)

    async def scores(self, conversations: Sequence[Sequence[str]], order: Sequence[int], seed: str) -> list[Scored]:
        """One score for each conversation, shown in this order. Raises JudgeError."""
        ids = [hashlib.sha256(f"{seed}/{n}".encode()).hexdigest()[:8] for n in range(len(conversations))]
        messages = messages_of(conversations, order, ids, self._rules, self._part.most_characters)
        why = ""
        for _ in range(FORM_TRIES):
            answer = await self._ask(messages, schema_of([ids[n] for n in order]))
            try:
                return read_scores(answer, ids)
            except ValueError as error:
                why = str(error)
        raise JudgeError(f"The answer of the judge {self._part.model} at {self._part.place} is of no use: {why}.")

    async def _ask(self, messages: Sequence[Mapping[str, str]], schema: Mapping[str, Any]) -> str:
        """Ask, again without a field that the endpoint refuses, which is remembered where that helps."""
        part, without = self._part, set(self._without)
        while True:
            about: dict[str, Any] = {"model": part.model, "messages": messages, "temperature": 0.0}
            besides = {"response_format": schema, **_in_place_of(without, part.max_tokens), **part.extra_body}
            question = Question(**about, max_tokens=part.max_tokens, besides=besides)
            found = await ask(self._critic, question, part.seconds)
            refused = refused_field(found.why) if isinstance(found, CriticFailure) else None
            if refused is None or refused in without:
                break
            without.add(refused)
        if isinstance(found, CriticFailure):
            key = "" if part.base_url is None else f" Its key is taken from {KEY}, which is "
            known = "" if not key else "set." if os.environ.get(KEY) else "not set."
            raise JudgeError(f"The judge {part.model} at {part.place} did not answer: {found.why}.{key}{known}")
        self._without |= without
        self.tokens += found.input_tokens + found.output_tokens
        self.cost += part.cost_of(found)
        return found.text


def refused_field(why: str) -> str | None:
    """The field of a request for which an endpoint refused it; None where that is not why. What is not named may be
    the schema, which not all know."""
    if not _REFUSED.match(why):
        return None
    named = next((name for name in ("max_tokens", "temperature") if name in why), None)
    return named if named and _UNSUPPORTED.search(why) else "response_format"


def _in_place_of(refused: set[str], max_tokens: int) -> dict[str, Any]:
    """What a request has where an endpoint refuses these fields; reasoning models call the limit otherwise."""
    other = {"max_completion_tokens": max_tokens} if "max_tokens" in refused else {}
    return {**dict.fromkeys(refused), **other}


async def conversation_of(store: LightningStore, record: RolloutRecord) -> list[str]:
    """What was said in a rollout, a text for each message, without the calls of judges and other models."""
    return _conversation(record, (await store.query_spans(record.rollout.rollout_id, "latest")).items)


def _conversation(record: RolloutRecord, spans: Sequence[Span]) -> list[str]:
    return [_text_of(m) for one in policy_conversations(record, spans) for m in one] or ["(no model was asked)"]


def seed_of(seed: int, records: Sequence[RolloutRecord]) -> str:
    """What decides how a group is shown, in a run of this seed."""
    names = "/".join(r.rollout.rollout_id for r in records)
    return f"{seed}/{records[0].rollout.metadata.get('group')}/{names}"


class _Judging(RunHooks):
    def __init__(self, part: GroupJudge, run: RunScope) -> None:
        self._part = part
        self._run = run
        self._store = run.context.store
        self._verdicts: dict[str, GroupVerdict] = {}
        """By group, until the step of the group is measured."""
        self._without: set[str] = set()
        self._tokens, self._cost = 0, 0.0
        self._warned: set[str] = set()

    async def begin(self) -> None:
        await self._asking(Judge.check)

    def metadata(self, step: int, group: int) -> Mapping[str, Any]:
        return {REWARDED_LATER: True}

    async def finished(self, groups: Sequence[Sequence[str]]) -> None:
        turns = asyncio.Semaphore(self._part.at_once)

        async def one(judge: Judge, rollout_ids: Sequence[str]) -> None:
            async with turns:
                await self._judge(judge, await self._store.query_records(rollout_ids))

        async def all_of_them(judge: Judge) -> None:
            try:
                async with asyncio.TaskGroup() as tasks:
                    for rollout_ids in groups:
                        tasks.create_task(one(judge, rollout_ids))
            except ExceptionGroup as several:  # one of them says it as well as all
                raise several.exceptions[0] from several

        await self._asking(all_of_them)

    async def _asking(self, work: Callable[[Judge], Coroutine[Any, Any, None]]) -> None:
        """Do it with a judge. Raises Stopped as soon as the user stops: what has no verdict yet gets one when the run
        goes on."""
        judge = Judge(self._part, self._critic(), self._without)
        try:
            await unless_stopped(self._run.context.stop, work(judge))
        finally:
            self._tokens, self._cost = self._tokens + judge.tokens, self._cost + judge.cost
            await judge.close()

    def _critic(self) -> CriticClient | None:
        """The base of the policies, where no endpoint is given."""
        if self._part.base_url is not None:
            return None
        settings = self._run.settings
        return EngineCritic(self._run.backend.engine(self._part.model), str(settings.model), settings.renderer)

    async def _judge(self, judge: Judge, records: Sequence[RolloutRecord]) -> None:
        """Judge a group, unless that was done before the run was interrupted."""
        good = [r for r in records if r.attempt and r.attempt.outcome in (Outcome.OK, Outcome.TRUNCATED)]
        spans = [(await self._store.query_spans(r.rollout.rollout_id, "latest")).items for r in good]
        before = [next((s for s in of_one if JUDGED in s.attributes), None) for of_one in spans]
        if all(before):  # all are written at once; one alone is an agent's own span
            first = before[0] if before else None
            if why := first and first.attributes.get(f"{ATTRIBUTES}.masked"):
                await mask_as_judge_error(self._store, good, str(why))
            return
        shown = [_conversation(record, of_one) for record, of_one in zip(good, spans, strict=True)]
        verdict = await judge.verdict(shown, seed_of(self._run.settings.seed, good))
        self._verdicts[str(good[0].rollout.metadata.get("group"))] = verdict
        if verdict.masked and not verdict.scores:
            self._warn_once("error", f"{verdict.masked} Groups without an answer train nothing.")
        if verdict.scores:  # at once: a group is judged or it is not, whenever the process dies
            pairs = zip(good, verdict.scores, strict=True)
            await self._store.add_many_spans([self._span(record, verdict, scored) for record, scored in pairs])
        if verdict.masked:
            await mask_as_judge_error(self._store, good, verdict.masked)

    def _span(self, record: RolloutRecord, verdict: GroupVerdict, scored: Scored) -> Span:
        """What the judge said of a rollout, with its reward unless the group is left out."""
        assert record.attempt is not None
        fields = {"score": scored.score, "reason": scored.reason, "agreement": verdict.agreement}
        why = {"masked": verdict.masked} if verdict.masked else {}
        reward = {} if verdict.masked else self._reward(record, scored.score)
        text = f"The judge: {scored.score:.2f}. {scored.reason}"
        return Span.from_attributes(
            name=ANNOTATION,
            attributes={**{f"{ATTRIBUTES}.{k}": v for k, v in (fields | why).items()}, MESSAGE_BODY: text, **reward},
            rollout_id=record.rollout.rollout_id,
            attempt_id=record.attempt.attempt_id,
        )

    def _reward(self, record: RolloutRecord, score: float) -> dict[str, Any]:
        """The score as the rollout's reward, or as one more part of the reward that it has."""
        parts = whole_parts(record.spans)
        name = self._part.part
        if parts and not self._run.settings.reward_weights.get(name):
            self._warn_once(
                "weight",
                f"The agent gives rewards of its own, and reward_weights has no weight for '{name}': the judge's score "
                f"is recorded and trains nothing. Set reward_weights={{'{next(iter(parts))}': 1.0, '{name}': 1.0}}.",
            )
        return reward_attributes({**parts, name: score}, next(iter(parts), name))

    def _warn_once(self, what: str, text: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            self._run.context.reporter.warn(text)

    def measure(self, sampled: Sampled) -> Mapping[str, Any]:
        groups = {str(e.rollout.metadata.get("group")) for e in (*sampled.episodes, *sampled.dropped)}
        found = [self._verdicts.pop(group) for group in sorted(groups) if group in self._verdicts]
        agreements = [v.agreement for v in found if v.agreement is not None]
        tokens, cost = self._tokens, self._cost
        self._tokens, self._cost = 0, 0.0
        return {
            **({"judge/agreement": fmean(agreements)} if agreements else {}),
            "judge/masked": sum(v.masked is not None for v in found),
            "judge/errors": sum(not v.scores for v in found),
            "judge/tokens": tokens,
            **({} if self._part.price is None else {"judge/cost": cost}),
        }
