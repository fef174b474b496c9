"""GEPA: reflective prompt evolution with a Pareto front, by the `gepa` library, on this package's rollouts.

The library decides which candidate is edited next, on which training tasks, and what is kept; rollouts, the critic, the
budget, the journal and the check before a prompt is promoted are those of all prompt optimisers here. Agrawal et al.,
"GEPA: Reflective Prompt Evolution Can Outperform Reinforcement Learning", arXiv 2507.19457.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from agentlightning.algorithm.prompts.candidate import Candidate
from agentlightning.algorithm.prompts.critic import CriticAnswer
from agentlightning.algorithm.prompts.demonstrations import bootstrap, propose
from agentlightning.algorithm.prompts.evaluation import EvaluationRequest, Split, Trial, mean
from agentlightning.algorithm.prompts.instructions import foreign_texts, shown
from agentlightning.algorithm.prompts.run import PromptRun, ends_in_words
from agentlightning.algorithm.prompts.settings import PromptSettings
from agentlightning.algorithm.prompts.words import conclude
from agentlightning.algorithm.sampling.rollouts import Stopped
from agentlightning.errors import ConfigError, missing_extra
from agentlightning.files import text_of
from agentlightning.types import Dataset, Demonstrations

if TYPE_CHECKING:
    from gepa.core.adapter import EvaluationBatch

logger = logging.getLogger(__name__)

T = TypeVar("T")
Item = tuple[Split, int]
"""A task, as the library is given it: its split and its number there."""


@dataclass
class GEPA(PromptSettings):
    """Improves the prompt templates of an agent by GEPA. Needs the extra `gepa`, which is small.

        tuner = agl.GEPA(AsyncOpenAI(), reflection_model="gpt-5", budget_rollouts=500)
        trainer = agl.Trainer(algorithm=tuner, initial_resources={"prompt_template": agl.PromptTemplate(template="…")})
        trainer.fit(agent, train_tasks, val_tasks)
        tuner.get_best_prompt().template

    The library knows scores, no outcomes: a rollout that failed by its prompt counts there as the lowest reward, one
    that failed by the system as the mean of its batch. The check before promotion leaves both out, as for `APO`.
    """

    reflection_model: str = "gpt-5-mini"
    """The critic's model that reads runs and writes new texts."""
    iterations: int = 20
    """Proposals at most."""
    reflection_minibatch_size: int = 3
    """Training tasks that a proposal is made from, and must do better on."""
    val_batch_size: int = 24
    """Validation tasks of the Pareto front; more are taken to check the winner."""
    candidate_selection_strategy: Literal["pareto", "current_best", "epsilon_greedy", "top_k_pareto"] = "pareto"
    """Which candidate is edited next."""
    module_selector: Literal["round_robin", "all"] = "round_robin"
    """Which of several templates are edited at a time."""
    use_merge: bool = False
    """Combine candidates of the front that were improved apart from each other."""
    max_merge_invocations: int = 5
    reflection_temperature: float = 1.0
    reflection_prompt_file: str | Path | None = None
    """A text of your own that asks for a new text, with <curr_param> and <side_info>."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("iterations", "reflection_minibatch_size", "val_batch_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}.")
        self._prompt = _own_prompt(self.reflection_prompt_file)

    async def run(self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None) -> None:
        """Let the library search, then check its best candidate; write down the best prompt."""
        async with PromptRun.make(self, train_dataset, val_dataset) as run:
            try:
                await self.search(run)
            except Stopped:
                run.note("Stopped. What was paid for is kept: resume goes on from here.")
            conclude(self, run)

    def least_rollouts(self, train: int, val: int) -> int:
        return min(self.val_batch_size, val) + 2 * min(self.reflection_minibatch_size, train)

    def comparisons(self) -> int:
        return self.iterations + (self.max_merge_invocations if self.use_merge else 0)

    async def search(self, run: PromptRun) -> None:
        bridge = _Bridge(self, run, self._prompt)
        await ends_in_words(self._search(run, bridge), run)
        await ends_in_words(self._check(run, bridge), run)

    async def _search(self, run: PromptRun, bridge: _Bridge) -> None:
        sample = run.val_order[: self.val_batch_size]
        await run.evaluate([EvaluationRequest(run.seed, "val", sample)], "validating the first prompt")
        run.check_first()
        run.report(0, self.iterations, None, run.val_mean(run.seed))
        await bootstrap(run)
        try:
            await asyncio.to_thread(_optimize, self, run, bridge, sample)
        finally:
            bridge.closed = True
        if bridge.failed is not None:
            raise bridge.failed

    async def _check(self, run: PromptRun, bridge: _Bridge) -> None:
        """The best of all that met the whole sample takes the place of the first prompt, if it is shown to be better.

        One proposal per iteration may have met it, and merges: each counts as a comparison.
        """
        scored = [(mean(list(run.known(c).values())), c) for c in run.candidates.values() if run.known(c)]
        ranked = sorted(
            ((s, c) for s, c in scored if s is not None and not run.dominated(c)), key=lambda pair: -pair[0]
        )
        if ranked and ranked[0][1] != run.incumbent:
            await run.challenge(ranked[0][1], self.comparisons(), self.val_batch_size)
        best = run.val_mean(ranked[0][1]) if ranked else None
        run.report(bridge.iterations + 1, self.iterations, None, best)


def _optimize(settings: GEPA, run: PromptRun, bridge: _Bridge, sample: Sequence[int]) -> None:
    """Runs in a thread of its own: the library is not async."""
    try:
        from gepa.api import optimize
    except ImportError:
        raise missing_extra("gepa", "gepa") from None
    adapter: Any = bridge  # the library types its protocols more narrowly than it uses them
    optimize(
        seed_candidate=run.seed.by_name,
        trainset=[("train", n) for n in range(len(run.train))],
        valset=[("val", n) for n in sample],
        adapter=adapter,
        candidate_selection_strategy=settings.candidate_selection_strategy,
        reflection_minibatch_size=min(settings.reflection_minibatch_size, len(run.train)),
        perfect_score=settings.reward_range[1],
        module_selector=settings.module_selector,
        use_merge=settings.use_merge,
        max_merge_invocations=settings.max_merge_invocations,
        stop_callbacks=bridge.is_over,
        callbacks=[adapter],
        logger=_Log(),
        seed=settings.seed,
    )


class _Bridge:
    """The library's adapter and callback: from its thread into the event loop, and back."""

    def __init__(self, settings: GEPA, run: PromptRun, prompt: str | None) -> None:
        self._settings = settings
        self._run = run
        self._prompt = prompt
        self._loop = asyncio.get_running_loop()
        self._trials: Sequence[Trial] = ()
        self._train: float | None = None
        self.iterations = 0
        """Finished ones."""
        self.closed = False
        """Nobody waits for the library any more."""
        self.failed: ConfigError | None = None
        """What the user must mend. The library itself logs errors and goes on."""

    # ---- what the library calls ------------------------------------------------------------------------------------

    def evaluate(
        self, batch: Sequence[Item], candidate: Mapping[str, str], capture_traces: bool = False
    ) -> EvaluationBatch[Trial, Trial]:
        from gepa.core.adapter import EvaluationBatch

        made = self._candidate(candidate)
        wanted = [EvaluationRequest(made, split, [n]) for split, n in batch]
        found = self._wait(self._run.evaluate(wanted, f"iteration {self.iterations + 1}: rollouts"))
        trials = [t for of_one in found for t in of_one]
        if batch and batch[0][0] == "train":
            self._train = mean(trials)
        return EvaluationBatch(trials, self._scores(trials), trials if capture_traces else None)

    def make_reflective_dataset(
        self,
        candidate: Mapping[str, str],
        eval_batch: EvaluationBatch[Trial, Trial],
        components_to_update: Sequence[str],
    ) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        self._trials = eval_batch.trajectories or ()
        return {name: [shown(t) for t in self._trials] for name in components_to_update}

    def propose_new_texts(
        self,
        candidate: Mapping[str, str],
        reflective_dataset: Mapping[str, Sequence[Mapping[str, Any]]],
        components_to_update: Sequence[str],
    ) -> dict[str, str]:
        """A text that must not be run is given back as it was: such a proposal improves nothing and is dropped."""
        made = parent = self._candidate(candidate)
        texts = [name for name in components_to_update if not isinstance(self._run.templates[name], Demonstrations)]
        for name in components_to_update:
            if name not in texts:
                measured = [t.task for t in self._trials]
                seed = self._settings.seed, self.iterations
                made = propose(self._run, made, name, *seed, apart_from=measured) or made
        for name, text in self._written(candidate, reflective_dataset, texts).items():
            made = self._run.admit(made, name, text, list(foreign_texts(self._trials))) or made
        return {name: made.by_name[name] for name in components_to_update} if made != parent else dict(candidate)

    def on_iteration_end(self, event: Mapping[str, Any]) -> None:
        self._loop.call_soon_threadsafe(self._report, int(event["iteration"]))

    def is_over(self, gepa_state: Any) -> bool:
        stopped = self._run.context.stop.is_set() or self._run.ledger.why is not None or self.failed is not None
        return self.closed or stopped or gepa_state.i >= self._settings.iterations - 1

    # ---- this side -------------------------------------------------------------------------------------------------

    def _written(
        self,
        candidate: Mapping[str, str],
        reflective_dataset: Mapping[str, Sequence[Mapping[str, Any]]],
        names: Sequence[str],
    ) -> dict[str, str]:
        """The critic's new texts, by name, as far as it answers."""
        from gepa.strategies.instruction_proposal import InstructionProposalSignature as Signature

        prompts = [
            str(
                Signature.prompt_renderer(
                    {
                        "current_instruction_doc": candidate[name],
                        "dataset_with_feedback": reflective_dataset[name],
                        "prompt_template": self._prompt,
                    }
                )
            )
            for name in names
        ]
        s = self._settings
        answers = self._wait(self._run.ask(s.reflection_model, prompts, s.reflection_temperature)) if prompts else []
        return {
            name: Signature.output_extractor(answer.text)["new_instruction"]
            for name, answer in zip(names, answers, strict=True)
            if isinstance(answer, CriticAnswer)
        }

    def _candidate(self, texts: Mapping[str, str]) -> Candidate:
        made = Candidate.of(texts)
        return self._run.candidates.setdefault(made.key, made)

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        if self.closed:
            work.close()
            raise Stopped
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result()
        except ConfigError as error:
            self.failed = error
            raise

    def _scores(self, trials: Sequence[Trial]) -> list[float]:
        low = self._settings.reward_range[0]
        otherwise = mean(trials)
        neutral = low if otherwise is None else otherwise
        return [t.reward if t.reward is not None else low if t.failed else neutral for t in trials]

    def _report(self, iteration: int) -> None:
        self.iterations = iteration
        means = [m for c in self._run.candidates.values() if (m := self._run.val_mean(c)) is not None]
        self._run.report(iteration, self._settings.iterations, self._train, max(means, default=None))


class _Log:
    """The library's log."""

    def log(self, message: str) -> None:
        logger.debug("gepa: %s", message)


def _own_prompt(file: str | Path | None) -> str | None:
    if file is None:
        return None
    if not Path(file).is_file():
        raise ConfigError(f"There is no file '{file}' with a prompt for the critic.")
    text = text_of(Path(file), f"'{file}'")
    for needed in ("<curr_param>", "<side_info>"):
        if needed not in text:
            raise ConfigError(f"{file} has no {needed}, so the critic would not see it. Add it.")
    return text
