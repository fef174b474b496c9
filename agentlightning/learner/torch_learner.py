"""The torch learner: packed token trees → gradients → AdamW steps, on a Hugging Face model. Synchronous.

Shape letters: N tokens, E loss entries, U distinct source tokens, V vocabulary.
"""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from agentlightning.errors import EngineError
from agentlightning.files import atomic_directory
from agentlightning.learner.base import LossConfig, OptimParams, PackedBatch
from agentlightning.learner.loss import compute_loss
from agentlightning.learner.policy import Policy
from agentlightning.learner.tree_attention import plan_tree, tree_attention
from agentlightning.types.call import Float32Array

logger = logging.getLogger(__name__)

STATE_FILE = "optimizer.pt"


class TorchLearner:
    """Synchronous twin of the `Learner` protocol; owns the optimiser of one policy."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._optimizer = torch.optim.AdamW(policy.trainable(), lr=0.0)

    def forward(self, batch: PackedBatch) -> Float32Array:
        """Plain log-probs of the entries' targets, shape [E]."""
        with torch.no_grad():
            logprobs_E, _ = self._logprobs(batch)
        return logprobs_E.cpu().numpy().astype(np.float32)

    def forward_backward(self, batch: PackedBatch, loss: LossConfig) -> dict[str, float]:
        """Add the gradients of the loss on `batch` to those that are there."""
        device = self.policy.device
        logprobs_E, entropy_E = self._logprobs(batch)
        value, metrics = compute_loss(
            logprobs_E,
            entropy_E,
            torch.as_tensor(batch.old_logprobs_E, device=device),
            torch.as_tensor(batch.advantages_E, device=device),
            torch.as_tensor(batch.weights_E, device=device),
            loss,
        )
        value.backward()
        return {**metrics, "entries": float(len(batch.targets_E)), "tree_tokens": float(len(batch.ids_N))}

    def optim_step(self, params: OptimParams) -> dict[str, float]:
        """Clip, step, zero the gradients; the weights get the next version. A step that is not finite is refused."""
        parameters = self.policy.trainable()
        limit = params.max_grad_norm or float("inf")
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, limit))
        if not np.isfinite(norm):
            self._optimizer.zero_grad(set_to_none=True)
            raise EngineError(
                f"The gradient is not finite (norm {norm}); the weights were left as they are. "
                "Lower the learning rate, or start again from the last checkpoint."
            )
        for group in self._optimizer.param_groups:
            group.update(
                lr=params.learning_rate,
                betas=(params.beta1, params.beta2),
                eps=params.eps,
                weight_decay=params.weight_decay,
            )
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.policy.version += 1
        return {"grad_norm": norm, "version": float(self.policy.version)}

    def save_state(self, path: str | Path) -> None:
        """The optimiser's state and the version; the weights are `export`'s."""
        with atomic_directory(Path(path)) as directory:
            state = {"optimizer": self._optimizer.state_dict(), "version": self.policy.version}
            torch.save(state, directory / STATE_FILE)

    def load_state(self, path: str | Path) -> None:
        """What `save_state` wrote, onto a policy loaded from the weights exported with it."""
        state = torch.load(Path(path) / STATE_FILE, map_location=self.policy.device, weights_only=True)
        self._optimizer.load_state_dict(state["optimizer"])
        self.policy.version = state["version"]

    def export(self, path: str | Path) -> None:
        """The policy as a Hugging Face model directory."""
        self.policy.export(path)

    def _logprobs(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """Log-probs of the targets and entropy of their distributions at the entries' temperature, both [E]."""
        model, device = self.policy.model, self.policy.device
        sources_U, row_E = np.unique(batch.source_E, return_inverse=True)
        with tree_attention(model):
            logits_UV = model(
                input_ids=_long(batch.ids_N, device)[None],
                position_ids=_long(batch.positions_N, device)[None],
                attention_mask=None,
                use_cache=False,
                logits_to_keep=_long(sources_U, device),
                tree=plan_tree(batch, device),
            ).logits[0]
        logits_EV = logits_UV.float()
        if len(sources_U) != len(row_E) or (np.diff(row_E) != 1).any():
            logits_EV = logits_EV[_long(row_E, device)]
        if (batch.temperature_E != 1.0).any():
            logits_EV = logits_EV / torch.as_tensor(batch.temperature_E, device=device)[:, None]
        logprobs_EV = logits_EV.log_softmax(-1)
        entropy_E = -(logprobs_EV.detach().exp() * logprobs_EV.detach()).sum(-1)
        return logprobs_EV.gather(1, _long(batch.targets_E, device)[:, None])[:, 0], entropy_E


def _long(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.as_tensor(array.astype(np.int64), device=device)
