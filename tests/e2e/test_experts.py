"""A model with mixture-of-experts layers trains through the embedded pair: engine, learner and packing agree."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from openai import AsyncOpenAI

import agentlightning as agl
from agentlightning.metrics import SilentConsole, read_metrics
from agentlightning.models import resolve_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def make_experts(folder: Path, head_dim: int = 16) -> str:
    """A random Qwen3-MoE of two layers with eight experts, two for each token, and the calculator's tokenizer."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    shipped = Path(resolve_model("calc"))
    shutil.copytree(shipped, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=704,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,  # pyright: ignore[reportCallIssue]
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.2,
        bos_token_id=None,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("replay", [False, True], ids=["routed freely", "routing replayed"])
async def test_engine_and_learner_agree_while_experts_learn(tmp_path: Path, replay: bool) -> None:
    async with AsyncOpenAI(base_url=agl.GATEWAY_URL, api_key="any") as client:

        @agl.rollout
        async def babbler(task: str, llm: agl.LLM) -> float:
            """The more of its answer is letters, the better."""
            messages = [{"role": "user", "content": task}]
            answer = await client.chat.completions.create(model=llm.model, messages=messages, max_tokens=24)  # pyright: ignore
            text = answer.choices[0].message.content or ""
            return sum(c.isalpha() for c in text) / max(len(text), 1)

        algorithm = agl.GRPO(
            model=make_experts(tmp_path / "model"),
            steps=3,
            tasks_per_step=4,
            group_size=8,
            minibatches=2,
            learning_rate=2e-3,
            max_context=128,
            check_packing_every=1,
            routing_replay=replay,
        )
        tasks = [f"Say {n} letters." for n in range(8)]
        trainer = agl.Trainer(algorithm=algorithm, run_dir=tmp_path / "run", console=SilentConsole())
        await trainer.fit_async(babbler, tasks)
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [m["step"] for m in rows] == [1, 2, 3]
    assert max(m["logprob_gap_max"] for m in rows) < 1e-3
    assert max(m["sync_gap"] for m in rows) < 1e-3
    assert max(max(m["packing_gap_logprobs"], m["packing_gap_gradients"]) for m in rows) < 1e-3, "packed as a tree"
    assert max(m["kl_step"] for m in rows) > 1e-4, "and the weights moved"
    assert all(("rerouted" in m) == replay for m in rows)
    if replay:
        assert max(m["rerouted"] for m in rows) > 0, "some tokens would have gone to other experts in the second update"
