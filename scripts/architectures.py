"""The table of architectures in docs/architectures.md: how each is trained and sampled, tried on small random models.

    python scripts/architectures.py [NAME ...]

tries every decoder that transformers can build (or those named) and, without names, writes the table anew. The slow
tests do the same and compare. Exact means: log-probs within 2e-5 of the model's own forward, gradients within 1e-4 of
those of plain rows.
"""

from __future__ import annotations

import gc
import os
import re
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any, cast

import numpy as np
import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from agentlightning.engine.base import Chunk, SamplingParams, concat
from agentlightning.engine.events import Ended, Failed, PartialSample, Request
from agentlightning.engine.torch_engine import TorchEngine
from agentlightning.errors import AgentLightningError
from agentlightning.learner.base import LossConfig
from agentlightning.learner.packing import CreditedCall, pack
from agentlightning.learner.policy import Policy
from agentlightning.learner.torch_learner import TorchLearner
from agentlightning.models import resolve_model
from agentlightning.types.call import Call, CallInfo

PAGE = Path(__file__).parents[1] / "docs" / "architectures.md"
BEGIN, END = "<!-- architectures: python scripts/architectures.py -->\n", "<!-- /architectures -->"
BRIEF = (
    (r"its sliding window is \d+ tokens, and a path has \d+", "sliding window"),
    (r"\w+ does not accept another attention function", "fixed attention"),
    (r"its layers of type (\w+) read tokens one after the other", r"`\1`"),
    (r"some layers cache something other than keys and values \((.*?)\)", r"`\1`"),
)
"""Reasons of many rows, and what the page calls them."""
EXACT, EXACT_GRADIENTS = 2e-5, 1e-4
WINDOW = 16

SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "moe_intermediate_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner"), 64),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 256),
    "vocab_size": 320,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": 2,
    "sliding_window": WINDOW,
    "attention_chunk_size": WINDOW,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""What every configuration that knows such a field gets."""


def each(names: str, fields: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return dict.fromkeys(names.split(), fields)


S, F, L = "sliding_attention", "full_attention", "linear_attention"
MAMBA: dict[str, Any] = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 8}
DELTA: dict[str, Any] = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "num_key_value_heads": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
INDEX: dict[str, Any] = {"head_dim": 8, "index_n_heads": 16, "index_head_dim": 16, "index_topk": 8}
OWN: dict[str, dict[str, Any]] = {
    **each("gemma2 gemma3_text gpt_oss olmo3 cohere2 exaone4 ministral cwm vaultgemma", {"layer_types": [S, F]}),
    **each("qwen3_next qwen3_5_text qwen3_5_moe_text", {**DELTA, "layer_types": [L, F]}),
    "olmo_hybrid": {**DELTA, "layer_types": [L, F]},
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "granitemoehybrid": {**MAMBA, "layer_types": ["mamba", "attention"]},
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 64, "lm_head_multiplier": 0.5, "embedding_multiplier": 2.0},
    "mamba2": {"num_heads": 4, "head_dim": 16, "expand": 2, "state_size": 8, "n_groups": 1, "chunk_size": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "num_hidden_layers": 2},
    "zamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8},
    "zamba2": {
        "num_hidden_layers": 2, "layers_block_type": ["mamba", "hybrid"], "mamba_d_state": 8, "n_mamba_heads": 4,
        "mamba_headdim": 16, "chunk_size": 8,
    },
    "nemotron_h": {"layers_block_type": ["mamba", "attention"], "mamba_num_heads": 4, "mamba_head_dim": 16,
        "ssm_state_size": 8, "n_groups": 1, "chunk_size": 8},
    "lfm2": {"layer_types": ["conv", F], "full_attn_idxs": None},
    "lfm2_moe": {"layer_types": ["conv", F], "num_dense_layers": 1},
    "llama4_text": {"layer_types": ["chunked_attention", F], "intermediate_size_mlp": 64},
    "minimax": {"layer_types": [L, F]},
    "recurrent_gemma": {"num_hidden_layers": 3, "attention_window_size": WINDOW, "lru_width": 32},
    "mistral": {},
    "minicpm3": {**LATENT, "dim_model_base": 16, "scale_emb": 2, "num_key_value_heads": 4},
    "deepseek_v2": {**LATENT, "num_experts_per_tok": 2, "n_routed_experts": 4, "topk_method": "greedy"},
    **each("deepseek_v3 glm4_moe_lite youtu", LATENT),
    "modernbert-decoder": {"layer_types": [S, F]},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": WINDOW},
    "gemma3n_text": {"layer_types": [S, F, S, F], "num_hidden_layers": 4, "num_kv_shared_layers": 0,
        "intermediate_size": [64] * 4, "activation_sparsity_pattern": [0.0] * 4, "vocab_size_per_layer_input": 320,
        "hidden_size_per_layer_input": 8, "laurel_rank": 4},
    "gemma4_text": {"layer_types": [S, F], "num_kv_shared_layers": 0, "vocab_size_per_layer_input": 320,
        "hidden_size_per_layer_input": 8, "global_head_dim": 16},
    **each("gptj codegen", {"rotary_dim": 8}),
    "ernie4_5_moe": {"moe_k": 2, "moe_layer_start_index": 0},
    **each("axk1 axk2 glm_moe_dsa deepseek_v32", {**LATENT, **INDEX}),
    "granite": {"logits_scaling": 4.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.5},
    "cohere": {"logit_scale": 0.25},
    "stablelm": {"num_key_value_heads": 4},
    "phi": {"num_key_value_heads": 4},
    "persimmon": {"num_key_value_heads": 4},
    "zaya": {"num_experts_per_tok": 1},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "kimi_linear": {**LATENT, "layer_types": [L, F], "linear_head_dim": 8, "linear_num_heads": 4},
}  # fmt: skip
"""Besides, by architecture: so that it is small, and its layers of every kind there is."""
EXPLICIT = ("nemotron", "ministral", "hunyuan_v1_dense", "hunyuan_v1_moe")
"""Whose `head_dim` and `num_key_value_heads` are not derived where they are missing."""
LEFT_OUT = {
    "decoders of encoder-decoders": (
        "bart bigbird_pegasus blenderbot blenderbot-small marian mbart moshi mvp musicgen musicgen_melody pegasus "
        "plbart prophetnet trocr whisper moss_transcribe_diarize"
    ),
    "encoders": (
        "bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert reformer rembert roberta "
        "roberta-prelayernorm roc_bert roformer xlm xlm-roberta xlm-roberta-xl xlnet xmod cpmant"
    ),
    "models of text and images, audio or other things, whose text part is listed": (
        "blt dots3_note emu3 fuyu gemma3 gemma3n gemma4 gemma4_assistant gemma4_unified gemma4_unified_assistant git "
        "got_ocr2 llama4 mllama phi4_multimodal qwen3_5 qwen3_5_moe qwen4_exp aria_text"
    ),
    "another name of a listed one": "gpt-sw3",
}


def names() -> list[str]:
    """The architectures of the table."""
    out = {name for group in LEFT_OUT.values() for name in group.split()}
    return sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - out)


def build(name: str) -> PreTrainedModel:
    """A small random model of an architecture."""
    kind = CONFIG_MAPPING[name]
    known = kind().to_dict()
    always = {"pad_token_id", *(("head_dim", "num_key_value_heads") if name in EXPLICIT else ())}
    fields = {k: v for k, v in SMALL.items() if known.get(k) is not None or k in always}
    if "layer_types" in known:
        fields["layer_types"] = None
    config = kind(**{**fields, **OWN.get(name, {})})
    torch.manual_seed(0)
    with torch.device("meta"):
        size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if size > 40_000_000:
        raise ValueError(f"no small one is known: {size / 1e6:.0f} million parameters")
    model = AutoModelForCausalLM.from_config(config, attn_implementation=None).float().eval()
    for parameter in model.parameters():  # nothing may be 0 or 1 just because training has not begun
        parameter.data.add_(0.05 * torch.randn_like(parameter))
    return model


@dataclass(frozen=True)
class Verdict:
    """How one architecture is trained and sampled; `why` says what stands in the way of more."""

    name: str
    learner: str
    engine: str
    why: str


def judge(name: str) -> Verdict:
    """Try one. Raises AssertionError where numbers are wrong and nobody noticed."""
    try:
        model = build(name)
        with torch.no_grad():
            plain(model, *(np.arange(3, 40, dtype=np.int32),) * 2)
    except Exception as error:
        return Verdict(name, "not tried", "not tried", _line(error))
    learner, why = try_learner(model)
    engine, engine_why = try_engine(model)
    return Verdict(name, learner, engine, "; ".join(dict.fromkeys(filter(None, (why, engine_why)))))


def try_learner(model: PreTrainedModel) -> tuple[str, str]:
    """ "tree", "rows" or "refused", and why."""
    policy = Policy("", model, cast(Any, None), (2,))
    learner, calls = TorchLearner(policy), conversations()
    batch, loss = pack(calls), LossConfig(name="reinforce")
    try:
        found_E = learner.forward(batch)
        learner.forward_backward(batch, loss)
    except AgentLightningError as error:
        return "refused", _line(error)
    got = gradients(model)
    expected = [plain(model, c.call.prompt_ids, c.call.response_ids) for c in calls]
    weights = torch.tensor(np.concatenate([c.advantages * c.weights for c in calls]))
    expected_E = torch.cat(expected)
    gap = float(np.abs(expected_E.detach().numpy() - found_E).max())
    assert gap < EXACT * max(1.0, float(expected_E.detach().abs().max())), ("log-probs", gap)
    (-(expected_E * weights).sum()).backward()
    want = gradients(model)
    largest = max(float(g.abs().max()) for g in want.values())
    worst = max(float((got[n] - g).abs().max() / max(float(g.abs().max()), 1e-3 * largest)) for n, g in want.items())
    assert worst < EXACT_GRADIENTS, ("gradients", worst)
    return ("rows", learner.why_rows) if learner.rows else ("tree", "")


def conversations() -> list[CreditedCall]:
    """Two prompts, three responses each, longer than the windows."""
    rng = np.random.default_rng(0)
    calls = []
    for group in range(2):
        prompt = rng.integers(3, 300, 21 + 4 * group).astype(np.int32)
        for sibling in range(3):
            response = rng.integers(3, 300, 4 + 3 * sibling).astype(np.int32)
            n = len(response)
            info = CallInfo(
                call_id=f"{group}-{sibling}", response_id="", rollout_id="", attempt_id="", choice=0, policy="policy",
                trained=True, agent=None, parent_call_id=None, model="policy", dialect="chat", finish_reason="stop",
                start_time=0.0, end_time=0.0, temperature=1.0,
            )  # fmt: skip
            zeros = np.zeros(n, dtype=np.float32)
            worth = rng.normal(size=n).astype(np.float32)
            call = Call(info, prompt, response, zeros, zeros, ())
            calls.append(CreditedCall(call, 3 * group + sibling, group, worth, np.full(n, 0.1, dtype=np.float32)))
    return calls


def plain(model: PreTrainedModel, prompt: np.ndarray, response: np.ndarray) -> torch.Tensor:
    """Log-probs of a response in the model's own forward."""
    ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))[None]
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    return logits.log_softmax(-1).gather(1, torch.from_numpy(response.astype(np.int64))[:, None])[:, 0]


def gradients(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    found = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return found


def try_engine(model: PreTrainedModel) -> tuple[str, str]:
    """How contexts are kept, or "refused", and why."""
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("calc"))
    try:
        engine = TorchEngine(model, tokenizer, (2,), max_context=96, max_concurrency=4, seed=0)
    except AgentLightningError as error:
        return "refused", _line(error)
    rng = np.random.default_rng(1)
    prefix = rng.integers(3, 300, 20).astype(np.int32)
    prompts = [np.concatenate([prefix, rng.integers(3, 300, 3 + 5 * i).astype(np.int32)]) for i in range(5)]
    responses = sample(engine, prompts)
    # a second turn of the first conversations
    more = [
        np.concatenate([prompt, response.ids, rng.integers(3, 300, 4).astype(np.int32)])
        for prompt, response in zip(prompts, responses, strict=True)
    ]
    responses += sample(engine, more[:3])
    for prompt, response in zip(prompts + more[:3], responses, strict=True):
        with torch.no_grad():
            expected = plain(model, prompt, response.ids).numpy()
        gap = float(np.abs(expected - response.plain_logprobs).max())
        assert gap < EXACT * max(1.0, float(np.abs(expected).max())), ("sampled log-probs", gap)
    return engine.contexts.kind, engine.contexts.why_own


def sample(engine: TorchEngine, prompts: list[np.ndarray]) -> list[Chunk]:
    """One response of up to 14 tokens to each."""
    chunks: dict[int, list[Chunk]] = {}
    for number, prompt in enumerate(prompts):
        engine.submit(Request(request_id=number, prompt_ids=prompt, params=SamplingParams(max_tokens=14)))
    while engine.active:
        for event in engine.step():
            assert not isinstance(event, Failed), event
            if isinstance(event, PartialSample | Ended):
                chunks.setdefault(event.request_id, []).append(event.chunk)
    return [concat(chunks[number]) for number in range(len(prompts))]


def _line(error: BaseException) -> str:
    return shorten((str(error).strip().splitlines() or [type(error).__name__])[0], 160, placeholder=" …")


def verdicts(wanted: list[str]) -> Iterator[Verdict]:
    torch.set_num_threads(1)
    for name in wanted:
        try:
            yield judge(name)
        except Exception as error:
            yield Verdict(name, "WRONG", "WRONG", f"{type(error).__name__}: {_line(error)}")
        gc.collect()


def brief(why: str) -> str:
    for reason, name in BRIEF:
        why = re.sub(reason, name, why)
    return why


def table(found: list[Verdict]) -> str:
    lines = ["| architecture | learner | engine | reason |", "|---|---|---|---|"]
    lines += [f"| `{v.name}` | {v.learner} | {v.engine} | {brief(v.why.replace('|', '/'))} |" for v in found]
    return "\n".join(lines) + "\n"


def main() -> None:
    wanted = sys.argv[1:]
    found: list[Verdict] = []
    for verdict in verdicts(wanted or names()):
        found.append(verdict)
        print(f"{verdict.name:24} {verdict.learner:8} {verdict.engine:10} {verdict.why[:200]}", flush=True)
    if not wanted:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(before + BEGIN + table(found) + END + rest.partition(END)[2])


if __name__ == "__main__":
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore")
    main()
