"""`python -m tests.learner.verl.steps MODEL FOLDER`: the same steps on the own learner and on verl's workers, as JSON.

A line has what two steps of a loss say in numbers, on the own learner (0 workers) or on 1 or 2 workers over gloo, and
how far the weights and the optimiser's moments are then from the own learner's. The last lines are a third step: of two
workers, and of one worker and the own learner that go on from what the two have written.
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
from agentlightning.learner.policy import load_policy
from agentlightning.learner.torch_learner import TorchLearner
from agentlightning.learner.verl.group import Workers, start_workers
from agentlightning.learner.verl.learner import VerlLearner
from agentlightning.learner.verl.sizes import Sizes
from tests.learner.ranks import batch as one_temperature

STEP = OptimParams(learning_rate=1e-3, max_kl=0.01, max_grad_norm=1.0, weight_decay=0.1)
LOSSES = {
    "ppo_clip": LossConfig(),
    "gspo": LossConfig(name="gspo"),
    "dpo": LossConfig(name="dpo"),
    "reinforce": LossConfig(name="reinforce", entropy_coef=0.01, kl_coef=0.1),
}
FEW = 64
"""Tokens of rows in a pass, so that a batch takes several."""


def batch() -> PackedBatch:
    """Two groups of three conversations, at two temperatures."""
    forest = one_temperature()
    cold = forest.sequence_E % 3 == 0
    return msgspec.structs.replace(forest, temperature_E=np.where(cold, 0.7, 1.0).astype(np.float32))


def step(learner: TorchLearner, config: LossConfig) -> list[float]:
    passed = learner.forward_backward(batch(), config)
    done = learner.optim_step(STEP)
    metrics = [passed.metrics[name] for name in sorted(passed.metrics)]
    moved = [done.metrics["kl_step"], done.metrics["halvings"]]
    return [passed.loss, done.grad_norm, float(passed.logprobs.mean()), *metrics, *moved]


def numbers_of(learner: TorchLearner, config: LossConfig) -> list[float]:
    return [*step(learner, config), *step(learner, config), float(learner.forward(batch()).mean())]


def apart(ours: TorchLearner, theirs: TorchLearner) -> dict[str, float]:
    pairs = zip(ours.policy.trainable(), theirs.policy.trainable(), strict=True)
    moments, others = (learner.state()["optimizer"]["adamw"]["state"] for learner in (ours, theirs))
    return {
        "weights": max(float((a - b).detach().abs().max()) for a, b in pairs),
        "moments": max(float((moments[n][k] - others[n][k]).abs().max()) for n in others for k in others[n]),
    }


@contextmanager
def workers(model: str, count: int) -> Iterator[Workers]:
    group = ray.util.placement_group([{"CPU": 1}] * count)
    ray.get(group.ready())
    started = start_workers(model, "float32", Sizes(workers=count), group)
    yield started
    started.end()
    ray.util.remove_placement_group(group)


def two_steps(model: str, folder: Path) -> None:
    options = {name: LearnerOptions(reference=model if c.needs_reference else None) for name, c in LOSSES.items()}
    own = {name: TorchLearner(load_policy(model, device="cpu"), options[name]) for name in LOSSES}
    for name, learner in own.items():
        say(loss=name, workers=0, numbers=numbers_of(learner, LOSSES[name]))
    for count in (1, 2):
        with workers(model, count) as started:
            for number, (name, config) in enumerate(LOSSES.items()):
                started.ask("begin")
                many = {"row_tokens": FEW} if number == 0 else {}
                learner = VerlLearner(load_policy(model, device="cpu"), options[name], started, count, **many)
                say(loss=name, workers=count, numbers=numbers_of(learner, config), **apart(learner, own[name]))
                if (name, count) == ("gspo", 2):
                    learner.save_state(folder / "state")
                    learner.export(folder / "model")
                    say(third=2, numbers=step(learner, config))


def third_step(folder: Path, config: LossConfig) -> None:
    model = str(folder / "model")
    own = TorchLearner(load_policy(model, device="cpu"))
    own.load_state(folder / "state")
    say(third=0, numbers=step(own, config))
    with workers(model, 1) as started:
        learner = VerlLearner(load_policy(model, device="cpu"), LearnerOptions(), started, 1)
        learner.load_state(folder / "state")
        say(third=1, numbers=step(learner, config))


def say(**what: Any) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def main(model: str, folder: Path) -> None:
    torch.set_num_threads(1)
    ray.init(address="local", num_cpus=4, include_dashboard=False, logging_level="error")
    two_steps(model, folder)
    third_step(folder, LOSSES["gspo"])
    ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
