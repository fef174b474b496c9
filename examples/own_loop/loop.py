"""The whole of reinforcement learning in one flat file, on the public parts: python examples/own_loop/loop.py [STEPS]

This is what `GRPO.run` does, without settings, checks, resuming and metrics: copy it and change what you like. Nothing
is hidden: rollouts go into the store, a runner runs the agent on them, the gateway samples from the engine and records
every token, and what was earned becomes gradients.

Shape letters: R rollouts.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np

import agentlightning as agl
from agentlightning.algorithm import collect
from agentlightning.backend import POLICY, ModelSpec, make_backend
from agentlightning.learner import CreditedCall, LossConfig, OptimParams, pack, split_by_budget
from agentlightning.rendering import load_rendering

MODEL = "calc"
TASKS_PER_STEP, GROUP_SIZE = 12, 8
LEARNING_RATE = 2e-4
TOKENS_PER_PASS = 16_384
LOSS = LossConfig(name="ppo_clip", clip_low=0.2, clip_high=0.28)


def advantages(rewards_R: np.ndarray, groups_R: np.ndarray) -> np.ndarray:
    """(r − mean) / std among the rollouts of the same task (GRPO); 0 where all earned the same."""
    found_R = np.zeros_like(rewards_R)
    for group in np.unique(groups_R):
        own = groups_R == group
        if rewards_R[own].std() > 1e-6:
            found_R[own] = (rewards_R[own] - rewards_R[own].mean()) / rewards_R[own].std()
    return found_R


async def train(steps: int, save_to: Path) -> list[float]:
    """Train for so many steps and write a checkpoint; the mean reward of each step."""
    tasks = agl.load_example("calc", "recipe").train_tasks()
    agent = agl.load_example("calc", "calc_agent").calc_agent
    rng, rewards = np.random.default_rng(0), []

    async with AsyncExitStack() as stack:
        # ---- the parts: a store, an engine and a learner on one model, a gateway before them, a runner for the agent
        store = agl.InMemoryLightningStore()
        stack.push_async_callback(store.close)
        backend = make_backend("embedded", ModelSpec(model=MODEL, max_context=512, seed=0))
        stack.push_async_callback(backend.close)
        await backend.start()
        learner = backend.learner(POLICY)
        rendering = load_rendering(agl.resolve_model(MODEL), None)
        gateway = agl.Gateway(store, backend.engine(POLICY), rendering, train_sampling={"temperature": 1.0})
        await gateway.start()
        stack.push_async_callback(gateway.stop)
        runner = agl.LitAgentRunner(agl.OtelTracer(), concurrency=TASKS_PER_STEP * GROUP_SIZE, gateway=gateway)
        runner.init(agent)
        runner.init_worker(0, store)
        stack.callback(runner.teardown)
        stop = asyncio.Event()
        running = asyncio.create_task(runner.iter(stop))
        resources = await store.add_resources({"llm": gateway.as_resource()})

        for step in range(1, steps + 1):
            # ---- enqueue a group of rollouts per task, wait for them, read what was sampled and earned
            began = time.monotonic()
            chosen = rng.choice(len(tasks), TASKS_PER_STEP, replace=False).tolist()
            requests = [
                agl.EnqueueRolloutRequest(
                    input=tasks[task],
                    mode=agl.RolloutMode.TRAIN,
                    resources_id=resources.resources_id,
                    metadata={"group": task},
                )
                for task in chosen
                for _ in range(GROUP_SIZE)
            ]
            ids = [rollout.rollout_id for rollout in await store.enqueue_many_rollouts(requests)]
            await store.wait_for_rollouts(rollout_ids=ids, timeout=600)
            episodes = [e for e in await collect(store, ids) if e.good and e.reward is not None]

            # ---- advantages
            rewards_R = np.array([e.reward for e in episodes], dtype=np.float32)
            groups_R = np.array([e.rollout.metadata["group"] for e in episodes], dtype=np.int32)
            advantages_R = advantages(rewards_R, groups_R)

            # ---- what each sampled token is worth, and how much it counts: all the same
            tokens = sum(e.sampled_tokens for e in episodes)
            credited: list[CreditedCall] = []
            for episode, group, advantage in zip(episodes, groups_R.tolist(), advantages_R.tolist(), strict=True):
                for call in episode.calls if advantage else ():
                    count = len(call.response_ids)
                    credited.append(
                        CreditedCall(
                            call=call,
                            sequence=len(credited),
                            group=group,
                            advantages=np.full(count, advantage, dtype=np.float32),
                            weights=np.full(count, 1 / tokens, dtype=np.float32),
                        )
                    )

            # ---- token trees, gradients, one optimiser step; then the engine samples from the new weights
            if credited:
                batches = [pack(part) for part in split_by_budget(credited, TOKENS_PER_PASS)]
                passed = await learner.forward_backward(batches, LOSS)
                stepped = await learner.optim_step(OptimParams(learning_rate=LEARNING_RATE))
                version = await backend.publish(POLICY)
                assert version == stepped.version, "the engine samples from what was trained"
                print(f"      loss {passed.loss:.4f}, gradient {stepped.grad_norm:.2f}, {passed.tree_tokens} tokens")
            rewards.append(float(rewards_R.mean()))
            print(f"{step:4d}  reward {rewards[-1]:.3f}  {time.monotonic() - began:.1f} s")

        stop.set()
        await running
        await backend.checkpoint(str(save_to))
    return rewards


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("steps", metavar="STEPS", type=int, nargs="?", default=24)
    asyncio.run(train(parser.parse_args().steps, Path("runs") / "own-loop"))
