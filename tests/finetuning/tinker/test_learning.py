"""Each loss and the optimiser by the official client, against the same in plain torch and peft."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import safetensors.torch
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from agentlightning.models import resolve_model

from .conftest import Running, Start, adapter_of, datum, ids, prompt, training_client, types

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
]
ADAM = {"learning_rate": 1e-3, "beta1": 0.8, "beta2": 0.95, "eps": 1e-4, "weight_decay": 0.01, "grad_clip_norm": 5.0}


class Plain:
    """The adapter in a folder, trained by plain torch: one sequence after the other, no tree."""

    def __init__(self, adapter: Path) -> None:
        base = AutoModelForCausalLM.from_pretrained(resolve_model("calc"), dtype=torch.float32)
        self.model = peft.PeftModel.from_pretrained(base, str(adapter), is_trainable=True).eval()
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.trained, lr=ADAM["learning_rate"], betas=(ADAM["beta1"], ADAM["beta2"]), eps=ADAM["eps"],
            weight_decay=ADAM["weight_decay"],
        )  # fmt: skip

    def logprobs(self, tokens: np.ndarray) -> Tensor:
        """Of each token but the first."""
        given = torch.from_numpy(tokens.astype(np.int64))
        found = self.model(input_ids=given[None, :-1]).logits[0].log_softmax(-1)
        return found.gather(1, given[1:, None])[:, 0]

    def step(self, loss: Tensor) -> float:
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.trained, ADAM["grad_clip_norm"])
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(norm)


def weights_in(folder: Path) -> dict[str, Tensor]:
    return safetensors.torch.load_file(folder / "adapter_model.safetensors")


def clipped(ratio: Tensor, low: float, high: float) -> Tensor:
    return ratio.clamp(low, high)


def sequence_ratio(new: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    mean = ((new.detach() - old) * mask).sum() / mask.sum()
    return torch.exp(mean + new - new.detach())


Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
LOSSES: dict[str, tuple[Loss, dict[str, float]]] = {
    "cross_entropy": (lambda new, old, advantage, mask: -(new * advantage).sum(), {}),
    "importance_sampling": (lambda new, old, advantage, mask: -(torch.exp(new - old) * advantage).sum(), {}),
    "ppo": (
        lambda new, old, advantage, mask: (
            -torch.minimum(torch.exp(new - old) * advantage, clipped(torch.exp(new - old), 0.9, 1.3) * advantage).sum()
        ),
        {"clip_low_threshold": 0.9, "clip_high_threshold": 1.3},
    ),
    "cispo": (
        lambda new, old, advantage, mask: -(clipped(torch.exp(new - old), 0.8, 1.2).detach() * new * advantage).sum(),
        {},
    ),
    "dro": (
        lambda new, old, advantage, mask: -(new * advantage - 0.5 * 0.2 * (new - old) ** 2).sum(),
        {"beta": 0.2},
    ),
    "gspo": (
        lambda new, old, advantage, mask: (
            -(
                torch.minimum(
                    sequence_ratio(new, old, mask) * advantage,
                    clipped(sequence_ratio(new, old, mask), 0.95, 1.1) * advantage,
                )
                * mask
            ).sum()
        ),
        {"clip_low_threshold": 0.95, "clip_high_threshold": 1.1},
    ),
}


def values(count: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Old log-probs near those of a fresh model, advantages of both signs, and a mask that leaves the prompt out."""
    rng = np.random.default_rng(seed)
    mask = (np.arange(count) >= 3).astype(np.float32)
    return rng.normal(-6, 2, count) * mask, rng.normal(0, 1, count) * mask, mask


@pytest.mark.parametrize("name", LOSSES)
def test_steps_are_those_of_plain_torch(service: Any, running: Running, name: str) -> None:
    """Three steps on sequences that share a prompt: log-probs, losses, norms and weights."""
    loss, config = LOSSES[name]
    client = training_client(service, seed=5)
    plain = Plain(adapter_of(running, client.save_state(f"begin-{name}").result().path))
    shared = ids(0, 5)
    sequences = [np.concatenate([shared, ids(i + 1, 4 + i)]) for i in range(4)]
    for step in range(3):
        data, expected = [], []
        for i, tokens in enumerate(sequences):
            old, advantages, mask = values(len(tokens) - 1, 10 * step + i)
            new = plain.logprobs(tokens)
            near = (new.detach().numpy() + np.clip(old, -0.4, 0.4)) * mask  # ratios on both sides of the thresholds
            given = {"weights": advantages} if name == "cross_entropy" else {"logprobs": near, "advantages": advantages}
            if name == "gspo":
                given["sequence_ratio_mask"] = mask
            data.append(datum(tokens, **given))
            tensors = (torch.tensor(part, dtype=torch.float32) for part in (near, advantages, mask))
            expected.append((new, loss(new, *tensors)))
        passed = client.forward_backward(data, name, config or None)
        stepped = client.optim_step(types.AdamParams(**ADAM))
        total = sum(part for _, part in expected)
        assert isinstance(total, Tensor)
        assert passed.result().metrics["loss:sum"] == pytest.approx(total.item(), rel=1e-4, abs=1e-3)
        for (new, _), output in zip(expected, passed.result().loss_fn_outputs, strict=True):
            np.testing.assert_allclose(output["logprobs"].to_numpy(), new.detach().numpy(), atol=1e-4)
        assert stepped.result().metrics["grad_norm"] == pytest.approx(plain.step(total), rel=1e-4)
    path = adapter_of(running, client.save_state(f"end-{name}").result().path)
    plain.model.save_pretrained(str(path.parent / "plain"), save_embedding_layers=False)
    learned, wanted = weights_in(path), weights_in(path.parent / "plain")
    assert learned.keys() == wanted.keys()
    assert any("lm_head" in key for key in wanted), "the output layer has an adapter, too"
    for key, value in wanted.items():
        torch.testing.assert_close(learned[key], value, rtol=0, atol=1e-5, msg=key)


def test_what_data_share_is_computed_once(service: Any) -> None:
    client = training_client(service)
    shared = ids(3, 20)
    data = [datum(np.concatenate([shared, ids(i, 4)])) for i in range(8)]
    metrics = client.forward(data, "cross_entropy").result().metrics
    assert metrics["tokens:sum"] == 8 * 23
    assert metrics["tokens_computed:sum"] == 20 + 8 * 3


def test_a_request_in_many_parts_is_one_step(service: Any, running: Running) -> None:
    """More data than the client puts into a request, which come as several, the first one last."""
    ones = [datum(ids(i, 4)) for i in range(1030)]
    whole, parts = training_client(service, seed=7), training_client(service, seed=7)
    first = whole.forward_backward(ones, "cross_entropy").result()
    assert len(first.loss_fn_outputs) == 1030
    seconds = [parts.forward_backward(ones[a:b], "cross_entropy").result() for a, b in ((0, 600), (600, 1030))]
    assert first.metrics["loss:sum"] == pytest.approx(sum(one.metrics["loss:sum"] for one in seconds), rel=1e-5)
    for name, client in (("whole", whole), ("parts", parts)):
        client.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        client.save_state(name).result()
    found = [
        weights_in(adapter_of(running, f"tinker://{client.model_id}/weights/{name}"))
        for name, client in (("whole", whole), ("parts", parts))
    ]
    for key, value in found[0].items():
        torch.testing.assert_close(found[1][key], value, rtol=0, atol=1e-5)


def test_a_loss_of_ones_own_is_computed_by_the_client(service: Any, running: Running) -> None:
    """It is a forward pass, and a cross entropy whose weights are the loss's gradients: any number, of any sign."""
    own, built_in = training_client(service, seed=2), training_client(service, seed=2)
    data = [datum(ids(i, 9), weights=np.ones(8)) for i in range(3)]

    def loss(data: Any, logprobs: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
        return -sum((one.sum() for one in logprobs), torch.zeros(())), {"mine:mean": 3.0}

    found = own.forward_backward_custom(data, loss).result()
    expected = built_in.forward_backward(data, "cross_entropy").result()
    assert found.metrics["mine:mean"] == 3.0
    assert found.metrics["loss:sum"] == pytest.approx(expected.metrics["loss:sum"], rel=1e-6)
    norms = [client.optim_step(types.AdamParams()).result().metrics["grad_norm"] for client in (own, built_in)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


@pytest.mark.parametrize("sparse", [False, True])
def test_a_token_may_have_several_targets(service: Any, sparse: bool) -> None:
    """As in distillation: a distribution over K tokens, dense or with a few cells only."""
    client = training_client(service)
    tokens, rng = ids(1, 6), np.random.default_rng(2)
    targets, weights = rng.integers(0, 291, (6, 7)), rng.random((6, 7)).astype(np.float32)
    if sparse:
        targets[rng.random((6, 7)) < 0.7] = 0
        weights[targets == 0] = 0
    given = {"target_tokens": targets, "weights": weights}
    if sparse:
        given = {name: types.TensorData.from_torch_sparse(torch.from_numpy(value)) for name, value in given.items()}
        assert given["target_tokens"].sparse_crow_indices is not None
    many = types.Datum(model_input=types.ModelInput.from_ints(tokens.tolist()), loss_fn_inputs=given)
    output = client.forward([many], "cross_entropy").result()
    found = output.loss_fn_outputs[0]["logprobs"].to_numpy().reshape(6, 7)
    singles = [
        types.Datum(
            model_input=types.ModelInput.from_ints(tokens.tolist()),
            loss_fn_inputs={"target_tokens": targets[:, k], "weights": weights[:, k]},
        )
        for k in range(7)
    ]
    one_by_one = client.forward(singles, "cross_entropy").result()
    columns = np.stack([one["logprobs"].to_numpy() for one in one_by_one.loss_fn_outputs], axis=1)
    there = targets != 0 if sparse else np.ones_like(targets, dtype=bool)
    np.testing.assert_allclose(found[there], columns[there], atol=1e-5)
    assert (found[~there] == 0).all()
    assert output.metrics["loss:sum"] == pytest.approx(one_by_one.metrics["loss:sum"], rel=1e-5)


def test_clients_on_one_base_learn_as_if_each_were_alone(service: Any, running: Running) -> None:
    """They take turns on one model; what each learns is bit for bit what it learns alone."""
    data = [datum(ids(i, 8), weights=np.full(7, sign)) for i, sign in enumerate((1.0, -0.1))]

    def learn(names: list[str]) -> dict[str, dict[str, Tensor]]:
        clients = {name: training_client(service, seed=4, rank=4 + int(name)) for name in names}
        for _ in range(3):
            for name, client in clients.items():
                client.forward_backward([data[int(name)]], "cross_entropy")
                client.optim_step(types.AdamParams(learning_rate=1e-3))
        paths = {name: client.save_state("end").result().path for name, client in clients.items()}
        return {name: weights_in(adapter_of(running, path)) for name, path in paths.items()}

    together, alone = learn(["0", "1"]), {**learn(["0"]), **learn(["1"])}
    for name, tensors in together.items():
        for key, value in tensors.items():
            assert torch.equal(value, alone[name][key]), (name, key)


def test_which_layers_have_an_adapter_is_the_clients_choice(service: Any, running: Running) -> None:
    choices = {"attn": "self_attn", "mlp": "mlp", "unembed": "lm_head"}
    for name, inside in choices.items():
        only = {f"train_{other}": other == name for other in choices}
        client = training_client(service, **only)
        path = client.save_state("x").result().path
        assert all(inside in key for key in weights_in(adapter_of(running, path)))
        assert running.saved(path).run["parts"] == {"attn": "attention", "mlp": "mlp", "unembed": "unembedding"}[name]


def test_the_owner_says_what_is_computed_for_a_loss_that_is_not_published(start: Start) -> None:
    """As the cookbook asks for it: with what was recorded of each sample, and where each token is from."""
    server = start()
    server.service.bases.models = {"calc": replace(server.service.bases.models["calc"], stable_reinforce="cispo")}
    with server.client() as service:
        client, other = training_client(service), training_client(service)
        sampler = client.save_weights_and_get_sampling_client(record_stability_info=True).result()
        params = types.SamplingParams(max_tokens=5, seed=1)
        (one,) = sampler.sample(prompt(ids(1, 4)), num_samples=1, sampling_params=params).result().sequences
        tokens, count = np.concatenate([ids(1, 4), one.tokens]), len(one.tokens)
        given = {"logprobs": [0.0] * 3 + list(one.logprobs), "advantages": [0.0] * 3 + [0.7] * count}
        plain = datum(tokens, **given)
        annotated = plain.with_provenance(
            model_input=[
                types.PromptProvenanceSpan(sequence_id=one.sequence_id, length=4),
                types.SampledProvenanceSpan(sequence_id=one.sequence_id, length=count - 1),
            ],
            loss_fn_inputs=[
                types.PromptProvenanceSpan(sequence_id=one.sequence_id, offset=1, length=3),
                types.SampledProvenanceSpan(sequence_id=one.sequence_id, length=count),
            ],
        )
        found = client.forward_backward([annotated], "stable_reinforce").result().metrics["loss:sum"]
        assert found == other.forward_backward([plain], "cispo").result().metrics["loss:sum"]
