"""A loop of importance sampling by the official client, and the same by our own parts, as in `examples/own_loop`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentlightning.backend import POLICY, ModelSpec, make_backend
from agentlightning.learner import CreditedCall, LossConfig, OptimParams, pack, split_by_budget
from agentlightning.types.call import Call, CallInfo

from .conftest import Running, adapter_of, ids, prompt, training_client, types
from .test_learning import weights_in

pytestmark = pytest.mark.slow

ADAM = {"learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-4}
STEPS, GROUPS, SAMPLES = 3, 2, 4


def reward(tokens: list[int]) -> float:
    return float(np.mean(np.asarray(tokens) % 2))


def credited(start: np.ndarray, one: Any, number: int, group: int, advantage: float) -> CreditedCall:
    """A sample as a call that was recorded."""
    info = CallInfo(
        call_id=f"c{number}", response_id=f"c{number}", rollout_id=f"r{number}", attempt_id="a", choice=0,
        policy="policy", trained=True, agent=None, parent_call_id=None, model="policy", dialect="chat",
        finish_reason="stop", start_time=0.0, end_time=1.0, temperature=1.0,
    )  # fmt: skip
    logprobs = np.array(one.logprobs, dtype=np.float32)
    call = Call(info, start.astype(np.int32), np.array(one.tokens, dtype=np.int32), logprobs, logprobs, ())
    count = len(one.tokens)
    return CreditedCall(call, number, group, np.full(count, advantage, np.float32), np.ones(count, np.float32))


async def test_the_weights_are_the_same(running: Running, tmp_path: Path) -> None:
    backend = make_backend("embedded", ModelSpec(model="calc", lora_rank=8, seed=0, device="cpu", max_context=512))
    await backend.start()
    learner = backend.learner(POLICY)
    with running.client() as service:
        client = training_client(service, rank=8, seed=0, train_unembed=False)
        for step in range(STEPS):
            sampler = client.save_weights_and_get_sampling_client().result()
            data, calls = [], []
            for group in range(GROUPS):
                start = ids(10 * step + group, 6)
                params = types.SamplingParams(max_tokens=8, seed=step)
                found = sampler.sample(prompt(start), num_samples=SAMPLES, sampling_params=params).result().sequences
                rewards = [reward(one.tokens) for one in found]
                for one, earned in zip(found, rewards, strict=True):
                    advantage = earned - float(np.mean(rewards))
                    before = len(start) - 1
                    data.append(
                        types.Datum(
                            model_input=prompt([*start, *one.tokens[:-1]]),
                            loss_fn_inputs={
                                "target_tokens": np.array([0] * before + list(one.tokens)),
                                "logprobs": np.array([0.0] * before + list(one.logprobs), dtype=np.float32),
                                "advantages": np.array([0.0] * before + [advantage] * len(one.tokens), np.float32),
                            },
                        )
                    )
                    calls.append(credited(start, one, len(calls), group, advantage))
            client.forward_backward(data, "importance_sampling")
            theirs = client.optim_step(types.AdamParams(**ADAM)).result().metrics["grad_norm"]
            batches = [pack(part) for part in split_by_budget(calls, 16_384)]
            await learner.forward_backward(batches, LossConfig(name="ppo_clip", clip_low=1.0, clip_high=float("inf")))
            ours = await learner.optim_step(OptimParams(**ADAM, max_grad_norm=0.0))
            np.testing.assert_allclose(theirs, ours.grad_norm, rtol=1e-4)
            await backend.publish(POLICY)
        path = adapter_of(running, client.save_state("end").result().path)
    await learner.export(str(tmp_path / "ours"))
    await backend.close()
    learned, wanted = weights_in(path), weights_in(tmp_path / "ours")
    assert learned.keys() == wanted.keys()
    assert max(float((learned[key] - value).abs().max()) for key, value in wanted.items()) < 1e-5
    assert any(torch.any(value != 0) for key, value in wanted.items() if "lora_B" in key), "something was learned"
