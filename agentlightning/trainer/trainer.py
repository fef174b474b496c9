"""What users call to train: `Trainer` takes an algorithm, an agent and tasks, and launches the run.

What a run consists of is started in `launch.py`; the training loop itself is the algorithm's: see
`algorithm/grpo.py`, `GRPO.run`.
"""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from agentlightning.adapter import TracerTraceToTriplet
from agentlightning.algorithm.base import Algorithm
from agentlightning.algorithm.baseline import Baseline, dry_run_of
from agentlightning.algorithm.checkpoint import (
    list_checkpoints,
)
from agentlightning.algorithm.features import FeatureSettings
from agentlightning.algorithm.hints import (
    KINDS,
    OF_HOOKS,
    OF_NAMES,
    OF_THE_TRAINER,
    OF_TRAINING,
    REWARD,
    TRACKERS,
    of_the_algorithm,
)
from agentlightning.algorithm.records import names_of
from agentlightning.algorithm.settings import TrainingSettings
from agentlightning.arguments import GivenByName, Hints, explained
from agentlightning.errors import AgentLightningError, BackendDied, ConfigError, debugging
from agentlightning.litagent import LitAgent
from agentlightning.metrics import Console, Sink, read_metrics
from agentlightning.metrics.console import default_console
from agentlightning.metrics.trackers import as_sink
from agentlightning.runner.remote import Address
from agentlightning.store.base import LightningStore
from agentlightning.tracer import OtelTracer, Tracer
from agentlightning.trainer import left_running
from agentlightning.trainer.awaiting import says_how_to_await
from agentlightning.trainer.checks import (
    as_agent,
    as_tasks,
    check_adapter,
    check_agents_resources,
    check_each,
    check_given,
    check_models,
    check_parts,
    check_places,
    check_proxy,
    check_resources,
    check_whole_numbers,
    listed,
    refuse_in_an_import_of_training,
    refuse_while_loading,
)
from agentlightning.trainer.folder import (
    METRICS_FILE,
    checkpoint_of,
    claimed,
    default_folder,
    draw_curve,
    new_folder,
    prepare_folder,
    resumable_journal,
)
from agentlightning.trainer.launch import Fit, Launch
from agentlightning.trainer.live import (
    RUN_FILE as RUN_FILE,
    known_settings,
)
from agentlightning.trainer.log import LOG_FILE, logged
from agentlightning.trainer.overrides import OTHER_VERBS
from agentlightning.trainer.provenance import code_of
from agentlightning.trainer.result import RunResult
from agentlightning.trainer.runners import StartedRunners, be_a_runner, started_runners
from agentlightning.trainer.strategy import Strategy
from agentlightning.trainer.sync import run_sync
from agentlightning.trainer.words import conclude, with_next_step
from agentlightning.types import Dataset, Hook, NamedResources, Resource

if TYPE_CHECKING:
    from agentlightning.gateway import Provider
    from agentlightning.gateway.dialects import Dialect

logger = logging.getLogger(__name__)

current_trainer: ContextVar[Trainer | None] = ContextVar("agentlightning_trainer", default=None)
"""The trainer whose run this code belongs to."""

RESTARTS = 3
"""How often in a row what samples and learns is started again where nothing was saved in between."""
NOT_AWAITED = (
    "fit_async() was called without await, so nothing was trained. In async code: await trainer.fit_async(…). "
    "Elsewhere: trainer.fit(…)."
)
Tasks = Dataset[Any] | str | Path
"""Tasks, or the name of a file that holds them."""


class Trainer(GivenByName):
    """Wires an algorithm, an agent and its tasks together.

    `fit` trains, `dev` runs the agent on tasks without learning. What is not given is made: a store in `run_dir`, a
    tracer, the model process and the gateway that the algorithm's policy needs.

    Args:
        algorithm: What to learn and how; None is `Baseline`.
        n_runners: Runners; each runs `concurrency` rollouts at once.
        strategy: Where runners are: "inline" (in this process), "processes" (n_runners of them), "ray" (actors on a
            cluster; the default with `backend="ray"`), or "remote" (they join from elsewhere); see `trainer.strategy`
            for what the environment can say about it.
        store: Where everything is recorded; None is a SQLite file in `run_dir`. A store that is given is not closed.
        tracer: Records what happens inside the agent.
        adapter: For algorithms that read spans: turns those of an attempt into data. None is `TracerTraceToTriplet`,
            whose `agent_match` is `train_agents` for algorithms that train a model.
        llm_proxy: A gateway of your own, for algorithms that train no model; it is started and stopped here.
        initial_resources: Resources by name, beside the policy's endpoint `llm`. An `LLM` among them is asked through
            the gateway, as one of `models` is (directly, where `llm_proxy` is given).
        models: Other providers that agents may ask through the gateway, by alias: a judge, a user simulator, an
            opponent. Their calls are recorded and never trained. Each is a resource of its alias, too. With a `price`
            what they cost is recorded and shown; `limits` say how much may be asked of them.
        dialects: Wire formats of your own that the gateway speaks besides its own.
        hooks: See every stage of every rollout.
        max_rollouts: Each runner stops after so many.
        port: Of the gateway; None picks a free one. It listens on this machine only.
        run_dir: Where the run leaves its files; None is a new folder in `runs/`.
        resume: A run's folder, a checkpoint, or the URL of `checkpoint_copy` to go on from.
        console: Where progress is shown; None is the terminal.
        sinks: Where metrics and messages go besides: the user's own `agentlightning.metrics.Sink`s, or trackers by
            their names, such as "wandb".
    """

    _otherwise = (
        "Settings of training, such as model, learning_rate or steps, are the algorithm's: "
        "Trainer(algorithm=GRPO(model=…, steps=…)); agent and tasks are given to fit(agent, tasks)."
    )

    _method_hints: ClassVar = OTHER_VERBS
    _others: ClassVar = Hints(
        KINDS,
        {
            **of_the_algorithm(names_of(FeatureSettings), OF_TRAINING.keys() - OF_THE_TRAINER.keys()),
            **REWARD,
            **TRACKERS,
            **OF_NAMES,
            **OF_HOOKS,
        },
    )

    def __init__(
        self,
        *,
        algorithm: Algorithm | None = None,
        n_runners: int | None = None,
        n_workers: int | None = None,
        concurrency: int = 64,
        store: LightningStore | None = None,
        tracer: Tracer | None = None,
        adapter: Any = None,
        llm_proxy: Any = None,
        initial_resources: Mapping[str, Resource] | None = None,
        models: Mapping[str, Provider] | None = None,
        dialects: Sequence[Dialect] = (),
        hooks: Sequence[Hook] | Hook | None = None,
        max_rollouts: int | None = None,
        strategy: str | Strategy | None = None,
        port: int | None = None,
        run_dir: str | Path | None = None,
        resume: str | Path | None = None,
        console: Console | None = None,
        sinks: Sequence[Sink | str] | Sink | str | None = (),
    ) -> None:
        check_parts(algorithm=algorithm, store=store, tracer=tracer, console=console)
        check_whole_numbers(
            n_runners=n_runners, n_workers=n_workers, concurrency=concurrency, max_rollouts=max_rollouts
        )
        check_places(run_dir=run_dir, resume=resume, port=port)
        check_models(models)
        check_resources(initial_resources)
        self.algorithm = algorithm or Baseline()
        of_algorithm = self.algorithm.trainer_defaults
        self.concurrency = concurrency
        self.store = store
        self.tracer = tracer or OtelTracer()
        check_adapter(adapter, self.algorithm)
        self.adapter = adapter or TracerTraceToTriplet()
        self.llm_proxy = llm_proxy
        check_proxy(llm_proxy, self.algorithm)
        self.initial_resources: NamedResources = dict(initial_resources or {})
        self.models = dict(models or {})
        self.dialects = tuple(dialects or ())
        self.hooks: list[Hook] = listed(hooks)
        check_each(hook=self.hooks)
        self.max_rollouts = max_rollouts
        self.strategy = _strategy(strategy, self.algorithm).with_key()
        self.n_runners = next(n for n in (self.strategy.n_runners, n_runners, n_workers, 1) if n is not None)
        self.address: asyncio.Future[Address] | None = None
        """While `fit` runs with runners elsewhere: where they find the store."""
        self.port = of_algorithm.port if port is None else port
        self._find_place(run_dir, resume)
        self._has_folder = self._training = False
        self.console = console
        self.sinks = [*map(as_sink, listed(sinks)), *of_algorithm.sinks]
        check_each(sink=self.sinks)
        if self.algorithm.serial:
            self.n_runners = self.concurrency = 1

    def _find_place(self, run_dir: str | Path | None, resume: str | Path | None) -> None:
        """Settle the run's folder, and the checkpoint or the journal that the run goes on from."""
        of_algorithm = self.algorithm.trainer_defaults
        run_dir, resume = (None if given is None else Path(given).expanduser() for given in (run_dir, resume))
        run_dir, resume = run_dir or of_algorithm.run_dir, resume or of_algorithm.resume
        self._taken_again = resumable_journal(self.algorithm, resume)
        self.resume_from: Path | None = None
        if resume and self._taken_again is None:
            self.resume_from = checkpoint_of(self.algorithm, resume, run_dir)
        self._settings_before = known_settings(self.resume_from.parent.parent) if self.resume_from else {}
        self.run_dir = self._taken_again or (
            Path(run_dir) if run_dir else default_folder(self.algorithm, self.resume_from)
        )
        self._names_folder = run_dir is None and self.resume_from is None and self._taken_again is None
        """Whether the run's folder has the name that is given to it here."""

    @explained
    def fit(
        self,
        agent: LitAgent[Any] | Callable[..., Any] | None,
        train_dataset: Tasks | None = None,
        val_dataset: Tasks | None = None,
        *,
        val_data: Tasks | None = None,
    ) -> RunResult:
        """Train `agent` on the tasks; validate on others. Blocks until it is done; Ctrl-C stops it cleanly.

        Tasks are a list, or anything that has a length and is read by number; or the name of a file that ends in
        .jsonl, .json, .csv or .parquet. `agent` may be None where all runners are elsewhere, and where the
        algorithm learns examples and nothing is validated; the tasks may be None where the algorithm brings its own.
        """
        refuse_in_an_import_of_training()
        val = val_dataset if val_dataset is not None else val_data
        try:
            return run_sync(self.fit_async(agent, train_dataset, val))
        except AgentLightningError as error:  # it says itself what to do; the way it came is for the log
            logger.debug("The run failed", exc_info=error)
            if debugging():
                raise
            raise error.with_traceback(None) from None
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"Stopped at once. To go on: Trainer(resume='{self.run_dir}')") from None
        finally:
            left_running.of_a_script()

    @explained
    def dev(self, agent: LitAgent[Any] | Callable[..., Any], train_dataset: Tasks) -> RunResult:
        """A dry run: each task once, on the model that `algorithm` would train; says what came of it, learns nothing.

        Its files are in a folder of its own inside `run_dir`, so `fit` may follow.
        """
        if not self._has_folder:
            self._take_folder()
        dry = copy.copy(self)
        dry.algorithm = dry_run_of(self.algorithm)
        dry.run_dir, dry._names_folder, dry._training = new_folder(self.run_dir / "dev"), False, False
        return dry.fit(agent, train_dataset)

    @says_how_to_await(NOT_AWAITED)
    @explained
    async def fit_async(
        self,
        agent: LitAgent[Any] | Callable[..., Any] | None,
        train_dataset: Tasks | None = None,
        val_dataset: Tasks | None = None,
        *,
        stop: asyncio.Event | None = None,
    ) -> RunResult:
        """`fit` for code that has an event loop already. Who gives `stop` sets it to end the run after its last
        finished step, and answers signals himself.
        """
        refuse_while_loading()
        needless = val_dataset is None and isinstance(self.algorithm, TrainingSettings) and not self.algorithm.samples
        without = agent is None and (needless or self.strategy.runs_no_agent)
        agent = LitAgent() if without else as_agent(agent, self.algorithm)
        current_trainer.set(self)
        if self.strategy.role == "runner":
            return await be_a_runner(self, agent)
        if train_dataset is not None:
            train_dataset = as_tasks("training", train_dataset)
        if val_dataset is not None:
            val_dataset = as_tasks("validation", val_dataset)
        if self.strategy.runs_here:
            agent.check_machine()
        check_given(self.algorithm, agent, train_dataset, val_dataset)
        if self.llm_proxy is None:  # else it may bring resources of its own
            check_agents_resources(agent, self.algorithm, self.initial_resources, self.models)
        if isinstance(self.algorithm, TrainingSettings):
            _ = self.algorithm.shape  # is there such a model? The folder of a run that goes on is as it was if not
        fit = Fit(
            agent,
            train_dataset,
            val_dataset,
            stop=stop or asyncio.Event(),
            answers_signals=stop is None,
            code=code_of(agent),
            settings_before=self._settings_before,
        )
        with self._in_its_folder():
            started = started_runners(self, agent)  # before there are threads
            with logged(self.run_dir / LOG_FILE):
                try:
                    await self._run_to_the_end(fit, started)
                except AgentLightningError as error:
                    with_next_step(error, self.run_dir)
                    raise
                finally:
                    if started is not None:
                        await started.stop()
            draw_curve(self.run_dir)
            return self._concluded(fit)

    @contextmanager
    def _in_its_folder(self) -> Iterator[None]:
        """Within the block the run has its folder, and is the only one of this trainer."""
        if self._training:
            raise ConfigError(
                f"This trainer is training already, in {self.run_dir}. Wait for that run, or make another Trainer."
            )
        self._take_folder()
        prepare_folder(self.run_dir, resuming=self.resume_from is not None or self._taken_again is not None)
        self._training = True
        try:
            yield
        finally:
            self._training = False

    def _take_folder(self) -> None:
        """Make the folder, where it is named here. A further run of this trainer gets one of its own."""
        if self._names_folder and (not self._has_folder or (self.run_dir / RUN_FILE).exists()):
            self.run_dir = claimed(default_folder(self.algorithm, None) if self._has_folder else self.run_dir)
            self._has_folder = True

    def _concluded(self, fit: Fit) -> RunResult:
        checkpoints, metrics = list_checkpoints(self.run_dir), read_metrics(self.run_dir / METRICS_FILE)
        result = RunResult(self.run_dir, checkpoints[-1] if checkpoints else None, fit.stop.is_set(), metrics)
        conclude(
            self.console or default_console(), self.algorithm, fit.agent, result, fit.resumed_at, fit.train_dataset
        )
        return result

    async def _run_to_the_end(self, fit: Fit, started: StartedRunners | None) -> None:
        deaths = 0
        while True:
            try:
                await Launch(self, fit, started).run()
                break
            except BackendDied as error:
                last = next(reversed(list_checkpoints(self.run_dir)), None)
                deaths = deaths + 1 if last == self.resume_from else 1
                if deaths > RESTARTS:
                    raise BackendDied(f"{error}\nIt was started again {RESTARTS} times without a step.") from error
                if last is None and not (fit.served.is_set() and isinstance(self.algorithm, TrainingSettings)):
                    raise  # it may be too large to be loaded
                logger.warning("%s\nThe run goes on from %s.", error, last or "its beginning")
                self.resume_from = last


def _strategy(given: str | Strategy | None, algorithm: Algorithm) -> Strategy:
    """Where runners are: as given or as the environment says; by default with the model on Ray, otherwise here."""
    if isinstance(given, Strategy):
        return given
    on_ray = isinstance(algorithm, TrainingSettings) and algorithm.backend == "ray"
    return Strategy.read(given, default="ray" if on_ray and not algorithm.serial else "inline")
