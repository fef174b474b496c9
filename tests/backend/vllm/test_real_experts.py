"""A mixture of experts trains through the real vLLM for CPUs: what it sampled is what the learner computes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from openai import AsyncOpenAI

import agentlightning as agl
from agentlightning.metrics import SilentConsole, read_metrics

from ...e2e.test_experts import make_experts

PROGRAM = os.environ.get("AGL_TEST_VLLM")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(PROGRAM is None, reason="the real vLLM is tested by `make test-vllm`"),
]
OPTIONS = {
    "command": PROGRAM,
    "args": ["--enforce-eager"],
    "env": {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"},
}


@pytest.mark.parametrize("replay", [False, True], ids=["routed freely", "routing replayed"])
async def test_experts_learn_from_what_vllm_sampled(tmp_path: Path, replay: bool) -> None:
    async with AsyncOpenAI(base_url=agl.GATEWAY_URL, api_key="any") as client:

        @agl.rollout
        async def babbler(task: str, llm: agl.LLM) -> float:
            """The more of its answer is letters, the better."""
            messages = [{"role": "user", "content": task}]
            answer = await client.chat.completions.create(model=llm.model, messages=messages, max_tokens=24)  # pyright: ignore
            text = answer.choices[0].message.content or ""
            return sum(c.isalpha() for c in text) / max(len(text), 1)

        algorithm = agl.GRPO(
            model=make_experts(tmp_path / "model", head_dim=32),
            backend="vllm",
            backend_options=OPTIONS,
            steps=3,
            tasks_per_step=4,
            group_size=8,
            minibatches=4,
            update_epochs=2,
            learning_rate=1e-3,
            max_context=128,
            routing_replay=replay,
        )
        tasks = [f"Say {n} letters." for n in range(8)]
        trainer = agl.Trainer(algorithm=algorithm, run_dir=tmp_path / "run", console=SilentConsole())
        await trainer.fit_async(babbler, tasks)
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [m["step"] for m in rows] == [1, 2, 3]
    assert max(m["logprob_gap_max"] for m in rows) < 1e-3, "the same experts, as far as log-probs can tell"
    assert max(m["sync_gap"] for m in rows) < 1e-3
    assert max(m["kl_step"] for m in rows) > 1e-4, "and the weights moved"
    assert all(("rerouted" in m) == replay for m in rows)
