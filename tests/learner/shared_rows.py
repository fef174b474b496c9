"""`python -m tests.learner.shared_rows`: small random models of several architectures, each row on two ranks, as JSON.

A line has the largest gaps between two ranks that share rows and one learner, of log-probs and of gradients (relative,
by tensor), or what a model was refused with.
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from agentlightning.errors import AgentLightningError
from agentlightning.learner.base import LearnerOptions, LossConfig
from agentlightning.learner.optimizer import whole
from agentlightning.learner.packing import pack
from agentlightning.learner.policy import Policy
from agentlightning.learner.rank_learner import RankLearner
from agentlightning.learner.torch_learner import TorchLearner
from agentlightning.learner.trial import worst_error
from tests.learner.ranks import in_processes

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "architectures.py"))
NAMES = (
    *("llama", "qwen2", "qwen3", "gemma3_text", "phi3", "olmo2", "gpt_neox", "glm4", "starcoder2", "qwen3_5_text"),
    *("apertus", "qwen3_moe", "gpt2"),
)
SCRIPT["SMALL"]["sliding_window"] = 512  # as trees


def work(rank: int, ranks: int, port: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    for name in NAMES:
        try:
            found = compare(name)
        except AgentLightningError as error:
            found = str(error)
        if rank == 0:
            sys.stdout.write(json.dumps({"of": name, "numbers": found}) + "\n")
            sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


def compare(name: str) -> list[float]:
    batch, loss = pack(SCRIPT["conversations"]()), LossConfig(name="reinforce")
    one = TorchLearner(policy(name))
    two = RankLearner(policy(name), LearnerOptions(), tensor_parallel=2)
    alone, shared = one.forward_backward(batch, loss), two.forward_backward(batch, loss)
    gap = float(abs(alone.logprobs - shared.logprobs).max())
    return [gap, worst_error(gradients(two), gradients(one))]


def policy(name: str) -> Policy:
    return Policy("", SCRIPT["build"](name), cast(Any, None), (2,))


def gradients(learner: TorchLearner) -> tuple[torch.Tensor, ...]:
    parameters = learner.policy.trainable()
    return tuple(torch.zeros_like(whole(p)) if p.grad is None else whole(p.grad) for p in parameters)


if __name__ == "__main__":
    in_processes(work, 2)
