"""Several policies on one model, sampled together or in turn: tokens per second for the same number of requests.

    python benchmarks/policies.py [--model DIR] [--at-once 32] [--rounds 5] [--threads 1] [--quick] [--json]

The policies are LoRA adapters (rank 16, random weights) on one model. The embedded engine samples from all of them at
once: every pass computes rows of all policies. Beside it stands what it replaces: an engine per policy with its share
of the places, one step of each after the other, each with its adapter switched on. The requests are the same for both
and are dealt out to the policies in turn: prompts of 128 tokens, 96 of them the same for all, and responses of 16 to
111 tokens. Both take turns in rounds, and medians count, so that a busy machine is busy for both; the time is processor
time of this process. `--json`: the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
import transformers

from agentlightning.engine.base import SamplingParams
from agentlightning.engine.events import POLICY, Ended, Request
from agentlightning.engine.torch_engine import TorchEngine
from agentlightning.learner.adapters import load_policies
from agentlightning.learner.policy import Policy

MOST = 4
SHARED_TOKENS, OWN_TOKENS = 96, 32
SHORTEST, LONGEST = 16, 111

Asked = list[tuple[np.ndarray, int]]
"""Prompts, and how many tokens are wanted after each."""


def adapters(model: str) -> list[Policy]:
    """Adapters that differ, so that nothing of one is good for another."""
    found = list(load_policies(model, {f"policy-{n}": None for n in range(MOST)}, device="cpu").values())
    torch.manual_seed(0)
    for policy in found:
        policy.activate()
        with torch.no_grad():
            for parameter in policy.trainable():
                parameter.normal_(std=0.01)
    return found


class Work:
    """Makes requests; the beginning of their prompts is always the same, the rest never."""

    def __init__(self, vocabulary: int) -> None:
        self._random = np.random.default_rng(0)
        self._vocabulary = vocabulary
        self._shared = self._ids(SHARED_TOKENS)

    def requests(self, count: int) -> Asked:
        lengths = self._random.integers(SHORTEST, LONGEST + 1, count)
        return [(np.concatenate([self._shared, self._ids(OWN_TOKENS)]), int(length)) for length in lengths]

    def _ids(self, count: int) -> np.ndarray:
        return self._random.integers(0, self._vocabulary, count).astype(np.int32)


def together(policies: list[Policy], at_once: int) -> Callable[[Asked], None]:
    """One engine for all of them."""
    engine = _engine(policies[0], at_once, shared=True)

    def run(asked: Asked) -> None:
        for number, (prompt, tokens) in enumerate(asked):
            _submit(engine, number, prompt, tokens, policies[number % len(policies)].adapter)
        _finish([(None, engine)], asked)

    return run


def in_turn(policies: list[Policy], at_once: int) -> Callable[[Asked], None]:
    """An engine for each, stepped one after the other."""
    engines = [(policy, _engine(policy, at_once // len(policies), shared=False)) for policy in policies]

    def run(asked: Asked) -> None:
        for number, (prompt, tokens) in enumerate(asked):
            _submit(engines[number % len(engines)][1], number, prompt, tokens, POLICY)
        _finish(engines, asked)

    return run


def _engine(policy: Policy, at_once: int, *, shared: bool) -> TorchEngine:
    policy.activate()
    # No stop strings here, so no tokenizer is needed.
    tokenizer = transformers.PreTrainedTokenizerFast
    adapters = policy.adapters if shared else None
    return TorchEngine(policy.model, tokenizer, (), adapters=adapters, max_context=512, max_concurrency=at_once)  # pyright: ignore


def _submit(engine: TorchEngine, number: int, prompt: np.ndarray, tokens: int, policy: str) -> None:
    params = SamplingParams(max_tokens=tokens)
    engine.submit(Request(request_id=number, prompt_ids=prompt, params=params, policy=policy))


def _finish(engines: list[tuple[Policy | None, TorchEngine]] | list[tuple[Policy, TorchEngine]], asked: Asked) -> None:
    sampled = 0
    while any(engine.active for _, engine in engines):
        for policy, engine in engines:
            if engine.active:
                if policy is not None:
                    policy.activate()
                sampled += sum(len(event.chunk.ids) for event in engine.step() if isinstance(event, Ended))
    assert sampled == sum(tokens for _, tokens in asked), sampled


def measure(policies: list[Policy], at_once: int, requests: int, rounds: int) -> dict[str, float]:
    """Tokens per second of both, medians of rounds in which they take turns."""
    ways = {"together": together(policies, at_once), "in turn": in_turn(policies, at_once)}
    work = Work(policies[0].model.get_input_embeddings().num_embeddings)  # pyright: ignore
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        asked = work.requests(requests)
        for name, run in ways.items():
            began = time.process_time()
            run(asked)
            if number:  # the first round warms up
                speeds[name].append(sum(tokens for _, tokens in asked) / (time.process_time() - began))
    return {name: statistics.median(found) for name, found in speeds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="calc", help="a model's name or directory")
    parser.add_argument("--at-once", type=int, default=32, help="requests that are sampled at the same time, in all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="fewer requests and rounds")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    requests, rounds = (2 * options.at_once, 1) if options.quick else (4 * options.at_once, options.rounds)
    loaded = adapters(options.model)
    print(f"{options.at_once} requests at once, tokens per second of processor time")
    print(f"{'policies':>8} {'together':>9} {'in turn':>9} {'ratio':>6} {'of one':>7}")
    figures: dict[str, float] = {}
    one = 0.0
    for count in (1, 2, MOST):
        found = measure(loaded[:count], options.at_once, requests, rounds)
        one = one or found["together"]
        ratio, share = found["together"] / found["in turn"], found["together"] / one
        print(f"{count:>8} {found['together']:>9.0f} {found['in turn']:>9.0f} {ratio:>6.2f} {share:>7.2f}", flush=True)
        figures |= {f"policies_{count}_together": found["together"], f"policies_{count}_in_turn": found["in turn"]}
    if options.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
