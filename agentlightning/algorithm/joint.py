"""Joint: prompts and weights under one budget of rollouts. Rounds of either, chosen by what the last ones gained.

The prompt is part of what a policy is: all rollouts of a training step run under one prompt, so siblings are never
compared across prompts; and what a candidate prompt earned counts for the weights that it was run under only.

A run is resumed from its last checkpoint of the weights. Finished rounds are in `joint.jsonl`; a round of prompts that
was interrupted is taken again, with its rollouts read from the store and the critic's answers from the journal.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, Literal

from agentlightning.algorithm.base import Algorithm, PolicySpec, TrainingContext
from agentlightning.algorithm.grpo import GRPO
from agentlightning.algorithm.hints import OF_THE_TRAINER
from agentlightning.algorithm.prompts.candidate import Candidate, templates_in
from agentlightning.algorithm.prompts.evaluation import EvaluationRequest, pairs
from agentlightning.algorithm.prompts.journal import Journal
from agentlightning.algorithm.prompts.run import PromptRun
from agentlightning.algorithm.prompts.settings import PromptSettings
from agentlightning.algorithm.prompts.words import write_best
from agentlightning.algorithm.run import TrainingRun
from agentlightning.algorithm.sampling.schedule import TaskSchedule
from agentlightning.algorithm.sampling.source import FinishedRollouts, RolloutSource
from agentlightning.arguments import GivenByName
from agentlightning.errors import ConfigError
from agentlightning.litagent import LitAgent
from agentlightning.types import Dataset, PromptTemplate
from agentlightning.types.finding import counted

JOURNAL_FILE = "joint.jsonl"


@dataclass(kw_only=True)
class Joint(GivenByName, Algorithm):
    """Improves an agent's prompts and its model's weights in turns, within `budget_rollouts`.

    joint = agl.Joint(prompt=agl.GEPA(client), weights=agl.GRPO(model="…"), budget_rollouts=5000)
    trainer = agl.Trainer(algorithm=joint, initial_resources={"prompt_template": agl.PromptTemplate(template="…")})
    trainer.fit(agent, train_tasks, val_tasks)
    joint.get_best_prompts(), trainer.run_dir / "checkpoints"
    """

    _others = OF_THE_TRAINER

    prompt: PromptSettings
    """How prompts are tuned; its budget of rollouts is that of a round."""
    weights: GRPO
    """How the model is trained; `steps`, `epochs`, `val_every`, `save_every`, `flat_steps` follow from the rounds."""
    budget_rollouts: int
    """The most rollouts in all, validation included."""
    steps_per_round: int = 4
    """Training steps in a round of weights."""
    rollouts_per_round: int | None = None
    """The most rollouts in a round of prompts; None: as many as a round of weights has."""
    memory: int = 2
    """How many of its last rounds say what prompts or weights gain per rollout."""
    patience: int = 3
    """What was passed over for so many rounds is tried again."""
    arms: Sequence[Arm] = field(default=("prompt", "weights"), repr=False)
    """What may be improved; one alone, to compare with."""

    def __post_init__(self) -> None:
        if self.weights.max_staleness or self.weights.quorum < 1:
            raise ConfigError("Joint changes the prompt between steps: leave out max_staleness and quorum.")
        if self.weights.adapters or not self.weights.samples:
            raise ConfigError("Joint trains one policy on what it samples; these weights have several, or sample none.")
        if self.prompt.budget_rollouts is not None:
            raise ConfigError("The budget is Joint's: Joint(budget_rollouts=…), and rollouts_per_round for a round.")
        for name in ("budget_rollouts", "steps_per_round", "memory", "patience"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}.")
        per_step = self.weights.tasks_per_step * self.weights.group_size
        self._training = replace(
            self.weights,
            steps=math.ceil(self.budget_rollouts / per_step) + self.steps_per_round,
            val_every=self.steps_per_round,
            save_every=self.steps_per_round,
            flat_steps=0,  # where siblings earn the same, another prompt may change that
        )
        self.rounds: list[Round] = []
        """The finished ones."""
        self._best: dict[str, PromptTemplate] = {}

    @property
    def policy(self) -> PolicySpec:
        return self.weights.policy

    @property
    def serial(self) -> bool:
        return self.weights.serial

    def check_agent(self, agent: LitAgent[Any]) -> None:
        self.weights.check_agent(agent)

    def get_best_prompts(self) -> dict[str, PromptTemplate]:
        """The templates that the weights were last trained under, by name. Raises ConfigError before a run."""
        if not self._best:
            raise ConfigError("There is no best prompt before a run: Trainer(algorithm=…).fit(agent, tasks) first.")
        return dict(self._best)

    async def run(self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None) -> None:
        """Round after round, until the budget does not cover another one."""
        if not train_dataset or not val_dataset:
            raise ConfigError("Joint needs training and validation tasks: Trainer.fit(agent, tasks, held_out).")
        context = self.context
        self._training.attach(context)
        run = TrainingRun(self._training, context, train_dataset, val_dataset, self._make_source)
        state = _Joint(self, run, train_dataset, val_dataset)
        try:
            async with run:
                await state.to_the_end()
        finally:
            self.rounds, self._best = state.rounds, state.templates
            state.close()

    def _make_source(self, schedule: TaskSchedule, again: Sequence[int], _: FinishedRollouts) -> _Prompted:
        """What was finished under another prompt is not used."""
        return _Prompted(self._training, schedule, again)


class _Prompted(RolloutSource):
    """Samples under the prompt of now: what the algorithm's context says when a step begins."""

    def __init__(self, settings: GRPO, schedule: TaskSchedule, again: Sequence[int]) -> None:
        super().__init__(settings, settings.context, schedule, again)
        self._training = settings

    async def sample(self, step: int, position: int) -> Any:
        self._context = self._training.context
        return await super().sample(step, position)


class _Joint:
    """What a run under way knows: the prompt of now, what is spent, and the rounds behind it."""

    def __init__(self, settings: Joint, run: TrainingRun, train: Dataset[Any], val: Dataset[Any]) -> None:
        self.settings = settings
        self.rounds: list[Round] = []
        self.spent = 0
        self._run = run
        self._train, self._val = train, val
        self._context: TrainingContext = settings.context
        self._journal = Journal(self._context.run_dir / JOURNAL_FILE)
        given = self._context.resources.resources if self._context.resources else {}
        self.templates = templates_in(given)
        if not self.templates:
            raise ConfigError("There is no prompt to tune: Trainer(initial_resources={'prompt_template': …}).")
        settings.prompt.require_critic(self.templates)
        self._first = Candidate.of({name: t.template for name, t in self.templates.items()})
        self._now = self._first
        self._val_reward = 0.0

    def close(self) -> None:
        self._journal.close()

    async def to_the_end(self) -> None:
        """Raises Stopped when the user wants to stop."""
        s, reporter = self.settings, self._context.reporter
        reporter.note(f"Joint improves {' and '.join(s.arms)} within {counted(s.budget_rollouts, 'rollout')}.")
        await self._begin()
        while (chosen := self._next()) is not None:
            arm, why = chosen
            number = len(self.rounds) + 1
            reporter.note(
                f"Round {number}: {arm}, because {why}. {self.spent} of {counted(s.budget_rollouts, 'rollout')} spent."
            )
            before = self.spent
            gain = await (self._train_weights() if arm == "weights" else self._tune_prompts(number))
            self.rounds.append(Round(arm=arm, rollouts=self.spent - before, gain=gain))
            self._write(number)
            reporter.note(f"Round {number}: {gain:+.3f}, validation reward now {self._val_reward:.3f}.")
        reporter.note(
            f"Spent: {self.spent} of {counted(s.budget_rollouts, 'rollout')} in {counted(len(self.rounds), 'round')}."
        )

    # ---- which round comes next, and what is known of those before -------------------------------------------------

    def _next(self) -> tuple[Arm, str] | None:
        """None where the budget does not cover a training step and a validation, or a round of prompts any more."""
        s = self.settings
        least = self._per_step + self._per_validation
        over = self._run.is_over
        if s.budget_rollouts - self.spent < least or (self.rounds and not self.rounds[-1].rollouts):
            return None
        arms: list[Arm] = [arm for arm in s.arms if arm == "prompt" or not over]
        if len(arms) < 2:
            return (arms[0], "there is nothing else to improve") if arms else None
        return choose(self.rounds, s.memory, s.patience)

    @property
    def _per_step(self) -> int:
        return min(self.settings.weights.tasks_per_step, len(self._train)) * self.settings.weights.group_size

    @property
    def _per_validation(self) -> int:
        return len(self._val) * self.settings.weights.val_repeats

    async def _begin(self) -> None:
        """Where the checkpoint left the run; the rounds of the journal that came after it are taken again."""
        before = await self._run.validate_before()
        self.spent, at = self._per_validation, 0
        for number in itertools.count(1):
            known = self._journal.get(f"round-{number}")
            if known is None or known["step"] > self._run.done:
                break
            at = known["step"]
            self.rounds.append(Round(arm=known["arm"], rollouts=known["rollouts"], gain=known["gain"]))
            self.spent += known["rollouts"]
            self._val_reward = known["val_reward"]
            self._now = Candidate.of(known["texts"])
        self.spent += (self._run.done - at) * self._per_step
        await self._prompt_of_now()
        if not self.rounds and before is None:
            before = await self._run.end_early()
            self.spent += self._per_validation
        if not self.rounds:
            self._val_reward = before or 0.0

    def _write(self, number: int) -> None:
        entry = {"arm": self.rounds[-1].arm, "rollouts": self.rounds[-1].rollouts, "gain": self.rounds[-1].gain}
        place = {"step": self._run.done, "val_reward": self._val_reward, "texts": self._now.by_name}
        self._journal.put(f"round-{number}", {**entry, **place})

    async def _prompt_of_now(self) -> None:
        """Whatever is sampled from here on runs under it."""
        base = self._context.resources.resources if self._context.resources else {}
        self.templates = self._now.resources(self.templates)
        stored = await self._context.store.add_resources({**base, **self.templates})
        self._context = replace(self._context, resources=stored)
        self._run.settings.attach(self._context)
        self._run.context = self._context

    # ---- rounds ----------------------------------------------------------------------------------------------------

    async def _train_weights(self) -> float:
        """Steps up to the next validation; the gain is what that says more than the one before."""
        run, before = self._run, self._val_reward
        found: float | None = None
        while found is None and not run.is_over:
            sampled = await run.sampled()
            if sampled is None:
                break
            run.check(sampled)
            learned = await run.learn(sampled)
            published = await run.publish(sampled)
            self.spent += len(sampled.episodes) + len(sampled.dropped)
            validated = await run.validate(sampled)
            found = validated.get("val_reward")
            self.spent += self._per_validation if validated else 0
            spent = {"spent_rollouts": self.spent}
            await run.end_step(sampled, {**learned, **published, **validated, **spent})
            left = self.settings.budget_rollouts - self.spent
            if found is None and left < self._per_step + self._per_validation:
                break
        if found is None:
            found = await run.end_early()
            self.spent += self._per_validation
        self._val_reward = before if found is None else found
        return self._val_reward - before

    async def _tune_prompts(self, number: int) -> float:
        """A search from the prompt of now, under the weights of now; the gain is what its winner earns more."""
        s = self.settings
        left = s.budget_rollouts - self.spent
        most = s.rollouts_per_round or s.steps_per_round * self._per_step + self._per_validation
        everywhere = len(self._val)  # what it takes to see the winner on all validation tasks
        settings = replace(s.prompt, budget_rollouts=min(left, most) - everywhere, seed=s.prompt.seed + number)
        settings.attach(self._context)
        search = _Search(settings, self._context, self.templates, self._train, self._val, under=f"r{number}-")
        async with search:
            await settings.search(search)
            if search.incumbent != search.seed:
                search.ledger.budget = replace(search.ledger.budget, rollouts=search.ledger.rollouts + everywhere)
                await search.evaluate(
                    [EvaluationRequest(search.incumbent, "val", range(everywhere))], "validating the new prompt"
                )
        self.spent += search.ledger.rollouts
        both = list(pairs(search.known(search.seed), search.known(search.incumbent)))
        if search.incumbent == search.seed or not both:
            return 0.0
        gain = sum(after - before for before, after in both) / len(both)
        self._now = search.incumbent
        self._val_reward = search.val_mean(search.incumbent) or 0.0
        write_best(search)
        await self._prompt_of_now()
        return gain


class _Search(PromptRun):
    """A round's search: its rows are events of the run, whose steps are those of the weights."""

    async def __aenter__(self) -> _Search:
        return self

    def report(self, step: int, steps: int | None, train: float | None, best: float | None) -> None:
        known = {"round": step, "reward": train, "best_val": best, "candidates": len(self.candidates)}
        self.context.reporter.event("prompts", {**known, "rollouts": self.ledger.rollouts})


Arm = Literal["prompt", "weights"]
ARMS: tuple[Arm, ...] = ("prompt", "weights")


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """The result of a finished round."""

    arm: Arm
    rollouts: int
    gain: float
    """How much more the agent earns on the same validation tasks than before the round."""

    @property
    def rate(self) -> float:
        """The gain in validation reward per hundred rollouts."""
        return 100 * self.gain / max(self.rollouts, 1)


def choose(rounds: Sequence[Round], memory: int, patience: int) -> tuple[Arm, str]:
    """The arm of the next round, and why.

    Each arm is tried once. Then it is the one that gained more per rollout in its last `memory` rounds; but one that
    was passed over for `patience` rounds is tried again, because what the other did may have made it worth something,
    and while neither gains they take turns.
    """
    for arm in ARMS:
        if all(r.arm != arm for r in rounds):
            return arm, "it was not tried yet"
    rates = {arm: fmean([r.rate for r in rounds if r.arm == arm][-memory:]) for arm in ARMS}
    waited = {arm: next(n for n, r in enumerate(reversed(rounds)) if r.arm == arm) for arm in ARMS}
    gains = " and ".join(f"{arm} {rate:+.4f}" for arm, rate in rates.items())
    gains = f"the last {memory} rounds of each gained per 100 rollouts: {gains}"
    longest = max(ARMS, key=lambda arm: waited[arm])
    if waited[longest] >= patience:
        return longest, f"it was passed over for {waited[longest]} rounds; {gains}"
    if max(rates.values()) <= 0:
        return longest, f"neither gains, so they take turns; {gains}"
    return max(ARMS, key=lambda arm: rates[arm]), gains
