"""`python -m tests.learner.ranks KIND MODEL FOLDER [SHARED]`: the same steps on one learner and on 1, 2 and 4 ranks, as
JSON. Of ranks that share rows SHARED share each, and there are no fewer.

One interpreter imports torch, and forks all ranks before it computes anything. A line has the loss, gradient norm,
log-probs and metrics of two steps; that of four ranks ends with how far their state is from what two ranks wrote.
"""

from __future__ import annotations

import json
import multiprocessing
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from agentlightning.learner.base import LearnerOptions, LossConfig, OptimParams, PackedBatch
from agentlightning.learner.packing import CreditedCall, pack
from agentlightning.learner.policy import LoraSpec, load_policy
from agentlightning.learner.rank_learner import RankLearner
from agentlightning.learner.torch_learner import TorchLearner
from agentlightning.types.call import Call
from tests.learner.conftest import call_info

STEP = OptimParams(learning_rate=1e-3, max_kl=0.05)


def batch() -> PackedBatch:
    """Two groups of three siblings with three turns each, on one system prompt."""
    rng = np.random.default_rng(3)

    def tokens(n: int) -> np.ndarray:
        return rng.integers(0, 250, n).astype(np.int32)

    system = tokens(12)
    credited: list[CreditedCall] = []
    for group in range(2):
        question = np.concatenate([system, tokens(5)])
        for sibling in range(3):
            context = question
            for _ in range(3):
                response = tokens(int(rng.integers(2, 7)))
                ones = np.ones(len(response), dtype=np.float32)
                call = Call(call_info(f"r{group}{sibling}"), context, response, -5 * ones, -5 * ones, ())
                advantages, weights = ones * np.float32(rng.normal()), ones * np.float32(rng.uniform(0.01, 0.1))
                credited.append(CreditedCall(call, 3 * group + sibling, group, advantages, weights))
                context = np.concatenate([context, response, tokens(3)])
    return pack(credited)


def learned(learner: TorchLearner, folder: Path, ranks: int) -> list[float]:
    """Two steps, and everything they say in numbers; two ranks write their state."""
    numbers: list[float] = []
    for _ in range(2):
        numbers += step(learner)
    state = learner.state()
    if ranks == 2 and dist.get_rank() == 0:
        torch.save(state, folder / "optimizer.pt")
    return numbers


def step(learner: TorchLearner) -> list[float]:
    forest = batch()
    passed = learner.forward_backward(forest, LossConfig())
    done = learner.optim_step(STEP)
    metrics = [passed.metrics[name] for name in sorted(passed.metrics)]
    moved = [done.metrics["kl_step"], done.metrics["halvings"]]
    return [passed.loss, done.grad_norm, float(passed.logprobs.mean()), *metrics, *moved]


def work(rank: int, ranks: int, port: int, kind: str, model: str, folder: Path, shared: int) -> None:
    torch.set_num_threads(1)
    dtype = "bfloat16" if kind == "bfloat16" else "float32"
    policy = load_policy(model, device="cpu", dtype=dtype, lora=LoraSpec(rank=4) if kind == "adapter" else None)
    options = LearnerOptions(gradient_checkpointing=kind == "checkpointed")
    if ranks:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    learner = RankLearner(policy, options, tensor_parallel=shared) if ranks else TorchLearner(policy, options)
    numbers = learned(learner, folder, ranks)
    if ranks == 4:  # what two ranks wrote is what four have
        before = learner.state()
        learner.load_state(folder)
        after = learner.state()
        numbers.append(max(_gap(before, after)))
    if rank == 0:
        sys.stdout.write(json.dumps({"of": ranks, "numbers": numbers}) + "\n")
        sys.stdout.flush()
    if ranks:
        dist.barrier()
        dist.destroy_process_group()


def _gap(ours: object, theirs: object) -> list[float]:
    """Largest differences of all tensors in two states."""
    if isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor):
        return [float((ours - theirs).abs().max())]
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return [gap for key in ours for gap in _gap(ours[key], theirs[key])]
    return [0.0]


def in_processes(work: Callable[..., None], ranks: int, *arguments: object) -> None:
    """Call `work(rank, ranks, port, *arguments)` in a process for each rank, one at least; the port is free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    forked = multiprocessing.get_context("fork")
    processes = [forked.Process(target=work, args=(rank, ranks, port, *arguments)) for rank in range(max(1, ranks))]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        if process.exitcode:
            raise SystemExit(process.exitcode)


def main(kind: str, model: str, folder: str, shared: str = "1") -> None:
    for ranks in (r for r in (0, 1, 2, 4) if r % int(shared) == 0):
        in_processes(work, ranks, kind, model, Path(folder), int(shared))


if __name__ == "__main__":
    main(*sys.argv[1:])
