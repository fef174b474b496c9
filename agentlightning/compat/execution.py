"""Where runners are, as it was said before: two strategies, and events that told them to stop."""

from __future__ import annotations

import multiprocessing
import os
import threading
from dataclasses import fields, replace
from typing import Any, Literal, Protocol

from agentlightning.errors import ConfigError
from agentlightning.trainer.strategy import Strategy


class ExecutionStrategy(Strategy):
    """What the two strategies have in common; scripts ask for it with `isinstance`, and derive from the two."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "execute" in vars(cls):
            raise ConfigError(
                f"{cls.__name__}.execute would never be called: the trainer starts and stops the parts itself. Say "
                "where runners are with Trainer(strategy='inline' | 'processes' | 'remote')."
            )

    def _become(self, other: Strategy) -> None:
        super().__init__(**{f.name: getattr(other, f.name) for f in fields(Strategy)})

    def with_key(self) -> Strategy:
        return Strategy(**{f.name: getattr(self, f.name) for f in fields(Strategy)}).with_key()


class ExecutionEvent(Protocol):
    """Something that can be set and waited for."""

    def set(self) -> None: ...

    def clear(self) -> None: ...

    def is_set(self) -> bool: ...

    def wait(self, timeout: float | None = None) -> bool: ...


class ThreadingEvent(threading.Event):
    """Among threads."""


class MultiprocessingEvent:
    """Among processes."""

    def __init__(self, ctx: Any = None) -> None:
        self._event = (ctx or multiprocessing).Event()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._event, name)


class SharedMemoryExecutionStrategy(ExecutionStrategy):
    """Runners in this process. Only `n_runners` has a meaning here: all parts share one event loop."""

    def __init__(
        self,
        n_runners: int = 1,
        main_thread: Literal["runner", "algorithm"] = "runner",
        join_timeout: float = 15.0,
        graceful_delay: float = 5.0,
        poll_interval: float = 0.05,
        managed_store: bool | None = None,
    ) -> None:
        self._become(replace(Strategy.read("inline"), n_runners=n_runners))


class ClientServerExecutionStrategy(ExecutionStrategy):
    """Runners in processes of this machine, or elsewhere if `role` (or AGL_CURRENT_ROLE) names one part."""

    def __init__(
        self,
        role: Literal["algorithm", "runner", "both"] | None = None,
        server_host: str | None = None,
        server_port: int | None = None,
        n_runners: int = 1,
        graceful_timeout: float = 10.0,
        terminate_timeout: float = 10.0,
        main_process: Literal["algorithm", "runner"] = "algorithm",
        managed_store: bool | None = None,
        allowed_exit_codes: tuple[int, ...] = (0, -15),
    ) -> None:
        given = {
            "AGL_CURRENT_ROLE": role,
            "AGL_SERVER_HOST": server_host,
            "AGL_SERVER_PORT": server_port,
            "AGL_MANAGED_STORE": None if managed_store is None else int(managed_store),
        }
        known = {name: str(value) for name, value in given.items() if value is not None}
        environment = {**os.environ, **known}
        runners = "processes" if (environment.get("AGL_CURRENT_ROLE") or "both").lower() == "both" else None
        self._become(replace(Strategy.read(runners, environment), n_runners=n_runners))
