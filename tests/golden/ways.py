"""Two deterministic steps of every way of learning, on the calculator that ships: what they came to, to the last bit.

    python -m tests.golden.ways [NAME ...]     # records these ways anew, or all of them, in tests/golden/steps.json

A change that shall change no number is proved by these records (`test_steps.py`). A record is made again only by a
commit that says why its numbers changed.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import agentlightning as agl
from agentlightning.metrics import SilentConsole, read_metrics
from agentlightning.trainer.example import load_example

RECORDS = Path(__file__).with_name("steps.json")
FEW = {"model": "calc", "steps": 2, "tasks_per_step": 2, "group_size": 6, "max_context": 512, "learning_rate": 1e-3}
FEW |= {"deterministic": True, "val_every": 2, "save_every": 1, "seed": 3, "preflight": "warn", "flat_steps": 0}
ALGORITHMS = {
    "GRPO": "GRPO()",
    "REINFORCE": "REINFORCE()",
    "RLOO": "RLOO()",
    "ReinforcePP": "ReinforcePP(kl_coef=0.01)",
    "ReinforcePPBaseline": "ReinforcePPBaseline()",
    "DrGRPO": "DrGRPO()",
    "DAPO": "DAPO(overlong_tokens=40, overlong_margin=20)",
    "GSPO": "GSPO(minibatches=2)",
    "CISPO": "CISPO(minibatches=2)",
    "PPO": "PPO()",
    "PPO by turns": "PPO(credit='gae', minibatches=2)",
    "Distill": "Distill(teacher='calc', minibatches=2)",
    "SelfDistill": "SelfDistill(minibatches=2, reference_every=1, reference_share=0.5)",
    "SFT": "SFT()",
    "SFT from chats": "SFT(source='chats', group_size=1)",
    "DPO": "DPO()",
    **{f"loss {name}": f"GRPO(loss='{name}', minibatches=2)" for name in ("dual_clip", "sapo", "dppo_tv")},
    **{f"loss {name}": f"GRPO(loss='{name}', minibatches=2)" for name in ("clip_cov", "kl_cov")},
    "loss gmpo": "GRPO(loss='gmpo', clip_low=0.4, clip_high=0.4, minibatches=2)",
    "loss dppo_kl": "GRPO(loss='dppo_kl', clip_low=0.05, clip_high=0.05, minibatches=2)",
    "advantage maxrl": "GRPO(advantage='maxrl')",
    "advantage pass@2": "GRPO(advantage='pass@2')",
    "credit return_to_go": "GRPO(credit='return_to_go', gamma=0.9)",
    "credit per_turn": "GRPO(credit='per_turn')",
    "credit gigpo": "GRPO(credit='gigpo', gamma=0.9)",
    "credit hierarchical": "GRPO(credit='hierarchical')",
    "sum of rewards": "GRPO(rollout_return='sum', normalization='rollout')",
    "sequences": "GRPO(normalization='sequence')",
    "transitions": "GRPO(group_by='rollout')",
    "curriculum learnability": "GRPO(curriculum='learnability', steps=5)",
    "curriculum unsolved": "GRPO(curriculum='unsolved', steps=5)",
    "curriculum pools": "GRPO(curriculum='pools', steps=5)",
    "baseline task": "REINFORCE(baseline='task')",
    "parts of a reward": "GRPO(reward_weights={'right': 1.0, 'short': 0.1})",
    "KL in the loss": "GRPO(kl_coef=0.05, kl_estimator='k2', kl_target=0.01)",
    "KL in the reward": "GRPO(kl_coef=0.05, kl_in='reward', reference_every=1, reference_share=0.5)",
    "entropy": "GRPO(entropy_coef=0.01, update_epochs=2, minibatches=2)",
    "guard against jumps": "GRPO(max_kl=1e-4, minibatches=2)",
    "replay": "GRPO(replay=1, replay_size=8)",
    "correction": "GRPO(correction='token', correction_veto=1e-4, replay=1, replay_size=8)",
    "truncated sampling": "GRPO(top_p=0.9, filter_replay=True)",
    "schedule": "GRPO(schedule='cosine', warmup_steps=1, weight_decay=0.1, max_grad_norm=0.1)",
    "measures": "GRPO(check_packing_every=1, gradient_noise_every=1, minibatches=2)",
    "adapter": "GRPO(lora_rank=4)",
}
SEVERAL_CALLS = ("PPO", "credit", "sum", "transitions", "sequences")
"""Ways, by how their names begin, whose agent asks three questions, each in a call that is rewarded."""
CHANGES = {"time", "seconds", "seconds_left", "groups", "replayed_groups"}
"""Columns of a step that say when it was, or how its rollouts were called."""


@agl.rollout
async def asks_three(task: list[dict[str, Any]], llm: agl.LLM) -> float:
    """Three questions, each in a call of its own that is rewarded."""
    calc = load_example("calc", "calc_agent")
    chat = calc.client.with_options(base_url=llm.endpoint, api_key=llm.api_key).chat.completions
    found: list[float] = []
    for one in task:
        messages = [{"role": "system", "content": calc.SYSTEM_PROMPT}, {"role": "user", "content": one["question"]}]
        response = await chat.create(model=llm.model, messages=messages, tools=[calc.CALC_TOOL], max_tokens=64)
        calls = response.choices[0].message.tool_calls or []
        found.append(float(str(one["answer"]) in [calc.calculate(c.function.arguments) for c in calls]))
        agl.emit_reward(found[-1], response_id=response.id)
    return sum(found)


@agl.rollout
async def of_parts(task: dict[str, Any], llm: agl.LLM) -> None:
    """The calculator's question, with a reward of two parts."""
    calc = load_example("calc", "calc_agent")
    chat = calc.client.with_options(base_url=llm.endpoint, api_key=llm.api_key).chat.completions
    messages = [{"role": "system", "content": calc.SYSTEM_PROMPT}, {"role": "user", "content": task["question"]}]
    response = await chat.create(model=llm.model, messages=messages, tools=[calc.CALC_TOOL], max_tokens=64)
    calls = response.choices[0].message.tool_calls or []
    right = float(str(task["answer"]) in [calc.calculate(c.function.arguments) for c in calls])
    agl.emit_reward({"right": right, "short": 1.0 / response.usage.completion_tokens}, primary_key="right")


def run(name: str, *, resume: str | None = None, **more: Any) -> None:
    """The run of that way, in the folder `run` of where it is called; `more` are other settings."""
    torch.set_num_threads(1)
    recipe, calc = load_example("calc", "recipe"), load_example("calc", "calc_agent")
    algorithm, _, arguments = ALGORITHMS[name].partition("(")
    given = eval(f"dict({arguments}")
    tasks, agent = [task for task in recipe.train_tasks() if _is_single(task)][:12], calc.calc_agent
    tasks = [{**task, "hint": f"The answer is {task['answer']}."} for task in tasks]
    val: Any = recipe.val_tasks()[:3]
    if name.startswith("curriculum"):
        tasks = tasks[:3]  # two a step, so that later steps have to choose
    elif name.startswith(SEVERAL_CALLS):
        tasks, val, agent = [tasks[i : i + 3] for i in range(0, 12, 3)], [val], asks_three
    elif name.startswith("parts"):
        agent = of_parts
    elif name == "SFT from chats":
        tasks = [{"messages": [{"role": "user", "content": t["question"]}, _said(str(t["answer"]))]} for t in tasks]
    settings = {**FEW, **given, **more}
    if algorithm in ("SFT", "DPO"):
        settings = {k: v for k, v in settings.items() if k in getattr(agl, algorithm).__dataclass_fields__}
    trainer = agl.Trainer(
        algorithm=getattr(agl, algorithm)(**settings), run_dir="run", resume=resume, console=SilentConsole()
    )
    trainer.fit(agent, tasks, val)


def _is_single(task: dict[str, Any]) -> bool:
    """Whether one operation answers it: the model that ships solves about every other."""
    return sum(word.strip("?.,").isdigit() for word in task["question"].split()) == 2


def _said(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def outcome(folder: Path) -> dict[str, Any]:
    """What a run came to: its rows but for its times, and a checksum of each file of weights or state."""
    rows = [
        {k: v for k, v in sorted(row.items()) if k not in CHANGES and not k.endswith("_seconds") and "_from" not in k}
        for row in read_metrics(folder / "metrics.jsonl")
    ]
    last = sorted((folder / "checkpoints").glob("step-*"))[-1]
    weights = {str(f.relative_to(last)): _checksum(load_file(f)) for f in sorted(last.rglob("*.safetensors"))}
    return {"rows": rows, "weights": weights}


def _checksum(tensors: Mapping[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def machine() -> str:
    """What bits depend on besides our code."""
    cpu = Path("/proc/cpuinfo")
    about = dict(line.split(":", 1) for line in cpu.read_text().splitlines() if ":" in line) if cpu.exists() else {}
    kind = {name.strip(): value.strip() for name, value in about.items()}
    known = [kind.get(name, "?") for name in ("vendor_id", "cpu family", "model", "stepping")]
    version, units = torch.__version__.partition("+")[0], torch.backends.cpu.get_cpu_capability()
    return f"torch {version}, {units}, {' '.join(known)}"


def measured(name: str, folder: Path, **given: Any) -> dict[str, Any]:
    """The way's outcome, run in a process of its own with one thread; `given` is for `run`."""
    arguments = json.dumps({"name": name, **given})
    command = [
        sys.executable,
        "-c",
        f"import json; from tests.golden.ways import run; run(**json.loads({arguments!r}))",
    ]
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{name}: {done.stdout}{done.stderr}"
    return outcome(folder / "run")


def environment() -> dict[str, str]:
    """Of the process of a run."""
    alone = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    root = str(Path(__file__).parents[2])
    return {**os.environ, **alone, "PYTHONPATH": f"{root}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")}


def main() -> None:
    records = json.loads(RECORDS.read_text()) if RECORDS.exists() else {"machine": machine(), "ways": {}}
    for name in sys.argv[1:] or ALGORITHMS:
        with tempfile.TemporaryDirectory() as folder:
            try:
                records["ways"][name] = measured(name, Path(folder))
            except AssertionError as problem:
                sys.stdout.write(f"{problem}\n")
            else:
                sys.stdout.write(f"{name}: {records['ways'][name]['weights']}\n")
    records["machine"] = machine()
    RECORDS.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
