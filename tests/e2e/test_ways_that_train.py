"""Ways of learning that need a model or an agent of their own: with each of them the calculator is learned.

Replayed routing needs a model with experts, credit by invocation an agent that asks others. Both are made here, of the
calculator that ships.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.metrics import SilentConsole, read_metrics
from agentlightning.models import resolve_model
from agentlightning.trainer.example import load_example

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

recipe, calc = load_example("calc", "recipe"), load_example("calc", "calc_agent")
SHIPPED = Path(resolve_model("calc"))
COMMON: dict[str, Any] = {**recipe.SETTINGS, "schedule": "constant", "val_every": 100, "save_every": 100}


async def train(run_dir: Path, algorithm: agl.GRPO, agent: Any, tasks: Any, val: Any) -> list[dict[str, Any]]:
    trainer = agl.Trainer(algorithm=algorithm, run_dir=run_dir, concurrency=96, console=SilentConsole())
    await trainer.fit_async(agent, tasks, val)
    rows = read_metrics(run_dir / "metrics.jsonl")
    assert max(m.get("logprob_gap_max", 0.0) for m in rows) < 1e-3
    return rows


# ---- credit by invocation ------------------------------------------------------------------------------------------


@agl.rollout
async def asks_three(task: list[dict[str, Any]], llm: agl.LLM, rollout: agl.AttemptedRollout) -> float:
    """Three questions, each asked of a helper in a conversation of its own, who is rewarded for it by name."""
    chat = calc.client.with_options(base_url=llm.for_agent("helper").endpoint, api_key=llm.api_key).chat.completions
    found: list[float] = []
    for one in task:
        asked = [{"role": "system", "content": calc.SYSTEM_PROMPT}, {"role": "user", "content": one["question"]}]
        response = await chat.create(model=llm.model, messages=asked, tools=[calc.CALC_TOOL], max_tokens=64)
        calls = response.choices[0].message.tool_calls or []
        found.append(float(str(one["answer"]) in [calc.calculate(c.function.arguments) for c in calls]))
        if rollout.mode == agl.RolloutMode.TRAIN:
            agl.emit_reward(found[-1], response_id=response.id)
    return sum(found) / len(found)


async def test_invocations_learn_what_they_earned_themselves(tmp_path: Path) -> None:
    easy = [task for task in recipe.train_tasks() if is_single(task)]
    sets = [easy[i : i + 3] for i in range(0, len(easy) - 2, 3)]
    settings = {"steps": 12, "tasks_per_step": 6, "group_size": 6, "minibatches": 1}
    algorithm = agl.GRPO(**{**COMMON, **settings, "model": "calc"}, credit="hierarchical")
    rows = await train(tmp_path / "run", algorithm, asks_three, sets[:-40], sets[-40:])
    shown = [(m.get("reward"), m.get("val_reward")) for m in rows]
    assert rows[-1]["val_reward"] > rows[0]["val_reward"] + 0.2, shown


def is_single(task: dict[str, Any]) -> bool:
    """Whether one operation answers it."""
    return sum(word.strip("?.,").isdigit() for word in task["question"].split()) == 2


# ---- replayed routing ----------------------------------------------------------------------------------------------


def make_experts(folder: Path, experts: int = 4) -> str:
    """The calculator with each of its dense layers copied into experts, two for each token (Komatsuzaki et al., arXiv
    2212.05055), which are then moved apart a little."""
    import torch
    from transformers import Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    dense: Any = Qwen3ForCausalLM.from_pretrained(SHIPPED)
    given = {k: v for k, v in dense.config.to_dict().items() if k not in ("model_type", "architectures", "dtype")}
    sizes = {"moe_intermediate_size": dense.config.intermediate_size, "num_experts": experts, "num_experts_per_tok": 2}
    torch.manual_seed(0)
    model: Any = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**given, **sizes, "norm_topk_prob": True}))
    weights = dense.state_dict()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in weights:
                parameter.copy_(weights[name])
        for layer, of in zip(model.model.layers, dense.model.layers, strict=True):
            into, out = layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj
            into.copy_(torch.cat([of.mlp.gate_proj.weight, of.mlp.up_proj.weight]).expand_as(into))
            out.copy_(of.mlp.down_proj.weight.expand_as(out))
            for kept in (into, out):
                kept.mul_(1 + 0.05 * torch.randn_like(kept))
            layer.mlp.gate.weight.normal_(std=0.3)
    shutil.copytree(SHIPPED, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    model.save_pretrained(folder)
    return str(folder)


async def test_experts_learn_the_calculator_with_their_routing_replayed(tmp_path: Path) -> None:
    settings = {"steps": 14, "tasks_per_step": 6, "minibatches": 3}
    model = make_experts(tmp_path / "model")
    algorithm = agl.GRPO(**{**COMMON, **settings, "model": model}, routing_replay=True)
    rows = await train(tmp_path / "run", algorithm, calc.calc_agent, recipe.train_tasks(), recipe.val_tasks())
    shown = [(m.get("reward"), m.get("rerouted"), m.get("val_reward")) for m in rows]
    assert rows[-1]["val_reward"] > rows[0]["val_reward"] + 0.2, shown
    assert max(m.get("rerouted", 0.0) for m in rows) > 0, shown
