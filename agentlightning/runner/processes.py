"""Runners in processes of their own: forked before the trainer starts anything, so the agent needs no pickling.

    trainer ── pipe ── keeper ── runner 1 … runner n

The keeper is a process without threads that forks the runners, replaces those that die, and ends them all when the pipe
closes, which it does in whatever way the trainer ends. POSIX only.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from agentlightning.errors import AgentLightningError, ConfigError
from agentlightning.litagent import LitAgent
from agentlightning.runner.executor import forget_agent_loop, new_event_loop
from agentlightning.runner.remote import Address, serve_rollouts
from agentlightning.tracer import Tracer
from agentlightning.types import Hook

STOP_SECONDS = 15.0
"""Between the request to stop and SIGKILL."""
_TOO_SOON = 2.0
_TOO_OFTEN = 5


class RunnerProcesses:
    """`fork` before there are threads; `start` when the store is served; `watch` beside the algorithm; then `stop`."""

    def __init__(self, keeper: int, pipe: int) -> None:
        self._keeper = keeper
        self._pipe: int | None = pipe
        self._ended = False
        self._code = 0

    @classmethod
    def fork(
        cls,
        count: int,
        agent: LitAgent[Any],
        hooks: Sequence[Hook],
        tracer: Tracer,
        *,
        concurrency: int,
        max_rollouts: int | None,
    ) -> RunnerProcesses:
        if not hasattr(os, "fork"):
            raise ConfigError("strategy='processes' needs fork, which this system lacks. Use the default strategy.")

        def runner(address: Address) -> None:
            with asyncio.Runner(loop_factory=new_event_loop) as loop:
                loop.run(_run(agent, hooks, tracer, address, concurrency, max_rollouts))

        reading, writing = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        keeper = os.fork()
        if keeper == 0:
            code = 1
            try:
                os.close(writing)
                code = _keep(reading, count, runner)
            finally:
                os._exit(code)
        os.close(reading)
        return cls(keeper, writing)

    def start(self, address: Address) -> None:
        """Tell the runners where the store is; they begin to claim."""
        secret = address.secret.hex() if address.secret else None
        self._tell([address.url, address.key, secret, address.run_id])

    async def pause(self) -> None:
        """The store is about to go; another `start` may follow."""
        self._tell(None)

    def _tell(self, message: Any) -> None:
        if self._pipe is not None:
            with suppress(BrokenPipeError):
                os.write(self._pipe, json.dumps(message).encode() + b"\n")

    async def watch(self) -> None:
        """Returns when all have done their `max_rollouts`. Raises AgentLightningError when they keep dying."""
        while not self._poll():  # noqa: ASYNC110
            await asyncio.sleep(0.5)
        if self._code == 0:
            return
        raise AgentLightningError(
            "The runner processes ended. One that dies is replaced, unless that happens again and again: its last "
            "words are above."
        )

    async def stop(self) -> None:
        """End them all and wait until they have. Idempotent."""
        if self._pipe is not None:
            os.close(self._pipe)
            self._pipe = None
        end = time.monotonic() + STOP_SECONDS + 5
        while not self._poll():
            if time.monotonic() > end:
                os.kill(self._keeper, signal.SIGKILL)
            await asyncio.sleep(0.02)

    def _poll(self) -> bool:
        if not self._ended:
            try:
                pid, self._code = os.waitpid(self._keeper, os.WNOHANG)
                self._ended = pid != 0
            except ChildProcessError:
                self._ended = True
        return self._ended


async def _run(
    agent: LitAgent[Any],
    hooks: Sequence[Hook],
    tracer: Tracer,
    address: Address,
    concurrency: int,
    max_rollouts: int | None,
) -> None:
    running = asyncio.ensure_future(
        serve_rollouts(
            agent,
            address,
            stop=asyncio.Event(),
            hooks=hooks,
            tracer=tracer,
            concurrency=concurrency,
            max_rollouts=max_rollouts,
        )
    )
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running.cancel)
    with suppress(asyncio.CancelledError):
        await running


# ---- in the keeper ---------------------------------------------------------------------------------------------------


def _keep(pipe: int, count: int, runner: Callable[[Address], None]) -> int:
    """Lines of JSON come through the pipe: an address to serve, or null to serve none; its end is the end."""
    _forget_the_parents_handlers()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole terminal; the trainer decides
    address: Address | None = None
    started: dict[int, float] = {}
    short_lives = 0
    with os.fdopen(pipe, "rb", buffering=0) as lines:  # unbuffered: `select` must see what is left
        while short_lives < _TOO_OFTEN:
            if select.select([lines], [], [], 0.2 if started else None)[0]:
                line = lines.readline()
                _end(list(started))
                if not line:
                    return 0
                address, started = _address(line), {}
                if address is not None:
                    started = {_fork_runner(pipe, runner, address): time.monotonic() for _ in range(count)}
            for pid in list(started):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if not ended:
                    continue
                lived = time.monotonic() - started.pop(pid)
                if status != 0 and address is not None:
                    short_lives = short_lives + 1 if lived < _TOO_SOON else 0
                    started[_fork_runner(pipe, runner, address)] = time.monotonic()
            if address is not None and not started:
                return 0  # each has done what it was asked for
    _end(list(started))
    return 1


def _address(line: bytes) -> Address | None:
    given = json.loads(line)
    if given is None:
        return None
    url, key, secret, run_id = given
    return Address(url, key, bytes.fromhex(secret) if secret else None, run_id)


def _fork_runner(pipe: int, runner: Callable[[Address], None], address: Address) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(pipe)
            forget_agent_loop()
            runner(address)
            code = 0
        except BaseException:  # the process's last words
            sys.excepthook(*sys.exc_info())  # pyright: ignore[reportArgumentType]
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return pid


def _forget_the_parents_handlers() -> None:
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)


def _end(pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    end = time.monotonic() + STOP_SECONDS
    for pid in pids:
        while os.waitpid(pid, os.WNOHANG)[0] == 0:
            if time.monotonic() > end:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
