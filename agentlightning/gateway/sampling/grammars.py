"""The grammars of the requests to one model: made on the event loop where that takes a moment, elsewhere otherwise."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Hashable

from agentlightning.gateway.exchange import CallRequest
from agentlightning.gateway.large.requests import LargeRequests
from agentlightning.gateway.sampling.constraint import constraint_of, encoded, grammar_of, is_simple
from agentlightning.rendering import Rendering
from agentlightning.types.arrays import Int32Array

KEPT_CHARACTERS = 8 * 2**20
"""Of the grammars that are kept for later requests."""
_OVERHEAD = 256
_DIGEST = 16


class GrammarCache:
    """Makes grammars, and keeps the latest by what they were made from."""

    def __init__(self, rendering: Rendering, large: LargeRequests) -> None:
        self._rendering = rendering
        self._large = large
        self._kept: OrderedDict[bytes, str | None] = OrderedDict()
        self._characters = 0

    async def of(self, owner: Hashable, request: CallRequest, prompt_ids: Int32Array) -> str | None:
        """What the response must look like; None if it may be anything. Raises `Refusal`."""
        constraint = constraint_of(request)
        if constraint is None:
            return None
        source = encoded(constraint, self._large.limits.schema_bytes)
        in_reasoning = self._rendering.starts_in_reasoning(prompt_ids)
        key = hashlib.blake2b(source, digest_size=_DIGEST, salt=bytes([in_reasoning])).digest()
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        if is_simple(constraint, len(source)):
            grammar = grammar_of(constraint, self._rendering, in_reasoning)
        else:
            grammar = await self._large.grammar(owner, self._rendering, constraint, in_reasoning)
        self._keep(key, grammar)
        return grammar

    def _keep(self, key: bytes, grammar: str | None) -> None:
        if key not in self._kept:  # another request may have been faster
            self._kept[key] = grammar
            self._characters += _size(grammar)
        while self._characters > KEPT_CHARACTERS:
            self._characters -= _size(self._kept.popitem(last=False)[1])


def _size(grammar: str | None) -> int:
    return _OVERHEAD + len(grammar or "")
