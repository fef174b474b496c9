"""What the embedded engine knows of the requests that it is computing: plain data, by request and by slot. With it how
much of which prompts one pass computes, what settings add to a request's logits, and where a stop string ends a
response as its text grows token by token.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agentlightning.engine.base import PromptLogprobs, SamplingParams
from agentlightning.engine.events import Request, SampledTokens
from agentlightning.engine.grammar import Matcher
from agentlightning.engine.sampler import Draw, alternatives
from agentlightning.engine.slots import SlotPlacement, Slots
from agentlightning.types.arrays import kept_array
from agentlightning.types.call import Float32Array, Int32Array


@dataclass(slots=True)
class TokenCounters:
    """Tokens since the engine was made. `cached` are prompt tokens that were not computed again."""

    sampled: int = 0
    prefilled: int = 0
    cached: int = 0


@dataclass(slots=True)
class PromptScores:
    """The log-probs of a prompt's tokens but the first, as they are computed piece by piece."""

    prompt_ids: Int32Array
    count: int
    """Alternatives of each token."""
    pieces: list[PromptLogprobs] = field(default_factory=list)
    known: int = 1
    """Tokens of the prompt that need no more: the first one has nothing before it."""

    @property
    def complete(self) -> bool:
        return self.known >= len(self.prompt_ids)

    def take(self, logits_QV: torch.Tensor, start: int) -> None:
        """Logits after the tokens from `start` on. From 0 it begins anew: weights have changed, or memory was short."""
        if start == 0:
            self.pieces, self.known = [], 1
        wanted = self.prompt_ids[start + 1 : start + 1 + len(logits_QV)]
        plain_TV = torch.log_softmax(logits_QV[: len(wanted)].float(), dim=-1)
        chosen = torch.from_numpy(wanted.astype(np.int64)).to(plain_TV.device)
        found = PromptLogprobs(logprobs=plain_TV.gather(1, chosen[:, None])[:, 0].cpu().numpy())
        if self.count:
            top = plain_TV.topk(min(self.count, plain_TV.shape[-1]), dim=-1)
            ids, values = top.indices.to(torch.int32).cpu().numpy(), top.values.cpu().numpy()
            found = msgspec.structs.replace(found, top_ids=ids, top_logprobs=values)
        self.pieces.append(found)
        self.known = start + 1 + len(wanted)

    def whole(self) -> PromptLogprobs | None:
        """All of them; None if there are none."""
        if not self.pieces:
            return None
        tops = [(piece.top_ids, piece.top_logprobs) for piece in self.pieces]
        return PromptLogprobs(
            logprobs=np.concatenate([piece.logprobs for piece in self.pieces]),
            top_ids=np.concatenate([ids for ids, _ in tops if ids is not None]) if self.count else None,
            top_logprobs=np.concatenate([values for _, values in tops if values is not None]) if self.count else None,
        )


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
    scored: PromptScores | None = None
    """Where the prompt's own log-probs are asked for."""

    @classmethod
    def of(cls, request: Request, placement: SlotPlacement, matcher: Matcher | None) -> Running:
        """A request that begins."""
        seed, wanted = request.params.seed, request.params.prompt_logprobs
        random = None if seed is None else np.random.Generator(np.random.PCG64(seed & (2**64 - 1)))
        scored = None if wanted is None else PromptScores(request.prompt_ids, wanted)
        return cls(request, placement.slot, placement.reused, random, matcher, scored=scored)

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

    def set(self, slot: int, request: Request, limit: int) -> None:
        params = request.params
        watched = request.stream or params.stop or params.stop_token_ids or params.top_logprobs or params.grammar
        self.temperature[slot] = params.temperature
        self.top_k[slot] = params.top_k
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p
        self.limit[slot] = limit
        self.watched[slot] = bool(watched or params.keeps)
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
"""Added to a logit, it leaves the token no chance as long as there are others."""


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
) -> SampledTokens:
    """The newest token of these requests, which are rows `indices` of what was drawn."""
    return SampledTokens(
        request_ids=request_ids,
        ids=drawn.ids[indices],
        logprobs=drawn.logprobs[indices],
        plain_logprobs=drawn.plain_logprobs[indices],
        version=version,
        top_ids=top_ids,
        top_logprobs=top_logprobs,
        kept=kept,
    )


_PIECE_FLOPS = 2e10
"""About a quarter of a second of one core."""
_SCORED_LOGITS = 2**24
"""Of a pass in which a prompt is scored: 64 MiB of float32, of which there are a few copies."""


def piece_tokens(model: PreTrainedModel) -> int:
    """Prompt tokens that are computed beside decoding: a piece that takes a CPU about as long as a few steps."""
    if model.device.type != "cpu":
        return sys.maxsize
    return max(int(_PIECE_FLOPS / (2 * sum(p.numel() for p in model.parameters()))), 64)


def scored_tokens(vocab_size: int) -> int:
    """Prompt tokens after each of which logits are kept."""
    return max(16, _SCORED_LOGITS // vocab_size)


def of_like_length(work: list[tuple[int, int]]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Slots and how many tokens to compute in each, from pairs of count and slot. Rows of very different lengths do not
    go into one pass: it would compute mostly padding.
    """
    left = sorted(work, reverse=True)
    while left:
        longest = left[0][0]
        batch = [(count, slot) for count, slot in left if 2 * count + 32 >= longest]
        del left[: len(batch)]
        counts, slots = np.array(batch).T
        yield slots, counts


_UNFINISHED = "�"
"""The text of a token that is only a part of a character."""


class StopStrings:
    """Looks for stop strings at the end of responses. Special tokens count as text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._pieces: dict[int, str] = {}

    def find(self, response_ids: Int32Array, stop: tuple[str, ...]) -> str | None:
        """The stop string that the last token completed, if any (the one that begins first)."""
        if not self._may_complete(int(response_ids[-1]), stop):
            return None
        # Every token adds at least one byte, so the string begins at most so many tokens ago. One more, because some
        # tokenizers drop a leading space of the first token they decode.
        window = max(len(s.encode()) for s in stop) + 1
        text = self._decode(response_ids[-window:].tolist())
        found = [(text.find(s), s) for s in stop if s in text]
        return min(found)[1] if found else None

    def _may_complete(self, token: int, stop: tuple[str, ...]) -> bool:
        """Whether a stop string can end inside the token: it holds the string's last character, or part of one."""
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self._decode([token])
        return _UNFINISHED in piece or any(s[-1] in piece or s[-1].isspace() for s in stop)

    def _decode(self, ids: list[int]) -> str:
        text = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str), type(text)
        return text
