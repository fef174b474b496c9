"""What calls of other providers use and cost, and how much of it is allowed: of one rollout, and of all together.

Tokens are those that the provider's answer reports; an answer without them is counted by its length. A call is let
through while its limits are not reached. What calls at the same time may use together is estimated before they are
sent: one that is not expected to fit waits until others have ended, and is then let through or refused.

`Reservations` keeps calls that are under way within the limits that all rollouts share. One attempt's calls count for
at most half of what is left, however much they ask for, so that others need not wait for them. Only one attempt at a
time may ask for more than that, so what may be used beyond a limit is what one attempt may use.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from math import inf
from typing import TYPE_CHECKING, Any, get_type_hints

import msgspec

from agentlightning.arguments import check_kinds, refuse_missing, refuse_unknown
from agentlightning.errors import ConfigError
from agentlightning.gateway.attempts import Key, LiveAttempt
from agentlightning.gateway.exchange import Refusal
from agentlightning.store.base import LightningStore
from agentlightning.types import Attributes
from agentlightning.types.call import Spent
from agentlightning.types.names import CHAT, COST, EMBEDDINGS

ESTIMATED = "agentlightning.usage.estimated"
"""On calls whose tokens the provider did not report."""
_BYTES_PER_TOKEN = 4
_ANSWER_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
"""Fields in which requests limit the length of an answer."""
_MOST = 2**31
"""No call has so many tokens; larger numbers have no meaningful cost."""
_ANSWER_TOKENS = 1000
"""Expected of an answer without a limit, until one has been measured."""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of one call."""

    input: int = 0
    output: int = 0
    cached: int = 0
    """Of the input, what the provider had in its cache."""
    estimated: bool = False

    @classmethod
    def reported(cls, answer: Mapping[str, Any]) -> Usage | None:
        """The usage in an answer; None if it reports none. Anthropic counts cached tokens beside the others."""
        usage = answer.get("usage")
        if not isinstance(usage, dict):
            return None
        given = _number(usage, "prompt_tokens") or _number(usage, "input_tokens")
        output = _number(usage, "completion_tokens") or _number(usage, "output_tokens")
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
        cache_read = _number(usage, "cache_read_input_tokens")
        written = _number(usage, "cache_creation_input_tokens")
        if not given and not output:
            return None
        cached = cache_read or _number(details, "cached_tokens")
        return cls(input=given + cache_read + written, output=output, cached=cached)

    @classmethod
    def guessed(cls, request: str, answer: bytes) -> Usage:
        """An estimate from the lengths of both bodies."""
        sizes = (-(-len(text) // _BYTES_PER_TOKEN) for text in (request, answer))
        return cls(input=next(sizes), output=next(sizes), estimated=True)

    @classmethod
    def expected(cls, request: Mapping[str, Any], size: int, answer: int) -> Usage:
        """What a request of `size` bytes is expected to use, with `answer` tokens where it sets no limit to them."""
        limits = [found for name in _ANSWER_LIMITS if (found := _number(request, name)) > 0]
        choices = max(1, _number(request, "n"))
        return cls(input=-(-size // _BYTES_PER_TOKEN), output=choices * min(limits, default=answer), estimated=True)

    @property
    def tokens(self) -> int:
        return self.input + self.output


def _number(found: Mapping[str, Any], name: str) -> int:
    value = found.get(name)
    return min(max(value, 0), _MOST) if isinstance(value, int) else 0


class _NamedFields(type(msgspec.Struct)):
    if not TYPE_CHECKING:  # type checkers and editors look at the fields

        def __call__(cls, *positional: Any, **given: Any) -> Any:
            check_kinds(cls.__name__, given, get_type_hints(cls))
            try:
                return super().__call__(*positional, **given)
            except TypeError:
                from inspect import signature

                parameters = list(signature(cls).parameters.values())
                refuse_unknown(cls.__name__, positional, given, [p.name for p in parameters], None)
                refuse_missing(cls.__name__, given, parameters, {})
                raise


class RoutingSettings(msgspec.Struct, metaclass=_NamedFields, frozen=True, kw_only=True):
    """Settings that users make. A field that does not exist is refused with the one that was probably meant."""


class TokenPrice(RoutingSettings, frozen=True, kw_only=True):
    """What a provider asks for a million tokens, in any currency."""

    input: float = 0.0
    output: float = 0.0
    cached_input: float | None = None
    """Of prompt tokens that the provider had in its cache; None is the same as for others."""

    def __post_init__(self) -> None:
        for name in ("input", "output", "cached_input"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigError(f"The {name} of a TokenPrice must not be below 0, and is {value}.")

    def of(self, usage: Usage) -> float:
        cached = self.input if self.cached_input is None else self.cached_input
        fresh = usage.input - usage.cached
        return (fresh * self.input + usage.cached * cached + usage.output * self.output) / 1e6


class SpendingLimits(RoutingSettings, frozen=True, kw_only=True):
    """How much may be asked of a provider; None is no limit."""

    calls: int | None = None
    """Requests of one rollout."""
    tokens: int | None = None
    """Tokens of one rollout, prompts and answers."""
    cost: float | None = None
    """Cost of one rollout."""
    run_calls: int | None = None
    """Requests of all rollouts."""
    run_tokens: int | None = None
    """Tokens of all rollouts."""
    run_cost: float | None = None
    """Cost of all rollouts."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"The limit {name} of a provider must be above 0, and is {value}.")

    def reached(self, spent: Spent, *, run: bool) -> str | None:
        """The limit that has been reached, with its value and what is used; None while none is."""
        for name, used in (("calls", spent.calls), ("tokens", spent.tokens), ("cost", spent.cost)):
            limit = getattr(self, f"run_{name}" if run else name)
            if limit is not None and used >= limit:
                return f"{'run_' if run else ''}{name}={limit:g}, and {used:.6g} are used"
        return None

    def leave_enough_for(self, expected: Spent) -> bool:
        """Whether this much stays within the limits of tokens and cost of one rollout."""
        given = {name: getattr(self, name) for name in ("tokens", "cost")}
        return all(limit is None or getattr(expected, name) <= limit for name, limit in given.items())


class Account:
    """What the calls of one provider have used, and whether there may be more."""

    def __init__(
        self, alias: str, store: LightningStore, price: TokenPrice | None, limits: SpendingLimits, earlier: Spent
    ) -> None:
        self._alias = alias
        self._store = store
        self._price = price
        self._limits = limits
        self.counts_tokens = price is not None or limits.tokens is not None or limits.run_tokens is not None
        """Whether anything depends on how many tokens a call has."""
        self.total = earlier
        self._open = Reservations(limits.run_tokens, limits.run_cost)
        """What calls that have no answer yet are expected to use."""
        self._ended = asyncio.Event()
        """Set when one of them has ended."""
        self._longest = 0
        """Tokens of an answer."""

    async def admit(self, live: LiveAttempt, request: Mapping[str, Any], size: int) -> Spent:
        """Count one more call of an attempt, whose body has `size` bytes; what it may use, which `release` gives back.

        Waits while calls that are under way may use what is left. Raises `Refusal`, naming the limit, where there may
        be no more.
        """
        if self._alias not in live.spent:
            stored = await self._stored(live)
            live.spent.setdefault(self._alias, stored)
        usage = Usage.expected(request, size, self._longest or _ANSWER_TOKENS)
        expected = Spent(calls=1, tokens=usage.tokens, cost=0.0 if self._price is None else self._price.of(usage))
        self._refuse_beyond(live)
        while not self._leaves_enough(live, expected):
            self._ended.clear()
            await self._ended.wait()
            self._refuse_beyond(live)
        self._add(live, Spent(calls=1))
        self._open.hold(live.key, expected, self.total)
        return expected

    def release(self, live: LiveAttempt, expected: Spent) -> None:
        """An admitted call has ended, and what it used has been charged."""
        self._open.release(live.key, expected)
        self._ended.set()

    def _refuse_beyond(self, live: LiveAttempt) -> None:
        own = self._limits.reached(live.spent[self._alias], run=False)
        if own is not None:
            why = f"This rollout has reached the limit of the model '{self._alias}': {own}"
            live.mark_limited(f"{why}.")
            raise Refusal(f"{why}. End the rollout with what there is.", code="provider_limit_exceeded", param="model")
        common = self._limits.reached(self.total, run=True)
        if common is not None:
            why = f"The limit of the model '{self._alias}' for all rollouts together is reached: {common}."
            live.mark_refused_by_provider(why)
            raise Refusal(why, code="provider_limit_exceeded", param="model")

    def _leaves_enough(self, live: LiveAttempt, expected: Spent) -> bool:
        """Whether a call fits beside those that are under way. One alone always does: what it will use is not known."""
        own = self._open.expected_of(live.key)
        if own is not None and not self._limits.leave_enough_for(live.spent[self._alias] + own + expected):
            return False
        return self._open.fits(live.key, expected, self.total)

    def charge(self, live: LiveAttempt, usage: Usage) -> Attributes:
        """Count what a call has used; the attributes that its span gets."""
        cost = None if self._price is None else self._price.of(usage)
        self._longest = max(self._longest, usage.output)
        self._add(live, Spent(tokens=usage.tokens, cost=cost or 0.0))
        counted = {"gen_ai.usage.input_tokens": usage.input, "gen_ai.usage.output_tokens": usage.output}
        return {
            **(counted if usage.tokens else {}),
            **({} if cost is None else {COST: cost}),
            **({ESTIMATED: True} if usage.estimated else {}),
        }

    def _add(self, live: LiveAttempt, more: Spent) -> None:
        live.spent[self._alias] = live.spent.get(self._alias, Spent()) + more
        self.total += more

    async def _stored(self, live: LiveAttempt) -> Spent:
        """What an earlier gateway has let the attempt use."""
        limits = self._limits
        if limits.calls is None and limits.tokens is None and limits.cost is None:
            return Spent()
        names = [f"{operation} {self._alias}" for operation in (CHAT, EMBEDDINGS)]
        found = [await self._store.query_spans(live.rollout_id, live.attempt_id, name=name) for name in names]
        ours = [span for spans in found for span in spans if "agentlightning.trained" in span.attributes]
        return sum(map(Spent.of_span, ours), Spent())


_SHARE = 2
"""What is left is divided by this for the most that counts for one attempt."""
_WITHOUT_LIMIT = 2**62


class Reservations:
    """What each attempt's open calls are expected to use, and how much of it counts. A limit may be None."""

    def __init__(self, tokens: int | None, cost: float | None) -> None:
        self._most = Spent(tokens=_WITHOUT_LIMIT if tokens is None else tokens, cost=inf if cost is None else cost)
        self._open: dict[Key, Spent] = {}
        self._held: dict[Key, Spent] = {}
        self._together = Spent()
        self._beyond: Key | None = None
        """The attempt that asks for more than counts for it."""

    def expected_of(self, attempt: Key) -> Spent | None:
        """What the attempt's open calls are expected to use."""
        return self._open.get(attempt)

    def fits(self, attempt: Key, expected: Spent, total: Spent) -> bool:
        """Whether one more call fits beside the open ones. `total`: what has been used. One call alone always does:
        what it will use is not known.
        """
        if not self._open:
            return True
        own, share = self._open.get(attempt, Spent()) + expected, self._share(total)
        if self._beyond not in (None, attempt) and not _within(own, share):
            return False
        used = total + self._together - self._held.get(attempt, Spent())
        if _within(used + own, self._most):
            return True
        return attempt not in self._open and _within(used + _lesser(expected, share), self._most)

    def hold(self, attempt: Key, expected: Spent, total: Spent) -> None:
        """A call begins."""
        own = self._open[attempt] = self._open.get(attempt, Spent()) + expected
        before = self._held.get(attempt, Spent())
        counts = _lesser(own, self._share(total))
        held = Spent(calls=own.calls, tokens=max(before.tokens, counts.tokens), cost=max(before.cost, counts.cost))
        self._held[attempt] = held
        self._together += held - before
        if not _within(own, held):
            self._beyond = attempt

    def release(self, attempt: Key, expected: Spent) -> None:
        """A call has ended; what it used is part of the total from now on."""
        own, before = self._open.pop(attempt) - expected, self._held.pop(attempt)
        if own.calls:
            self._open[attempt], self._held[attempt] = own, _lesser(own, before)
        self._together = self._together - before + self._held.get(attempt, Spent()) if self._open else Spent()
        if self._beyond == attempt and (not own.calls or _within(own, self._held[attempt])):
            self._beyond = None

    def _share(self, total: Spent) -> Spent:
        left = self._most - total
        return Spent(tokens=max(0, left.tokens // _SHARE), cost=max(0.0, left.cost / _SHARE))


def _within(amount: Spent, most: Spent) -> bool:
    return amount.tokens <= most.tokens and amount.cost <= most.cost


def _lesser(one: Spent, other: Spent) -> Spent:
    return Spent(calls=one.calls, tokens=min(one.tokens, other.tokens), cost=min(one.cost, other.cost))
