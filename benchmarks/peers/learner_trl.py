"""One update of trl's GRPOTrainer, for `benchmarks/learner.py`; runs in an environment that has trl (made with 1.16).

Reads a JSON line with the model's directory and the rows, then performs one update per further line and answers with
the milliseconds it took.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time

import torch
from datasets import Dataset  # pyright: ignore[reportMissingImports]
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]


def main() -> None:
    torch.set_num_threads(1)
    answers = sys.stdout
    sys.stdout = sys.stderr  # trl prints
    given = json.loads(sys.stdin.readline())
    prompts, responses = given["prompts"], given["responses"]
    model = AutoModelForCausalLM.from_pretrained(given["model"], dtype=torch.float32)
    count = max(len(prompts), 2)
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=count,
        num_generations=count,
        use_cpu=True,
        bf16=False,
        report_to=[],
        gradient_checkpointing=False,
        loss_type="dapo",
    )
    dataset = Dataset.from_dict({"prompt": ["x"] * count})
    tokenizer = AutoTokenizer.from_pretrained(given["model"])
    trainer = GRPOTrainer(model, lambda completions, **_: [0.0] * len(completions), config, dataset,
                          processing_class=tokenizer)  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    inputs = _inputs(prompts, responses)
    trainer.current_gradient_accumulation_steps = 1
    model.train()
    print("ready", file=answers, flush=True)
    for _ in sys.stdin:
        began = time.perf_counter()
        trainer._compute_loss(model, inputs).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(1000 * (time.perf_counter() - began), file=answers, flush=True)


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
