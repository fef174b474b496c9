"""Thousands of agents at once for minutes, while parts are killed, suspended, starved of disk, and told a wrong time.

Agents talk to a real gateway and a real store; the engine behind it answers at once, always the same. Three processes:
the site (store and gateway), and two that run agents. Every rollout must succeed in the end, with every answer that its
agent was given recorded; memory must not grow by more than 48 MiB in the second half (SQLite's page caches are three of
16); nothing may be open later than its deadline allows. The clock that is told wrong is the wall's, never the monotonic
one: as when a machine was asleep or its time is set. Filling the disk needs root, for a small one of the store's own,
and is skipped without.
    python scripts/soak.py [--agents 2000] [--seconds 600] [--think 20] [--faults kill_agents,…] [--quick] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from agentlightning.trainer.sync import run_sync

KEY = "the key of the soak"
TURNS = 3
RESPONSE = "The answer is 7."
DISK_BYTES = 2 * 2**30
PROCESSES = 2
MOST_GROWTH = 48.0
"""MiB by which the site's memory may grow in the second half: as much as the page caches of SQLite hold."""

# ---- the site: store and gateway -----------------------------------------------------------------------------------


class Parrot:
    """An engine that always says the same, at once."""

    def __init__(self, rendering: Any) -> None:
        import numpy as np

        ids = [*rendering.encode(RESPONSE), rendering.stop_token_ids[0]]
        self.ids = np.array(ids, dtype=np.int32)
        self.logprobs = np.linspace(-0.1, -2, len(ids)).astype(np.float32)
        self.stop = ids[-1]

    async def info(self) -> Any:
        from agentlightning.engine.base import EngineInfo

        return EngineInfo(
            model="parrot", max_context=4096, max_concurrency=4096, vocab_size=1000, eos_ids=(self.stop,), version=0
        )

    async def generate(
        self, prompt_ids: Any, params: Any, *, stream: bool = False, request_id: str | None = None
    ) -> AsyncGenerator[Any, None]:
        from agentlightning.engine.base import Chunk

        yield Chunk(ids=self.ids, logprobs=self.logprobs, plain_logprobs=self.logprobs, version=0, finish_reason="stop")


def take_time_from(clock: Path) -> None:
    """From now on the wall's clock is as many seconds ahead as the file says; it is read four times a second."""
    right, told = time.time, [0.0, 0.0]  # when it was looked at, and what it said

    def ahead() -> float:
        if (now := time.monotonic()) - told[0] > 0.25:
            told[:] = now, float(clock.read_text()) if clock.exists() else 0.0
        return right() + told[1]

    time.time = ahead


async def be_the_site(spec: dict[str, Any]) -> None:
    take_time_from(Path(spec["folder"]) / "clock")
    from agentlightning.gateway import Gateway
    from agentlightning.keys import derived_secret
    from agentlightning.models import resolve_model
    from agentlightning.rendering import load_rendering
    from agentlightning.store import LightningStoreServer, SqliteLightningStore

    secret = derived_secret(KEY)
    rendering = load_rendering(resolve_model("calc"))
    async with AsyncExitStack() as stack:
        store = SqliteLightningStore(Path(spec["folder"]) / "store.db")
        stack.push_async_callback(store.close)
        gateway = Gateway(
            store,
            Parrot(rendering),
            rendering,
            port=spec["gateway_port"],
            secret=secret,
            journal=Path(spec["folder"]) / "journal",
        )
        await gateway.start()
        stack.push_async_callback(gateway.stop)
        if not spec["again"]:
            await store.add_resources({"llm": gateway.as_resource()})
        server = LightningStoreServer(store, port=spec["store_port"], admin_key=KEY, secret=secret)
        await server.start()
        stack.push_async_callback(server.stop)
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


# ---- the agents ----------------------------------------------------------------------------------------------------


async def be_agents(spec: dict[str, Any]) -> None:
    import aiohttp

    import agentlightning as agl
    from agentlightning.runner.remote import Address, serve_rollouts
    from agentlightning.tracer import DummyTracer

    sessions: list[aiohttp.ClientSession] = []  # made where agents run: they have a loop of their own
    drops = random.Random(spec["seed"])

    async def ask(llm: Any, messages: list[dict[str, str]]) -> dict[str, str]:
        """As a patient client asks: a broken connection or a 5xx is tried again, for two minutes."""
        if not sessions:
            sessions.append(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        body = {"model": llm.model, "messages": messages}
        headers = {"Authorization": f"Bearer {llm.api_key}"}
        end = time.monotonic() + 120
        while True:
            with suppress(aiohttp.ClientError, TimeoutError, OSError):
                seconds = 0.002 if drops.random() < spec["drop"] else 60.0  # now and then one hangs up
                async with asyncio.timeout(seconds):
                    url = f"{llm.endpoint}/chat/completions"
                    async with sessions[0].post(url, json=body, headers=headers) as answer:
                        found = await answer.json()
                        if answer.status == 200:
                            return found["choices"][0]["message"]
                        if answer.status < 500:
                            raise RuntimeError(f"{answer.status}: {found}")
            if time.monotonic() > end:
                raise TimeoutError("The gateway was out of reach for two minutes.")
            await asyncio.sleep(drops.uniform(0.2, 1.0))

    @agl.rollout
    async def agent(task: Any, llm: agl.LLM) -> float:
        messages = [{"role": "user", "content": f"What is {task} + 3?"}]
        for turn in range(TURNS):
            await asyncio.sleep(drops.expovariate(1 / spec["think"]))
            messages.append(await ask(llm, messages))
            messages.append({"role": "user", "content": f"And then, in turn {turn}?"})
        return float(TURNS)

    address = Address(f"http://127.0.0.1:{spec['store_port']}", KEY)
    await serve_rollouts(agent, address, stop=asyncio.Event(), tracer=DummyTracer(), concurrency=spec["concurrency"])


# ---- the driver ----------------------------------------------------------------------------------------------------


@dataclass
class Soak:
    """The processes, what was asked of them, and what came of it."""

    agents: int
    seconds: float
    think: float
    folder: Path
    spec: dict[str, Any]
    open: dict[str, float] = field(default_factory=dict)
    ended: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    retried: int = 0
    longest: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    due: set[str] = field(default_factory=set)
    """Faults that have not struck yet."""
    skipped: list[str] = field(default_factory=list)
    memory: list[tuple[float, float]] = field(default_factory=list)
    site: subprocess.Popen[str] | None = None
    crews: list[subprocess.Popen[str]] = field(default_factory=list)

    # -- processes

    def start(self, role: str, **more: Any) -> subprocess.Popen[str]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, __file__, "--role", role, "--spec", json.dumps({**self.spec, **more})]
        log = (self.folder / f"{role}.log").open("a")
        return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=log)

    async def start_site(self, again: bool) -> None:
        self.site = self.start("site", again=again)
        assert self.site.stdout is not None
        line = await asyncio.to_thread(self.site.stdout.readline)
        if line != "ready\n":
            raise RuntimeError(f"The site did not start: {(self.folder / 'site.log').read_text()[-2000:]}")

    def start_crew(self, number: int) -> subprocess.Popen[str]:
        return self.start("agents", seed=random.random(), concurrency=-(-self.agents // PROCESSES))

    def end(self) -> None:
        for process in (self.site, *self.crews):
            if process is not None:
                process.kill()
                process.communicate()

    @property
    def clock(self) -> Path:
        return self.folder / "clock"

    # -- faults

    async def kill_agents(self) -> None:
        number = random.randrange(len(self.crews))
        self.crews[number].kill()
        self.crews[number].communicate()
        self.crews[number] = self.start_crew(number)

    async def kill_site(self) -> None:
        assert self.site is not None
        self.site.kill()
        self.site.communicate()
        await self.start_site(again=True)

    async def suspend_agents(self) -> None:
        await self._suspend(random.choice(self.crews))

    async def suspend_site(self) -> None:
        assert self.site is not None
        await self._suspend(self.site)

    async def _suspend(self, process: subprocess.Popen[str]) -> None:
        process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(5)
        process.send_signal(signal.SIGCONT)

    async def step_clock(self) -> None:
        """Three hours ahead, and every other time three hours back."""
        ahead = self.faults["step_clock"] % 2 == 0
        work = self.clock.with_suffix(".new")
        work.write_text(str(3 * 3600 if ahead else 0))
        work.replace(self.clock)

    async def fill_disk(self) -> None:
        """For five seconds not a byte is free, where the store has a small disk of its own."""
        ballast = self.folder / "ballast"
        with suppress(OSError), ballast.open("wb") as file:
            while True:
                file.write(bytes(2**20))
        await asyncio.sleep(5)
        ballast.unlink()

    # -- the load

    async def fill(self, store: Any) -> None:
        """Keep as many rollouts open as there are to be agents."""
        from agentlightning.types import AttemptStatus, EnqueueRolloutRequest, RolloutConfig

        again = [AttemptStatus.FAILED, AttemptStatus.TIMEOUT, AttemptStatus.UNRESPONSIVE]
        config = RolloutConfig(timeout_seconds=self.deadline, max_attempts=20, retry_condition=again)
        config = config.model_copy(update={"unresponsive_seconds": 30.0})
        missing = self.agents - len(self.open)
        if missing > 0:
            requests = [EnqueueRolloutRequest(input=random.randrange(1000), config=config) for _ in range(missing)]
            for rollout in await store.enqueue_many_rollouts(requests):
                self.open[rollout.rollout_id] = time.monotonic()

    @property
    def deadline(self) -> float:
        """Of one attempt."""
        return 20 * self.think + 180

    async def collect(self, store: Any) -> None:
        """Take what is finished and look whether it is whole."""
        done = await store.wait_for_any_rollout(rollout_ids=list(self.open), timeout=2.0)
        ids = [rollout.rollout_id for rollout in done]
        for part in (ids[i : i + 200] for i in range(0, len(ids), 200)):
            calls = await store.query_calls(part)
            for rollout_id in part:
                if len(calls.get(rollout_id, ())) < TURNS:
                    self.wrong.append(f"{rollout_id}: {len(calls.get(rollout_id, ()))} calls of {TURNS} are recorded")
        for rollout in done:
            self.ended[rollout.status.value] += 1
            if rollout.status.value != "succeeded":
                self.wrong.append(f"{rollout.rollout_id} ended as {rollout.status.value}")
            self.longest = max(self.longest, time.monotonic() - self.open.pop(rollout.rollout_id))

    async def load(self, began: float) -> None:
        from agentlightning.store import LightningStoreClient

        store = LightningStoreClient(f"http://127.0.0.1:{self.spec['store_port']}", key=KEY, retry_seconds=120.0)
        try:
            # On a busy machine a fault takes longer: none shall be missing in the end.
            while time.monotonic() < began + self.seconds or (self.due and time.monotonic() < began + 4 * self.seconds):
                await self.fill(store)
                await self.collect(store)
            end = time.monotonic() + self.deadline + 60  # the last ones; a lease may have to run out first
            while self.open and time.monotonic() < end:
                await self.collect(store)
            self.retried = (await store.statistics())["total_attempts"] - sum(self.ended.values()) - len(self.open)
            self.wrong += [f"{rollout_id} is open past its deadline" for rollout_id in self.open]
        finally:
            await store.close()

    async def strike(self, began: float, faults: list[str]) -> None:
        """One fault after the other; the site is killed in the first half only, so that its memory can be followed."""
        pause = max(6.0, self.seconds / 24)
        for name in itertools.cycle(faults):
            await asyncio.sleep(pause)
            passed = time.monotonic() - began
            if passed > self.seconds * 0.9 and not self.due:
                return
            if name not in self.due and passed > self.seconds * (0.5 if name == "kill_site" else 0.9):
                continue
            await getattr(self, name)()
            self.faults[name] += 1
            self.due.discard(name)

    async def watch_memory(self, began: float) -> None:
        while True:
            await asyncio.sleep(1.0)
            assert self.site is not None
            with suppress(OSError, ValueError, IndexError):
                self.memory.append((time.monotonic() - began, _resident(self.site.pid)))

    async def tell(self, began: float) -> None:
        """A line of progress now and then, on standard error."""
        while True:
            await asyncio.sleep(max(5.0, self.seconds / 20))
            passed, size = time.monotonic() - began, self.memory[-1][1] if self.memory else 0.0
            struck = ", ".join(f"{name} {count}" for name, count in self.faults.items()) or "none yet"
            print(
                f"{passed:4.0f} s of {self.seconds:.0f}{'' if passed < self.seconds else ', waiting for the last'}: "
                f"{sum(self.ended.values())} rollouts ended, {len(self.open)} open, {len(self.wrong)} lost or wrong; "
                f"{size:.0f} MiB; faults: {struck}",
                file=sys.stderr,
                flush=True,
            )

    def growth(self) -> float:
        return growth(self.memory, self.seconds)


def growth(memory: list[tuple[float, float]], seconds: float) -> float:
    """MiB by which memory (when, how much) grew in the second half of so many seconds: from the middle one of the third
    quarter's sizes to the middle one of the last's.
    """
    quarters: list[list[float]] = [[], []]
    for at, size in memory:
        if seconds / 2 < at < seconds:
            quarters[at > seconds * 0.75].append(size)
    middle = [sorted(sizes)[len(sizes) // 2] for sizes in quarters if sizes]
    return middle[1] - middle[0] if len(middle) == 2 else 0.0


def verdict(memory: list[tuple[float, float]], seconds: float) -> str | None:
    """Why the site's memory counts as growing; None if it does not."""
    if (grown := growth(memory, seconds)) <= MOST_GROWTH:
        return None
    return f"The site's memory grew by {grown:.0f} MiB in the second half; {MOST_GROWTH:.0f} are what it may."


FAULTS = ("kill_agents", "suspend_site", "kill_site", "suspend_agents", "fill_disk", "step_clock")


async def soak(agents: int, seconds: float, think: float, faults: list[str]) -> Soak:
    folder = Path(mkdtemp(prefix="agl-soak-"))
    own_disk = "fill_disk" in faults and _mount(folder)
    spec = {"folder": str(folder), "store_port": _port(), "gateway_port": _port(), "think": think, "drop": 0.02}
    run = Soak(agents, seconds, think, folder, spec)
    if "fill_disk" in faults and not own_disk:
        run.skipped.append("fill_disk: a disk of its own cannot be mounted here")
    possible = [f for f in faults if not any(s.startswith(f) for s in run.skipped)]
    run.due = set(possible)
    try:
        await run.start_site(again=False)
        run.crews = [run.start_crew(number) for number in range(PROCESSES)]
        began = time.monotonic()
        watching = [asyncio.create_task(run.watch_memory(began)), asyncio.create_task(run.tell(began))]
        striking = [asyncio.create_task(run.strike(began, possible))] if possible else []
        loading = asyncio.create_task(run.load(began))
        await asyncio.wait({loading, *striking}, return_when=asyncio.FIRST_EXCEPTION)
        for task in striking:
            if task.done():
                task.result()
        await loading
        for task in (*watching, *striking):
            task.cancel()
        await asyncio.gather(*watching, *striking, return_exceptions=True)
        return run
    finally:
        run.end()
        if own_disk:
            _unmount(folder)
        shutil.rmtree(folder, ignore_errors=True)


def _mount(folder: Path) -> bool:
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES // 2**20}m", "tmpfs", str(folder)]
    return os.geteuid() == 0 and subprocess.run(command, capture_output=True, check=False).returncode == 0


def _unmount(folder: Path) -> None:
    subprocess.run(["umount", "-l", str(folder)], check=False)


def _resident(pid: int) -> float:
    """MiB."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 / 2**20


def _port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def report(run: Soak) -> dict[str, Any]:
    return {
        "agents": run.agents,
        "seconds": run.seconds,
        "rollouts": sum(run.ended.values()),
        "calls": TURNS * run.ended["succeeded"],
        "ended": dict(run.ended),
        "faults": dict(run.faults),
        "skipped": run.skipped,
        "attempts_done_again": run.retried,
        "lost_or_wrong": len(run.wrong),
        "longest_rollout_s": round(run.longest, 1),
        "memory_mib": round(run.memory[-1][1]) if run.memory else None,
        "memory_growth_mib": round(run.growth(), 1),
        "memory_every_minute_mib": every_minute(run.memory),
    }


def every_minute(memory: list[tuple[float, float]]) -> list[int]:
    """The size at the end of each minute."""
    last = {int(at // 60): size for at, size in memory}
    return [round(last[minute]) for minute in sorted(last)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--think", type=float, help="seconds before each call, on average (a thirtieth of the time)")
    parser.add_argument("--faults", default=",".join(FAULTS), help="which, by comma; '' for none (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="100 agents for 60 seconds")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--role", choices=("site", "agents"), help=argparse.SUPPRESS)
    parser.add_argument("--spec", type=json.loads, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.role:
        run_sync(be_the_site(given.spec) if given.role == "site" else be_agents(given.spec))
        return
    faults = [name for name in given.faults.split(",") if name]
    if unknown := set(faults) - set(FAULTS):
        parser.error(f"there is no fault {', '.join(sorted(unknown))}; there are {', '.join(FAULTS)}")
    agents = given.agents or (100 if given.quick else 2000)
    seconds = given.seconds or (60.0 if given.quick else 600.0)
    run = run_sync(soak(agents, seconds, given.think or max(1.0, seconds / 30), faults))
    found = report(run)
    print(json.dumps(found) if given.json else "\n".join(f"{name:>20}  {value}" for name, value in found.items()))
    grown = verdict(run.memory, run.seconds)
    for line in [*run.wrong[:10], *([grown] if grown else [])]:
        print(line, file=sys.stderr)
    sys.exit(1 if run.wrong or grown else 0)


if __name__ == "__main__":
    main()
