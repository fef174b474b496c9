"""The composition root: one start of a run. Its parts are started in order, the algorithm runs beside the runners, and
all is stopped in reverse order. A run whose model process dies is launched again, by the trainer.

    main process    store · gateway · runner · algorithm         (one event loop)
                    the user's agents                            (a loop or threads of their own)
    backend         engines and learners of the policies         (a model process, by default)
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from agentlightning.algorithm.base import (
    PolicySpec,
    TrainingContext,
    no_open_calls,
    run_algorithm,
    with_trained_agents,
)
from agentlightning.algorithm.checkpoint import kept_while_used, model_path, read_checkpoint, set_aside_later
from agentlightning.algorithm.settings import TrainingSettings
from agentlightning.doctor.preflight import objections
from agentlightning.litagent import LitAgent
from agentlightning.metrics import JsonlSink, Reporter, Sink, StoreSink, read_metrics
from agentlightning.metrics.console import default_console
from agentlightning.runner import LitAgentRunner, ModelAccess
from agentlightning.runner.remote import Address
from agentlightning.store import SqliteLightningStore
from agentlightning.store.base import LightningStore
from agentlightning.trainer.checks import has_endpoints
from agentlightning.trainer.folder import METRICS_FILE, STORE_FILE
from agentlightning.trainer.live import cancel_leftovers, describe, open_door, recorded
from agentlightning.trainer.on_ray import connect_to_ray
from agentlightning.trainer.provenance import provenance, recipe_of
from agentlightning.trainer.runners import OwnerOfRunners, StartedRunners
from agentlightning.trainer.spending import as_metrics, say_spent, spent_before
from agentlightning.trainer.sync import run_with_background, stop_on_interrupt
from agentlightning.trainer.words import introduce, last_step, resuming
from agentlightning.types import Dataset, NamedResources, ResourcesUpdate, Run
from agentlightning.types.call import Spent

if TYPE_CHECKING:
    from agentlightning.gateway import Gateway, Provider
    from agentlightning.gateway.dialects import Dialect
    from agentlightning.trainer.serving import ServedModels

logger = logging.getLogger(__name__)


class OwnerOfLaunches(OwnerOfRunners, Protocol):
    """A trainer, as its launches see it: see the arguments of `Trainer`."""

    resume_from: Path | None
    store: LightningStore | None
    adapter: Any
    llm_proxy: Any
    initial_resources: NamedResources
    models: dict[str, Provider]
    dialects: tuple[Dialect, ...]
    port: int | None
    sinks: list[Sink]
    address: asyncio.Future[Address] | None


@dataclass(slots=True)
class Fit:
    """What `Trainer.fit` was asked to do, and what its launches leave for those after them."""

    agent: LitAgent[Any]
    train_dataset: Dataset[Any] | None
    val_dataset: Dataset[Any] | None
    stop: asyncio.Event
    answers_signals: bool
    code: str
    """See `code_of`."""
    settings_before: Mapping[str, Any]
    """Those of the run that goes on."""
    served: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once its models were loaded."""
    resumed_at: int | None = None
    """The step of the checkpoint it goes on from, which may be gone when the run is done: newer ones are kept."""
    spent: Mapping[str, Spent] = field(default_factory=dict[str, Spent])
    """What was asked of other providers before this launch."""


class Launch:
    """One start of `fit`, with the trainer's settings; `started` are the runners of other processes."""

    def __init__(self, trainer: OwnerOfLaunches, fit: Fit, started: StartedRunners | None) -> None:
        self._trainer = trainer
        self._fit = fit
        self._started = started
        self._stack = AsyncExitStack()

    async def run(self) -> None:
        """Start the parts, run the algorithm to its end, stop the parts.

        Raises:
            BackendDied: What samples and learns is gone; the run may be launched again from its last checkpoint.
        """
        trainer, fit = self._trainer, self._fit
        fit.spent = fit.spent or spent_before(trainer.run_dir / METRICS_FILE)  # before its later steps are dropped
        async with self._stack as stack:
            if trainer.resume_from is not None and isinstance(trainer.algorithm, TrainingSettings):
                keep = trainer.algorithm.keep_checkpoints
                stack.enter_context(kept_while_used(trainer.resume_from, trainer.run_dir, keep))
            store, run = await self._open_store()
            if trainer.strategy.runners == "ray":
                trainer.strategy = trainer.strategy.at(
                    await connect_to_ray(stack, trainer.algorithm, trainer.n_runners)
                )
            address, dashboard = await self._open_door(store, run)
            reporter = await self._start_reporting(store, run, dashboard)
            served, resources = await self._serve_models(store, reporter)
            fit.served.set()
            gateway = served.gateway if served else None
            if trainer.llm_proxy is not None:
                gateway = await self._start_llm_proxy(store)
            context = self._context(store, run, reporter, served, gateway, await store.add_resources(resources))
            trainer.algorithm.attach(context)
            if self._started is not None and address is not None:
                self._started.start(address)
                stack.push_async_callback(self._started.pause)
            await self._run_with_runners(context, gateway)

    def _context(
        self,
        store: LightningStore,
        run: Run,
        reporter: Reporter,
        served: ServedModels | None,
        gateway: Gateway | None,
        resources: ResourcesUpdate,
    ) -> TrainingContext:
        """What the algorithm is given."""
        trainer, fit, spec = self._trainer, self._fit, self._spec()
        return TrainingContext(
            store=store,
            run_dir=trainer.run_dir,
            run_id=run.run_id,
            reporter=reporter,
            resources=resources,
            initial_resources=trainer.initial_resources,
            adapter=trainer.adapter,
            llm_proxy=gateway,
            backend=served.backend if served else None,
            refused_requests=gateway.refused_requests if gateway else {},
            selected_by=spec.selection if spec else {},
            group_reward=fit.agent.group_reward,
            objections=objections,
            open_calls=served.gateway.open_calls if served else no_open_calls,
            resume_from=trainer.resume_from,
            recipe=recipe_of(trainer.algorithm, fit.code, trainer.initial_resources, run.state),
            stop=fit.stop,
        )

    async def _open_store(self) -> tuple[LightningStore, Run]:
        """The store, and what the run is in it; nothing of an earlier life of the run is left under way."""
        trainer, fit = self._trainer, self._fit
        store = trainer.store
        if store is None:  # first of all: its file can be opened once, which keeps a second run out of the folder
            store = SqliteLightningStore(trainer.run_dir / STORE_FILE)
            self._stack.push_async_callback(store.close)
            await cancel_leftovers(store)
        about = provenance(trainer.run_dir, fit.agent, fit.train_dataset, fit.val_dataset)
        run = describe(trainer.run_dir, trainer.algorithm, fit.agent, about)
        if trainer.store is not None:  # others may work in it
            await cancel_leftovers(store, run.run_id)
        if trainer.resume_from is not None and (moved := set_aside_later(trainer.run_dir, trainer.resume_from)):
            names = ", ".join(path.name for path in moved)
            logger.warning("Checkpoints later than %s are set aside as %s", trainer.resume_from.name, names)
        return store, run

    async def _start_reporting(self, store: LightningStore, run: Run, dashboard: str | None) -> Reporter:
        """What the run measures and says goes to the store, a file, the terminal and the user's own sinks."""
        trainer, fit = self._trainer, self._fit
        fit.resumed_at = read_checkpoint(trainer.resume_from).step if trainer.resume_from else None
        first_step = 0 if fit.resumed_at is None else fit.resumed_at + 1
        resumed = self._resuming(run)
        rows = StoreSink(store, run.run_id)
        metrics = JsonlSink(trainer.run_dir / METRICS_FILE, first_step)
        console = trainer.console or default_console()
        if dashboard is not None:
            console.note(f"Dashboard: {dashboard}")  # no record of the run: nobody answers there later on
        reporter = Reporter(rows, metrics, console, guests=trainer.sinks)
        stopped = fit.stop.is_set
        await self._stack.enter_async_context(recorded(store, run, rows, first_step=first_step, stopped=stopped))
        self._stack.callback(reporter.close)
        reporter.start(run)
        if fit.answers_signals:
            self._stack.enter_context(stop_on_interrupt(fit.stop, reporter.note))
        introduce(reporter, trainer.algorithm, trainer.run_dir, fit.train_dataset, fit.val_dataset, resumed)
        return reporter

    def _resuming(self, run: Run) -> str | None:
        """The words for a run that goes on; None for a new one."""
        trainer, fit = self._trainer, self._fit
        if trainer.resume_from is None or not isinstance(trainer.algorithm, TrainingSettings):
            return None
        file = trainer.run_dir / METRICS_FILE
        recorded = last_step(read_metrics(file)) if file.is_file() else 0
        done, tasks = read_checkpoint(trainer.resume_from), len(fit.train_dataset or ())
        steps = trainer.algorithm.steps_of(tasks, done.step, done.position) if tasks else trainer.algorithm.steps
        now = {"algorithm": run.algorithm, **run.settings}
        return resuming(trainer.resume_from, done.step, recorded, fit.settings_before, now, steps)

    async def _open_door(self, store: LightningStore, run: Run) -> tuple[Address | None, str | None]:
        """Serve the store to runners that are not here, and to whoever looks at the run: the addresses of both."""
        trainer = self._trainer
        address = await trainer.strategy.serve(self._stack, store)
        if address is not None:
            address = replace(address, run_id=run.run_id)
        dashboard = await open_door(self._stack, store, address, trainer.run_dir)
        if address is not None and trainer.address is not None and not trainer.address.done():
            trainer.address.set_result(address)
        return address, dashboard

    async def _serve_models(
        self, store: LightningStore, reporter: Reporter
    ) -> tuple[ServedModels | None, NamedResources]:
        """The backend and the gateway in front of it and of other providers, if there is anything to serve; and what
        agents are given.
        """
        trainer, spec, given = self._trainer, self._spec(), self._trainer.initial_resources
        if spec is None and not trainer.models and (trainer.llm_proxy is not None or not has_endpoints(given)):
            return None, given
        from agentlightning.gateway.dialects import DIALECTS
        from agentlightning.trainer.endpoints import SHADOWED, given_endpoints
        from agentlightning.trainer.serving import serve_models

        endpoints = given_endpoints({} if trainer.llm_proxy is not None else given, trainer.models, spec)
        for name in endpoints.left_out:
            reporter.warn(SHADOWED.format(name=name))

        if spec is not None:
            reporter.status(f"loading {spec.model.model}")
        strategy = trainer.strategy
        models = {**trainer.models, **endpoints.providers}
        served = await serve_models(
            self._stack,
            store,
            spec,
            models=models,
            spent=self._fit.spent,
            dialects=(*DIALECTS, *trainer.dialects),
            host=strategy.gateway_host,
            port=trainer.port,
            secret=strategy.secret,
            folder=trainer.run_dir,
        )
        served.gateway.warn_with(reporter.warn)
        if models:
            reporter.measure_too(lambda: as_metrics(served.gateway.spent, models))
            self._stack.callback(self._settle, served.gateway, reporter)
        return served, endpoints.resources(given, served)

    def _settle(self, gateway: Gateway, reporter: Reporter) -> None:
        self._fit.spent = gateway.spent
        say_spent(reporter, self._fit.spent)

    async def _start_llm_proxy(self, store: LightningStore) -> Any:
        """The gateway that was given, recording in this run's store."""
        proxy = self._trainer.llm_proxy
        if not proxy.is_running():
            proxy.set_store(store)
            await proxy.start()
            self._stack.push_async_callback(proxy.stop)
        return proxy

    async def _run_with_runners(self, context: TrainingContext, gateway: ModelAccess | None) -> None:
        """The algorithm's end ends the runners; a runner that fails, or a dead backend, ends the algorithm."""
        trainer, fit, backend = self._trainer, self._fit, context.backend
        here = trainer.n_runners if trainer.strategy.runners == "inline" else 0
        runners = [self._make_runner(context, gateway, number) for number in range(here)]
        background = [runner.iter() for runner in runners]
        background += [] if self._started is None else [self._started.watch()]
        background += [] if backend is None else [backend.watch()]
        try:
            await run_with_background(run_algorithm(trainer.algorithm, fit.train_dataset, fit.val_dataset), background)
        finally:
            for runner in runners:
                runner.teardown()

    def _make_runner(self, context: TrainingContext, gateway: ModelAccess | None, number: int) -> LitAgentRunner:
        trainer = self._trainer
        runner = LitAgentRunner(
            trainer.tracer,
            trainer.max_rollouts,
            concurrency=trainer.concurrency,
            gateway=gateway,
            run_id=context.run_id,
        )
        runner.init(self._fit.agent, trainer.hooks)
        runner.init_worker(number, context.store)
        return runner

    def _spec(self) -> PolicySpec | None:
        """The algorithm's policy, trained on what the agent says; a resumed run begins with its checkpoint."""
        trainer, trained = self._trainer, self._fit.agent.trained_agents
        spec = trainer.algorithm.policy and with_trained_agents(trainer.algorithm.policy, trained)
        if spec is not None and (matched := getattr(trainer.adapter, "agent_match", None)):
            spec = with_trained_agents(spec, matched, "The adapter says agent_match")
        if spec is None or trainer.resume_from is None:
            return spec
        weights = model_path(trainer.resume_from)
        if spec.model.adapters:
            policies = {name: str(weights / name) for name in spec.model.adapters}
            return replace(spec, model=replace(spec.model, policies=policies))
        return replace(spec, model=replace(spec.model, model=str(weights)))
