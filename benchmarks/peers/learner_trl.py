"""One update of trl's GRPOTrainer, for `benchmarks/learner.py` and `benchmarks/gpu.py`; runs in an environment that has
trl (made with 1.16).

Reads a JSON line with the model's directory and the rows, then performs one update per further line and answers with a
JSON line: the milliseconds it took, and on a GPU the most memory it had, or the error. What may be said besides is on
which `device`, of which `dtype`, with an adapter of which `lora_rank`, how many rows `at_once`, and `checkpointing`.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from typing import Any

import torch
from datasets import Dataset  # pyright: ignore[reportMissingImports]
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]


def main() -> None:
    answers = sys.stdout
    sys.stdout = sys.stderr  # trl prints
    given: dict[str, Any] = json.loads(sys.stdin.readline())
    device = given.get("device", "cpu")
    if device == "cpu":
        torch.set_num_threads(1)
    prompts, responses = given["prompts"], given["responses"]
    rows = given.get("at_once", len(prompts))
    trainer, model = _trainer(given, max(len(prompts), 2))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-6)
    inputs = _inputs(prompts, responses)
    parts = [_some(inputs, slice(at, at + rows), device) for at in range(0, len(prompts), rows)]
    trainer.current_gradient_accumulation_steps = 1
    model.train()
    print("ready", file=answers, flush=True)
    for _ in sys.stdin:
        try:
            print(json.dumps(_update(trainer, model, optimizer, parts)), file=answers, flush=True)
        except torch.OutOfMemoryError:
            print(json.dumps({"error": "out of memory"}), file=answers, flush=True)


def _trainer(given: dict[str, Any], count: int) -> tuple[Any, Any]:
    dtype = given.get("dtype", "float32")
    model: Any = AutoModelForCausalLM.from_pretrained(given["model"], dtype=getattr(torch, dtype))
    if given.get("lora_rank"):
        from peft import LoraConfig, get_peft_model

        rank = given["lora_rank"]
        model = get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"))
    cpu = given.get("device", "cpu") == "cpu"
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=count,
        num_generations=count,
        use_cpu=cpu,
        bf16=not cpu and dtype == "bfloat16",
        report_to=[],
        gradient_checkpointing=False,  # the trainer's own loop would turn it on, and is not run
        loss_type="dapo",
    )
    if given.get("checkpointing"):
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    dataset = Dataset.from_dict({"prompt": ["x"] * count})
    tokenizer = AutoTokenizer.from_pretrained(given["model"])
    trainer = GRPOTrainer(model, lambda completions, **_: [0.0] * len(completions), config, dataset,
                          processing_class=tokenizer)  # fmt: skip
    return trainer, model


def _update(trainer: Any, model: Any, optimizer: Any, parts: list[dict[str, Any]]) -> dict[str, float]:
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    for inputs in parts:
        trainer._compute_loss(model, inputs).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if not cuda:
        return {"ms": 1000 * (time.perf_counter() - began)}
    torch.cuda.synchronize()
    return {"ms": 1000 * (time.perf_counter() - began), "gib": torch.cuda.max_memory_allocated() / 2**30}


def _some(inputs: dict[str, torch.Tensor], rows: slice, device: str) -> dict[str, torch.Tensor]:
    """Some of the rows; how many tokens there are in all stays what it is."""
    return {name: (value[rows] if value.ndim else value).to(device) for name, value in inputs.items()}


def _inputs(prompts: list[list[int]], responses: list[list[int]]) -> dict[str, torch.Tensor]:
    """Prompts padded at the front, responses at the end, as the trainer does."""
    longest_p, longest_r = max(map(len, prompts)), max(map(len, responses))
    response_mask = torch.tensor([[1] * len(r) + [0] * (longest_r - len(r)) for r in responses])
    return {
        "prompt_ids": torch.tensor([[0] * (longest_p - len(p)) + p for p in prompts]),
        "prompt_mask": torch.tensor([[0] * (longest_p - len(p)) + [1] * len(p) for p in prompts]),
        "completion_ids": torch.tensor([r + [0] * (longest_r - len(r)) for r in responses]),
        "completion_mask": response_mask,
        "advantages": torch.linspace(-1, 1, len(prompts)),
        "old_per_token_logps": torch.full(response_mask.shape, -7.0),
        "num_items_in_batch": response_mask.sum(),
    }


if __name__ == "__main__":
    main()
