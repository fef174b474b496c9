"""Tokens that were sampled before are scored as the model's own forward scores them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from agentlightning.backend.embedded.scores import ScoreCall, ScoredCalls, ScoreRequest

CALLS = [ScoreCall([5, 6, 7], [8, 9], 1.0), ScoreCall([5, 6, 7, 8, 9, 3], [4, 2, 2], 0.5)]


@pytest.mark.slow
def test_log_probs_and_entropies_are_those_of_a_plain_forward(tiny_model_dir: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    asked = msgspec.json.encode(ScoreRequest(model=str(tiny_model_dir), calls=CALLS, device="cpu"))
    command = [sys.executable, "-m", "agentlightning.backend.embedded.scores"]
    done = subprocess.run(command, input=asked, capture_output=True, check=True, timeout=120)
    found = msgspec.json.decode(done.stdout, type=ScoredCalls)
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32).eval()
    for call, logprobs, entropies in zip(CALLS, found.logprobs, found.entropies, strict=True):
        ids = torch.tensor([[*call.prompt_ids, *call.response_ids]])
        with torch.no_grad():
            logits = model(ids).logits[0, len(call.prompt_ids) - 1 : -1] / call.temperature
        wanted = torch.log_softmax(logits.double(), -1)
        assert logprobs == pytest.approx(wanted[range(len(logprobs)), call.response_ids].numpy(), abs=1e-4)
        assert entropies == pytest.approx(-(wanted.exp() * wanted).sum(-1).numpy(), abs=1e-4)
        assert np.all(np.array(entropies) > 0)


@pytest.mark.slow
def test_a_token_that_the_model_does_not_have_is_refused(tiny_model_dir: Path) -> None:
    asked = msgspec.json.encode(
        ScoreRequest(model=str(tiny_model_dir), calls=[ScoreCall([5], [10**6], 1.0)], device="cpu")
    )
    command = [sys.executable, "-m", "agentlightning.backend.embedded.scores"]
    done = subprocess.run(command, input=asked, capture_output=True, check=False, timeout=120)
    assert done.returncode != 0
    assert b"There is no token 1000000" in done.stderr
