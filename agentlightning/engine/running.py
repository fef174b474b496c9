"""What the embedded engine knows of the requests that it is computing. Plain data, by request and by slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from agentlightning.engine.base import SamplingParams
from agentlightning.engine.events import Request, Sampled
from agentlightning.engine.grammar import Matcher
from agentlightning.engine.sampler import Draw, alternatives
from agentlightning.engine.slots import Slots
from agentlightning.types.call import Float32Array, Int32Array
from agentlightning.types.kept import kept_array


@dataclass(slots=True)
class Counters:
    """Tokens since the engine was made. `cached` are prompt tokens that were not computed again."""

    sampled: int = 0
    prefilled: int = 0
    cached: int = 0


@dataclass(slots=True)
class Running:
    """A request in a slot."""

    request: Request
    slot: int
    cached: int
    random: np.random.Generator | None
    matcher: Matcher | None
    charged: int = 0
    """Response tokens that its owner was charged for."""
    emitted: int = 0
    """Response tokens given out so far."""
    top: list[tuple[Int32Array, Float32Array]] = field(default_factory=list)
    """Alternatives of the response tokens not given out yet, [K] each."""
    kept: list[Int32Array | None] = field(default_factory=list)
    """Of the same tokens, what a filter left to draw from."""

    def note(self, drawn: Draw, index: int, vocabulary: int) -> None:
        """Keep what was asked for besides of the newest token, row `index` of what was drawn."""
        params = self.request.params
        if params.top_logprobs:
            self.top.append(alternatives(drawn.distribution_BV[index], min(params.top_logprobs, vocabulary)))
        if params.keeps:
            self.kept.append(drawn.kept.get(index))

    def take_noted(self) -> tuple[Int32Array | None, Float32Array | None, Int32Array | None]:
        """What was kept of the tokens not given out yet: alternatives, their log-probs, and what a filter left."""
        (top, self.top), (kept, self.kept) = (self.top, []), (self.kept, [])
        if not top:
            return None, None, kept_array(kept)
        return np.stack([ids for ids, _ in top]), np.stack([logprobs for _, logprobs in top]), kept_array(kept)


@dataclass(frozen=True, slots=True)
class Columns:
    """What a step needs of the requests in all slots at once, arrays of shape [slots]."""

    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    limit: np.ndarray
    """Prompt plus response end here."""
    watched: np.ndarray
    """Whether the request needs a look at every token: it streams, has stops of its own, or wants alternatives."""
    constrained: np.ndarray
    """Whether the response follows a grammar."""
    shifted: np.ndarray
    """Whether the request moves logits."""
    ignores_eos: np.ndarray
    """Whether it goes on after the model's own end."""
    keeps: np.ndarray
    """Whether it asks what a filter left to draw from."""

    @classmethod
    def of(cls, slots: int) -> Columns:
        whole = np.zeros(slots, dtype=np.int64)
        no = np.zeros(slots, dtype=np.bool_)
        flags = (no.copy(), no.copy(), no.copy(), no.copy(), no.copy())
        return cls(np.ones(slots), whole.copy(), np.ones(slots), np.zeros(slots), whole.copy(), *flags)

    def set(self, slot: int, params: SamplingParams, limit: int, watched: bool) -> None:
        self.temperature[slot] = params.temperature
        self.top_k[slot] = params.top_k
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p
        self.limit[slot] = limit
        self.watched[slot] = watched
        self.constrained[slot] = params.grammar is not None
        self.shifted[slot] = params.shifts_logits
        self.ignores_eos[slot] = params.ignore_eos
        self.keeps[slot] = params.keeps

    def swap(self, a: int, b: int) -> None:
        numbers = (self.temperature, self.top_k, self.top_p, self.min_p, self.limit)
        for column in (*numbers, self.watched, self.constrained, self.shifted, self.ignores_eos, self.keeps):
            column[[a, b]] = column[[b, a]]


def allowed_tokens(running: Sequence[Running | None], constrained: np.ndarray) -> dict[int, torch.Tensor]:
    """The tokens that the grammars of these rows' requests allow next, bool [V] by row; `constrained` has some."""
    allowed: dict[int, torch.Tensor] = {}
    for index in np.flatnonzero(constrained).tolist():
        one = running[index]
        mask = None if one is None or one.matcher is None else one.matcher.allowed()
        if mask is not None:
            allowed[index] = mask
    return allowed


def own_draws(running: Sequence[Running | None], drawn: np.ndarray) -> np.ndarray:
    """Numbers that were drawn for these rows, those of requests that brought a seed from their own generators."""
    for index, one in enumerate(running):
        if one is not None and one.random is not None:
            drawn[index] = one.random.random()
    return drawn


def shifts(
    running: Sequence[Running | None], shifted: np.ndarray, slots: Slots, is_eos_V: np.ndarray
) -> dict[int, torch.Tensor]:
    """What is added to the logits of these rows' requests, [V] by row; `shifted` has some."""
    found: dict[int, torch.Tensor] = {}
    for index in np.flatnonzero(shifted).tolist():
        if (one := running[index]) is not None:
            response = slots.tokens[one.slot, len(one.request.prompt_ids) : slots.length[one.slot]]
            found[index] = shift_of(one.request.params, response, is_eos_V)
    return found


_NEVER = -1e4
"""Added to a logit, it leaves no chance to a token as long as there are others."""


def shift_of(params: SamplingParams, response: np.ndarray, is_eos_V: np.ndarray) -> torch.Tensor:
    """What a request's settings add to the logits of its next token, [V], after this response so far."""
    counts_V = np.bincount(response, minlength=len(is_eos_V))
    shift_V = -params.frequency_penalty * counts_V - params.presence_penalty * (counts_V > 0)
    for token, bias in params.logit_bias.items():
        shift_V[token] += bias
    if len(response) < params.min_tokens:
        ends_V = is_eos_V.copy()
        ends_V[[token for token in params.stop_token_ids if token < len(ends_V)]] = True
        shift_V[ends_V] += _NEVER
    return torch.from_numpy(shift_V.astype(np.float32))


def sampled(
    request_ids: list[int],
    drawn: Draw,
    indices: list[int],
    version: int,
    top_ids: Int32Array | None = None,
    top_logprobs: Float32Array | None = None,
    kept: Int32Array | None = None,
) -> Sampled:
    """The newest token of these requests, rows `indices` of what was drawn."""
    return Sampled(
        request_ids=request_ids,
        ids=drawn.ids[indices],
        logprobs=drawn.logprobs[indices],
        plain_logprobs=drawn.plain_logprobs[indices],
        version=version,
        top_ids=top_ids,
        top_logprobs=top_logprobs,
        kept=kept,
    )
