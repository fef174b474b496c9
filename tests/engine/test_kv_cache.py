"""Which models fit into slots: those that do are exact, the others are refused by name of the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from agentlightning.engine.kv_cache import KVShape, SlotCache, probe
from agentlightning.engine.slot_model import SlotModel
from agentlightning.errors import ModelError
from agentlightning.learner.policy import Policy

from .conftest import gap, make_engine, random_ids, request, run

SMALL: dict[str, Any] = {"vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def llama() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**SMALL, intermediate_size=64, num_key_value_heads=4, initializer_range=0.2))


def gpt2() -> PreTrainedModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=320, n_embd=32, n_layer=2, n_head=4, initializer_range=0.2))


def opt() -> PreTrainedModel:
    return OPTForCausalLM(OPTConfig(**SMALL, ffn_dim=64, word_embed_proj_dim=32, init_std=0.2))


def gemma_with_windows() -> PreTrainedModel:
    return Gemma3ForCausalLM(Gemma3TextConfig(**SMALL, intermediate_size=64, num_key_value_heads=2, head_dim=8))


def bloom() -> PreTrainedModel:
    return BloomForCausalLM(BloomConfig(vocab_size=320, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.2))


def mamba() -> PreTrainedModel:
    return MambaForCausalLM(MambaConfig(vocab_size=320, hidden_size=32, num_hidden_layers=2))


def t5() -> PreTrainedModel:
    return T5ForConditionalGeneration(T5Config(vocab_size=320, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4))


@pytest.mark.parametrize("build", [llama, gpt2, opt])
def test_other_families_are_exact(policy: Policy, build: type) -> None:
    torch.manual_seed(0)
    policy.model = build().eval()
    requests = [request(i, random_ids(5 + 11 * i, i)) for i in range(4)]
    responses = run(make_engine(policy), requests)
    assert max(gap(policy, r, responses[r.request_id]) for r in requests) < 2e-5


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (gemma_with_windows, "Sliding"),
        (mamba, "Linear"),
        (t5, "encoder-decoder"),
        (bloom, "its forward fails"),
    ],
)
def test_models_that_do_not_fit_are_refused(policy: Policy, build: type, reason: str) -> None:
    policy.model = build().eval()
    with pytest.raises(ModelError, match=f"(?s){reason}.*vLLM"):
        make_engine(policy)


def test_eager_attention_is_exact(policy: Policy, tiny_model_dir: Path) -> None:
    policy.model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, attn_implementation="eager").eval()
    requests = [request(i, random_ids(5 + 11 * i, i)) for i in range(4)]
    responses = run(make_engine(policy), requests)
    assert max(gap(policy, r, responses[r.request_id]) for r in requests) < 2e-5


def test_a_model_that_ignores_its_positions_is_found_out(policy: Policy) -> None:
    class Forgetful(type(policy.model)):
        def forward(self, *args: object, position_ids: torch.Tensor | None = None, **kwargs: object) -> object:
            return super().forward(*args, **kwargs)

    model = Forgetful(policy.model.config).eval()
    with pytest.raises(ModelError, match="does not follow the positions"):
        SlotModel(model, probe(model), 2, 64).self_check()


def test_memory_is_taken_as_it_is_used() -> None:
    shape = KVShape(layers=4, heads=8, key_size=64, value_size=64, dtype=torch.bfloat16, device=torch.device("cpu"))
    before = resident_bytes()
    cache = SlotCache(shape, slots=64, capacity=2**14)  # 8 GiB of zeros
    cache.copy(0, 1, 10)
    assert resident_bytes() - before < 50 * 2**20


def test_copy_and_swap() -> None:
    shape = KVShape(layers=2, heads=1, key_size=3, value_size=2, dtype=torch.float32, device=torch.device("cpu"))
    cache = SlotCache(shape, slots=3, capacity=8)
    keys, values = torch.randn(2, 1, 1, 5, 3), torch.randn(2, 1, 1, 5, 2)
    cache.plan(slice(0, 1), torch.arange(5), 5, 5)
    for layer in range(2):
        cache.update(keys[layer], values[layer], layer)

    def read(slot: int) -> np.ndarray:
        cache.plan(slice(slot, slot + 1), torch.tensor([slot * 8 + 7]), 5, 1)
        got = [cache.update(torch.zeros(1, 1, 1, 3), torch.zeros(1, 1, 1, 2), layer) for layer in range(2)]
        return torch.cat([torch.cat(pair, dim=-1) for pair in got]).numpy()

    whole = torch.cat([keys, values], dim=-1)[:, 0].numpy()
    cache.copy(0, 2, 4)
    np.testing.assert_array_equal(read(2)[:, :, :4], whole[:, :, :4])
    assert not read(2)[:, :, 4].any()
    cache.swap(0, 1, 5)
    np.testing.assert_array_equal(read(1), whole)
    assert not read(0).any()
    cache.clear(1)
    assert not read(1).any()


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096
