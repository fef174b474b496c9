"""Plans on paper: figures computed by hand, and those of real passes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from agentlightning.errors import ConfigError
from agentlightning.learner.base import LearnerOptions, LossConfig, PackedBatch
from agentlightning.learner.policy import LoraSpec, load_policy
from agentlightning.learner.torch_learner import TorchLearner
from agentlightning.models.hardware import GIB, GPUS, Hardware, devices, this_cpu
from agentlightning.models.plan import (
    HOST_BANDWIDTH,
    KEPT,
    PlannedJob,
    best,
    changes,
    context_bytes,
    layouts,
    learner_memory,
    learning_seconds,
    vllm_apart,
)
from agentlightning.models.shape import SIZES, known_shape, read_shape

GIVEN = PlannedJob(shape=SIZES["8b"], dtype="bfloat16")
H100 = GPUS["H100"]


@pytest.mark.parametrize(
    ("size", "billions"), [("135m", 0.1345), ("0.6b", 0.596), ("4b", 4.02), ("8b", 8.19), ("32b", 32.8), ("70b", 70.6)]
)
def test_sizes_have_the_parameters_that_their_pages_state(size: str, billions: float) -> None:
    assert known_shape(size.upper()).parameters == pytest.approx(billions * 1e9, rel=0.01)


def test_experts_are_held_all_and_met_in_part() -> None:
    shape = SIZES["30b-a3b"]
    assert shape.parameters == pytest.approx(30.5e9, rel=0.01)
    assert shape.active == pytest.approx(3.0e9, rel=0.05)  # 3.3 with the embeddings, which are looked up


@pytest.mark.slow
def test_an_optimiser_on_the_host_costs_time_instead_of_memory() -> None:
    there, p = replace(GIVEN, offload=True), GIVEN.shape.parameters
    assert learner_memory(there)["gradients and optimiser"] == 2 * p, "the gradients of one pass, in bfloat16"
    # 163,840 tokens of a tree are ten passes: their gradients and the new weights, at 4 GB/s; 28 bytes at 20 GB/s.
    assert (GIVEN.tree_tokens, GIVEN.pass_tokens) == (180_224, 16_384)
    more = learning_seconds(there, H100, 1) - learning_seconds(GIVEN, H100, 1)
    assert more == pytest.approx(p * (12 * 2 / 4e9 + 28 / 2e10))
    adapter = replace(GIVEN, lora_rank=16)
    assert learning_seconds(replace(adapter, offload=True), H100, 1) == learning_seconds(adapter, H100, 1)
    assert {layout.learners for layout in layouts(there, H100, 8)} == {1}, "several ranks share it out"
    tight = replace(GIVEN, gradient_checkpointing=True, tokens_per_batch=4096)
    found = next(change.settings for change in changes(tight, H100, 1))
    assert found == {"offload": True}
    on_paper = [change.settings for change in changes(tight, this_cpu(), 1)]
    assert not any("offload" in settings for settings in on_paper)


def test_memory_by_hand() -> None:
    # 36 layers × (8 heads × 128) × keys and values × 2 bytes = 147,456 bytes per token.
    assert context_bytes(replace(GIVEN, context=1000)) == 147_456_000
    p = 36 * (4096 * 128 * (64 + 16) + 3 * 4096 * 12_288) + 2 * 151_936 * 4096
    full = learner_memory(GIVEN)
    assert full["weights"] == 2 * p
    assert full["gradients and optimiser"] == (4 + 4 + 4 + 4) * p, "float32: gradient, two moments, copy"
    # 16,384 tokens × 36 layers × (8 × 4096 + 4 × (4096 + 1024) + 4 × 12,288) numbers × 2 bytes × 1.15
    assert full["activations"] == int(16_384 * 36 * (32_768 + 20_480 + 49_152) * 2 * 1.15)
    assert full["logits"] == 2**26 * 16
    assert learner_memory(replace(GIVEN, lora_rank=16))["gradients and optimiser"] == pytest.approx(0.1 * p, rel=1e-6)
    saved = learner_memory(replace(GIVEN, gradient_checkpointing=True))["activations"]
    assert saved == full["activations"] // 36 + 2 * 16_384 * 36 * 4096 * 2


def test_time_by_hand() -> None:
    # 16 tasks × (3072 + 8 × 1024) tokens; three times a forward of 2 P + 2 × 36 × 4096 × 4096 each, at 35 % of 989e12.
    p = GIVEN.shape.parameters - 151_936 * 4096  # embeddings are looked up
    assert GIVEN.tree_tokens == 180_224
    expected = 180_224 * 3 * (2 * p + 2 * 36 * 4096 * 4096) / (989e12 * 0.15)
    assert learning_seconds(GIVEN, H100, 1) == pytest.approx(expected)
    assert learning_seconds(replace(GIVEN, lora_rank=8), H100, 1) == pytest.approx(expected * 2 / 3)
    # Full weights go through memory to three servers, after each step; an adapter costs nothing.
    layout = vllm_apart(GIVEN, H100, 4)
    assert layout.replicas == 3
    assert layout.seconds["publishing"] == 3 * 2 * GIVEN.shape.parameters / HOST_BANDWIDTH
    assert layout.published == 2 * GIVEN.shape.parameters
    assert vllm_apart(replace(GIVEN, lora_rank=8), H100, 4).seconds["publishing"] == 0
    # One token of 22 requests reads the weights and 22 contexts, seven eighths full, at 60 % of 3.35e12 bytes/s.
    a_token = (2 * p + 22 * context_bytes(GIVEN) * 7 / 8) / (3.35e12 * 0.6) + 36 * 3e-5
    prefill = 16 * 3072 / 3 * 2 * p / (989e12 * 0.5)
    assert layout.seconds["sampling"] == pytest.approx(prefill + 2 * 1024 * a_token, rel=0.02)


def test_what_does_not_fit_is_changed_until_it_does() -> None:
    job = replace(GIVEN, shape=SIZES["0.6b"])
    layout = best(job, GPUS["L4"], 1)
    assert not layout.fits
    setting, gpu = changes(job, GPUS["L4"], 1)
    assert setting.settings == {"tokens_per_batch": 4096}
    assert setting.layout.fits
    assert best(replace(job, tokens_per_batch=4096), GPUS["L4"], 1).fits
    assert gpu.settings == {"--gpus": "A100-80"}
    assert not list(changes(replace(GIVEN, shape=SIZES["70b"]), GPUS["L4"], 1)), "no way at all"


def test_the_faster_backend_is_taken() -> None:
    job = replace(GIVEN, shape=SIZES["0.6b"], lora_rank=16, tokens_per_batch=4096)
    assert best(job, H100, 1).backend == "vllm"
    two = best(job, H100, 2)
    assert (two.backend, two.replicas) == ("vllm", 1)
    cpu = Hardware("this CPU", 64 * GIB, 1e11, 2e10)
    assert best(replace(job, dtype="float32"), cpu, 1).backend == "embedded"


def test_a_model_too_wide_for_one_gpu_is_spread_over_several_for_sampling() -> None:
    layout = vllm_apart(replace(GIVEN, shape=SIZES["70b"]), H100, 8)
    assert (layout.tensor_parallel, layout.replicas) == (2, 3)
    assert layout.memory["server"]["weights"] == SIZES["70b"].parameters
    assert not layout.fits, "the learner is on one GPU"


def test_a_learner_too_large_for_one_gpu_is_spread_over_ranks() -> None:
    job = replace(GIVEN, shape=SIZES["8b"], tokens_per_batch=4096)
    assert not vllm_apart(job, H100, 8).fits, "the optimiser's state of all weights is more than one holds"
    layout = best(job, H100, 8)
    assert layout.learners > 1
    assert layout.fits
    assert layout.learners + layout.replicas * layout.tensor_parallel <= 8
    alone, first = learner_memory(job), layout.memory["learner"]
    assert first["gradients and optimiser"] == alone["gradients and optimiser"] // layout.learners
    assert first["weights"] > alone["weights"], "the first rank has the whole model besides"
    assert layout.seconds["learning"] == pytest.approx(learning_seconds(job, H100, 1) / layout.learners)


def test_devices_by_name() -> None:
    assert devices("4xH100") == (H100, 4)
    assert devices("a100-80") == devices("A100") == (GPUS["A100-80"], 1)
    assert devices("cpu")[1] == 1
    for wrong in ("H1000", "0xH100", "four H100"):
        with pytest.raises(ConfigError, match="Known are A10,"):
            devices(wrong)


def test_this_processor_is_measured() -> None:
    cpu = this_cpu()
    assert 1e9 < cpu.flops < 1e14
    assert 1e8 < cpu.bandwidth < 1e13
    assert not cpu.is_gpu


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("lora", [None, pytest.param(LoraSpec(rank=8), marks=pytest.mark.slow)], ids=["all", "lora"])
@pytest.mark.parametrize("saving", [False, True], ids=["kept", "checkpointed"])
def test_activations_are_those_that_autograd_saves(dtype: str, lora: LoraSpec | None, saving: bool) -> None:
    policy = load_policy("calc", device="cpu", dtype=dtype, lora=lora)
    learner = TorchLearner(policy, LearnerOptions(gradient_checkpointing=saving))
    saved = [saved_bytes(learner, tokens) for tokens in (128, 640)]
    shape = read_shape("calc")
    assert shape is not None
    job = PlannedJob(shape=shape, dtype=dtype, lora_rank=lora and lora.rank, gradient_checkpointing=saving, context=640)
    planned = learner_memory(replace(job, response=8, group_size=1, tasks_per_step=1))["activations"]
    if saving:  # the one layer that is computed anew is not among those that are kept
        kept = KEPT["float32" if job.each == 4 else "short", job.adapter]
        planned -= int(shape.activation_numbers(640) * job.each * kept) // shape.layers
    measured = (saved[1] - saved[0]) / 512 * 640
    assert measured <= planned * 1.1
    assert planned <= measured * (1.6 if saving else 1.1)


def saved_bytes(learner: TorchLearner, tokens: int) -> int:
    """What a pass over one conversation of so many tokens, eight of them sampled, keeps for its gradient."""
    held = {p.untyped_storage().data_ptr() for p in learner.policy.model.parameters()}
    found: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in held:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    learner._tried = True
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = learner._loss(conversation(tokens), LossConfig())
    total = sum(found.values())
    del result
    return total


def conversation(tokens: int, sampled: int = 8) -> PackedBatch:
    ids = np.arange(tokens, dtype=np.int32) % 250
    source = np.arange(tokens - 1 - sampled, tokens - 1, dtype=np.int32)
    zero, one = np.zeros(sampled, dtype=np.int32), np.ones(sampled, dtype=np.float32)
    return PackedBatch(
        ids_N=ids,
        positions_N=np.arange(tokens, dtype=np.int32),
        starts_S=np.array([0], dtype=np.int32),
        parents_S=np.array([-1], dtype=np.int32),
        source_E=source,
        targets_E=ids[source + 1],
        sequence_E=zero,
        group_E=zero,
        old_logprobs_E=-5 * one,
        advantages_E=one,
        weights_E=np.full(sampled, 1 / sampled, dtype=np.float32),
        temperature_E=one,
    )


@pytest.mark.parametrize(
    ("row", "model"), [("0.7 million (`calc`)", "calc"), ("0.6 billion", "0.6B"), ("8 billion", "8B")]
)
def test_the_rates_of_the_first_page_are_the_defaults(row: str, model: str) -> None:
    page = (Path(__file__).parents[2] / "docs" / "getting-started.md").read_text()
    (cells,) = (line.split(" | ") for line in page.splitlines() if line.startswith(f"| {row} | "))
    shape = read_shape(model) if model == "calc" else known_shape(model)
    assert shape is not None
    shown = [f"{shape.learning_rate(adapter=adapter):.0e}".replace("e-0", "e-") for adapter in (False, True)]
    assert [cells[1], cells[3]] == shown


def test_the_rate_of_the_bidding_game_is_the_default() -> None:
    folder = Path(__file__).parents[2] / "examples" / "bidding"
    shape = read_shape(str(folder / "model"))
    assert shape is not None
    rate = f"{shape.learning_rate(adapter=False):.1e}".replace("e-0", "e-")
    assert f"the default learning rate for this size, {rate}." in (folder / "README.md").read_text()
