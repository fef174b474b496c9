"""What the training loop costs by the number of engines: where more of them bring no more, and why.

Everything is real but what computes: GRPO's loop, a store on SQLite, the gateway, a runner, agents that call over HTTP,
and the fleet that deals requests to engines. An engine answers with 64 tokens after `--answer` seconds, `--slots`
requests at once; a learner sleeps for `--learn` seconds. There are as many rollouts at once as slots, each with one
call of 100 tokens. Engines and learner take no processor time, so whatever is missing from the ideal is ours, and that
of the agents, which are in the same process.
    python benchmarks/engines.py [--engines 1 2 4 8 16 32] [--slots 16] [--answer 2] [--steps 4] [--quick] [--json]

Keys, for each number of engines: `calls_per_s` while rollouts are sampled, `ideal_calls_per_s` (slots / answer),
`ours` (the share of the steps' wall clock in which neither engines nor learner would have to be waited for),
`cpu_ms` (processor time of the process per call), `mib` (its memory at the end), `busy` (of one core).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

import numpy as np
import psutil

ROOT = Path(__file__).parents[1]
PROMPT = "How far is it from one end of the town to the other, if one takes the road along the river? " * 4
WAVES = 2
"""How often each slot is taken in a step."""
GROUP, TOKENS = 8, 64


class Sleeping:
    """A replica of the engine: see `fleet.KeptReplica`."""

    def __init__(self, name: str, slots: int) -> None:
        self.name = name
        self.running = 0
        self.publication_seconds = 0.0
        self.ready = asyncio.Event()
        self.slots = asyncio.Semaphore(slots)

    def lost(self, cause: Exception) -> None:
        self.ready.clear()

    async def run(self) -> None:
        self.ready.set()
        await asyncio.Event().wait()


class SleepingBackend:
    """See `Backend`: a fleet of engines and a learner that only take their time."""

    def __init__(self, engines: int, slots: int, answer: float, learn: float) -> None:
        from agentlightning.backend.fleet import Fleet

        self.fleet = Fleet([Sleeping(f"engine {number}", slots) for number in range(engines)], slots)
        self._answer, self._learn, self._slots = answer, learn, slots
        self._published = self._learned = 0
        self.calls = 0

    async def start(self) -> None:
        from agentlightning.models import resolve_model
        from agentlightning.rendering.load import load_rendering

        rendering = load_rendering(resolve_model("calc"))
        self._end = rendering.stop_token_ids[0]
        self._ids = np.array([*(rendering.encode("It is far. ") * 40)[: TOKENS - 1], self._end], dtype=np.int32)
        self._logprobs = np.linspace(-0.1, -2, len(self._ids)).astype(np.float32)
        await self.fleet.start()

    def engine(self, policy: str) -> Any:
        return self

    def learner(self, policy: str) -> Any:
        return self

    async def info(self) -> Any:
        from agentlightning.engine.base import EngineInfo

        return EngineInfo(
            model="calc",
            max_context=1024,
            max_concurrency=self._slots * len(self.fleet.replicas),
            vocab_size=1000,
            eos_ids=(self._end,),
            version=self._published,
        )

    async def generate(
        self, prompt_ids: Any, params: Any, *, stream: bool = False, request_id: str | None = None
    ) -> AsyncGenerator[Any, None]:
        share = min(params.max_tokens or TOKENS, TOKENS) / TOKENS
        async for chunk in self.fleet.sample(prompt_ids, params, lambda replica: self._on(replica, share)):
            yield chunk

    async def _on(self, replica: Sleeping, share: float) -> AsyncGenerator[Any, None]:
        from agentlightning.engine.base import Chunk

        replica.running += 1
        try:
            async with replica.slots:
                await asyncio.sleep(self._answer * share)
        finally:
            replica.running -= 1
        self.calls += 1
        yield Chunk(
            ids=self._ids,
            logprobs=self._logprobs,
            plain_logprobs=self._logprobs,
            version=self._published,
            finish_reason="stop",
        )

    async def forward(self, batch: Any, *, reference: bool = False) -> Any:
        return batch.old_logprobs_E

    async def forward_backward(self, batches: Sequence[Any], loss: Any) -> Any:
        from agentlightning.learner.base import PassResult

        await asyncio.sleep(self._learn)
        logprobs = np.concatenate([batch.old_logprobs_E for batch in batches])
        return PassResult(loss=0.0, logprobs=logprobs, tree_tokens=len(logprobs), metrics={})

    async def optim_step(self, params: Any) -> Any:
        from agentlightning.learner.base import StepResult

        self._learned += 1
        return StepResult(version=self._learned, grad_norm=1.0)

    async def publish(self, policy: str) -> int:
        self._published = self._learned
        return self._published

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def reseed(self, seed: int) -> None: ...

    async def watch(self) -> NoReturn:
        await self.fleet.watch()

    async def stats(self) -> None:
        return None

    async def checkpoint(self, uri: str) -> None:
        for kind in ("model", "optimizer"):
            (Path(uri) / kind).mkdir(parents=True, exist_ok=True)

    async def restore(self, uri: str) -> None: ...

    async def close(self) -> None:
        await self.fleet.close()


def train(given: Mapping[str, Any]) -> dict[str, float]:
    """A run with so many engines, in a process of its own."""
    import aiohttp

    import agentlightning as agl
    from agentlightning.metrics import SilentConsole, read_metrics

    sessions: list[aiohttp.ClientSession] = []
    engines, slots = given["engines"], given["slots"]

    @agl.rollout
    async def agent(task: int, llm: agl.LLM) -> float:
        if not sessions:
            sessions.append(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        body = {"model": llm.model, "messages": [{"role": "user", "content": f"{PROMPT}{task}"}]}
        headers = {"Authorization": f"Bearer {llm.api_key}"}
        async with sessions[0].post(f"{llm.endpoint}/chat/completions", json=body, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            await answer.read()
        return float(np.random.default_rng().integers(2))

    backend = SleepingBackend(engines, slots, given["answer"], given["learn"])
    tasks_per_step = max(1, WAVES * engines * slots // GROUP)
    algorithm = agl.GRPO(
        model="calc",
        backend=lambda spec: backend,
        steps=given["steps"] + 1,
        tasks_per_step=tasks_per_step,
        group_size=GROUP,
        max_context=1024,
        flat_steps=0,
        gradient_noise_every=0,
        check_packing_every=0,
        save_every=1000,
    )
    with TemporaryDirectory() as folder:
        trainer = agl.Trainer(algorithm=algorithm, concurrency=engines * slots, run_dir=folder, console=SilentConsole())
        used = psutil.Process().cpu_times()
        trainer.fit(agent, list(range(tasks_per_step * (given["steps"] + 1))))
        now = psutil.Process().cpu_times()
        rows = [row for row in read_metrics(Path(folder) / "metrics.jsonl") if row["step"] > 1]  # the first warms up
    seconds = rows[-1]["time"] - rows[0]["sampling_from"]
    calls = sum(row["rollouts"] for row in rows)
    ideal = WAVES * given["answer"] + given["learn"]
    cpu = now.user + now.system - used.user - used.system
    return {
        "engines": engines,
        "calls_per_s": calls / sum(row["sampling_seconds"] for row in rows),
        "ideal_calls_per_s": engines * slots / given["answer"],
        "ours": 1 - len(rows) * ideal / seconds,
        "cpu_ms": 1000 * cpu / backend.calls,
        "busy": cpu / seconds * len(rows) / (len(rows) + 1),
        "mib": psutil.Process().memory_info().rss / 2**20,
    }


def measured(given: Mapping[str, Any]) -> dict[str, float]:
    command = [sys.executable, __file__, "--spec", json.dumps(given)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-4000:])
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--slots", type=int, default=16, help="requests that an engine samples at once")
    parser.add_argument("--answer", type=float, default=2.0, help="seconds of a call")
    parser.add_argument("--learn", type=float, default=1.0, help="seconds of an update")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--spec", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.spec:
        sys.stdout.write(json.dumps(train(json.loads(given.spec))) + "\n")
        return
    if given.quick:
        given.engines, given.steps, given.answer, given.learn = [1, 4], 1, 0.5, 0.1
    settings = {name: getattr(given, name) for name in ("slots", "answer", "learn", "steps")}
    began = time.monotonic()
    rows = [measured({"engines": engines, **settings}) for engines in given.engines]
    if given.json:
        print(json.dumps(rows))
        return
    print(
        "| engines | calls/s | of ideal | ours | CPU of a call | of one core | memory |\n|---|---|---|---|---|---|---|"
    )
    for row in rows:
        share = row["calls_per_s"] / row["ideal_calls_per_s"]
        print(
            f"| {row['engines']} | {row['calls_per_s']:.0f} | {share:.0%} | {row['ours']:.0%} "
            f"| {row['cpu_ms']:.1f} ms | {row['busy']:.0%} | {row['mib']:.0f} MiB |"
        )
    print(f"\nin {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
