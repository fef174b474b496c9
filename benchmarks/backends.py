"""The calculator agent on each backend: the same script but for the flag. Steps, time and traffic of each as a row.

    python benchmarks/backends.py [--steps 24] [--vllm /path/to/vllm] [--only embedded vllm …] [--quick] [--json]

vLLM is left out where its program is not named; `scripts/vllm_cpu.py --no-tests` makes one for CPUs.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import agentlightning as agl
from agentlightning.backend import ModelSpec
from agentlightning.backend.vllm.backend import VLLMBackend
from agentlightning.metrics import SilentConsole, read_metrics
from agentlightning.trainer.example import load_example

ON_A_CPU: dict[str, Any] = {
    "args": ["--enforce-eager"],
    "env": {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"},
}
KINDS = ["embedded", "embedded-lora", "vllm", "vllm-lora", "vllm-gloo", "vllm-gloo-lora"]
"""With "gloo" weights are sent to the server; otherwise it reads the learner's files."""
ADAPTER = {"lora_rank": 8, "learning_rate": 2e-3}


class Measured(VLLMBackend):
    """Counts what goes to and from its servers."""

    sent = received = weights = 0

    async def _export(self, policy: str, path: str) -> None:
        await super()._export(policy, path)
        Measured.weights += sum(file.stat().st_size for file in Path(path).iterdir())  # noqa: ASYNC240 - a benchmark

    async def close(self) -> None:
        if hasattr(self, "servers"):
            apis = [replica.api for replica in self.servers.fleet.replicas]
            Measured.sent = sum(api.sent for api in apis)
            Measured.received = sum(api.received for api in apis)
        await super().close()


def measured(spec: ModelSpec) -> VLLMBackend:
    """The vLLM backend, as `backend="vllm"` makes it."""
    Measured.sent = Measured.received = Measured.weights = 0
    return Measured(spec)


def train(kind: str, steps: int, vllm: str | None, run_dir: Path) -> str:
    """A row of the table."""
    recipe = load_example("calc", "recipe")
    agent = load_example("calc", "calc_agent").calc_agent
    settings: dict[str, Any] = {**recipe.SETTINGS, "steps": steps, **(ADAPTER if kind.endswith("lora") else {})}
    if kind.startswith("vllm"):
        sent = {"weight_transfer": "gloo"} if "gloo" in kind else {}
        settings |= {"backend": measured, "backend_options": {"command": vllm, **ON_A_CPU, **sent}}
    began = time.monotonic()
    trainer = agl.Trainer(
        algorithm=agl.GRPO(model="calc", seed=0, **settings),
        run_dir=run_dir,
        concurrency=recipe.CONCURRENCY,
        console=SilentConsole(),
    )
    trainer.fit(agent, recipe.train_tasks(), recipe.val_tasks())
    seconds = time.monotonic() - began
    rows = read_metrics(run_dir / "metrics.jsonl")
    vals = [m["val_reward"] for m in rows if m.get("val_reward") is not None]
    learned = [m for m in rows if m.get("updates")]
    reached = next((m["step"] for m in learned if m["reward"] >= 0.85), "–")
    gap = max(max(m["sync_gap"], m["logprob_gap_max"]) for m in learned)
    sample, learn = (sum(m[k] for m in learned) / len(learned) for k in ("sampling_seconds", "learning_seconds"))
    return (
        f"| {kind} | {vals[0]:.2f} → {vals[-1]:.2f} | {reached} | {sample:.1f} + {learn:.1f} | {seconds:.0f} | "
        f"{gap:.0e} | {_traffic(kind, steps)} |"
    )


def _traffic(kind: str, steps: int) -> str:
    if not kind.startswith("vllm"):
        return "–"
    sent, received, weights = (n / steps / 2**20 for n in (Measured.sent, Measured.received, Measured.weights))
    return f"{sent:.1f} + {received:.1f} + {weights:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--vllm", help="the program of a vLLM for CPUs")
    parser.add_argument("--only", nargs="*", default=KINDS)
    parser.add_argument("--quick", action="store_true", help="two steps of the embedded backend")
    parser.add_argument("--json", action="store_true", help="the rows as JSON, too, by backend")
    options = parser.parse_args()
    kinds = ["embedded"] if options.quick else options.only
    if options.vllm is None:
        kinds = [kind for kind in kinds if not kind.startswith("vllm")]
    print("| backend | validation reward | ≥ 0.85 at step | sample + learn s/step | total s | largest log-prob gap |"
          " MiB/step: sent + received + weights |\n|---|---|---|---|---|---|---|")  # fmt: skip
    rows: dict[str, str] = {}
    for kind in kinds:
        with tempfile.TemporaryDirectory() as folder:
            rows[kind] = train(kind, 2 if options.quick else options.steps, options.vllm, Path(folder) / "run")
            print(rows[kind], flush=True)
    if options.json:
        print(json.dumps({kind: [cell.strip() for cell in row.strip("|").split("|")] for kind, row in rows.items()}))


if __name__ == "__main__":
    main()
