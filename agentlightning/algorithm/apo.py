"""APO: automatic prompt optimisation by textual gradients with beam search.

A critic reads runs of the agent and says what is wrong with its prompt (the "gradient"), writes another one (the
"step"), and of all prompts the best few are kept (the beam). Pryzant et al., "Automatic Prompt Optimization with
'Gradient Descent' and Beam Search", EMNLP 2023, arXiv 2305.03495. THE LOOP is `APO._search`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentlightning.algorithm.prompts.candidate import Candidate, placeholders
from agentlightning.algorithm.prompts.critic import CriticAnswer
from agentlightning.algorithm.prompts.demonstrations import bootstrap, propose
from agentlightning.algorithm.prompts.evaluation import EvaluationRequest, Trial, mean
from agentlightning.algorithm.prompts.instructions import (
    CRITIQUE,
    EDIT,
    check_texts,
    critique_prompt,
    edit_prompt,
    foreign_texts,
    read_edit,
)
from agentlightning.algorithm.prompts.run import PromptRun, ends_in_words, shuffled
from agentlightning.algorithm.prompts.settings import PromptSettings
from agentlightning.algorithm.prompts.words import conclude
from agentlightning.algorithm.sampling.rollouts import Stopped
from agentlightning.errors import ConfigError
from agentlightning.files import text_of
from agentlightning.types import Dataset, Demonstrations


@dataclass
class APO(PromptSettings):
    """Improves the prompt templates of an agent; its model stays as it is, and no GPU is needed.

        apo = agl.APO(AsyncOpenAI(), gradient_model="gpt-5-mini", apply_edit_model="gpt-5-mini")
        trainer = agl.Trainer(algorithm=apo, initial_resources={"prompt_template": agl.PromptTemplate(template="…")})
        trainer.fit(agent, train_tasks, val_tasks)
        apo.get_best_prompt().template

    A round makes up to `beam_width` × `branch_factor` candidates from the beam, scores them and the beam on the same
    `val_batch_size` validation tasks, and keeps the best `beam_width`. The best of them then meets the incumbent on
    more of the validation tasks, and takes its place when it is shown to be better.
    """

    gradient_model: str = "gpt-5-mini"
    """The critic's model that says what is wrong."""
    apply_edit_model: str = "gpt-5-mini"
    """The critic's model that writes the new template."""
    gradient_batch_size: int = 4
    """Training tasks that one critique is about."""
    val_batch_size: int = 16
    """Validation tasks that candidates are ranked on."""
    beam_width: int = 4
    """Prompts that are kept after each round."""
    branch_factor: int = 4
    """Candidates made from each place in the beam, per round."""
    beam_rounds: int = 3
    """How many rounds there are."""
    diversity_temperature: float = 1.0
    """The critic's temperature."""
    run_initial_validation: bool = True
    """Measure the first prompt on its own before the first round, as round 0."""
    gradient_prompt_files: Sequence[str | Path] | None = None
    """Texts of your own that ask for a critique, with {name}, {template}, {runs}, {low} and {high}; used in turn."""
    apply_edit_prompt_files: Sequence[str | Path] | None = None
    """The same for the edit, with {name}, {template}, {critique} and {placeholders}."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("gradient_batch_size", "val_batch_size", "beam_width", "branch_factor", "beam_rounds"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}.")
        self._critiques = _texts(self.gradient_prompt_files, CRITIQUE)
        self._edits = _texts(self.apply_edit_prompt_files, EDIT)
        for critique in self._critiques:
            for edit in self._edits:
                check_texts(critique, edit)

    async def run(self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None) -> None:
        """Search until the last round, the end of the budget, or a stop; then write down the best prompt."""
        async with PromptRun.make(self, train_dataset, val_dataset) as run:
            try:
                await self.search(run)
            except Stopped:
                run.note("Stopped. What was paid for is kept: resume goes on from here.")
            conclude(self, run)

    def least_rollouts(self, train: int, val: int) -> int:
        return 2 * min(self.val_batch_size, val) + min(self.gradient_batch_size, train)

    def comparisons(self) -> int:
        return self.beam_rounds * (self.beam_width * self.branch_factor + 1)

    async def search(self, run: PromptRun) -> None:
        await ends_in_words(self._search(run), run)

    async def _search(self, run: PromptRun) -> None:
        sample = run.val_order[: self.val_batch_size]
        beam = [run.seed]
        if self.run_initial_validation:
            await run.evaluate([EvaluationRequest(run.seed, "val", sample)], "validating the first prompt")
            run.check_first()
            run.report(0, self.beam_rounds, None, run.val_mean(run.seed))
        await bootstrap(run)
        for number in range(1, self.beam_rounds + 1):
            children, seen = await self._children(run, beam, number)
            contenders = list(dict.fromkeys([*beam, run.incumbent, *children]))
            wanted = [EvaluationRequest(c, "val", sample) for c in contenders]
            scores = [mean(trials) for trials in await run.evaluate(wanted, f"round {number}: ranking")]
            ranked = _ranked(run, contenders, scores)
            best = ranked[0]
            if best != run.incumbent:
                # every child was looked at to choose this one, so each counts as a comparison
                await run.challenge(best, self.comparisons(), self.val_batch_size)
            beam = ranked[: self.beam_width]
            run.report(number, self.beam_rounds, mean(seen), run.val_mean(best))

    async def _children(
        self, run: PromptRun, beam: Sequence[Candidate], number: int
    ) -> tuple[list[Candidate], list[Trial]]:
        """New candidates, and the trials on training tasks that they were made from."""
        parents = [beam[n % len(beam)] for n in range(self.beam_width)]
        size = min(self.gradient_batch_size, len(run.train))
        batches = [shuffled(range(len(run.train)), self.seed, number, slot)[:size] for slot in range(len(parents))]
        wanted = [EvaluationRequest(parent, "train", batch) for parent, batch in zip(parents, batches, strict=True)]
        trials = await run.evaluate(wanted, f"round {number}: runs for the critic")
        jobs: list[_Improvement] = []
        proposed: list[Candidate | None] = []
        names = sorted(run.templates)
        for slot, parent in enumerate(parents):
            worst = self._worst(run, parent)
            if all(t.reward == self.reward_range[1] for t in worst):
                continue  # nothing that a critic could say
            for branch in range(self.branch_factor):
                name = names[(slot * self.branch_factor + branch + number - 1) % len(names)]
                if isinstance(run.templates[name], Demonstrations):
                    proposed.append(propose(run, parent, name, self.seed, number, slot, branch))
                    continue
                order = shuffled(range(len(worst)), self.seed, number, slot, branch)
                shown = [worst[0], *(worst[i] for i in order if i)][:size]
                jobs.append(_Improvement(parent, name, shown, len(jobs)))
        made = [*(c for c in proposed if c is not None), *await self._edited(run, jobs)]
        return list(dict.fromkeys(made)), [t for batch in trials for t in batch]

    def _worst(self, run: PromptRun, parent: Candidate) -> list[Trial]:
        """Twice as many of a candidate's training trials as a critique shows, those that earned least first."""
        low = self.reward_range[0]
        seen = sorted(run.known(parent, "train").values(), key=lambda t: low if t.reward is None else t.reward)
        return seen[: 2 * self.gradient_batch_size]

    async def _edited(self, run: PromptRun, jobs: Sequence[_Improvement]) -> list[Candidate]:
        """What the critic makes of each job, without edits that failed or must not be run."""
        if not jobs:
            return []
        questions = [
            critique_prompt(_turn(self._critiques, j), j.name, j.text, j.trials, self.reward_range) for j in jobs
        ]
        critiques = await run.ask(self.gradient_model, questions, self.diversity_temperature)
        answered = [(j, a.text) for j, a in zip(jobs, critiques, strict=True) if isinstance(a, CriticAnswer)]
        kept = {j.name: sorted(placeholders(run.templates[j.name], j.text)) for j in jobs}
        edits = [edit_prompt(_turn(self._edits, j), j.name, j.text, text, kept[j.name]) for j, text in answered]
        written = await run.ask(self.apply_edit_model, edits, self.diversity_temperature) if edits else []
        found: list[Candidate] = []
        for (job, _), answer in zip(answered, written, strict=True):
            if isinstance(answer, CriticAnswer):
                made = run.admit(job.parent, job.name, read_edit(answer.text), list(foreign_texts(job.trials)))
                found += [made] if made is not None else []
        return found


@dataclass(frozen=True, slots=True)
class _Improvement:
    """One template of one candidate is to be improved."""

    parent: Candidate
    name: str
    trials: Sequence[Trial]
    number: int

    @property
    def text(self) -> str:
        return self.parent.by_name[self.name]


def _ranked(run: PromptRun, candidates: Sequence[Candidate], scores: Sequence[float | None]) -> list[Candidate]:
    """Best first; of equals the earlier. Those that make the agent fail, or earned nothing at all, are left out."""
    kept = [
        (score, candidate)
        for candidate, score in zip(candidates, scores, strict=True)
        if score is not None and (candidate == run.incumbent or not run.dominated(candidate))
    ]
    if not kept:
        return [run.incumbent]
    return [candidate for _, candidate in sorted(kept, key=lambda pair: -pair[0])]


def _turn(texts: Sequence[str], job: _Improvement) -> str:
    return texts[job.number % len(texts)]


def _texts(files: Sequence[str | Path] | None, otherwise: str) -> list[str]:
    if not files:
        return [otherwise]
    for file in files:
        if Path(file).suffix == ".poml":
            raise ConfigError(f"{file}: the critic's prompts are plain text with {{placeholders}} here, not POML.")
        if not Path(file).is_file():
            raise ConfigError(f"There is no file '{file}' with a prompt for the critic.")
    return [text_of(Path(file), f"'{file}'") for file in files]
