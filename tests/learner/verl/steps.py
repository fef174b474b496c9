"""`python -m tests.learner.verl.steps MODEL FOLDER`: the same steps on the own learner and on verl's workers, as JSON.

A line has what two steps of a loss say in numbers, of all weights or of an adapter, on the own learner (0 workers) or
on some workers over gloo, of which some may share each row, and how far the weights and the optimiser's moments are
then from the own learner's. The last lines of both are a third step: of two workers, and of one worker and the own
learner that go on from what the two have written.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import ray  # pyright: ignore[reportMissingImports]
import torch

from agentlightning.learner.base import LearnerOptions, LossConfig, OptimParams, PackedBatch
from agentlightning.learner.policy import LoraSpec, Policy, load_policy
from agentlightning.learner.torch_learner import TorchLearner
from agentlightning.learner.verl.group import Workers, start_workers
from agentlightning.learner.verl.learner import VerlLearner
from agentlightning.learner.verl.sizes import Sizes
from tests.learner.ranks import batch as one_temperature

STEP = OptimParams(learning_rate=1e-3, max_kl=0.01, max_grad_norm=1.0, weight_decay=0.1)
OF_ADAPTER = msgspec.structs.replace(STEP, max_kl=0.004)
"""Some steps of each are halved."""
LOSSES = {
    "ppo_clip": LossConfig(),
    "gspo": LossConfig(name="gspo"),
    "dpo": LossConfig(name="dpo"),
    "reinforce": LossConfig(name="reinforce", entropy_coef=0.01, kl_coef=0.1),
}
TRAINED = {"all": None, "adapter": LoraSpec(rank=4, seed=5)}
LAYOUTS: dict[tuple[int, int], list[str]] = {
    (1, 1): ["ppo_clip", "gspo", "dpo", "reinforce"],
    (2, 1): ["ppo_clip", "gspo", "dpo", "reinforce"],
    (2, 2): ["ppo_clip", "reinforce"],
    (4, 2): ["reinforce"],
}
"""How many workers, how many of them share a row, and the losses."""
SAVED = "gspo"
FEW = 64
"""Tokens of rows in a pass, so that a batch takes several."""


def batch() -> PackedBatch:
    """Two groups of three conversations, at two temperatures."""
    forest = one_temperature()
    cold = forest.sequence_E % 3 == 0
    return msgspec.structs.replace(forest, temperature_E=np.where(cold, 0.7, 1.0).astype(np.float32))


def step(learner: TorchLearner, config: LossConfig) -> list[float]:
    passed = learner.forward_backward(batch(), config)
    done = learner.optim_step(STEP if learner.policy.peft is None else OF_ADAPTER)
    metrics = [passed.metrics[name] for name in sorted(passed.metrics)]
    moved = [done.metrics["kl_step"], done.metrics["halvings"]]
    return [passed.loss, done.grad_norm, float(passed.logprobs.mean()), *metrics, *moved]


def numbers_of(learner: TorchLearner, config: LossConfig) -> list[float]:
    return [*step(learner, config), *step(learner, config), float(learner.forward(batch()).mean())]


def apart(ours: TorchLearner, theirs: TorchLearner) -> dict[str, float]:
    pairs = zip(ours.policy.trainable(), theirs.policy.trainable(), strict=True)
    moments, others = (learner.state()["optimizer"]["adamw"]["state"] for learner in (ours, theirs))
    assert moments.keys() == others.keys()
    return {
        "weights": max(float((a - b).detach().abs().max()) for a, b in pairs),
        "moments": max(float((moments[n][k] - others[n][k]).abs().max()) for n in others for k in others[n]),
    }


@contextmanager
def workers(policy: Policy, count: int, shared: int = 1, dtype: str = "float32") -> Iterator[Workers]:
    group = ray.util.placement_group([{"CPU": 1}] * count)
    ray.get(group.ready())
    started = start_workers(policy, dtype, Sizes(workers=count, sequence_parallel=shared), group)
    yield started
    started.end()
    ray.util.remove_placement_group(group)


def two_steps(model: str, kind: str, folder: Path) -> None:
    losses = [name for name in LOSSES if kind == "all" or name != "dpo"]

    def policy() -> Policy:
        return load_policy(model, device="cpu", lora=TRAINED[kind])

    options = {name: LearnerOptions(reference=model if LOSSES[name].needs_reference else None) for name in losses}
    own = {name: TorchLearner(policy(), options[name]) for name in losses}
    for name, learner in own.items():
        say(trained=kind, loss=name, workers=0, shared=1, numbers=numbers_of(learner, LOSSES[name]))
    for (count, shared), some in LAYOUTS.items():
        with workers(policy(), count, shared) as started:
            for name in filter(losses.__contains__, some):
                started.begin()
                many = {"row_tokens": FEW} if name == "ppo_clip" else {}
                learner = VerlLearner(policy(), options[name], started, count // shared, **many)
                numbers = numbers_of(learner, LOSSES[name])
                here = {"workers": count, "shared": shared}
                say(trained=kind, loss=name, numbers=numbers, **here, **apart(learner, own[name]))
                if (name, count) == (SAVED, 2):
                    learner.save_state(folder / "state")
                    learner.export(folder / "model")
                    say(trained=kind, third=2, numbers=step(learner, LOSSES[name]))


def third_step(kind: str, folder: Path) -> None:
    model = str(folder / "model")
    own = TorchLearner(load_policy(model, device="cpu"))
    own.load_state(folder / "state")
    say(trained=kind, third=0, numbers=step(own, LOSSES[SAVED]))
    with workers(load_policy(model, device="cpu"), 1) as started:
        learner = VerlLearner(load_policy(model, device="cpu"), LearnerOptions(), started, 1)
        learner.load_state(folder / "state")
        say(trained=kind, third=1, numbers=step(learner, LOSSES[SAVED]))


def in_bfloat16(model: str, folder: Path) -> None:
    """A step, and what becomes of the float32 weights that were stepped when another number of workers, or the own
    learner, goes on."""

    def policy(path: str) -> Policy:
        return load_policy(path, device="cpu", dtype="bfloat16")

    files, count = str(folder / "model"), len(policy(model).trainable())
    own = TorchLearner(policy(model))
    with workers(policy(model), 2, dtype="bfloat16") as started:
        learner = VerlLearner(policy(model), LearnerOptions(), started, 2)
        numbers = [step(one, LOSSES["ppo_clip"]) for one in (own, learner)]
        learner.save_state(folder / "state")
        learner.export(files)
        stepped = started.ask("weights", 0, count)[0]
    with workers(policy(files), 1, dtype="bfloat16") as started:
        VerlLearner(policy(files), LearnerOptions(), started, 1).load_state(folder / "state")
        again = started.ask("weights", 0, count)[0]
    own = TorchLearner(policy(files))
    own.load_state(folder / "state")
    rounded = [weights.bfloat16().float() for weights in stepped]
    others = {"workers": again, "own": own.state()["optimizer"]["copies"], "rounded": rounded}
    lost = {
        name: max(float((a - b).abs().max()) for a, b in zip(stepped, of, strict=True)) for name, of in others.items()
    }
    say(trained="bfloat16", numbers=numbers, lost=lost)


def say(**what: Any) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def main(model: str, folder: Path) -> None:
    torch.set_num_threads(1)
    ray.init(address="local", num_cpus=4, include_dashboard=False, logging_level="error")
    for kind in TRAINED:
        two_steps(model, kind, folder / kind)
        third_step(kind, folder / kind)
    in_bfloat16(model, folder / "bfloat16")
    ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
