"""One update of the learner on the CPU, one thread: packed token trees, the same learner on padded rows, and trl.

    python benchmarks/learner.py [--trl-python ENV/bin/python] [--quick] [--game] [--json]

A tiny Qwen3 of about 4 M parameters. Four loads: a group of 8 responses of 64 tokens to one prompt of 512, a trajectory
of 6 turns, one of 20, and a group of 4 trajectories whose clients rewrote the history. trl's GRPOTrainer
(`--trl-python`: an environment that has it) gets every call as a row, as the padded learner does. An update is forward,
backward and AdamW's step; the three take turns, and medians count, so that a busy machine is busy for all.

`token_ratio` is the padded rows' tokens over the tree's: what computing each token once could bring at most where only
tokens cost time. `…_share` is the speed-up as a share of it.

`--game` instead trains one long rollout, minutes of work: nine players, 60 calls, prompts up to 12,000 tokens and
responses of 1,000, in passes of at most 16,384 tokens. What counts there is memory.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from agentlightning.learner import forward
from agentlightning.learner.base import LearnerOptions, LossConfig, OptimParams, PackedBatch
from agentlightning.learner.packing import CreditedCall, pack, split_by_budget, unique_tokens
from agentlightning.learner.policy import load_policy
from agentlightning.learner.torch_learner import TorchLearner
from agentlightning.types.call import Call, CallInfo, Int32Array

VOCABULARY = 2048
LOSS = LossConfig(clip_low=0.2, clip_high=0.28)


def make_model(path: Path) -> None:
    """About 3.7 M parameters."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=16_384,
        tie_word_embeddings=True,
        eos_token_id=0,
        pad_token_id=0,
        bos_token_id=None,
    )
    save_model(path, config, torch.float32, "cpu")


def save_model(path: Path, config: Qwen3Config, dtype: torch.dtype, device: str) -> None:
    """With random weights, and a tokenizer that trl insists on."""
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = Qwen3ForCausalLM._from_config(config, dtype=dtype)
    model.save_pretrained(path)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(config.vocab_size)}, unk_token="w1"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w0", pad_token="w0").save_pretrained(path)


# ---- loads -----------------------------------------------------------------------------------------------------------


def tokens(rng: np.random.Generator, n: int) -> Int32Array:
    return rng.integers(2, VOCABULARY, n).astype(np.int32)


def group(rng: np.random.Generator) -> list[CreditedCall]:
    prompt = tokens(rng, 512)
    return [credited(prompt, tokens(rng, 64), i) for i in range(8)]


def turns(rng: np.random.Generator, count: int, sequence: int = 0, rewrite: bool = False) -> list[CreditedCall]:
    """Each turn samples 40 tokens and reads 40; with `rewrite` a client drops the last response every third turn."""
    start = np.random.default_rng(7)
    history = tokens(start, 280)
    calls = []
    for turn in range(count):
        response = tokens(rng, 40)
        calls.append(credited(history, response, sequence))
        kept = history if rewrite and turn % 3 == 2 else np.concatenate([history, response])
        history = np.concatenate([kept, tokens(rng, 40)])
    return calls


def branch(rng: np.random.Generator) -> list[CreditedCall]:
    return [call for sibling in range(4) for call in turns(rng, 6, sibling, rewrite=True)]


def game(rng: np.random.Generator) -> list[CreditedCall]:
    """Nine players with a conversation each behind the same rules; 60 calls."""
    rules, calls = tokens(rng, 3000), []
    for player in range(9):
        history = np.concatenate([rules, tokens(rng, 1000)])
        for _ in range(7 if player < 6 else 6):
            response = tokens(rng, 1000)
            calls.append(credited(history, response, player))
            history = np.concatenate([history, response, tokens(rng, 330)])
    return calls


LOADS: dict[str, Callable[[np.random.Generator], list[CreditedCall]]] = {
    "": group,
    "turns6_": lambda rng: turns(rng, 6),
    "turns20_": lambda rng: turns(rng, 20),
    "branch_": branch,
}
NAMES = {
    "": "group of 8 × (512 + 64)",
    "turns6_": "6 turns",
    "turns20_": "20 turns",
    "branch_": "4 branching of 6 turns",
}


def credited(prompt: Int32Array, response: Int32Array, sequence: int) -> CreditedCall:
    n = len(response)
    info = CallInfo("c", "c", "r", "a", 0, "p", True, None, None, "p", "chat", "stop", 0.0, 0.0, 1.0)
    old = np.full(n, -7.0, np.float32)
    advantages = np.full(n, (-1.0) ** sequence, np.float32)
    return CreditedCall(
        Call(info, prompt, response, old, old, ()), sequence, 0, advantages, np.full(n, 1 / (8 * n), np.float32)
    )


def every_call_a_row(calls: list[CreditedCall]) -> PackedBatch:
    """The same loss entries with nothing shared: what a learner without trees computes."""
    alone = [pack([c]) for c in calls]
    starts = np.cumsum([0, *(len(b.ids_N) for b in alone)])[:-1].astype(np.int32)
    together = {
        name: np.concatenate([getattr(b, name) for b in alone])
        for name in PackedBatch.__struct_fields__
        if getattr(alone[0], name) is not None
    }
    sources = np.concatenate([b.source_E + start for b, start in zip(alone, starts, strict=True)])
    return PackedBatch(**{**together, "starts_S": starts, "source_E": sources.astype(np.int32)})


# ---- the three -------------------------------------------------------------------------------------------------------


def updater(path: Path, batch: PackedBatch, *, rows: bool) -> Callable[[], float]:
    learner = TorchLearner(load_policy(path, device="cpu"))
    learner.rows = rows

    def update() -> float:
        began = time.perf_counter()
        learner.forward_backward(batch, LOSS)
        learner.optim_step(OptimParams(learning_rate=1e-6))
        return 1000 * (time.perf_counter() - began)

    return update


@contextmanager
def trl_updater(
    python: str, path: Path, calls: list[CreditedCall], **how: Any
) -> Iterator[Callable[[], dict[str, Any]]]:
    """trl in its own process, one update per call: its `ms`, and on a GPU its `gib` at most, or an `error`."""
    script = Path(__file__).parent / "peers" / "learner_trl.py"
    process = subprocess.Popen(
        [python, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    ask, answer = process.stdin, process.stdout
    rows = {
        **how,
        "model": str(path),
        "prompts": [c.call.prompt_ids.tolist() for c in calls],
        "responses": [c.call.response_ids.tolist() for c in calls],
    }
    print(json.dumps(rows), file=ask, flush=True)
    if answer.readline().strip() != "ready":
        raise SystemExit(f"{script} does not start with {python}: is trl installed there?")

    def update() -> dict[str, Any]:
        print("", file=ask, flush=True)
        return json.loads(answer.readline())

    try:
        yield update
    finally:
        ask.close()
        process.wait(timeout=60)


def peak_mb(update: Callable[[], float]) -> float | None:
    """How much memory an update needs on top of what is there before, by the kernel's high-water mark."""
    marks = Path("/proc/self/clear_refs")
    if not marks.exists():
        return None
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # what is free already must not hide what is needed
    marks.write_text("5")
    before = status_mb("VmRSS")
    update()
    return status_mb("VmHWM") - before


def status_mb(field: str) -> float:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field))
    return int(line.split()[1]) / 1024


def measure(prefix: str, path: Path, trl_python: str | None, rounds: int) -> dict[str, float | None]:
    calls = LOADS[prefix](np.random.default_rng(1))
    batch = pack(calls)
    ways = {"tree": updater(path, batch, rows=False), "padded": updater(path, every_call_a_row(calls), rows=True)}
    memory = {name: peak_mb(update) for name, update in ways.items()}
    found: dict[str, list[float]] = {}
    with trl_updater(trl_python, path, calls) if trl_python else nullcontext() as trl:
        everyone = {**ways, **({"trl": lambda: trl()["ms"]} if trl else {})}
        for number in range(rounds + 1):
            for name, update in everyone.items():
                ms = update()
                if number:
                    found.setdefault(name, []).append(ms)
    ms = {name: statistics.median(values) for name, values in found.items()}
    longest = max(len(c.call.prompt_ids) + len(c.call.response_ids) for c in calls)
    ratio = len(calls) * longest / len(batch.ids_N)
    speedup = ms["padded"] / ms["tree"]
    return {
        f"{prefix}tree_ms": ms["tree"],
        f"{prefix}padded_ms": ms["padded"],
        f"{prefix}trl_ms": ms.get("trl"),
        f"{prefix}speedup_vs_padded": speedup,
        f"{prefix}speedup_vs_trl": ms["trl"] / ms["tree"] if "trl" in ms else None,
        f"{prefix}token_ratio": ratio,
        f"{prefix}speedup_share": speedup / ratio,
        f"{prefix}tree_mb": memory["tree"],
        f"{prefix}padded_mb": memory["padded"],
    }


def measure_game(path: Path) -> dict[str, float | None]:
    """One update on the game, all cores."""
    torch.set_num_threads(os.cpu_count() or 1)
    calls = game(np.random.default_rng(1))
    passes = [pack(part) for part in split_by_budget(calls, 16_384)]
    figures: dict[str, float | None] = {
        "game_calls": len(calls),
        "game_row_tokens": sum(len(c.call.prompt_ids) + len(c.call.response_ids) for c in calls),
        "game_tree_tokens": unique_tokens(calls),
        "game_passes": len(passes),
    }
    for name, checkpointing in (("game", False), ("game_checkpointing", True)):
        options = LearnerOptions(gradient_checkpointing=checkpointing)
        learner = TorchLearner(load_policy(path, device="cpu"), options)

        def update(learner: TorchLearner = learner) -> float:
            for batch in passes:
                learner.forward_backward(batch, LOSS)
            learner.optim_step(OptimParams(learning_rate=1e-6))
            return 0.0

        began = time.perf_counter()
        figures[f"{name}_mb"] = peak_mb(update)
        figures[f"{name}_s"] = time.perf_counter() - began
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--trl-python", help="the interpreter of an environment that has trl")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, and without the 20 turns")
    parser.add_argument("--game", action="store_true", help="one rollout of 60 long calls instead: memory")
    parser.add_argument("--json", action="store_true", help="end with the figures as one line of JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    forward.ROW_TOKENS = 1 << 30  # the padded learner is the plain one: all rows at once, as long as the longest
    figures: dict[str, float | None] = {}
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        if arguments.game:
            print(json.dumps(measure_game(Path(folder))))
            return
        for prefix in LOADS:
            if not (arguments.quick and prefix == "turns20_"):
                rounds = 2 if arguments.quick else (3 if prefix in ("turns20_", "branch_") else 7)
                figures |= measure(prefix, Path(folder), arguments.trl_python, rounds)
    Console().print(table(figures))
    if arguments.json:
        print(json.dumps(figures))


def table(figures: dict[str, Any]) -> Table:
    shown = Table(title="One update, one thread: milliseconds, and what the pass needs on top in memory")
    for title in ("load", "tree", "padded", "trl", "× padded", "× trl", "token ratio", "share", "tree MB", "padded MB"):
        shown.add_column(title, justify="left" if title == "load" else "right")
    keys = ("tree_ms", "padded_ms", "trl_ms", "speedup_vs_padded", "speedup_vs_trl", "token_ratio", "speedup_share")
    for prefix, name in NAMES.items():
        if f"{prefix}tree_ms" not in figures:
            continue
        values = [figures[prefix + key] for key in (*keys, "tree_mb", "padded_mb")]
        formats = (".0f", ".0f", ".0f", ".2f", ".2f", ".2f", ".0%", ".0f", ".0f")
        shown.add_row(name, *("–" if v is None else f"{v:{f}}" for v, f in zip(values, formats, strict=True)))
    return shown


if __name__ == "__main__":
    main()
