"""What a prompt optimiser works on: candidates, their evaluation, the critic, the budget, and the incumbent.

The incumbent is the prompt that a run stands for. A candidate takes its place only when the rewards on the same
validation tasks are evidence enough (`significance`), and when it does not make the agent fail more often.

A run is resumed by taking the same course again: rollouts that are finished are in the store, answers of the critic in
the journal, so that nothing is paid for twice.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from shlex import quote
from types import TracebackType
from typing import Any, Self

from agentlightning.algorithm.base import TrainingContext
from agentlightning.algorithm.prompts.budget import BudgetSpent, Ledger
from agentlightning.algorithm.prompts.candidate import Candidate, difference, flaw, placeholders, templates_in
from agentlightning.algorithm.prompts.critic import CriticAnswer, CriticFailure, Question, ask
from agentlightning.algorithm.prompts.evaluation import (
    EvaluationRequest,
    Evaluator,
    Split,
    Trial,
    mean,
    more_failures,
    pairs,
)
from agentlightning.algorithm.prompts.journal import Journal
from agentlightning.algorithm.prompts.settings import PromptSettings, held_out
from agentlightning.algorithm.prompts.significance import evidence, threshold
from agentlightning.algorithm.rollout_verdicts import with_cause
from agentlightning.errors import ConfigError
from agentlightning.metrics.intervals import power_words
from agentlightning.types import Dataset, PromptTemplate
from agentlightning.types.finding import counted

JOURNAL_FILE = "critic.jsonl"
_QUESTIONS = 3
"""How many questions a critic may refuse before it is taken for one that answers none."""
COLUMNS = (
    ("step", "round", "d"),
    ("candidates", "candidates", "d"),
    ("reward", "train", ".3f"),
    ("best_val", "best val", ".3f"),
    ("val_reward", "incumbent", ".3f"),
    ("rollouts", "rollouts", "d"),
    ("critic_tokens", "critic tokens", "d"),
    ("cost", "cost", ".4f"),
    ("seconds", "seconds", ".1f"),
)


@dataclass(frozen=True, slots=True)
class ComparisonVerdict:
    """The result of comparing a candidate with the incumbent."""

    better: bool
    e_value: float
    needed: float
    tasks: int
    difference: float
    """Mean over the tasks that both have a reward for."""
    why: str


class PromptRun:
    """One run of a prompt optimiser. A context: closing it lets the critic and the journal go."""

    def __init__(
        self,
        settings: PromptSettings,
        context: TrainingContext,
        templates: Mapping[str, PromptTemplate],
        train: Dataset[Any],
        val: Dataset[Any],
        under: str = "",
    ) -> None:
        """`under`: names what its rollouts depend on besides the prompt, where that changes within a run."""
        self.settings = settings
        self.templates = templates
        self.train, self.val = train, val
        self.ledger = Ledger(settings.budget)
        self.incumbent = self.seed = Candidate.of({name: t.template for name, t in templates.items()})
        self.candidates: dict[str, Candidate] = {self.seed.key: self.seed}
        self.rejected: list[str] = []
        """Why edits did not become candidates."""
        self.closest: tuple[Candidate, ComparisonVerdict] | None = None
        """The best comparison that was not evidence enough."""
        self._context = context
        splits: Mapping[Split, Dataset[Any]] = {"train": train, "val": val}
        self._under = under
        self._evaluator = Evaluator(
            context, templates, splits, self.ledger, settings.config, settings.reward_range, under, settings.seed
        )
        self._critic = settings.make_critic()
        self._journal = Journal(context.run_dir / JOURNAL_FILE)
        self._requests: Counter[str] = Counter()
        self._began = time.monotonic()
        self.val_order: Sequence[int] = shuffled(range(len(val)), settings.seed)
        """The validation tasks in the order in which they are used."""
        self.train_order: Sequence[int] = shuffled(range(len(train)), settings.seed)
        """The same of the training tasks, where they are taken one after the other."""

    @classmethod
    def make(cls, settings: PromptSettings, train: Dataset[Any] | None, val: Dataset[Any] | None) -> PromptRun:
        """Raises ConfigError where there is nothing to tune or to tune on."""
        context = settings.context
        templates = templates_in(context.resources.resources if context.resources else {})
        if not templates:
            raise ConfigError(
                "There is no prompt to tune. Give one: Trainer(initial_resources={'prompt_template': "
                "PromptTemplate(template='…')}), and let the agent take a parameter of that name."
            )
        for note in _notes(templates):
            context.reporter.note(note)
        settings.require_critic(templates)
        if train is None or len(train) == 0:
            raise ConfigError(f"{type(settings).__name__} needs training tasks: Trainer.fit(agent, tasks).")
        if val is None or len(val) == 0:
            train, val = _split(train, settings.seed)
            context.reporter.note(
                f"There are no validation tasks: {len(val)} of the training tasks are set apart for validation."
            )
        settings.require_rollouts(len(train), len(val))
        return cls(settings, context, templates, train, val)

    async def __aenter__(self) -> Self:
        s, reporter = self.settings, self._context.reporter
        columns = [c for c in COLUMNS if c[0] != "cost" or s.prices is not None]
        reporter.columns(columns)
        names = ", ".join(self.templates)
        limits = [
            f"{limit:g} {what}"
            for limit, what in (
                (s.budget_rollouts, "rollouts"),
                (s.budget_critic_tokens, "critic tokens"),
                (s.budget_cost, "cost"),
            )
            if limit is not None
        ]
        reporter.note(
            f"{type(s).__name__} tunes the prompt {names} on {counted(len(self.train), 'training task')} and "
            f"{counted(len(self.val), 'validation task')}. Budget: {', '.join(limits) or 'none'}.\n"
            f"{self._power()}\n"
            f"Everything is recorded in {self._context.run_dir}. Ctrl-C stops cleanly.\n"
        )
        return self

    def _power(self) -> str:
        """What the validation tasks can show, said before anything is spent."""
        needed = threshold(self.settings.significance, self.settings.comparisons())
        return power_words(len(self.val), lambda differences: evidence(differences) >= needed)

    async def __aexit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self._journal.close()
        await self._critic.close()

    # ---- candidates ------------------------------------------------------------------------------------------------

    def admit(self, parent: Candidate, name: str, text: str | None, foreign: Sequence[str] = ()) -> Candidate | None:
        """The parent with an edited template; None, with the reason kept, for an edit that must not be run."""
        if text is None:
            return self.reject("malformed: the new template is not between <new_template> and </new_template>")
        why = flaw(self.templates[name], parent.by_name[name], text, foreign, self.settings.max_copied_words)
        if why is not None:
            return self.reject(why)
        made = parent.edited(name, text)
        return self.candidates.setdefault(made.key, made)

    def reject(self, why: str) -> None:
        """Say why an edit does not become a candidate; the run goes on without it."""
        self.rejected.append(why)
        self._context.reporter.event("edit rejected", {"why": why})

    # ---- rollouts --------------------------------------------------------------------------------------------------

    async def evaluate(self, wanted: Sequence[EvaluationRequest], status: str) -> list[list[Trial]]:
        """Runs trials of candidates, as `Evaluator.run` does."""
        return await self._evaluator.run(wanted, status)

    def known(self, candidate: Candidate, split: Split = "val") -> dict[int, Trial]:
        """The validation trials of a candidate so far, by task."""
        return self._evaluator.known(candidate, split)

    def val_mean(self, candidate: Candidate) -> float | None:
        """The candidate's mean reward over all validation tasks that it has run on."""
        return mean(list(self.known(candidate).values()))

    def check_first(self) -> None:
        """Raises ConfigError where the first prompt has earned nothing on any task because the agent or its model
        failed: no edit would be to blame or to thank for it.
        """
        trials = list(self.known(self.seed).values())
        if not trials:
            return
        run_dir = self._context.run_dir
        if all(t.refusal is not None for t in trials):
            raise ConfigError(
                f"The agent's model answered none of its calls on the first {counted(len(trials), 'validation task')}: "
                f"{trials[-1].refusal}\nCheck the model's URL, its name and its key. No critic was called. To see "
                f"the calls:  agl show {quote(str(run_dir))}"
            )
        if all(t.reward is None for t in trials):
            error = (trials[0].error or trials[0].outcome.value).strip()
            why = with_cause(error, error.partition("\n")[0][:300])
            raise ConfigError(
                f"The agent failed on {counted(len(trials), 'validation task')}, all that it was first run on. "
                f"The first: "
                f"{why}\nNo critic was called. To see them:  agl show {quote(str(run_dir))} --failed"
            )

    # ---- the critic ------------------------------------------------------------------------------------------------

    async def ask(self, model: str, prompts: Sequence[str], temperature: float) -> list[CriticAnswer | CriticFailure]:
        """Put questions to the critic, all at once; an answer that is in the journal is not asked for again.

        Raises BudgetSpent before any is sent if the rest of the budget may not cover all of them.
        """
        limit = self.settings.critic_max_tokens
        questions = [
            Question(model=model, messages=[{"role": "user", "content": p}], temperature=temperature, max_tokens=limit)
            for p in prompts
        ]
        self.ledger.admit_critic(sum(q.expected_tokens for q in questions))
        keys = [self._numbered(_key(q)) for q in questions]
        self._context.reporter.status(f"asking the critic {len(questions)} questions")
        answers = await asyncio.gather(*(self._ask(k, q) for k, q in zip(keys, questions, strict=True)))
        self._check_critic(model, answers)
        for key, answer in zip(keys, answers, strict=True):
            self._keep(key, answer)
            self.ledger.critic_calls += 1
            if isinstance(answer, CriticAnswer):
                self.ledger.critic_input += answer.input_tokens
                self.ledger.critic_output += answer.output_tokens
            else:
                self.reject(f"the critic did not answer ({answer.kind}): {answer.why}")
        return answers

    def _check_critic(self, model: str, answers: Sequence[CriticAnswer | CriticFailure]) -> None:
        """Raises ConfigError where the critic has answered none of its questions since the run began: there is nobody
        who improves a prompt. One that is there and refuses a question may answer another: it is given `_QUESTIONS` of
        them. The failures that end a run are in no journal, so that a resumed run asks again.
        """
        failures = [a for a in answers if isinstance(a, CriticFailure)]
        if not failures or len(failures) < len(answers) or self.ledger.critic_output > 0:
            return
        before, is_there = self.ledger.critic_calls, all(a.kind in ("refused", "empty") for a in failures)
        if before + len(failures) < _QUESTIONS and is_there:
            return
        raise ConfigError(
            f"The critic answered none of its first {before + len(failures)} questions: {failures[0].why}\nCheck its "
            f"URL, its model ('{model}') and its key, then go on with the same command and  --resume "
            f"{quote(str(self._context.run_dir))}"
        )

    def _numbered(self, key: str) -> str:
        """The same question put several times is answered several times."""
        self._requests[key] += 1
        return f"{self._under}{key}-{self._requests[key]}"

    async def _ask(self, key: str, question: Question) -> CriticAnswer | CriticFailure:
        known = self._journal.get(key)
        if known is not None:
            kind = CriticAnswer if "text" in known else CriticFailure
            return kind(**known)
        answer = await ask(self._critic, question, self.settings.critic_timeout)
        if isinstance(answer, CriticAnswer):  # at once: it is paid for
            self._keep(key, answer)
        return answer

    def _keep(self, key: str, answer: CriticAnswer | CriticFailure) -> None:
        if self._journal.get(key) is None:
            self._journal.put(key, {name: getattr(answer, name) for name in answer.__slots__})

    # ---- the incumbent ---------------------------------------------------------------------------------------------

    async def challenge(self, candidate: Candidate, tests: int, batch: int) -> ComparisonVerdict:
        """Compare a candidate with the incumbent on the same validation tasks, on more of them while it leads.

        `tests` is how many comparisons there may be in all (see `threshold`); `batch` is how many tasks are added at a
        time. The one that wins is the incumbent from now on.
        """
        needed = threshold(self.settings.significance, tests)
        while True:
            verdict = self._verdict(candidate, needed)
            left = [t for t in self.val_order if t not in self.known(candidate) or t not in self.known(self.incumbent)]
            if verdict.better or verdict.difference <= 0 or not left:
                break
            wanted = [EvaluationRequest(c, "val", left[:batch]) for c in (candidate, self.incumbent)]
            await self.evaluate(wanted, "comparing with the incumbent")
        if verdict.better:
            await self._promote(candidate, verdict)
        elif verdict.difference > 0 and (self.closest is None or verdict.e_value > self.closest[1].e_value):
            self.closest = candidate, verdict
        return verdict

    def _verdict(self, candidate: Candidate, needed: float) -> ComparisonVerdict:
        before, after = self.known(self.incumbent), self.known(candidate)
        both = list(pairs(before, after))
        gain = sum(b - a for a, b in both) / len(both) if both else 0.0
        e_value = evidence([b - a for a, b in both], self.settings.width)
        failures = more_failures(before, after)
        better = e_value >= needed and failures <= 0
        why = f"on {counted(len(both), 'task')} {gain:+.3f}, e-value {e_value:.3g} of {needed:g}"
        if failures > 0:
            why += f", but it fails on {counted(failures, 'task')} more"
        return ComparisonVerdict(better, e_value, needed, len(both), gain, why)

    async def _promote(self, candidate: Candidate, verdict: ComparisonVerdict) -> None:
        """Make it the incumbent, in the store as the next version of the run's best resources."""
        before, self.incumbent = self.incumbent, candidate
        self.closest = None
        changed = difference(before, candidate)
        if self._journal.get(f"promoted-{candidate.key}") is None:
            best_id = f"{self._context.run_id or 'run'}-best"
            stored = await self._context.store.update_resources(best_id, {**candidate.resources(self.templates)})
            entry = {"resources_id": best_id, "version": stored.version, "diff": changed, "why": verdict.why}
            self._journal.put(f"promoted-{candidate.key}", entry)
        self._context.reporter.event("promoted", {"candidate": candidate.key, "why": verdict.why, "diff": changed})
        self._context.reporter.note(f"Promoted {candidate.key} ({verdict.why}):\n{changed}")

    def dominated(self, candidate: Candidate) -> bool:
        """Whether the agent fails more often with this candidate than with the incumbent; it is then dropped."""
        return more_failures(self.known(self.incumbent), self.known(candidate)) > 0

    # ---- reporting -------------------------------------------------------------------------------------------------

    def report(self, step: int, steps: int | None, train: float | None, best: float | None) -> None:
        """The row of a round; round 0 is the prompt as it came."""
        self._context.reporter.step(
            {
                "step": step,
                "steps": steps,
                "candidates": len(self.candidates),
                "reward": train,
                "best_val": best,
                "val_reward": self.val_mean(self.incumbent),
                "val_tasks": len(self.known(self.incumbent)),
                "rejected_edits": len(self.rejected),
                "rollouts": self.ledger.rollouts,
                "critic_calls": self.ledger.critic_calls,
                "critic_tokens": self.ledger.critic_tokens,
                "cost": self.ledger.cost,
                "seconds": round(time.monotonic() - self._began, 1),
            }
        )

    def note(self, text: str) -> None:
        self._context.reporter.note(text)

    @property
    def context(self) -> TrainingContext:
        return self._context


async def ends_in_words(work: Any, run: PromptRun) -> None:
    """Await the search; a budget that is spent ends it like its last round does."""
    try:
        await work
    except BudgetSpent as spent:
        run.note(f"Stopped at {spent}.")


def _notes(templates: Mapping[str, PromptTemplate]) -> Iterator[str]:
    """What is odd about the templates as they came. Raises ConfigError for one that cannot be read."""
    for name, template in templates.items():
        try:
            fixed = not template.literal and not placeholders(template)
        except ValueError as error:
            raise ConfigError(
                f"{name} cannot be read as a template: {error}. Double the braces that are no placeholder, as in {{{{ "
                "and }}."
            ) from None
        if fixed:
            yield (
                f"{name} has no placeholder such as {{question}}, so it is the same text for every task. That is fine "
                "if the agent sends the task in another message."
            )


def shuffled(numbers: Sequence[int], *seed: int) -> list[int]:
    """Shuffles the numbers in an order that depends only on the seed."""
    return random.Random(repr(seed)).sample(numbers, len(numbers))


def _key(question: Question) -> str:
    return "ask-" + hashlib.sha256(json.dumps(question.body, sort_keys=True).encode()).hexdigest()[:24]


def _split(tasks: Dataset[Any], seed: int) -> tuple[list[Any], list[Any]]:
    """Training and validation tasks out of one set; at least one of each."""
    if len(tasks) < 2:
        raise ConfigError("One task is too few: give some for training and others for validation.")
    apart = held_out(len(tasks))
    chosen = [tasks[i] for i in shuffled(range(len(tasks)), seed)]
    return chosen[apart:], chosen[:apart]
