"""What the embedded engine refuses, and how much it can hold: requests, settings and budgets, each with its message."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from agentlightning.engine.base import SamplingParams
from agentlightning.errors import ConfigError, ModelError
from agentlightning.types.call import Int32Array

logger = logging.getLogger(__name__)

MAX_TOP_LOGPROBS = 100
MAX_BIASES = 300
"""Tokens of a request's `logit_bias`."""
MAX_STOPS = 64
"""Stop strings of one request, and as many stop ids."""
MAX_STOP_LENGTH = 1024
"""Characters of one stop string."""
MAX_GRAMMAR_LENGTH = 512 * 1024
"""Characters of a grammar, which holds the JSON schemas of a request."""
MAX_PATTERNS = 100
"""Property patterns of a grammar. The time that they take to compile grows with their third power."""
MAX_PATTERN_LENGTH = 20_000
"""Characters of all patterns of a grammar."""
MAX_REPEATED = 10_000
"""How often a part of a pattern may be repeated by repetitions inside of each other, as in `(a{100}){100}`. The first
token of a text takes as long as there are repetitions, and sampling waits for it.
"""
MAX_WAITING_GRAMMARS = 256
"""Different grammars of one owner that wait to be compiled."""
_TOKENS = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|\{\d+(?:,\d*)?\}|.", re.DOTALL)
"""Of a regular expression: an escape, a class, a repetition, or a character."""
MIN_CONTEXT = 16
MIN_PREFILL = 16


def slot_count(slot_bytes: int, budget: int, concurrency: int) -> int:
    """As many slots as the budget holds, up to two per request: one to sample in, one to keep a context for later."""
    slots = min(budget // slot_bytes, 2 * concurrency)
    if slots < 1:
        raise ConfigError(
            f"One context takes {slot_bytes / 2**20:,.0f} MiB of KV cache, more than the budget of "
            f"{budget / 2**20:,.0f} MiB. Lower max_context to the tokens of the longest conversation."
        )
    if slots < concurrency:
        logger.warning(
            "The KV cache holds %d contexts of %.0f MiB, so only %d of %d requests are sampled at the same time. "
            "Lower max_context to sample more of them at once.",
            slots, slot_bytes / 2**20, slots, concurrency,
        )  # fmt: skip
    return slots


def check_engine(max_context: int, max_concurrency: int, prefill_tokens: int) -> None:
    """Refuse sizes with which nothing could be sampled."""
    _refuse(
        {
            f"max_context must be {MIN_CONTEXT} or more, not {max_context}": max_context >= MIN_CONTEXT,
            f"max_concurrency must be 1 or more, not {max_concurrency}": max_concurrency >= 1,
            f"prefill_tokens must be {MIN_PREFILL} or more, not {prefill_tokens}": prefill_tokens >= MIN_PREFILL,
        }
    )


def check_end_ids(eos_ids: tuple[int, ...], vocab_size: int) -> None:
    """Refuse a model that could never end a response as its settings say."""
    outside = [token for token in eos_ids if not 0 <= token < vocab_size]
    if outside:
        raise ModelError(
            f"The end-of-sequence ids {outside} are outside the model's vocabulary of {vocab_size}. "
            "Correct eos_token_id in its generation_config.json."
        )


def check_params(params: SamplingParams) -> None:
    """Refuse settings that mean nothing."""
    top = params.top_logprobs
    _refuse(
        {
            f"temperature must be 0 or more and finite, not {params.temperature}": 0 <= params.temperature < math.inf,
            f"top_p must be above 0 and at most 1, not {params.top_p}": 0 < params.top_p <= 1,
            f"min_p must be from 0 to 1, not {params.min_p}": 0 <= params.min_p <= 1,
            f"top_k must be 0 (off) or more, not {params.top_k}": params.top_k >= 0,
            f"presence_penalty must be from -2 to 2, not {params.presence_penalty}": -2 <= params.presence_penalty <= 2,
            f"frequency_penalty must be from -2 to 2, not {params.frequency_penalty}": (
                -2 <= params.frequency_penalty <= 2
            ),
            f"logit_bias may hold {MAX_BIASES} tokens, each from -100 to 100": len(params.logit_bias) <= MAX_BIASES
            and all(-100 <= bias <= 100 for bias in params.logit_bias.values()),
            f"max_tokens must be 1 or more, not {params.max_tokens}": params.max_tokens is None
            or params.max_tokens > 0,
            f"prompt_logprobs must be from 0 to {MAX_TOP_LOGPROBS}, not {params.prompt_logprobs}": (
                0 <= (params.prompt_logprobs or 0) <= MAX_TOP_LOGPROBS
            ),
            f"top_logprobs must be from 0 to {MAX_TOP_LOGPROBS}, not {top}": 0 <= top <= MAX_TOP_LOGPROBS,
            "stop must not hold an empty string": all(params.stop),
            f"stop may hold {MAX_STOPS} strings, not {len(params.stop)}": len(params.stop) <= MAX_STOPS,
            f"a stop string may have {MAX_STOP_LENGTH} characters": all(len(s) <= MAX_STOP_LENGTH for s in params.stop),
            f"stop_token_ids may hold {MAX_STOPS} ids": len(params.stop_token_ids) <= MAX_STOPS,
        }
    )


def check_grammar(grammar: str) -> None:
    """Refuse a grammar that would take long to compile."""
    length = len(grammar)
    few = {
        f"the JSON schemas of a request may have {MAX_GRAMMAR_LENGTH:,} characters in all, not {length:,}": (
            length <= MAX_GRAMMAR_LENGTH
        )
    }
    _refuse(few)
    patterns, regexes = _patterns(grammar), list(_regexes(grammar))
    written = sum(map(len, regexes))
    few = {
        f"the JSON schemas of a request may have {MAX_PATTERNS} patternProperties in all, not {patterns}": (
            patterns <= MAX_PATTERNS
        ),
        f"the patterns of a request may have {MAX_PATTERN_LENGTH:,} characters in all, not {written:,}": (
            written <= MAX_PATTERN_LENGTH
        ),
    }
    _refuse(few)
    often = max(map(repeated, regexes), default=1)
    most = f"nested repetitions of a pattern may repeat a part {MAX_REPEATED:,} times in all, not {often:,}"
    _refuse({most: often <= MAX_REPEATED})


def check_waiting_grammars(count: int) -> None:
    """Refuse more grammars than one owner may have waiting."""
    most = f"an attempt may have {MAX_WAITING_GRAMMARS} different JSON schemas waiting to be compiled; try again later"
    _refuse({most: count <= MAX_WAITING_GRAMMARS})


def _patterns(grammar: str) -> int:
    """How many property patterns the JSON schemas in a grammar have."""
    return sum(map(len, _values_of("patternProperties", "{", grammar.replace('\\"', '"'))))


def _values_of(keyword: str, opening: str, text: str) -> Iterator[Any]:
    """What a keyword's values in JSON are that open so."""
    for found in re.finditer(rf'"{keyword}"\s*:\s*(?={opening})', text):
        with suppress(ValueError, RecursionError):
            yield json.JSONDecoder().raw_decode(text, found.end())[0]


def _regexes(grammar: str) -> Iterator[str]:
    """The regular expressions in a grammar: of its schemas, and of its own terminals."""
    yield from _values_of("pattern", '"', grammar)
    for patterns in _values_of("patternProperties", "{", grammar):
        yield from patterns
    yield from re.findall(r"^[A-Z_0-9]+: *(/.*)$", grammar, re.MULTILINE)


def repeated(pattern: str) -> int:
    """How often counted repetitions inside of each other repeat a part of a pattern; 1 where none are."""
    most, inside, last = 1, [1], 1  # by open group, and of what came last: how often its parts are repeated
    for token in _TOKENS.findall(pattern):
        if token == "(":
            inside.append(1)
        elif token == ")" and len(inside) > 1:
            last = inside.pop()
        elif token[0] == "{" and len(token) > 1:
            count = max(map(int, re.findall(r"\d{1,9}", token)))
            most = max(most, last * count if last > 1 else 1)
            last *= count
        elif token not in "*+?":
            last = 1
        inside[-1] = max(inside[-1], last)
    return most


def _refuse(rules: dict[str, bool]) -> None:
    """Raise the messages of the rules that do not hold."""
    broken = [message for message, holds in rules.items() if not holds]
    if broken:
        raise ConfigError("; ".join(broken) + ".")


def check_bias(params: SamplingParams, vocab_size: int) -> None:
    """Refuse a bias for tokens that do not exist."""
    outside = [token for token in params.logit_bias if not 0 <= token < vocab_size]
    _refuse({f"logit_bias has tokens outside the model's vocabulary of {vocab_size}: {outside[:5]}": not outside})


def check_prompt(prompt_ids: Int32Array, max_context: int, vocab_size: int) -> None:
    """Refuse prompts that cannot be sampled from."""
    if not len(prompt_ids):
        raise ModelError("The prompt is empty; give at least one token.")
    if len(prompt_ids) >= max_context:
        raise ModelError(
            f"The prompt has {len(prompt_ids)} tokens, but the context ends at {max_context} (prompt and response). "
            "Shorten the prompt, or raise max_context if the model allows it."
        )
    low, high = int(prompt_ids.min()), int(prompt_ids.max())
    if low < 0 or high >= vocab_size:
        raise ModelError(
            f"The prompt holds token id {low if low < 0 else high}, outside the model's vocabulary of {vocab_size}. "
            "Was it made with another model's tokenizer?"
        )
