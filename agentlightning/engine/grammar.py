"""Responses that must follow a grammar: which tokens may come next, by the `llguidance` library.

A grammar is a text in llguidance's own form (its `LLMatcher.grammar_from_*` makes them), so that it can travel to
engines in other processes.

Shape letter: V vocabulary.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from agentlightning.errors import ConfigError, ModelError, missing_extra


class Grammars:
    """Makes the matchers of one tokenizer. Reading a large vocabulary takes a second, so it waits for the first."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._reader: Any = None

    def matcher(self, grammar: str) -> Matcher:
        """A matcher at the beginning of a response. Raises `ConfigError` for a grammar that makes no sense."""
        try:
            from llguidance import LLMatcher
        except ImportError as error:
            raise missing_extra("torch", "llguidance") from error
        found = LLMatcher(self._read(), grammar, log_level=0)
        if found.is_error():
            raise ConfigError(f"The grammar of a request cannot be used: {found.get_error()}")
        return Matcher(found, self._vocab_size)

    def _read(self) -> Any:
        if self._reader is None:
            from llguidance import LLTokenizer

            backend = getattr(self._tokenizer, "backend_tokenizer", None)
            if backend is None:
                raise ModelError(
                    "JSON answers need a tokenizer with a tokenizer.json, and this model has only the slow kind. "
                    "Save one into the model directory with transformers' AutoTokenizer."
                )
            self._reader = LLTokenizer(backend.to_str(), n_vocab=self._vocab_size, eos_token=list(self._eos_ids))
        return self._reader


class Matcher:
    """Where one response stands in its grammar."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    def allowed(self) -> torch.Tensor | None:
        """Which tokens may come next, bool [V]; None if none may (the grammar became too complex to follow)."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        mask = np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)
        if self._matcher.is_error() or not mask.any():
            return None
        return torch.from_numpy(mask)

    def take(self, token: int) -> None:
        """Go on by one token, which was allowed."""
        self._matcher.consume_token(token)
