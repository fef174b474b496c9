"""How the contexts of models are kept: in slots, in caches of their own, or not at all; exact in each case."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
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
    MistralConfig,
    MistralForCausalLM,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from agentlightning.engine.base import SamplingParams
from agentlightning.engine.kv_cache import DoesNotFit, KVShape, SlotCache, probe
from agentlightning.engine.slot_model import SlotModel
from agentlightning.errors import ModelError
from agentlightning.learner.policy import Policy

from .conftest import gap, make_engine, random_ids, reference, request, run

SMALL: dict[str, Any] = {"vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def llama() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**SMALL, intermediate_size=64, num_key_value_heads=4, initializer_range=0.2))


def gpt2() -> PreTrainedModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=320, n_embd=32, n_layer=2, n_head=4, initializer_range=0.2))


def opt() -> PreTrainedModel:
    return OPTForCausalLM(OPTConfig(**SMALL, ffn_dim=64, word_embed_proj_dim=32, init_std=0.2))


def gemma_with_windows() -> PreTrainedModel:
    windows: dict[str, Any] = {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]}
    return Gemma3ForCausalLM(
        Gemma3TextConfig(**SMALL, **windows, intermediate_size=64, num_key_value_heads=2, head_dim=8)
    )


def bloom() -> PreTrainedModel:
    return BloomForCausalLM(BloomConfig(vocab_size=320, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.2))


def mamba() -> PreTrainedModel:
    return MambaForCausalLM(MambaConfig(vocab_size=320, hidden_size=32, num_hidden_layers=2))


def t5() -> PreTrainedModel:
    return T5ForConditionalGeneration(T5Config(vocab_size=320, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4))


def mistral_with_windows() -> PreTrainedModel:
    config = MistralConfig(**SMALL, intermediate_size=64, num_key_value_heads=2, sliding_window=7)
    return MistralForCausalLM(config)


def hybrid() -> PreTrainedModel:
    config = Qwen3NextConfig(
        **SMALL, intermediate_size=64, moe_intermediate_size=32, shared_expert_intermediate_size=32,
        num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2,
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention"],
    )  # fmt: skip
    return Qwen3NextForCausalLM(config)


def openai_gpt() -> PreTrainedModel:
    return OpenAIGPTLMHeadModel(OpenAIGPTConfig(vocab_size=320, n_embd=32, n_layer=2, n_head=4))


@pytest.mark.quick_with("gpt2", "gemma", "hybrid", "openai_gpt")
@pytest.mark.parametrize(
    ("build", "kind"),
    [
        (llama, "slots"),
        (gpt2, "slots"),
        (opt, "slots"),
        (gemma_with_windows, "slots"),
        (mistral_with_windows, "slots"),
        (hybrid, "own cache"),
        (mamba, "own cache"),
        (bloom, "own cache"),
        (openai_gpt, "recomputed"),
    ],
)
def test_other_families_are_exact(policy: Policy, build: type, kind: str) -> None:
    """Many at once, then a second turn of each conversation, then all again under other weights."""
    torch.manual_seed(0)
    policy.model = build().eval()
    engine = make_engine(policy, max_concurrency=3, max_context=160)
    assert engine.contexts.kind == kind
    requests = [request(i, random_ids(5 + 11 * i, i)) for i in range(4)]
    responses = run(engine, requests)
    turns = [
        request(10 + i, np.concatenate([r.prompt_ids, responses[i].ids, random_ids(3, 9)]))
        for i, r in enumerate(requests)
    ]
    responses |= run(engine, turns)
    assert max(gap(policy, r, responses[r.request_id]) for r in requests + turns) < 2e-5
    asked = SamplingParams(max_tokens=2, prompt_logprobs=0)
    scored = run(engine, [msgspec.structs.replace(r, request_id=20 + r.request_id, params=asked) for r in turns])
    for turn in turns:
        prompt = scored[20 + turn.request_id].prompt
        assert prompt is not None
        expected = reference(policy, turn.prompt_ids[:1], turn.prompt_ids[1:])
        assert np.abs(prompt.logprobs - expected).max() < 2e-5
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.05)
    engine.weights_changed(1)
    responses = run(engine, turns)
    assert max(gap(policy, r, responses[r.request_id]) for r in turns) < 2e-5


def test_a_conversation_goes_on_in_its_own_cache(policy: Policy) -> None:
    policy.model = hybrid().eval()
    engine = make_engine(policy, max_concurrency=2)
    first = request(0, random_ids(30, 0))
    response = run(engine, [first])[0]
    before = engine.counters.prefilled
    run(engine, [request(1, np.concatenate([first.prompt_ids, response.ids, random_ids(4, 1)]))])
    assert engine.counters.cached == 30 + len(response.ids) - 1
    assert engine.counters.prefilled - before == 5


def test_encoder_decoders_are_refused(policy: Policy) -> None:
    policy.model = t5().eval()
    with pytest.raises(ModelError, match="encoder-decoder"):
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
    with pytest.raises(DoesNotFit, match="differ by"):
        SlotModel(model, probe(model), 2, 64).self_check()


def test_memory_is_taken_as_it_is_used() -> None:
    shape = KVShape(layers=((8, 64, 64),) * 4, dtype=torch.bfloat16, device=torch.device("cpu"))
    before = resident_bytes()
    cache = SlotCache(shape, slots=64, capacity=2**14)  # 8 GiB of zeros
    cache.copy(0, 1, 10)
    assert resident_bytes() - before < 50 * 2**20


def test_copy_and_swap() -> None:
    shape = KVShape(layers=((1, 3, 2),) * 2, dtype=torch.float32, device=torch.device("cpu"))
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
    cache.swap(0, 1, 5, 5)
    np.testing.assert_array_equal(read(1), whole)
    assert not read(0).any()
    cache.clear(1)
    assert not read(1).any()


def test_memory_is_given_back() -> None:
    """Of a slot's first 64 tokens the last 32 go, in every layer; what stays is what it was."""
    shape = KVShape(layers=((2, 64, 64),) * 3, dtype=torch.float32, device=torch.device("cpu"))
    assert shape.block == 16
    cache = SlotCache(shape, slots=40, capacity=2**14, paged=True)  # 1.9 GiB of addresses
    before = resident_bytes()
    keys = torch.randn(1, 2, 2**13, 64)
    for slot in range(20):
        cache.plan(slice(slot, slot + 1), torch.arange(2**13) + slot * 2**14, 64, 2**13)
        for layer in range(3):
            cache.update(keys, keys, layer)
    written = 20 * 2**13 * shape.bytes_per_token
    assert resident_bytes() - before > 0.9 * written
    for slot in range(20):
        cache.give_back(slot, 32)
    assert resident_bytes() - before < 0.1 * written
    cache.plan(slice(3, 4), torch.tensor([0]), 64, 1)
    for layer in range(3):
        kept, _ = cache.update(keys[:, :, :1], keys[:, :, :1], layer)
        torch.testing.assert_close(kept[:, :, :32], keys[:, :, :32])
        assert not kept[:, :, 32:].any()


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def test_a_gpus_share_leaves_what_learning_will_take(monkeypatch: pytest.MonkeyPatch) -> None:
    from agentlightning.engine.contexts import cache_budget
    from agentlightning.learner.optimizer import optimizer_bytes
    from agentlightning.models.hardware import cache_bytes

    weights = [torch.nn.Parameter(torch.empty(10, 10, dtype=kind)) for kind in (torch.float32, torch.bfloat16)]
    assert [optimizer_bytes([w]) for w in weights] == [1200, 1600]
    assert optimizer_bytes(weights, offload=True) == 600
    gib = 2**30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (50 * gib, 80 * gib))
    assert cache_budget(torch.device("cuda"), 30 * gib) == cache_bytes(20 * gib) == 4 * gib
    assert cache_budget(torch.device("cuda"), 45 * gib) == cache_budget(torch.device("cpu")) == 2 * gib
