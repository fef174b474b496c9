"""What a publication on Ray costs, by size of the model and number of engines: bytes and seconds.

    python benchmarks/publication.py [--sizes 0.7 30 120 240] [--layouts 1x1 1x2 1x4 2x1 2x2] [--lora-rank 8]
        [--quick] [--json]

A local cluster of so many nodes with so many engines each (`NODESxENGINES`), and a learner on one of them. Random
Qwen3s in float32 of so many million parameters take one step and are published, `ROUNDS` times; medians count. Nodes
share this machine, and so its one copy of the weights: on a cluster each machine with engines writes one. `write` is
the time until the learner has written its weights, `take up` what the slowest engine needs from then on: they are put
into Ray's object store, carried to its machine, checked, written there and loaded. Needs the extra `ray`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import statistics
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from agentlightning.backend import POLICY, ModelSpec
from agentlightning.backend.ray.backend import RayBackend
from agentlightning.engine.base import SamplingParams, concat
from agentlightning.learner.base import LossConfig, OptimParams, PackedBatch
from agentlightning.models import resolve_model

SHAPES = {0.7: (96, 6), 30: (512, 8), 120: (1024, 8), 240: (1024, 17), 480: (1536, 15)}
"""Hidden size and layers, by millions of parameters, nearly."""
PROMPT = np.arange(20, 60, dtype=np.int32)
ROUNDS = 3


def make_model(folder: Path, size: float) -> int:
    """Writes it with the calculator's tokenizer; returns the number of parameters."""
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("calc"))
    tokenizer.save_pretrained(folder)
    hidden, layers = SHAPES[size]
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 32,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    model: Any = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


async def a_row(backend: RayBackend) -> PackedBatch:
    """A prompt and a response to it, to learn from."""
    params = SamplingParams(max_tokens=8, seed=3, owner="benchmark", ignore_eos=True)
    chunk = concat([chunk async for chunk in backend.engine(POLICY).generate(PROMPT, params)])
    ids, count = np.concatenate([PROMPT, chunk.ids]).astype(np.int32), len(chunk.ids)
    return PackedBatch(
        ids_N=ids,
        positions_N=np.arange(len(ids), dtype=np.int32),
        starts_S=np.zeros(1, dtype=np.int32),
        parents_S=np.full(1, -1, dtype=np.int32),
        source_E=np.arange(len(PROMPT) - 1, len(ids) - 1, dtype=np.int32),
        targets_E=chunk.ids,
        sequence_E=np.zeros(count, dtype=np.int32),
        group_E=np.zeros(count, dtype=np.int32),
        old_logprobs_E=chunk.plain_logprobs,
        advantages_E=np.ones(count, dtype=np.float32),
        weights_E=np.full(count, 1 / count, dtype=np.float32),
        temperature_E=np.ones(count, dtype=np.float32),
    )


async def published(backend: RayBackend, rounds: int) -> dict[str, float]:
    """Medians over so many publications."""
    found: dict[str, list[float]] = {"bytes": [], "seconds": [], "take_up_seconds": []}
    learner = backend.learner(POLICY)
    for _ in range(rounds):
        await learner.forward_backward([await a_row(backend)], LossConfig(name="reinforce"))
        await learner.optim_step(OptimParams(learning_rate=1e-4))
        before, began = (await backend.stats()).published_bytes, time.perf_counter()
        await backend.publish(POLICY)
        found["seconds"].append(time.perf_counter() - began)
        stats = await backend.stats()
        found["bytes"].append(stats.published_bytes - before)
        found["take_up_seconds"].append(max(stats.publication_seconds.values()))
    return {name: statistics.median(values) for name, values in found.items()}


async def measured(model: Path, parameters: int, layout: str, lora_rank: int | None, rounds: int) -> dict[str, Any]:
    from ray.cluster_utils import Cluster  # pyright: ignore[reportMissingImports]

    nodes, engines = map(int, layout.split("x"))
    each = {"num_cpus": engines + 1, "object_store_memory": (100 << 20) + 12 * parameters}
    cluster = Cluster(initialize_head=True, head_node_args=each)
    try:
        for _ in range(nodes - 1):
            cluster.add_node(**each)
        options: dict[str, Any] = {"address": str(cluster.address), "engines": nodes * engines, "placement": "SPREAD"}
        spec = ModelSpec(
            model=str(model), device="cpu", max_context=256, seed=0, lora_rank=lora_rank, backend_options=options
        )
        backend = RayBackend(spec)
        await backend.start()
        try:
            return {"nodes": nodes, "engines": nodes * engines, **await published(backend, rounds)}
        finally:
            await backend.close()
    finally:
        cluster.shutdown()


async def run(sizes: list[float], layouts: list[str], lora_rank: int, rounds: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for size in sizes:
            model = Path(folder) / str(size)
            parameters = make_model(model, size)
            for layout in layouts:
                for rank in (None, lora_rank):
                    found = await measured(model, parameters, layout, rank, rounds)
                    rows.append({"parameters": parameters, "lora_rank": rank, **found})
                    print(json.dumps(rows[-1]), flush=True)
    return rows


def table(rows: list[dict[str, Any]]) -> Table:
    columns = ("parameters, M", "trained", "nodes", "engines", "MB written", "seconds", "write", "take up")
    made = Table(*columns, title="A publication on Ray")
    for row in rows:
        made.add_row(
            f"{row['parameters'] / 1e6:,.1f}",
            "all weights" if row["lora_rank"] is None else f"LoRA of rank {row['lora_rank']}",
            str(row["nodes"]),
            str(row["engines"]),
            f"{row['bytes'] / 1e6:,.1f}",
            f"{row['seconds']:.2f}",
            f"{row['seconds'] - row['take_up_seconds']:.2f}",
            f"{row['take_up_seconds']:.2f}",
        )
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=float, nargs="+", choices=SHAPES, default=[0.7, 30, 120, 240])
    parser.add_argument("--layouts", nargs="+", default=["1x1", "1x2", "1x4", "2x1", "2x2"])
    parser.add_argument("--lora-rank", type=int, default=8, help="of the adapter that is measured beside all weights")
    parser.add_argument("--quick", action="store_true", help="the smallest model on one node with one and two engines")
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object at the end")
    given = parser.parse_args()
    if find_spec("ray") is None:
        print("Not measured: Ray is not installed here. Install it with:  pip install 'agentlightning[ray]'")
        return
    logging.basicConfig(level=logging.WARNING)
    sizes, layouts = ([0.7], ["1x1", "1x2"]) if given.quick else (given.sizes, given.layouts)
    rows = asyncio.run(run(sizes, layouts, given.lora_rank, 1 if given.quick else ROUNDS))
    Console(width=120).print(table(rows))
    if given.json:
        print(json.dumps({"publication": rows}))


if __name__ == "__main__":
    main()
