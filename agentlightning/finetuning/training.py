"""The process that trains one job: `python -m agentlightning.finetuning.training FOLDER`, started by the queue.

It trains in the folder, from its last checkpoint if there is one, and leaves what came of it in `outcome.json`. A line
on its output says that there is something new to read in the folder. When its input ends, because the job is to pause
or the server died, it stops after the step under way, with a checkpoint.

Jobs on examples also measure the loss on held-out ones, on a batch after each step and on all where a checkpoint is
written, and how often a token of chats is the model's likeliest one. Both are parts of the run (`ValidationLoss`,
`TokenAccuracy`).
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import select
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from agentlightning.algorithm.checkpoint import list_checkpoints
from agentlightning.algorithm.episode import Episode
from agentlightning.algorithm.part import Part, PolicyHooks, PolicyScope, RunHooks, RunScope
from agentlightning.algorithm.sampling.examples import chat_episodes, pair_episodes, rendering_of
from agentlightning.algorithm.settings import TrainingSettings
from agentlightning.backend import POLICY
from agentlightning.errors import AgentLightningError
from agentlightning.files import atomic_write, open_private
from agentlightning.finetuning.graders import parse_grader
from agentlightning.finetuning.graders.agent import GradedCompletion
from agentlightning.finetuning.graders.settings import owners_settings
from agentlightning.finetuning.lines import LineError, Lines
from agentlightning.finetuning.progress import GraderMeasures
from agentlightning.finetuning.recipe import BaseModel, algorithm
from agentlightning.finetuning.requests import Integration, Method
from agentlightning.gateway import Provider
from agentlightning.learner.base import Evaluates, LossConfig
from agentlightning.learner.packing import CreditedCall, pack, split_by_budget
from agentlightning.litagent import LitAgent, Program
from agentlightning.metrics import SilentConsole, Sink
from agentlightning.metrics.sink import METRICS_FILE
from agentlightning.metrics.trackers import WandbSink
from agentlightning.trainer import Trainer
from agentlightning.trainer.example import load_agent
from agentlightning.trainer.sync import run_sync
from agentlightning.types import Dataset
from agentlightning.types.arrays import np

MODELS_URL, MODELS_KEY = "AGL_JOB_MODELS_URL", "AGL_JOB_MODELS_KEY"
"""Variables of the environment: where a job's graders ask models, and with which key."""
JOB_FILE, OUTCOME_FILE, LOCK_FILE = "job.json", "outcome.json", "process.lock"


class JobFile(msgspec.Struct, frozen=True, kw_only=True):
    """What `job.json` says."""

    id: str
    method: Method
    taken: Mapping[str, Any]
    base: str
    settings: Mapping[str, Any]
    seed: int
    training_file: str
    validation_file: str | None
    integrations: list[Integration]
    agent: str | None = None
    """The agent that is trained: `file.py:agent`, or a command."""


class OutcomeFile(msgspec.Struct, frozen=True, kw_only=True):
    """What `outcome.json` says."""

    status: str
    """succeeded, stopped or failed."""
    code: str | None = None
    message: str | None = None
    param: str | None = None


class _Nudge(Sink):
    """Writes a line whenever there is something new to read in the folder."""

    def step(self, metrics: Mapping[str, Any]) -> None:
        self._say()

    def event(self, name: str, data: Mapping[str, Any]) -> None:
        self._say()

    def _say(self) -> None:
        with contextlib.suppress(OSError):  # nobody reads: the server died, and the next one reads the folder
            os.write(1, b"\n")


def main() -> None:
    folder = Path(sys.argv[1])
    with open_private(folder / LOCK_FILE, "a+") as lock:  # held until this process is gone
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        if select.select([0], [], [], 0)[0] and not os.read(0, 1):  # the server that wanted this died meanwhile
            return
        outcome = run_sync(_outcome(folder, msgspec.json.decode((folder / JOB_FILE).read_bytes(), type=JobFile)))
        atomic_write(folder / OUTCOME_FILE, msgspec.json.encode(outcome).decode())


async def _outcome(folder: Path, job: JobFile) -> OutcomeFile:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    threading.Thread(target=_watch_input, args=(loop, stop), daemon=True).start()
    try:
        result = await _train(folder, job, stop)
    except LineError as error:
        return OutcomeFile(status="failed", code="invalid_training_file", message=str(error), param="training_file")
    except AgentLightningError as error:
        return OutcomeFile(status="failed", code="training_failed", message=str(error))
    return OutcomeFile(status="stopped" if result.stopped else "succeeded")


def _watch_input(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    while os.read(0, 4096):
        pass
    loop.call_soon_threadsafe(stop.set)


async def _train(folder: Path, job: JobFile, stop: asyncio.Event) -> Any:
    kind = job.method.type
    train = Lines(Path(job.training_file), job.method.lines)
    val = None if job.validation_file is None else Lines(Path(job.validation_file), job.method.lines)
    settings = algorithm(kind, job.taken, len(train), BaseModel(job.id, job.base, job.settings), seed=job.seed)
    resumes = bool(list_checkpoints(folder))
    if not resumes:  # killed before the first checkpoint was written
        (folder / METRICS_FILE).unlink(missing_ok=True)
    trainer = Trainer(
        algorithm=_with_validation(settings, kind, val),
        run_dir=folder,
        resume=folder if resumes else None,
        console=SilentConsole(),
        models=_models(job),
        sinks=[_Nudge(), *_trackers(job, folder)],
    )
    if kind != "reinforcement":
        return await trainer.fit_async(None, train, None, stop=stop)
    return await trainer.fit_async(_agent(job), train, val, stop=stop)


def _models(job: JobFile) -> dict[str, Provider]:
    """The models that the job's grader asks: the owner's own providers, otherwise the server."""
    method = job.method.reinforcement
    if method is None or method.grader is None:
        return {}
    url, key = os.environ[MODELS_URL], os.environ[MODELS_KEY]
    names = parse_grader(method.grader).models
    of_owner = owners_settings()
    return {name: of_owner.provider(name) or Provider(base_url=url, api_key=key, model=name) for name in names}


def _agent(job: JobFile) -> LitAgent[Any]:
    if job.agent is not None:
        return agent_of(job.agent)
    method = job.method.reinforcement
    assert method is not None
    assert method.grader is not None
    return GradedCompletion(method.grader, response_format=method.response_format)


def agent_of(reference: str) -> LitAgent[Any]:
    """What `file.py:agent` names, or the program that a command starts. Raises ConfigError."""
    file, _, name = reference.rpartition(":")
    return load_agent(reference) if file.endswith(".py") and name.isidentifier() else Program(reference)


def _with_validation(settings: TrainingSettings, kind: str, val: Lines | None) -> TrainingSettings:
    if kind == "reinforcement":
        return replace(settings, parts=(GraderMeasures(),))
    parts: tuple[Part, ...] = (TokenAccuracy(),) if kind == "supervised" else ()
    if val is not None:
        parts += (ValidationLoss(examples=val, episodes_of=pair_episodes if kind == "dpo" else chat_episodes),)
    return replace(settings, parts=parts)


def _trackers(job: JobFile, folder: Path) -> list[Sink]:
    return [WandbSink(**_of_wandb(one), folder=folder) for one in job.integrations]


def _of_wandb(one: Integration) -> dict[str, Any]:
    given = json.loads(msgspec.json.encode(one.wandb))
    return {name: value for name, value in given.items() if value is not None}


_MEASURED = LossConfig(name="reinforce", token_accuracy=True)


@dataclass(frozen=True, kw_only=True)
class TokenAccuracy(Part):
    """Measures `token_accuracy`: how often a token that is learned was the model's likeliest one before the step."""

    name = "token_accuracy"

    def in_policy(self, policy: PolicyScope) -> PolicyHooks | None:
        return _AccuracyMeasured()


class _AccuracyMeasured(PolicyHooks):
    def loss(self, loss: LossConfig) -> LossConfig:
        return msgspec.structs.replace(loss, token_accuracy=True)


@dataclass(frozen=True, kw_only=True)
class ValidationLoss(Part):
    """Measures `valid_loss` and `full_valid_loss`: nats per token of chats, or what DPO minimises for preferences. Of
    chats also `valid_token_accuracy` and `full_valid_token_accuracy`, where the learner can."""

    name = "validation_loss"
    examples: Dataset[Any] = field(repr=False)
    episodes_of: Callable[[Any, Any, str], list[Episode]] = field(repr=False)
    """Makes the rollouts of an example, as in training."""

    def in_run(self, run: RunScope) -> RunHooks:
        return _ValidationMeasures(self, run)


class _ValidationMeasures(RunHooks):
    def __init__(self, part: ValidationLoss, run: RunScope) -> None:
        self._part = part
        self._run = run
        self._learner = run.backend.learner(POLICY)
        self._last = run.settings.steps_of(len(run.tasks))
        self._made: list[list[Episode]] = []
        """By example, once it is needed."""

    async def published(self, step: int, versions: Mapping[str, int], episodes: Sequence[Episode]) -> dict[str, Any]:
        if not self._made:
            rendering, examples = rendering_of(self._run.settings), self._part.examples
            self._made = [self._part.episodes_of(rendering, examples[i], f"valid-{i}") for i in range(len(examples))]
        batch, size = self._run.settings.tasks_per_step, len(self._made)
        chosen = [self._made[((step - 1) * batch + i) % size] for i in range(min(batch, size))]
        found = await self._measured("valid", chosen)
        if step % self._run.settings.save_every == 0 or step == self._last:
            found |= await self._measured("full_valid", self._made)
        return found

    async def _measured(self, name: str, examples: Sequence[Sequence[Episode]]) -> dict[str, Any]:
        loss, accuracy = await self._loss(examples)
        return {f"{name}_loss": loss} | ({} if accuracy is None else {f"{name}_token_accuracy": accuracy})

    async def _loss(self, examples: Sequence[Sequence[Episode]]) -> tuple[float, float | None]:
        """The mean over tokens, or over pairs; and the share of tokens that are the likeliest ones."""
        settings = self._run.settings
        pairs = settings.loss_spec.pairs
        calls: list[CreditedCall] = []
        for group, episodes in enumerate(examples):
            for episode in episodes:
                for call in episode.calls:
                    sign = np.full(len(call.response_ids), 1.0 if episode.reward else -1.0, dtype=np.float32)
                    calls.append(CreditedCall(call, len(calls), group, sign, sign))
        margins, total, tokens, likeliest = np.zeros(len(examples)), 0.0, 0, 0.0
        evaluating = self._learner if isinstance(self._learner, Evaluates) and not pairs else None
        for some in split_by_budget(calls, settings.tokens_per_batch, whole_groups=pairs):
            batch = pack(some)
            if evaluating is not None:
                passed = await evaluating.evaluate([batch], _MEASURED)
                logprobs_E = passed.logprobs
                likeliest += passed.metrics["token_accuracy"] * len(logprobs_E)
            else:
                logprobs_E = await self._learner.forward(batch)
            if pairs:
                gap_E = logprobs_E - await self._learner.forward(batch, reference=True)
                np.add.at(margins, batch.group_E, batch.advantages_E * gap_E)
            total, tokens = total - float(logprobs_E.sum()), tokens + len(logprobs_E)
        if pairs:
            return float(np.logaddexp(0.0, -settings.loss_config().dpo_beta * margins).mean()), None
        return total / max(tokens, 1), None if evaluating is None else likeliest / max(tokens, 1)


if __name__ == "__main__":
    main()
