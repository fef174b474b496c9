"""Methods and words that runners had, and what agents asked of them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from agentlightning.compat.tracing import get_active_tracer
from agentlightning.litagent import LitAgent
from agentlightning.runner import LitAgentRunner
from agentlightning.runner.runner import current_runner
from agentlightning.store.base import LightningStore
from agentlightning.tracer import Tracer
from agentlightning.trainer.trainer import current_trainer
from agentlightning.types import Hook

_POLL_SECONDS = 0.1


@contextmanager
def run_context(
    self: LitAgentRunner,
    *,
    agent: LitAgent[Any],
    store: LightningStore,
    hooks: Sequence[Hook] | None = None,
    worker_id: int | None = None,
) -> Iterator[LitAgentRunner]:
    """A runner that is ready for `step` and `iter`, and torn down at the end."""
    self.init(agent, hooks or ())
    self.init_worker(worker_id or 0, store)
    try:
        yield self
    finally:
        self.teardown()


def get_agent(self: LitAgentRunner) -> LitAgent[Any]:
    """The agent it was given."""
    return self._ready_agent()


def get_store(self: LitAgentRunner) -> LightningStore:
    """The store it was given."""
    return self._ready_store()


def get_worker_id(self: LitAgentRunner) -> str:
    """Its name in the store."""
    return self.worker_id


def _tracer(self: LitAgentRunner) -> Tracer:
    """Its tracer."""
    return self._tracer


tracer = property(_tracer)


def teardown_worker(self: LitAgentRunner, worker_id: int, *_: Any) -> None:
    """`teardown` undoes all of it."""


@classmethod
def of_type(cls: type, _: Any) -> type:
    """`LitAgentRunner[Task]` is `LitAgentRunner`."""
    return cls


def event(arguments: dict[str, Any], value: Any) -> AbstractContextManager[None] | None:
    """`iter(event=…)`: an event of a thread or a process stops it as well."""
    if value is None or isinstance(value, asyncio.Event):
        arguments["stop"] = value
        return None
    stop = asyncio.Event()
    arguments["stop"] = stop
    # Held by the loop's own reference through the event it waits on; it ends with the process at the latest.
    _watching.add(task := asyncio.get_running_loop().create_task(_watch(value, stop)))
    task.add_done_callback(_watching.discard)
    return None


_watching: set[asyncio.Task[None]] = set()


async def _watch(value: Any, stop: asyncio.Event) -> None:
    while not value.is_set():  # noqa: ASYNC110 (it is no event of this loop)
        await asyncio.sleep(_POLL_SECONDS)
    stop.set()


# ---- what agents asked for -------------------------------------------------------------------------------------------

_runners: WeakKeyDictionary[LitAgent[Any], Any] = WeakKeyDictionary()
_trainers: WeakKeyDictionary[LitAgent[Any], Any] = WeakKeyDictionary()


def _agents_tracer(self: LitAgent[Any]) -> Tracer:
    return get_active_tracer() or Tracer()


agents_tracer = property(_agents_tracer)


def get_runner(self: LitAgent[Any]) -> Any:
    """The runner whose rollout this is, or the one that was set. Raises ValueError where there is none."""
    return _found(_runners.get(self) or current_runner.get(), "runner")


def get_trainer(self: LitAgent[Any]) -> Any:
    """The trainer of this run, or the one that was set. Raises ValueError where there is none."""
    return _found(_trainers.get(self) or current_trainer.get(), "trainer")


def set_runner(self: LitAgent[Any], runner: Any) -> None:
    _runners[self] = runner


def set_trainer(self: LitAgent[Any], trainer: Any) -> None:
    _trainers[self] = trainer


agents_runner = property(get_runner)
agents_trainer = property(get_trainer)


def _found(value: Any, what: str) -> Any:
    if value is None:
        raise ValueError(f"There is no {what} here: the agent runs in none.")
    return value
