"""Responses that must follow a grammar: which tokens may come next, by the `llguidance` library.

A grammar is a text in llguidance's own form (its `LLMatcher.grammar_from_*` makes them), so that it can travel to
engines in other processes.

Shape letter: V vocabulary.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from agentlightning.engine.limits import check_grammar, check_waiting_grammars
from agentlightning.errors import AgentLightningError, ConfigError, ModelError, missing_extra

COMPILE_SECONDS = 10.0
"""A grammar that takes longer to compile is refused."""
STEP_SECONDS = 0.5
"""Computing, for one token of one response: a grammar with which it takes longer is not followed any further."""
_SOON = 0.02
"""Whoever brings a new grammar waits so long for it: most are ready by then. Sampling waits, too."""
_NOT_SOONER = 0.2
"""After such a wait there is none for so long, however many new grammars come."""
_KEPT = 64
"""Compiled grammars that are kept for later requests."""


class Compiling:
    """A grammar on its way. All requests with the same text share it."""

    def __init__(self, grammar: str, vocab_size: int) -> None:
        self.grammar = grammar
        self.future: Future[Any] = Future()
        self.vocab_size = vocab_size
        self.too_slow = False
        """Whether a response could not be held to it in time."""
        self._deadline: float | None = None

    @property
    def waits(self) -> bool:
        """Whether nobody has begun to compile it."""
        return self._deadline is None

    def begin(self) -> None:
        """It is being compiled now: the time that it waited for others is not its own."""
        self._deadline = time.monotonic() + COMPILE_SECONDS

    def matcher(self, wait: float = 0.0) -> Matcher | None:
        """A matcher at the beginning of a response; None if it is not ready within so many seconds.

        Raises `ConfigError` for a grammar that makes no sense or takes too long, `ModelError` for a tokenizer that
        cannot be read.
        """
        if wait and not self.future.done():
            futures.wait([self.future], wait)
        if not self.future.done():
            if self._deadline is None or time.monotonic() < self._deadline:
                return None
            raise ConfigError(
                f"The grammar of a request was not compiled within {COMPILE_SECONDS:.0f} s. Simplify its JSON schema."
            )
        found = self.future.result()
        if found.is_error():
            raise ConfigError(f"The grammar of a request cannot be used: {found.get_error()}")
        if self.too_slow:
            raise ConfigError("The grammar of a request is too complex to follow. Simplify its JSON schema.")
        return Matcher(found.deep_copy(), self)


class Grammars:
    """Compiles grammars for one tokenizer in a thread, so that nobody's sampling waits for another's schema, and owners
    take turns, so that nobody's grammar waits for more than one of another's.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._reader: Any = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._lock = threading.Lock()
        self._waiting: OrderedDict[str, dict[str, Compiling]] = OrderedDict()
        """Grammars of each owner by their text, the oldest first; whose turn is next stands first."""
        self._kept: OrderedDict[str, Compiling] = OrderedDict()
        self._wait_again = 0.0

    def begin(self, grammar: str, owner: str) -> Compiling:
        """The grammar, compiled or on its way. Raises `ConfigError` for one that is larger than allowed, or one too
        many of its owner's that wait.
        """
        found = self._kept.get(grammar)
        is_new = found is None
        if found is None:
            check_grammar(grammar)
            found = Compiling(grammar, self._vocab_size)
        if found.waits:
            self._queue(found, owner)
        self._kept[grammar] = found
        self._kept.move_to_end(grammar)
        while len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        if is_new and time.monotonic() >= self._wait_again:
            with suppress(AgentLightningError):  # told to whoever asks for a matcher
                found.matcher(_SOON)
            self._wait_again = time.monotonic() + _NOT_SOONER
        return found

    def _queue(self, compiling: Compiling, owner: str) -> None:
        """Line it up among its owner's; another's that waits too does not wait for that one's turn."""
        with self._lock:
            own = self._waiting.get(owner, {})
            if compiling.grammar in own:
                return
            check_waiting_grammars(len(own) + 1)
            own[compiling.grammar] = compiling
            self._waiting[owner] = own
        self._thread.submit(self._compile_next)

    def _next(self) -> Compiling | None:
        """What to compile now, whose time begins."""
        with self._lock:
            while self._waiting:
                owner, own = self._waiting.popitem(last=False)
                found = own.pop(next(iter(own)))
                if own:
                    self._waiting[owner] = own
                if found.waits:
                    found.begin()
                    return found
        return None

    def _compile_next(self) -> None:
        compiling = self._next()
        if compiling is None:
            return
        try:
            compiling.future.set_result(self._compile(compiling.grammar))
        except BaseException as error:  # whatever it is: the request that waits for the grammar gets it
            compiling.future.set_exception(error)

    def _compile(self, grammar: str) -> Any:
        try:
            from llguidance import LLMatcher
        except ImportError as error:
            raise missing_extra("torch", "llguidance") from error
        return LLMatcher(self._read(), grammar, log_level=0)  # lets other threads run while it compiles

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

    def __init__(self, matcher: Any, grammar: Compiling) -> None:
        self._matcher = matcher
        self._grammar = grammar

    def allowed(self) -> torch.Tensor | None:
        """Which tokens may come next, bool [V]; None if none may (the grammar became too complex to follow)."""
        if self._grammar.too_slow:
            return None
        start = time.thread_time()
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._grammar.too_slow = time.thread_time() - start > STEP_SECONDS
        mask = np.unpackbits(bits, count=self._grammar.vocab_size, bitorder="little").view(np.bool_)
        if self._matcher.is_error() or self._grammar.too_slow or not mask.any():
            return None
        return torch.from_numpy(mask)

    def take(self, token: int) -> None:
        """Go on by one token, which was allowed."""
        self._matcher.consume_token(token)
