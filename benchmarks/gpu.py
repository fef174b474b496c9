"""Tokens per second and memory on a GPU: the learner on token trees and rows, beside trl; the engine, beside vLLM.

    python benchmarks/gpu.py [--shapes 0.6B,4B] [--rows 4096,16384] [--shared 0.5] [--only tree]
                             [--trl-python ENV/bin/python] [--vllm PROGRAM] [--quick] [--json]

Models of Qwen3's shapes and vocabulary with random weights in bfloat16, and an adapter of rank 16 in training
(`--lora-rank 0`: all weights). The load is a group of 8 rollouts of `--rows` tokens each, of which the first half
(`--shared`) is the same for all; the rest is their own, and learned.

An update is forward, backward and AdamW's step, all with gradient checkpointing. Its tokens per second are the
rollouts', 8 × `--rows`, however many a way computes, so all figures of a size compare. Trees are one pass; rows are
passes of at most as many tokens as the tree has; trl gets so many rows at once, and half of them until there is memory.
`gap` is the largest difference of a log-prob to the first way's, before any update: rounding, or something is wrong.

The engine samples for the same group: 8 prompts and responses of `--rows` tokens together, the last 256 at most of them
sampled. Each row is printed as it is measured: one update that compiles and warms up, then as many as begin within
`--seconds`, one at least. Memory is the most that torch had allocated on the GPU, weights and optimiser included.

Where there is no GPU nothing is measured. `--device cpu --quick` runs the same code on a tiny model: a test, no figure.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, Qwen3Config

from agentlightning.learner.base import LearnerOptions, OptimParams, PackedBatch, joined
from agentlightning.learner.forward import takes_flex
from agentlightning.learner.packing import CreditedCall, pack
from agentlightning.learner.policy import LoraSpec, load_policy
from agentlightning.learner.torch_learner import TorchLearner
from benchmarks.engine import Job, Ours, Vllm
from benchmarks.learner import LOSS, credited, every_call_a_row, peak_mb, save_model, tokens, trl_updater

GROUP = 8
MOST_SAMPLED = 256
SHAPES = {
    "tiny": {"vocab_size": 2048, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.2},
    "0.6B": {"vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
             "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
    "4B": {"vocab_size": 151_936, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
           "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128},
}  # fmt: skip
COLUMNS = {"what": "<34", "tokens/s": ">10", "s": ">9", "GiB": ">7", "gap": ">9"}


@dataclass(frozen=True)
class Way:
    """A way of computing the group."""

    attention: Literal["flex", "segments"]
    tree: bool
    padded: bool = False


WAYS = {
    "tree": Way("flex", tree=True),
    "tree by segments": Way("segments", tree=True),
    "rows, packed": Way("flex", tree=False),
    "rows, padded": Way("segments", tree=False, padded=True),
}


@dataclass(frozen=True)
class Given:
    """What is measured, and where."""

    device: str
    dtype: str
    model: Path
    row: int
    """Tokens of a rollout."""
    shared: int
    """How many of them are the same for the group."""
    lora_rank: int
    seconds: float
    trl_python: str
    vllm: str | None

    @property
    def total(self) -> int:
        return GROUP * self.row

    @property
    def rows_at_once(self) -> int:
        """As many as have the tokens of the tree."""
        return (self.shared + GROUP * (self.row - self.shared)) // self.row

    def calls(self) -> list[CreditedCall]:
        rng = np.random.default_rng(1)
        prompt = tokens(rng, self.shared)
        return [credited(prompt, tokens(rng, self.row - self.shared), sequence) for sequence in range(GROUP)]


@dataclass(frozen=True)
class Row:
    """A line of the table; `note` says why there are no figures."""

    what: str
    note: str = ""
    tokens_per_s: float | None = None
    seconds: float | None = None
    gib: float | None = None
    gap: float | None = None

    def __str__(self) -> str:
        if self.note:
            return f"{self.what:<34}  {self.note}"
        figures = (self.tokens_per_s, self.seconds, self.gib, self.gap)
        formats = (">10,.0f", ">9.3f", ">7.2f", ">9.2g")
        cells = (f"{'–':>{COLUMNS[n][1:]}}" if v is None else f"{v:{f}}" for n, v, f in
                 zip(list(COLUMNS)[1:], figures, formats, strict=True))  # fmt: skip
        return "  ".join([f"{self.what:<34}", *cells])


# ---- the learner -----------------------------------------------------------------------------------------------------


def passes(way: Way, given: Given) -> list[PackedBatch]:
    calls = given.calls()
    if way.tree:
        return [pack(calls)]
    size = GROUP if way.padded else given.rows_at_once  # padded rows are cut into passes by the learner itself
    return [every_call_a_row(calls[at : at + size]) for at in range(0, GROUP, size)]


def learned(name: str, given: Given, first: list[np.ndarray]) -> Row:
    """An update of the learner; `first` holds the log-probs of the first way, once there was one."""
    way = WAYS[name]
    parts = passes(way, given)
    with_memory = Memory(given.device)
    lora = LoraSpec(rank=given.lora_rank) if given.lora_rank else None
    policy = load_policy(given.model, device=given.device, dtype=given.dtype, lora=lora)
    options = LearnerOptions(gradient_checkpointing=True, tree_attention=way.attention)
    learner = TorchLearner(policy, options)
    learner.rows = way.padded
    found: list[np.ndarray] = []

    def update() -> None:
        found.append(joined([learner.forward_backward(part, LOSS) for part in parts]).logprobs)
        learner.optim_step(OptimParams(learning_rate=1e-6))

    seconds, gib = with_memory.of(update, given.seconds)
    if learner.rows != way.padded or takes_flex(learner.options, policy.device) != (way.attention == "flex"):
        return Row(name, "cannot be computed here; the warning says why")
    first[:] = first or found[:1]
    gap = float(np.abs(found[0] - first[0]).max())
    return Row(name, "", given.total / seconds, seconds, gib, gap)


def trl_learned(given: Given) -> Row:
    """An update of trl's, with the most rows at once that there is memory for, by halves."""
    if not has(given.trl_python, "trl"):
        return Row("trl", "not installed (--trl-python names an environment that has it)")
    how = {"device": given.device, "dtype": given.dtype, "lora_rank": given.lora_rank, "checkpointing": True}
    rows, note = given.rows_at_once, ""
    while rows:
        with trl_updater(given.trl_python, given.model, given.calls(), **how, at_once=rows) as ask:
            answers = [ask()]
            until = time.monotonic() + given.seconds
            while "error" not in answers[-1] and (len(answers) == 1 or time.monotonic() < until):
                answers.append(ask())
        if "error" not in answers[-1]:
            seconds = statistics.median(a["ms"] for a in answers[1:]) / 1000
            gib = max(a["gib"] for a in answers) if "gib" in answers[0] else None
            return Row(f"trl, {rows} rows at once", "", given.total / seconds, seconds, gib)
        rows, note = rows // 2, answers[-1]["error"]
    return Row("trl", note)


def has(python: str, package: str) -> bool:
    """Whether an interpreter finds a package."""
    find = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    return subprocess.run([python, "-c", find], capture_output=True, check=False).returncode == 0


# ---- the engine ------------------------------------------------------------------------------------------------------


def jobs(given: Given) -> list[Job]:
    """The group's prompts, and how much is sampled: the same for all, so that nobody waits for the longest."""
    rng = np.random.default_rng(2)
    sampled = min(MOST_SAMPLED, (given.row - given.shared) // 2)
    shared = tokens(rng, given.shared).tolist()
    own = given.row - given.shared - sampled
    return [Job(shared + tokens(rng, own).tolist(), sampled) for _ in range(GROUP)]


def engine_sampled(given: Given) -> Row:
    """The embedded engine."""
    with_memory = Memory(given.device)
    kind = getattr(torch, given.dtype)
    model: Any = AutoModelForCausalLM.from_pretrained(given.model, dtype=kind, attn_implementation="sdpa")
    # Room for two contexts per request, as much as the engine would ever use.
    engine = Ours(model.to(given.device).eval(), GROUP, max_context=given.row, kv_budget_bytes=1 << 37)
    asked = jobs(given)
    seconds, gib = with_memory.of(lambda: engine(asked), given.seconds)
    return Row("embedded engine", "", sum(job.tokens for job in asked) / seconds, seconds, gib)


def vllm_sampled(given: Given) -> Row:
    """vLLM as it starts by itself. Its memory is what it sets aside, so there is nothing to tell."""
    if given.vllm is None:
        return Row("vLLM", "not installed (--vllm names its program)")
    arguments = Vllm.ON_A_CPU if given.device == "cpu" else ("--dtype", given.dtype, "--max-model-len", str(given.row))
    server = Vllm(given.vllm, str(given.model), GROUP, os.cpu_count() or 1, arguments=arguments)
    try:
        run, asked = server.at(GROUP), jobs(given)
        seconds = timed(lambda: run(asked), given.seconds)
    finally:
        server.close()
    return Row("vLLM", "", sum(job.tokens for job in asked) / seconds, seconds)


OTHERS = {
    "trl": ("learner_trl", trl_learned),
    "embedded engine": ("engine", engine_sampled),
    "vLLM": ("engine_vllm", vllm_sampled),
}
"""What else is measured: its name in the figures, and how."""


# ---- measuring -------------------------------------------------------------------------------------------------------


def timed(work: Callable[[], None], seconds: float, wait: Callable[[], None] = lambda: None) -> float:
    """Median seconds, once warm."""
    work()
    wait()
    found: list[float] = []
    until = time.monotonic() + seconds
    while not found or time.monotonic() < until:
        began = time.perf_counter()
        work()
        wait()
        found.append(time.perf_counter() - began)
    return statistics.median(found)


class Memory:
    """The most memory from now on: all that torch has on a GPU, or what the process needs for one more on a CPU."""

    def __init__(self, device: str) -> None:
        self._cuda = torch.device(device).type == "cuda"
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()

    def of(self, work: Callable[[], None], seconds: float) -> tuple[float, float | None]:
        """Seconds of the work, and GiB."""
        if self._cuda:
            took = timed(work, seconds, torch.cuda.synchronize)
            return took, torch.cuda.max_memory_allocated() / 2**30

        def once() -> float:
            work()
            return 0.0

        took = timed(work, seconds)
        more = peak_mb(once)
        return took, None if more is None else more / 1024


def row_of(what: str, measure: Callable[[], Row]) -> Row:
    """What has no room is a row, too, and so is a peer that does not start. Each finds the GPU empty."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    try:
        return measure()
    except torch.OutOfMemoryError:
        return Row(what, "out of memory")
    except SystemExit as why:
        return Row(what, str(why).strip().splitlines()[-1])


def measure(shape: str, given: Given, only: Collection[str], tell: Callable[[str, Row], None]) -> None:
    """Each way, or those that are named."""
    print(f"\n{shape}: {GROUP} rollouts of {given.row:,} tokens, the first {given.shared:,} the same; "
          f"a tree of {given.shared + GROUP * (given.row - given.shared):,} tokens")  # fmt: skip
    print("  ".join(f"{name:{side}}" for name, side in COLUMNS.items()))
    first: list[np.ndarray] = []
    for name in WAYS:
        if name in only:
            tell(f"learner_{name}", row_of(name, lambda name=name: learned(name, given, first)))
    for name, (key, peer) in OTHERS.items():
        if name in only:
            tell(key, row_of(name, lambda peer=peer: peer(given)))


def settings(arguments: argparse.Namespace) -> tuple[list[str], list[int]]:
    """Shapes and tokens of rows, as given or as they are by default."""
    if arguments.device == "cpu":
        shapes, rows = "tiny", "96" if arguments.quick else "96,300"
    else:
        shapes, rows = ("0.6B", "4096") if arguments.quick else ("0.6B,4B", "4096,16384")
    names: str = arguments.shapes or shapes
    lengths: str = arguments.rows or rows
    return names.split(","), [int(row) for row in lengths.split(",")]


def parsed(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Tokens per second and memory of learner and engine on a GPU.")
    parser.add_argument("--shapes", help=f"of {', '.join(SHAPES)}; 0.6B,4B unless given")
    parser.add_argument("--rows", help="tokens of a rollout; 4096,16384 unless given")
    parser.add_argument("--shared", type=float, default=0.5, help="which share of them is the same for the group (0.5)")
    parser.add_argument("--lora-rank", type=int, default=16, help="of the adapter in training; 0: all weights (16)")
    parser.add_argument("--seconds", type=float, default=20.0, help="in which updates of a row may begin (20)")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try the script out")
    parser.add_argument("--trl-python", default=sys.executable, help="the interpreter of an environment that has trl")
    parser.add_argument("--vllm", metavar="PROGRAM", default=shutil.which("vllm"), help="where `vllm` is")
    every = [*WAYS, *OTHERS]
    parser.add_argument("--only", action="append", choices=every, help="a line of the table; may be given again")
    parser.add_argument("--quick", action="store_true", help="0.6B with rows of 4,096 tokens, one update each")
    parser.add_argument("--json", action="store_true", help="last line: one JSON object")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> None:
    arguments = parsed(words)
    if arguments.device != "cpu" and not torch.cuda.is_available():
        print("There is no GPU here that torch could use, so nothing is measured.")
        return
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    shapes, lengths = settings(arguments)
    if arguments.device == "cpu":
        torch.set_num_threads(1)
    name = "a CPU, which says nothing of a GPU" if arguments.device == "cpu" else torch.cuda.get_device_name()
    print(f"On {name}; torch {torch.__version__}, bfloat16, "
          f"{f'an adapter of rank {arguments.lora_rank}' if arguments.lora_rank else 'all weights'}")  # fmt: skip
    figures: dict[str, Any] = {}
    for shape in shapes:
        with tempfile.TemporaryDirectory(prefix="agl-gpu-") as folder:
            config = Qwen3Config(**SHAPES[shape], max_position_embeddings=max(lengths), tie_word_embeddings=True,
                                 eos_token_id=0, pad_token_id=0, bos_token_id=None)  # fmt: skip
            save_model(Path(folder), config, torch.bfloat16, arguments.device)
            for row in lengths:
                given = Given(
                    device=arguments.device,
                    dtype="bfloat16",
                    model=Path(folder),
                    row=row,
                    shared=int(row * arguments.shared),
                    lora_rank=arguments.lora_rank,
                    seconds=0.0 if arguments.quick else arguments.seconds,
                    trl_python=arguments.trl_python,
                    vllm=arguments.vllm,
                )

                def tell(key: str, found: Row, prefix: str = f"{shape}_{row}") -> None:
                    print(found, flush=True)
                    whole = {"tokens_per_s": found.tokens_per_s, "gib": found.gib, "gap": found.gap}
                    figures.update({f"{prefix}_{key}_{n}".replace(", ", "_").replace(" ", "_"): v
                                    for n, v in whole.items() if v is not None})  # fmt: skip

                measure(shape, given, arguments.only or [*WAYS, *OTHERS], tell)
    if arguments.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
