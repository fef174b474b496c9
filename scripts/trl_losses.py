"""Numbers of trl's GRPO losses for `tests/learner/test_trl.py`: the same tensors, its code, and the gradients it gives.

    python scripts/trl_losses.py > tests/learner/trl_losses.json      # in an environment with trl (made with 1.16)

trl is not needed to run the tests.
"""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any
from unittest.mock import MagicMock

import torch

LENGTHS = [5, 3, 4, 2]
MAX_COMPLETION = 8
CASES: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo"},
    "grpo_kl": {"loss_type": "grpo", "beta": 0.1},
    "dapo": {"loss_type": "dapo"},
    "dapo_entropy": {"loss_type": "dapo", "entropy_coef": 0.05},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.03, "epsilon_high": 0.04},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.2},
}


def main() -> None:
    from trl import GRPOTrainer, __version__  # pyright: ignore[reportMissingImports]

    torch.manual_seed(1)
    width = max(LENGTHS)
    mask = torch.tensor([[1.0] * n + [0.0] * (width - n) for n in LENGTHS], dtype=torch.float64)
    old = -torch.rand(len(LENGTHS), width, dtype=torch.float64) * 3
    new = old + torch.randn_like(old) * 0.3
    reference = old + torch.randn_like(old) * 0.2
    entropies = torch.rand_like(old)
    advantages = torch.tensor([1.5, -0.5, 0.25, -1.25], dtype=torch.float64)
    found: dict[str, Any] = {}
    for name, settings in CASES.items():
        logps, entropy = new.clone().requires_grad_(), entropies.clone().requires_grad_()
        trainer = _trainer(settings, logps, entropy)
        inputs = {
            "prompt_ids": torch.zeros(len(LENGTHS), 1, dtype=torch.long),
            "prompt_mask": torch.ones(len(LENGTHS), 1, dtype=torch.long),
            "completion_ids": torch.zeros(len(LENGTHS), width, dtype=torch.long),
            "completion_mask": mask,
            "advantages": advantages,
            "old_per_token_logps": old,
            "ref_per_token_logps": reference,
            "num_items_in_batch": mask.sum(),
        }
        loss = GRPOTrainer._compute_loss(trainer, trainer.model, inputs)
        loss.backward()
        assert logps.grad is not None
        by_entropy = entropy.grad if entropy.grad is not None else torch.zeros_like(entropy)
        found[name] = {
            "settings": settings,
            "loss": loss.item(),
            "gradient": _flat(logps.grad),
            "entropy_gradient": _flat(by_entropy),
        }
    given = {
        "lengths": LENGTHS,
        "max_completion": MAX_COMPLETION,
        "advantages": advantages.tolist(),
        "new": _flat(new),
        "old": _flat(old),
        "reference": _flat(reference),
        "entropy": _flat(entropies),
    }
    print(json.dumps({"trl": __version__, "given": given, "cases": found}, indent=1))


def _trainer(settings: dict[str, Any], logps: torch.Tensor, entropies: torch.Tensor) -> Any:
    """As much of a trainer as the loss reads."""
    trainer = MagicMock()
    trainer.configure_mock(
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=settings.get("importance_sampling_level", "token"),
        beta=settings.get("beta", 0.0),
        loss_type=settings["loss_type"],
        epsilon_low=settings.get("epsilon_low", 0.2),
        epsilon_high=settings.get("epsilon_high", 0.28),
        use_vllm=False,
        current_gradient_accumulation_steps=1,
        max_completion_length=MAX_COMPLETION,
        use_adaptive_entropy=False,
        entropy_coef=settings.get("entropy_coef", 0.0),
        _entropy_bonus_enabled="entropy_coef" in settings,
        _metrics={"train": defaultdict(list), "eval": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (logps, entropies, None),
    )
    trainer.args.configure_mock(use_bias_correction_kl=False, delta=None, steps_per_generation=1)
    trainer.accelerator.configure_mock(num_processes=1, gather=lambda x: x)
    return trainer


def _flat(padded: torch.Tensor) -> list[float]:
    return [x for row, n in zip(padded.tolist(), LENGTHS, strict=True) for x in row[:n]]


if __name__ == "__main__":
    main()
