"""The torch learner: packed token trees → gradients → AdamW steps, on a Hugging Face model. Synchronous.

A reference that follows the policy moves a share of the way to it now and then:

    π_ref ← α π + (1 − α) π_ref, in the weights (TR-DPO: Gorbatovski et al., arXiv 2404.09656, eq. 3 and 4)

With α = 1 it is replaced (a refresh); with a small α in every step it is an exponential moving average of the policy.

Shape letters: E loss entries.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentlightning.errors import ConfigError, EngineError, ModelError
from agentlightning.files import atomic_directory
from agentlightning.learner.base import (
    LearnerOptions,
    LossConfig,
    OptimParams,
    PackedBatch,
    PackingCheck,
    PassResult,
    StepResult,
)
from agentlightning.learner.critic import ValueHead
from agentlightning.learner.forward import Scores, distributions, score, why_no_tree
from agentlightning.learner.guard import MOST_HALVINGS, divergence, probes_of
from agentlightning.learner.loss import Entries, compute_loss
from agentlightning.learner.noise import Half, noise_measures, sampled
from agentlightning.learner.optimizer import Optimizer
from agentlightning.learner.policy import Policy, load_model, refuse_other_tokens
from agentlightning.learner.routing import RoutingReplay
from agentlightning.learner.trial import relative_error, tolerance, try_trees, why_not, worst_error
from agentlightning.models.weights import older_than
from agentlightning.types.call import Float32Array

logger = logging.getLogger(__name__)

STATE_FILE = "optimizer.pt"


@contextmanager
def _in_one_order(device: torch.device) -> Iterator[None]:
    """On a CPU, let the gradients of a state that several tokens follow be added up in one order. Else several threads
    add them as they come, so that equal runs differ in the last bit. On a GPU this sum has one order by itself."""
    if device.type != "cpu":
        yield
        return
    before, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)


class TorchLearner:
    """Synchronous twin of the `Learner` protocol; owns the optimiser of one policy.

    `rows` is whether trees are computed as separate rows: because the model cannot do otherwise, or because a packing
    check did not hold; `why_rows` says what the model's reason is.
    """

    def __init__(self, policy: Policy, options: LearnerOptions | None = None) -> None:
        self.policy = policy
        self.options = options or LearnerOptions()
        self.rows, self.why_rows = False, ""
        self._tried = False
        self._optimizer = self._make_optimizer()
        self._passed: list[PackedBatch] = []
        """The batches whose gradients have been added up since the last step."""
        self._half: Half | None = None
        """The state of `keep_half`, for the gradient that is being added up."""
        self._routing: RoutingReplay | None = None
        """None until something is kept."""
        self._critic: ValueHead | None = None
        if self.options.critic:
            self._critic = ValueHead(policy.model.config.get_text_config().hidden_size, policy.device)
        self._reference: PreTrainedModel | None = None
        self._moved = False
        """Whether the reference is no longer what it was loaded as."""
        if self.options.reference:
            self._add_reference(self.options.reference)

    def _make_optimizer(self) -> Optimizer:
        if not self.options.offload:
            return Optimizer(self.policy.trainable())
        if self.policy.device.type == "cpu":
            raise ConfigError(
                "offload=True takes the optimiser from a GPU's memory, and the model is on the CPU: leave it out."
            )
        return Optimizer(self.policy.trainable(), keep_on="cpu")

    def _add_reference(self, path: str) -> None:
        """An adapter has its base already, or another adapter beside it; any other reference is a model of its own."""
        policy = self.policy
        adapter = (Path(path) / "adapter_config.json").is_file()
        if policy.peft is not None and adapter:
            policy.add_reference(path)
        elif policy.peft is None or path != policy.model.name_or_path:
            refuse_other_tokens(policy, path)
            self._reference = load_model(path, policy.model.dtype).to(policy.device)  # pyright: ignore
            self._reference.eval().requires_grad_(False)  # pyright: ignore[reportOptionalMemberAccess]

    def forward(self, batch: PackedBatch, *, reference: bool = False) -> Float32Array:
        """Plain log-probs of the entries' targets, shape [E]; under the reference model if asked for."""
        with torch.no_grad():
            logprobs_E = self._reference_logprobs(batch) if reference else self._score(batch).logprobs_E
        return logprobs_E.cpu().numpy().astype(np.float32)

    def scores(self, batch: PackedBatch) -> tuple[Float32Array, Float32Array]:
        """Plain log-probs of the entries' targets, and the entropy of the distribution at each, both of shape [E]."""
        with torch.no_grad():
            found = self._score(batch)
        logprobs_E, entropy_E = (part.float().cpu().numpy() for part in (found.logprobs_E, found.entropy_E))
        return logprobs_E, entropy_E

    def values(self, batch: PackedBatch) -> Float32Array:
        """What the critic expects from each entry's state on, shape [E]."""
        if self._critic is None:
            raise ConfigError("This learner has no critic; it is made with LearnerOptions(critic=True).")
        with torch.no_grad():
            return self._critic.values(self._score(batch).hidden_EH).cpu().numpy().astype(np.float32)

    def forward_backward(self, batch: PackedBatch, loss: LossConfig) -> PassResult:
        """Add the gradients of the loss on `batch` to those that are there."""
        scores, value, metrics = self._loss(batch, loss)
        self._passed.append(batch)
        with self._replaying(), _in_one_order(self.policy.device):  # what is computed again for its gradient, too
            value.backward()
        if self._routing is not None:
            metrics["rerouted"] = self._routing.moved()
        self._optimizer.gather()
        if self._critic is not None and batch.returns_E is not None:
            self._critic.keep(scores.hidden_EH, self._tensor(batch.returns_E))
        return PassResult(
            loss=metrics.pop("loss"),
            logprobs=scores.logprobs_E.detach().float().cpu().numpy(),
            tree_tokens=len(batch.ids_N),
            metrics=metrics,
        )

    def evaluate(self, batch: PackedBatch, loss: LossConfig) -> PassResult:
        """The loss on `batch`, without gradients."""
        with torch.no_grad():
            scores, _, metrics = self._loss(batch, loss)
        value, logprobs = metrics.pop("loss"), scores.logprobs_E.float().cpu().numpy()
        return PassResult(loss=value, logprobs=logprobs, tree_tokens=len(batch.ids_N), metrics=metrics)

    def check_packing(self, batch: PackedBatch, loss: LossConfig) -> PackingCheck:
        """Compare the packed pass with separate rows; from one that does not hold on, rows are computed."""
        parameters = self.policy.trainable()
        found: list[tuple[Tensor, tuple[Tensor, ...]]] = []
        self._choose_passes(batch)
        before = self.rows
        for self.rows in (before, True):
            scores, value, _ = self._loss(batch, loss)
            gradients = torch.autograd.grad(value, parameters, allow_unused=True, materialize_grads=True)
            found.append((scores.logprobs_E.detach(), gradients))
        (packed_E, packed), (rows_E, rows) = found
        worst, logprobs = worst_error(packed, rows), relative_error(packed_E, rows_E)
        limit = tolerance(self.policy.model)
        self.rows = before or max(worst, logprobs) > limit
        return PackingCheck(logprobs=logprobs, gradients=worst, holds=max(worst, logprobs) <= limit)

    def keep_routes(self, batch: PackedBatch, *, first: bool) -> None:
        """Remember which experts are chosen in this pass; with `first`, and in no other."""
        self._routing = self._routing or RoutingReplay(self.policy.model)
        if first:
            self._routing.forget()
        with torch.no_grad(), self._routing.keeping():
            self._score(batch)

    def keep_half(self, share: float) -> None:
        """Remember the gradient of this share of the minibatch; `optim_step` compares it with that of the rest."""
        self._half = Half(sampled(self._optimizer.gradients())[0], share)

    def take_gradient(self) -> list[Tensor | None]:
        """The gradient that was added up, by trained tensor; what is added up begins anew."""
        found = self._optimizer.gradients()
        self._optimizer.zero()
        return found

    def optim_step(self, params: OptimParams) -> StepResult:
        """Clip, step, zero the gradients; the weights get the next version. A step that is not finite is refused."""
        noise = self._noise()
        norm = self._optimizer.clip(params.max_grad_norm)
        if not np.isfinite(norm):
            self._optimizer.zero()
            raise EngineError(
                f"The gradient is not finite (norm {norm}); the weights were left as they are. "
                "Lower the learning rate, or start again from the last checkpoint."
            )
        metrics = {**noise, **self._step(params)}
        if self._critic is not None:
            metrics |= self._critic.step()
        self.policy.version += 1
        return StepResult(grad_norm=norm, version=self.policy.version, metrics=metrics)

    def _noise(self) -> dict[str, float]:
        """What the halves of the gradient say, where one was kept; before anything is clipped."""
        half, self._half = self._half, None
        return {} if half is None else noise_measures(half, *sampled(self._optimizer.gradients()))

    def _step(self, params: OptimParams) -> dict[str, float]:
        """One AdamW step, halved until it moves the policy no farther than `max_kl`; see `guard`."""
        passed, self._passed = self._passed, []
        if params.max_kl is None or params.learning_rate == 0 or not passed:
            self._optimizer.step(params)
            return {}
        probes, before = probes_of(passed), self._optimizer.weights()
        old_EV = self._distributions(probes)
        self._optimizer.step(params)
        kl, halvings = self._divergence(probes, old_EV), 0
        while kl > params.max_kl and halvings < MOST_HALVINGS:
            self._optimizer.halve_step(before)
            kl, halvings = self._divergence(probes, old_EV), halvings + 1
        return {"kl_step": kl, "halvings": float(halvings)}

    def _distributions(self, probes: Sequence[PackedBatch]) -> Tensor:
        """Log-probs of every next token in the probes' states, [E, V]."""
        with torch.no_grad():
            return torch.cat([self._head(self._score(probe).hidden_EH, probe) for probe in probes])

    def _head(self, hidden_EH: Tensor, probe: PackedBatch) -> Tensor:
        return distributions(self.policy.model, hidden_EH, self._tensor(probe.temperature_E))

    def _divergence(self, probes: Sequence[PackedBatch], old_EV: Tensor) -> float:
        """How far the policy has moved from what it was."""
        return divergence(self._distributions(probes), old_EV)

    def move_reference(self, share: float) -> None:
        """Take the reference this share of the way to the policy."""
        if self.options.reference is None:
            raise ConfigError("This learner has no reference model; it is made with LearnerOptions(reference=…).")
        _move_reference(_paired_with_reference(self.policy, self._reference), share)
        self._moved = True

    def save_state(self, path: str | Path) -> None:
        """The optimisers' state, the critic and the version; the weights are `export`'s."""
        with atomic_directory(Path(path)) as directory:
            state = self.state()
            torch.save(state, directory / STATE_FILE)

    def state(self) -> dict[str, Any]:
        """What `save_state` writes."""
        state: dict[str, Any] = {"optimizer": self._optimizer.state(), "version": self.policy.version}
        if self._critic is not None:
            state["critic"] = self._critic.state()
        if self._moved:
            state["reference"] = [kept for kept, _ in _paired_with_reference(self.policy, self._reference)]
        return state

    def load_state(self, path: str | Path) -> None:
        """What `save_state` wrote, onto a policy loaded from the weights exported with it."""
        place = "cpu" if self.options.offload else self.policy.device
        state = _read_state(Path(path) / STATE_FILE, place)
        try:
            self._optimizer.load(state["optimizer"])
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"The optimiser's state in {path} is of other parameters than those in training ({error}). Resume with "
                "the settings that the run began with, or start a new run from the checkpoint's model."
                f"{_older(Path(path))}"
            ) from error
        if self._critic is not None and "critic" in state:
            self._critic.load(state["critic"])
        if "reference" in state:
            _put_reference(_paired_with_reference(self.policy, self._reference), state["reference"])
            self._moved = True
        self.policy.version = state["version"]

    def export(self, path: str | Path) -> None:
        """The policy as a Hugging Face model directory."""
        self.policy.export(path)

    def _score(self, batch: PackedBatch, *, entropy_grad: bool = False, likeliest: bool = False) -> Scores:
        embedding: Any = self.policy.model.get_input_embeddings()
        vocabulary = len(embedding.weight)
        if (largest := int(batch.ids_N.max())) >= vocabulary:
            raise ModelError(
                f"There is no token {largest} in this model's vocabulary of {vocabulary}. Triplets with token ids of "
                "their own must hold those of the policy in training."
            )
        self._choose_passes(batch)
        more = {"rows": self.rows, "entropy_grad": entropy_grad, "likeliest": likeliest}
        return self._inside(lambda: score(self.policy.model, batch, self.options, **more))

    def _inside(self, work: Callable[[], Scores]) -> Scores:
        """Everything that the policy's model computes is computed in here."""
        return work()

    def _choose_passes(self, batch: PackedBatch) -> None:
        """Turn to rows where the model cannot compute this batch as trees.

        Raises `ModelError` for a model of which not even rows have the numbers of its own forward.
        """
        model = self.policy.model
        if not self.rows:
            reason = why_no_tree(model, int(batch.positions_N.max()) + 1)
            if reason is None and not self._tried:
                self.options, reason = try_trees(model, self.options)
            if reason is not None:
                self.rows, self.why_rows = True, reason.rstrip(".")
                logger.warning("Every path of a token tree is computed as a row of its own: %s.", self.why_rows)
        if self.rows and not self._tried and (reason := why_not(model, self.options, rows=True)):
            raise ModelError(
                f"{type(model).__name__} cannot be trained here: computed as rows, {reason.rstrip('.')}. "
                "Choose a model of another architecture."
            )
        self._tried = True

    def _reference_logprobs(self, batch: PackedBatch) -> Tensor:
        """Without gradient. An adapter's reference is the adapter that it began as, or else the model beneath it."""
        self._choose_passes(batch)
        with torch.no_grad():
            if self._reference is not None:
                rows = self.rows or type(self._reference) is not type(self.policy.model)
                return score(self._reference, batch, self.options, rows=rows).logprobs_E
            if self.policy.peft is not None:
                with self.policy.reference():
                    return self._inside(
                        lambda: score(self.policy.model, batch, self.options, rows=self.rows)
                    ).logprobs_E
        raise ConfigError("This learner has no reference model; it is made with LearnerOptions(reference=…).")

    def _loss(self, batch: PackedBatch, loss: LossConfig) -> tuple[Scores, Tensor, dict[str, float]]:
        reference_E = self._reference_logprobs(batch) if loss.needs_reference else None
        with self._replaying():
            scores = self._score(batch, entropy_grad=loss.entropy_coef != 0, likeliest=loss.token_accuracy)
        entries = Entries(
            logprobs_E=scores.logprobs_E,
            old_E=self._tensor(batch.old_logprobs_E),
            advantages_E=self._tensor(batch.advantages_E),
            weights_E=self._tensor(batch.weights_E),
            sequence_E=self._tensor(batch.sequence_E),
            group_E=self._tensor(batch.group_E),
            entropy_E=scores.entropy_E,
            reference_E=reference_E,
        )
        value, metrics = compute_loss(entries, loss)
        if scores.likeliest_E is not None:
            metrics["token_accuracy"] = scores.likeliest_E.float().mean().item()
        return scores, value, metrics

    def _replaying(self) -> AbstractContextManager[None]:
        return nullcontext() if self._routing is None else self._routing.replaying()

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.tensor(array, device=self.policy.device)


def _read_state(file: Path, place: Any) -> dict[str, Any]:
    """Raises ConfigError, which names an older checkpoint that is whole, for a file that no `save_state` wrote."""
    try:
        state = torch.load(file, map_location=place, weights_only=True)
        if isinstance(state, dict) and {"optimizer", "version"} <= state.keys():
            return state
        words = "it holds something else"
    except Exception as error:  # of zip files, pickles, tensors and disks: whatever a damaged one raises
        words = str(error).partition("\n")[0][:200]
    raise ConfigError(f"The optimiser's state in {file} cannot be read: {words}.{_older(file)}")


def _older(place: Path) -> str:
    """The older checkpoint to go on from, where the place is in one."""
    checkpoint = next((p for p in (place, *place.parents) if (p / "checkpoint.json").is_file()), None)
    return "" if checkpoint is None else f" {older_than(checkpoint, resuming=True)} Name it with --resume."


_ReferencePairs = list[tuple[Tensor, Tensor]]


def _paired_with_reference(policy: Policy, reference: PreTrainedModel | None) -> _ReferencePairs:
    """Each tensor of the reference with the policy's. An adapter's reference is another adapter, which changes nothing
    at first where the reference was the model beneath.

    Raises ConfigError for a reference of another shape than the policy.
    """
    if reference is None:
        return policy.reference_pairs()
    if policy.peft is not None:
        raise ConfigError("The reference is a whole model and the policy an adapter, so it cannot follow the policy.")
    ours, theirs = dict(policy.model.named_parameters()), dict(reference.named_parameters())
    if {n: p.shape for n, p in ours.items()} != {n: p.shape for n, p in theirs.items()}:
        raise ConfigError("The reference has other layers than the policy, so it cannot follow it.")
    return [(theirs[name], ours[name]) for name in theirs]


def _move_reference(pairs: _ReferencePairs, share: float) -> None:
    """Take the reference this share of the way to the policy."""
    with torch.no_grad():
        for kept, now in pairs:
            kept.lerp_(now.to(kept.dtype), share)


def _put_reference(pairs: _ReferencePairs, saved: Sequence[Tensor]) -> None:
    """Restore the reference from what was saved of it."""
    with torch.no_grad():
        for (kept, _), tensor in zip(pairs, saved, strict=True):
            kept.copy_(tensor)
