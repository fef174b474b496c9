"""The embedded engine on a GPU: log-probs are those of a plain forward, however requests come and go."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from agentlightning.engine.torch_engine import TorchEngine
from agentlightning.learner.policy import LoraSpec, load_policy
from agentlightning.models import resolve_model
from tests.engine.conftest import gap, make_engine, random_ids, request, run

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.mark.parametrize(("dtype", "allowed"), [("float32", 2e-4), ("bfloat16", 0.3)])
@pytest.mark.parametrize("lora", [None, LoraSpec(rank=4)], ids=["all weights", "adapter"])
def test_log_probs_are_those_of_a_plain_forward(
    tiny_model_dir: Path, dtype: str, allowed: float, lora: LoraSpec | None
) -> None:
    """Forty requests of many lengths that join and leave, some with a shared beginning, some with filters."""
    policy = load_policy(tiny_model_dir, device="cuda", dtype=dtype, lora=lora)
    engine = make_engine(policy, max_context=256, max_concurrency=12)
    rng, shared = np.random.default_rng(0), random_ids(60, 1)
    asked = []
    for number in range(40):
        own = random_ids(int(rng.integers(1, 90)), number)
        prompt = np.concatenate([shared, own]) if number % 2 else own
        settings = {"top_p": 0.9, "top_k": 20} if number % 5 == 0 else {}
        asked.append(request(number, prompt, max_tokens=int(rng.integers(1, 60)), ignore_eos=True, **settings))
    found = run(engine, asked)
    gaps = [gap(policy, one, found[one.request_id]) for one in asked]
    assert max(gaps) < allowed, max(gaps)


def test_the_same_requests_are_answered_with_the_same_tokens(tiny_model_dir: Path) -> None:
    """Alone and one after the other, as a deterministic run asks."""
    policy = load_policy(tiny_model_dir, device="cuda")

    def answers() -> list[list[int]]:
        engine = make_engine(policy, max_context=256)
        asked = [request(n, random_ids(20 + 7 * n, n), max_tokens=40) for n in range(8)]
        return [run(engine, [one])[one.request_id].ids.tolist() for one in asked]

    assert answers() == answers()


@pytest.mark.parametrize(("name", "recorded"), [("llama", True), ("gemma3_text", True), ("qwen3_moe", None)])
def test_models_of_other_kinds(name: str, recorded: bool | None, tmp_path: Path) -> None:
    """Windows, and experts: where a pass cannot be recorded as a graph, sampling goes on without."""
    script = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "architectures.py"))
    model = script["build"](name).to("cuda")
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("calc"))
    engine = TorchEngine(model, tokenizer, (2,), max_context=200, max_concurrency=4, seed=0)
    asked = [request(n, random_ids(10 + 9 * n, n), max_tokens=50, ignore_eos=True) for n in range(6)]
    found = run(engine, asked)
    alike: Any = SimpleNamespace(model=model, device=model.device)
    assert max(gap(alike, one, found[one.request_id]) for one in asked) < 1e-3
    passes: Any = engine._model
    sys.stdout.write(f"{name}, {engine.contexts.kind}, recorded: {passes.graphs.works}, {len(passes.graphs._recorded)}")
    assert recorded is None or passes.graphs.works == recorded
