"""A random Qwen3, calls to learn from, and the reference that takes each call alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from agentlightning.learner.packing import CreditedCall
from agentlightning.learner.policy import Policy, load_policy
from agentlightning.types.call import Call, CallInfo, Int32Array

MakeCall = Callable[..., CreditedCall]


@pytest.fixture
def policy(tiny_model_dir: Path) -> Policy:
    torch.set_num_threads(1)
    return load_policy(tiny_model_dir, device="cpu")


@pytest.fixture
def make_call() -> MakeCall:
    def make(
        prompt: Int32Array,
        response: Int32Array,
        *,
        sequence: int = 0,
        group: int = 0,
        advantage: float = 1.0,
        weight: float = 1.0,
        temperature: float = 1.0,
        old_logprobs: np.ndarray | None = None,
    ) -> CreditedCall:
        n = len(response)
        old = np.zeros(n, dtype=np.float32) if old_logprobs is None else old_logprobs
        call = Call(call_info(f"r{sequence}", temperature), prompt, response, old, old, ())
        advantages = np.full(n, advantage, dtype=np.float32)
        return CreditedCall(call, sequence, group, advantages, np.full(n, weight, dtype=np.float32))

    return make


def call_info(rollout_id: str, temperature: float = 1.0) -> CallInfo:
    return CallInfo(
        call_id=f"{rollout_id}-c",
        response_id=f"{rollout_id}-c",
        rollout_id=rollout_id,
        attempt_id="a",
        choice=0,
        policy="policy",
        trained=True,
        agent=None,
        parent_call_id=None,
        model="policy",
        dialect="chat",
        finish_reason="stop",
        start_time=0.0,
        end_time=0.0,
        temperature=temperature,
    )


@pytest.fixture
def group_of_conversations(make_call: MakeCall) -> list[CreditedCall]:
    """Two groups of three siblings with three turns each; one sibling's history branches in its last turn."""
    rng = np.random.default_rng(3)

    def tokens(n: int) -> Int32Array:
        return rng.integers(0, 250, n).astype(np.int32)

    system = tokens(12)
    credited: list[CreditedCall] = []
    for group in range(2):
        question = np.concatenate([system, tokens(5)])
        for sibling in range(3):
            context = question
            for turn in range(3):
                response = tokens(int(rng.integers(2, 7)))
                branched = sibling == 1 and turn == 2
                prompt = np.concatenate([question, tokens(4)]) if branched else context
                credited.append(
                    make_call(
                        prompt,
                        response,
                        sequence=3 * group + sibling,
                        group=group,
                        advantage=float(rng.normal()),
                        weight=float(rng.uniform(0.01, 0.1)),
                    )
                )
                context = np.concatenate([context, response, tokens(3)])
    return credited
