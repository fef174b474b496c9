"""Tiny models of three families, made on the spot: tokenizers of a few hundred tokens, and chat templates of our own.

The tokenizers are byte-level BPE whose merges are written down, not learnt: each of `WORDS` is one token, everything
else falls into letters. So the ids are the same everywhere and for ever, and golden files can hold them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from agentlightning.gateway import load_rendering
from agentlightning.rendering import RenderersRendering
from tests.temporary import shared_folder

TEMPLATES = Path(__file__).parent / "templates"

WORDS = (
    "system", "user", "assistant", "tool", "name", "arguments", "parameters", "functions", "analysis", "commentary",
    "final", "json", "Ġthe", "Ġis", "Ġand", "Ġof", "Ġto", "Ġyou", "calc", "answer", "Ġanswer", "number", "ipython",
)  # fmt: skip


@dataclass(frozen=True)
class Family:
    """A model family: its special tokens (the first one ends a turn), its other added tokens, and its quirks."""

    name: str
    special: tuple[str, ...]
    marks: tuple[str, ...] = ()
    bos: str | None = None
    renderer: str | None = None
    """The renderer to name in the settings; None to be rendered by the template."""
    thinks: bool = True
    parallel: bool = True
    """Whether an answer may hold several calls."""
    template: str = ""


_QWEN = ("<|im_end|>", "<|im_start|>", "<|endoftext|>")
_QWEN_MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
_LLAMA = (
    "<|eot_id|>", "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>"
)  # fmt: skip
_HARMONY = (
    "<|return|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>", "<|endoftext|>"
)  # fmt: skip

FAMILIES = {
    f.name: f
    for f in (
        Family("qwen3", _QWEN, _QWEN_MARKS, renderer="qwen3", template="qwen3"),
        Family("qwen3-template", _QWEN, _QWEN_MARKS, template="qwen3"),
        Family("llama3", _LLAMA, bos=_LLAMA[1], renderer="llama-3", thinks=False, parallel=False, template="llama3"),
        Family("llama3-template", _LLAMA, bos=_LLAMA[1], thinks=False, parallel=False, template="llama3"),
        Family("gpt-oss-template", _HARMONY, parallel=False, template="gpt_oss"),
    )
}

_GLM = ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
_GLM_MARKS = (*_QWEN_MARKS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "/nothink")
_VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_SECTIONS = tuple(
    f"<｜tool▁{kind}▁{end}｜>" for kind in ("calls", "call", "outputs", "output") for end in ("begin", "end")
)
_DEEPSEEK = ("<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>")
_WORDS_V4 = ("latest_reminder", "action", "query", "authority", "domain", "title", "read_url")
_V4 = ("｜DSML｜", *(f"<｜{word}｜>" for word in _WORDS_V4))
TAGGED = {
    f.name: f
    for f in (
        Family("qwen3.5", _QWEN, (*_QWEN_MARKS, *_VISION), renderer="qwen3.5", template="qwen3"),
        Family("glm-4.5", _GLM, _GLM_MARKS, renderer="glm-4.5", template="qwen3"),
        Family("glm-5", _GLM, _GLM_MARKS, renderer="glm-5", template="qwen3"),
        Family("deepseek-v3", _DEEPSEEK, (*_SECTIONS, "<｜tool▁sep｜>"), renderer="deepseek-v3", template="qwen3"),
        Family("deepseek-v4", _DEEPSEEK, ("<think>", "</think>", *_V4), renderer="deepseek-v4", template="qwen3"),
    )
}
"""Families whose calls are written in tags or sections. Their renderers are named, so that no template is read."""


def make_model(family: Family, directory: Path) -> Path:
    """Write the family's tokenizer, template and settings to a directory."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = _merges(WORDS)
    vocab = {token: i for i, token in enumerate([*alphabet, *dict.fromkeys(a + b for a, b in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in family.special])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in family.marks])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"eos_token": family.special[0], **({"bos_token": family.bos} if family.bos else {})}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "chat_template.jinja").write_text((TEMPLATES / f"{family.template}.jinja").read_text())
    if family.renderer is not None:
        (directory / "agentlightning.json").write_text(json.dumps({"renderer": family.renderer}))
    return directory


@cache
def rendering_of(name: str) -> RenderersRendering:
    return load_rendering(str(make_model((FAMILIES | TAGGED)[name], Path(shared_folder("family-")))))


def _merges(words: Sequence[str]) -> list[tuple[str, str]]:
    """Merges that put each word together from its left."""
    return list(dict.fromkeys((word[:i], word[i]) for word in words for i in range(1, len(word))))
