"""A teacher behind an endpoint that says how likely it finds given tokens, for on-policy distillation.

Asked over `POST {url}/completions` with token ids, so nothing is encoded again: with vLLM's `prompt_logprobs`, and
where a server does not know that, with `echo`. What it says is at temperature 1. A conversation is asked for once, for
the longest of its calls that hold one another.

A policy that distills itself (`agl.SelfDistill`) gives its teacher privileged context: the teacher sees the
conversation that the policy had, with one message more before it. The policy's own tokens stay as they were sampled:
the message is put in front of them as tokens, and nothing is rendered a second time. Self-distillation fine-tuning
(SDFT, Shenfeld et al., arXiv 2601.19897) takes a demonstration of the task as that message.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any

from agentlightning.algorithm.credit.ratios import mean_gap
from agentlightning.algorithm.episode import Episode
from agentlightning.algorithm.part import ComparedPass, Part, PolicyHooks, PolicyScope, Update
from agentlightning.algorithm.parts.reference import Reference
from agentlightning.algorithm.settings import TrainingSettings
from agentlightning.arguments import Needs, SettingsGroup
from agentlightning.errors import ConfigError, JudgeError, ModelError
from agentlightning.learner.packing import CreditedCall, pack
from agentlightning.metrics.catalogue import STABLE, Metric
from agentlightning.rendering.base import Rendering
from agentlightning.types.arrays import Float32Array, Int32Array, np
from agentlightning.types.call import Call

KEY = "AGL_TEACHER_KEY"
"""The environment variable with the endpoint's key."""
AT_ONCE = 16
"""Requests at the same time."""
TRIES = 4
SECONDS = 300.0
"""Seconds to wait for an answer."""


class EndpointTeacher:
    """The model `name` behind `url`, which ends with /v1."""

    def __init__(self, url: str, name: str) -> None:
        self._url = url.rstrip("/") + "/completions"
        self._name = name
        self._echoes = False
        """The server does not know `prompt_logprobs`."""

    async def logprobs(self, calls: Sequence[Call]) -> list[Float32Array]:
        """Log-probs of each call's response tokens. Raises JudgeError if the endpoint does not give them."""
        import aiohttp

        from agentlightning.net.outgoing import http_session

        whole = [np.concatenate([c.prompt_ids, c.response_ids]) for c in calls]
        sequences = longest_of(whole)
        turns = asyncio.Semaphore(AT_ONCE)
        headers = {"Authorization": f"Bearer {os.environ[KEY]}"} if KEY in os.environ else {}
        timeout = aiohttp.ClientTimeout(total=SECONDS)
        async with http_session(headers=headers, timeout=timeout) as session:

            async def one(ids: Int32Array) -> Float32Array:
                async with turns:
                    return await self._ask(session, ids)

            found = dict(zip(sequences, await asyncio.gather(*(one(whole[n]) for n in sequences)), strict=True))
        holding = [next(n for n in sequences if _holds(whole[n], ids)) for ids in whole]
        return [
            found[n][len(c.prompt_ids) : len(c.prompt_ids) + len(c.response_ids)]
            for n, c in zip(holding, calls, strict=True)
        ]

    async def _ask(self, session: Any, ids: Int32Array) -> Float32Array:
        """Log-probs of all tokens but the first, which has none and stands as 0."""
        if not self._echoes:
            found = read_prompt_logprobs(await self._post(session, ids, {"prompt_logprobs": 0}), ids)
            if found is not None:
                return found
        found = read_echo(await self._post(session, ids, {"echo": True, "logprobs": 1}), ids)
        if found is None:
            raise JudgeError(
                f"The teacher at {self._url} gives no log-probs of a prompt's tokens, neither by prompt_logprobs nor "
                "by echo. Serve it with vLLM, or load it here: leave teacher_url out, and let teacher be a directory "
                "or a Hugging Face id."
            )
        self._echoes = True
        return found

    async def _post(self, session: Any, ids: Int32Array, how: dict[str, Any]) -> Any:
        import aiohttp

        from agentlightning.net.outgoing import UnwantedAnswer, reason_of

        body = {"model": self._name, "prompt": ids.tolist(), "max_tokens": 1, "temperature": 0.0, **how}
        reason = ""
        for tried in range(TRIES):
            try:
                async with session.post(self._url, json=body) as response:
                    if response.status == 200:
                        if isinstance(answer := await response.json(), dict):
                            return answer
                        raise ValueError("its answer is no JSON object")
                    reason = f"{response.status}: {(await response.text())[:300]}"
                    if response.status in (400, 422) and "echo" not in how:
                        return {}  # it may not know the parameter: the other way is tried
                    if response.status < 500 and response.status != 429:
                        break
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                reason = reason_of(error)
                if isinstance(error, UnwantedAnswer):
                    break
            if tried + 1 < TRIES:
                await asyncio.sleep(2.0**tried)
        raise JudgeError(
            f"The teacher at {self._url} did not answer: {reason}. Nothing was learned from this step; the last "
            f"checkpoint is good. Look after the server (its key is taken from {KEY}) and resume."
        )


def longest_of(sequences: Sequence[Int32Array]) -> list[int]:
    """Indices of those that begin no other one, longest first; of equal ones the first."""
    kept: list[int] = []
    for n in sorted(range(len(sequences)), key=lambda n: -len(sequences[n])):
        if not any(_holds(sequences[k], sequences[n]) for k in kept):
            kept.append(n)
    return kept


def _holds(longer: Int32Array, start: Int32Array) -> bool:
    return len(longer) >= len(start) and np.array_equal(longer[: len(start)], start)


def read_prompt_logprobs(answer: Any, ids: Int32Array) -> Float32Array | None:
    """vLLM's `prompt_logprobs`: null for the first token, then a record by token id. None where there is none."""
    choice = (answer.get("choices") or [{}])[0]
    given = choice.get("prompt_logprobs") or answer.get("prompt_logprobs")
    if not given or len(given) != len(ids):
        return None
    return _checked([0.0, *(_of(one, token) for one, token in zip(given[1:], ids[1:].tolist(), strict=True))])


def _of(one: Any, token: int) -> float:
    """Of the token itself, among its alternatives."""
    found = (one or {}).get(str(token))
    return float(found["logprob"] if isinstance(found, dict) else "nan" if found is None else found)


def read_echo(answer: Any, ids: Int32Array) -> Float32Array | None:
    """The log-probs of an echoed prompt, with those of the sampled token behind them. None where there are none."""
    choice = (answer.get("choices") or [{}])[0]
    given = (choice.get("logprobs") or {}).get("token_logprobs")
    if not given or len(given) < len(ids):
        return None
    return _checked([0.0, *map(float, given[1 : len(ids)])])


def _checked(values: Sequence[float]) -> Float32Array:
    found = np.array(values, dtype=np.float32)
    if not np.isfinite(found).all():
        raise ConfigError(
            "The teacher gave no finite log-prob for each token of a conversation. It must have the same tokens as the "
            "policy: take a model of the same family."
        )
    return found


_TEACHER = Needs(lambda s: s.credit_mode.teacher, "credit='teacher', as agl.Distill has it")
_HINT = Needs(
    lambda s: s.credit_mode.teacher and s.teacher.url is None,
    "a teacher that is loaded here, as agl.SelfDistill has it",
)


@dataclass(frozen=True, kw_only=True)
class Teacher(SettingsGroup, Part):
    """Tokens are worth how much likelier a teacher finds them than the policy: `Distill` and `SelfDistill`."""

    metrics = (
        Metric(
            "kl_teacher",
            "KL to the teacher",
            STABLE,
            "nats",
            "With a teacher: the mean of log π − log π_teacher over sampled tokens.",
        ),
    )

    model: Annotated[str | None, _TEACHER] = None
    """The model that `Distill` learns from: a name, a directory, a run's folder or a Hugging Face id, with the same
    tokens as `model`."""
    url: Annotated[str | None, _TEACHER] = None
    """Get the token log-probs of `teacher` from this endpoint (…/v1) instead of loading the model; its key is in the
    environment variable `AGL_TEACHER_KEY`."""
    hint: Annotated[str | None, _HINT] = None
    """For `SelfDistill`: the field of a task with the text that only the teacher sees."""

    @classmethod
    def of(cls, settings: TrainingSettings) -> Teacher | None:
        return cls.given(settings) if settings.credit_mode.teacher else None

    @classmethod
    def check(cls, settings: TrainingSettings) -> None:
        s, own = settings, cls.given(settings)
        if not s.credit_mode.teacher:
            return
        if own.model is None:
            raise ConfigError(
                "Distilling needs the model to learn from: agl.Distill(model=…, teacher=…), or --set teacher=… on the "
                "command line."
            )
        if Reference.given(s).coef or s.loss_spec.reference:
            raise ConfigError(
                "The teacher is what the policy is compared with, so there is no other reference. Leave "
                "kl_coef out, and take a loss without a reference."
            )
        if own.url is not None and not re.match(r"https?://", own.url):
            raise ConfigError(f"teacher_url is {own.url!r}; give an address such as 'http://localhost:8000/v1'.")
        if own.url is not None and s.temperature != 1.0:
            raise ConfigError(
                "A teacher behind an endpoint says how likely it finds tokens at temperature 1, and the policy samples "
                f"at {s.temperature}. Leave temperature out, or load the teacher here: leave teacher_url out."
            )
        if own.url is not None and s.filter_replay:
            raise ConfigError(
                "A teacher behind an endpoint says how likely it finds tokens among all, not among those that a filter "
                "kept. Leave filter_replay out, or load the teacher here: leave teacher_url out."
            )
        if s.adapters:
            raise ConfigError(
                "A teacher is for one policy; train several policies one by one: agl.Distill(lora_rank=…)."
            )

    def check_model(self) -> None:
        """Raises ConfigError for a teacher to be loaded that is nowhere, or whose weights nobody has."""
        if self.url is not None or self.model is None:
            return
        from agentlightning.models import resolve_model

        try:
            resolve_model(self.model)
        except ModelError as error:
            raise ConfigError(
                f"The teacher cannot be loaded. {error} A teacher has its weights here, or a server that gives "
                "log-probs of a prompt, as vLLM's does: teacher_url=…"
            ) from error

    def in_policy(self, policy: PolicyScope) -> PolicyHooks:
        return _TeacherGaps(self, policy)


class _TeacherGaps(PolicyHooks):
    def __init__(self, part: Teacher, policy: PolicyScope) -> None:
        settings = policy.settings
        self._learner = policy.learner
        self._endpoint = None if part.url is None else EndpointTeacher(part.url, part.model or "")
        self._hints = (
            None if part.hint is None else PrivilegedContext(part.hint, str(settings.model), settings.renderer)
        )

    async def before_credit(self, update: Update) -> None:
        gaps: list[Float32Array] = []
        for one in update.compared:
            own_E = await update.own_logprobs(one.batch)
            gaps.append(own_E - await self._logprobs(update, one))
            update.values |= one.by_call(-gaps[-1])
        if gaps:
            update.metrics["kl_teacher"] = mean_gap(gaps)

    async def _logprobs(self, update: Update, one: ComparedPass) -> Float32Array:
        """How likely the teacher finds the entries of a pass, [E]."""
        if self._endpoint is not None:
            return np.concatenate(await self._endpoint.logprobs([c.call for c in one.calls]))
        seen = one.batch if self._hints is None else pack(self._hints.shown(one.calls, update.episodes))
        return await self._learner.forward(seen, reference=True)


class PrivilegedContext:
    """The text that stands under a key of each task."""

    def __init__(self, key: str, model: str, renderer: str | None) -> None:
        self._key = key
        self._model = model
        self._renderer = renderer
        self._tokens: dict[str, Int32Array] = {}

    def shown(self, calls: Sequence[CreditedCall], episodes: Sequence[Episode]) -> list[CreditedCall]:
        """The calls as the teacher sees them, in their order. Raises ConfigError for a task without the text."""
        tasks = {e.rollout.rollout_id: e.rollout.input for e in episodes}
        return [self._with(c, self._message(tasks[c.call.info.rollout_id])) for c in calls]

    def _with(self, credited: CreditedCall, message: Int32Array) -> CreditedCall:
        call = credited.call
        return replace(credited, call=replace(call, prompt_ids=in_front(message, call.prompt_ids)))

    def _message(self, task: Any) -> Int32Array:
        text = task.get(self._key) if isinstance(task, Mapping) else None
        if not isinstance(text, str) or not text:
            raise ConfigError(
                f"Each task needs a hint for the teacher, a text, in its field {self._key!r}; here it is {text!r}. "
                "Give tasks that have it, or name another field: hint='…'."
            )
        if text not in self._tokens:
            self._tokens[text] = message_tokens(self._rendering, text)
        return self._tokens[text]

    @cached_property
    def _rendering(self) -> Rendering:
        from agentlightning.models import resolve_model
        from agentlightning.rendering import load_rendering

        return load_rendering(resolve_model(self._model), self._renderer)


def message_tokens(rendering: Rendering, text: str) -> Int32Array:
    """A system message up to where another message begins, with the first tokens of that one.

    It is what a prompt of that message alone and one of it and a question have in common.
    """
    message: Any = {"role": "system", "content": text}
    alone = rendering.render([message], None)
    followed = rendering.render([message, {"role": "user", "content": "?"}], None)
    shorter = min(len(alone), len(followed))
    differ = np.flatnonzero(alone[:shorter] != followed[:shorter])
    return alone[: differ[0] if len(differ) else shorter]


def in_front(message: Int32Array, prompt: Int32Array) -> Int32Array:
    """The message and then the prompt. A token that begins every text stands once, and so does what both share where
    they meet."""
    if prompt[0] == message[0] and message[0] not in message[1:] and len(prompt) > 1:
        prompt = prompt[1:]
    shared = (k for k in range(min(len(message), len(prompt)), 0, -1) if np.array_equal(message[-k:], prompt[:k]))
    return np.concatenate([message, prompt[next(shared, 0) :]])
