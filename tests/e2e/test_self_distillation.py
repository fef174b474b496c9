"""Self-distillation: a model that does better when it is told how learns to do so untold, without a reward.

The shipped calculator does nothing better for being told anything, so it is made to: fine-tuned for a minute on
conversations that begin with an advice, which are careful, and on others, which are of mixed quality as before.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import agentlightning as agl
from agentlightning.algorithm.parts.teacher import in_front, message_tokens
from agentlightning.metrics import SilentConsole, read_metrics
from agentlightning.models import resolve_model
from agentlightning.rendering import load_rendering
from agentlightning.trainer.example import load_example

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

recipe, calc = load_example("calc", "recipe"), load_example("calc", "calc_agent")
ADVICE = "Use the tool for every operation, in the right order."
ADVISED, UNTOLD = {"careful": 1.0}, {"careful": 10, "give up": 30, "hasty": 23, "wrong operator": 19}


BATCH = 24


def make_advisable(folder: Path, steps: int) -> str:
    """The shipped model, made to do as the advice says, and as before where there is none."""
    import torch
    from renderers import Qwen3Renderer
    from transformers import AutoTokenizer, Qwen3ForCausalLM

    making, demonstrations = load_example("calc", "make_model"), load_example("calc", "demonstrations")
    shipped, rng = resolve_model("calc"), random.Random(0)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    tokenizer: Any = AutoTokenizer.from_pretrained(shipped)
    teacher = making.Teacher(tokenizer, Qwen3Renderer(tokenizer))
    advice = message_tokens(load_rendering(shipped, None), ADVICE)

    drawn = itertools.count()

    def draw(weights: dict[str, float]) -> tuple[list[int], list[int]]:
        advised = next(drawn) // BATCH % 2 == 0  # a batch is of one kind: what all rows begin with is computed once
        ids, targets = teacher.row(demonstrations.demonstrate(rng, ADVISED if advised else weights))
        if not advised:
            return ids, targets
        told = in_front(advice, np.array(ids, dtype=np.int32)).tolist()
        return told, [making.IGNORED] * (len(told) - len(targets)) + targets

    model: Any = Qwen3ForCausalLM.from_pretrained(shipped, dtype=torch.float32)
    making.train(model, draw, making.Stage("advised", steps, BATCH, 0.01, 2e-3, UNTOLD))
    making.save(model, tokenizer, folder)
    return str(folder)


def success(model: str, *, told: bool) -> float:
    """Of the held-out tasks, with the advice before the conversation or without it, as the teacher sees it."""
    import torch
    from renderers import Qwen3Renderer
    from transformers import AutoTokenizer, Qwen3ForCausalLM

    play = load_example("calc", "play")
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    renderer, network = Qwen3Renderer(tokenizer), Qwen3ForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    advice = message_tokens(load_rendering(model, None), ADVICE)
    first_prompt = play.first_prompt

    def advised(renderer: Any, question: str) -> list[int]:
        return in_front(advice, np.array(first_prompt(renderer, question), dtype=np.int32)).tolist()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(play, "first_prompt", advised if told else first_prompt)
        return play.success(play.play(network, renderer, recipe.val_tasks()[:60], generator=torch.Generator()))


async def test_what_it_does_when_it_is_told_it_learns_to_do_untold(tmp_path: Path) -> None:
    model = make_advisable(tmp_path / "model", 300)
    assert success(model, told=True) > 0.85
    assert success(model, told=False) < 0.55
    tasks = [{**task, "hint": ADVICE} for task in recipe.train_tasks()]
    settings = {**recipe.SETTINGS, "model": model, "steps": 8, "val_every": 8, "save_every": 8}
    trainer = agl.Trainer(
        algorithm=agl.SelfDistill(**settings), run_dir=tmp_path / "run", concurrency=96, console=SilentConsole()
    )
    await trainer.fit_async(calc.calc_agent, tasks, recipe.val_tasks())
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    shown = [(m.get("reward"), m.get("val_reward")) for m in rows]
    assert rows[-1]["val_reward"] > rows[0]["val_reward"] + 0.3, shown
