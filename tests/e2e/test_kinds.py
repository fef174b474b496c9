"""Short runs of the algorithms that differ most from GRPO, through the whole system: the validation reward goes up."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from agentlightning.metrics import read_metrics

ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1"}

SCRIPT = """
import json, random, sys
import agentlightning as agl
from agentlightning.trainer.example import load_example
from agentlightning.metrics import SilentConsole

recipe, calc = load_example("calc", "recipe"), load_example("calc", "calc_agent")


def message(turn):
    if not turn.startswith("<tool_call>"):
        return {"role": "assistant", "content": turn}
    call = json.loads(turn.removeprefix("<tool_call>").removesuffix("</tool_call>"))
    function = {"name": call["name"], "arguments": json.dumps(call["arguments"])}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": function}]}


def chats(count):
    demonstrate, rng = load_example("calc", "demonstrations").demonstrate, random.Random(0)
    for _ in range(count):
        shown = demonstrate(rng, {"careful": 1.0})
        messages = [{"role": "system", "content": calc.SYSTEM_PROMPT}, {"role": "user", "content": shown.question}]
        for turn, result in zip(shown.turns, [*shown.results, None], strict=True):
            messages.append(message(turn))
            if result is not None:
                messages.append({"role": "tool", "content": result})
        yield {"messages": messages, "tools": [calc.CALC_TOOL]}


common = dict(model="calc", learning_rate=2e-4, max_context=512, val_every=100, tasks_per_step=12, minibatches=2)
algorithm, tasks = {
    "sft on rollouts": lambda: (agl.SFT(steps=8, **common), recipe.train_tasks()),
    "sft on chats": lambda: (agl.SFT(steps=5, source="chats", **{**common, "tasks_per_step": 48}), list(chats(240))),
    "dpo": lambda: (agl.DPO(steps=8, **common), recipe.train_tasks()),
    "ppo": lambda: (agl.PPO(steps=8, **common), recipe.train_tasks()),
    "kl in the reward": lambda: (agl.RLOO(steps=8, kl_coef=0.01, kl_in="reward", **common), recipe.train_tasks()),
    "ahead": lambda: (agl.GRPO(steps=8, max_staleness=1, **common), recipe.train_tasks()),
}[sys.argv[1]]()
agl.Trainer(algorithm=algorithm, run_dir="run", concurrency=96, console=SilentConsole()).fit(
    calc.calc_agent, tasks, recipe.val_tasks()
)
"""


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("kind", ["sft on rollouts", "sft on chats", "dpo", "ppo", "kl in the reward", "ahead"])
def test_it_learns(kind: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, kind]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=ENVIRONMENT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert rows[-1]["val_reward"] > rows[0]["val_reward"] + 0.08, [(m.get("reward"), m.get("val_reward")) for m in rows]
    if kind == "ppo":
        explained = [m["explained_variance"] for m in rows[1:]]
        assert max(explained) > 0.3, explained
    if kind == "ahead":
        assert any(m["staleness"] > 0 for m in rows[1:])
        overlapped = sum(
            later["sampling_from"] < now["learning_from"] + now["learning_seconds"] for now, later in pairwise(rows[1:])
        )
        assert overlapped >= len(rows) - 3, "the next step is sampled while this one is learned"
