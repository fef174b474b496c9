"""The embedded engine: continuous batching over an unmodified Hugging Face forward. Synchronous; one thread calls it.

Requests join and leave at every `step`. A step admits waiting prompts, computes those of their tokens that no slot of
the KV cache holds yet (prefill), then samples one token for every request whose context is computed (decode). Requests
that decode sit in the lowest slots, so the cache is read as one view; a few idle slots between them are computed along
and ignored, more are swapped away.

Several policies that are adapters on the model share all of it: queue, cache, and passes, of which each row is computed
by its own policy. Only contexts are never shared between policies.

It is not a server: no threads, no sockets, no clock. The model process drives it.

Shape letters: B requests, V vocabulary.
"""

from __future__ import annotations

import sys
from collections.abc import Collection

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agentlightning.engine.base import Chunk, EngineInfo
from agentlightning.engine.block_pool import BlockPool
from agentlightning.engine.contexts import cache_budget, make_contexts
from agentlightning.engine.events import POLICY, Ended, Event, Failed, PartialSample, Request
from agentlightning.engine.grammar import Grammars
from agentlightning.engine.limits import check_bias, check_end_ids, check_engine, check_params, check_prompt
from agentlightning.engine.policies import Adapters, Policies
from agentlightning.engine.queue import Admission, RequestQueue
from agentlightning.engine.running import (
    Columns,
    Running,
    StopStrings,
    TokenCounters,
    allowed_tokens,
    of_like_length,
    own_draws,
    piece_tokens,
    sampled,
    scored_tokens,
    shifts,
)
from agentlightning.engine.sampler import Draw, RowSettings, draw
from agentlightning.engine.slot_model import SlotModel
from agentlightning.engine.slots import NOBODY, SlotPlacement, Slots
from agentlightning.errors import AgentLightningError, ConfigError, EngineError

DEFAULT_CONTEXT = 4096
"""Longest context in tokens where neither the caller nor the model asks for less."""
_GRAMMAR_WAIT = 0.05
"""Seconds that a step waits for a grammar when there is nothing else to do."""

_DIVERGED = (
    "The model's log-probs are not finite (NaN or infinite): its weights have diverged. "
    "Lower the learning rate and start again from an earlier checkpoint."
)
_TOO_COMPLEX = "The response could not be held to its JSON schema any further: it is too complex. Simplify the schema."


class TorchEngine:
    """Samples from `model`, whose weights others may change between steps (and then call `weights_changed`)."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        eos_ids: tuple[int, ...],
        *,
        adapters: Adapters | None = None,
        version: int = 0,
        max_context: int | None = None,
        max_concurrency: int = 64,
        kv_budget_bytes: int | None = None,
        prefill_tokens: int = 2048,
        seed: int | None = None,
    ) -> None:
        """`adapters` are those of several policies; without, the model is the only one. `kv_budget_bytes` bounds the KV
        cache, whose memory is taken as it is used on a CPU; None: as much as `cache_budget` says. `prefill_tokens`
        bounds the prompt tokens computed per step, so that long prompts do not hold up requests that are decoding.
        `seed` is for requests that bring none.

        Raises `ModelError` for a model it cannot sample from, `ConfigError` for a budget too small.
        """
        model.eval()
        # Not every configuration names a longest position; a model without one has no limit of its own.
        own_limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
        self.max_context = min(DEFAULT_CONTEXT if max_context is None else max_context, own_limit)
        check_engine(self.max_context, max_concurrency, prefill_tokens)
        budget = cache_budget(model.device) if kv_budget_bytes is None else kv_budget_bytes
        self.contexts = make_contexts(model, self.max_context, budget, max_concurrency)
        slots = self.contexts.slots
        self.max_concurrency = min(max_concurrency, slots)
        self.policies = Policies(adapters, version, seed)
        self.policies.mixes = self.contexts.cuts
        self.eos_ids = eos_ids
        self.counters = TokenCounters()
        self._model = self.contexts.model
        if adapters is None and model.device.type == "cuda" and isinstance(self._model, SlotModel):
            self._model.record_graphs()
        self.vocab_size = self.contexts.vocab_size
        check_end_ids(eos_ids, self.vocab_size)
        self._prefill_tokens = prefill_tokens
        self._piece_tokens = min(piece_tokens(model), prefill_tokens)
        self._scored_tokens = scored_tokens(self.vocab_size)
        self._queue = RequestQueue(Grammars(tokenizer, self.vocab_size, eos_ids))
        self._admission = Admission(self._queue, self.max_concurrency, slots)
        self._running: dict[int, Running] = {}
        self._by_slot: list[Running | None] = [None] * slots
        self._slots = Slots(slots, self._model.capacity, cuts=self.contexts.cuts, reuses=self.contexts.continues)
        self._memory: BlockPool | None = None
        if self.contexts.budget is not None and isinstance(self._model, SlotModel):
            self._memory = BlockPool(self._model.cache, self._slots, self.contexts.budget)
        self._columns = Columns.of(slots)
        self._logprobs = np.zeros(self._slots.tokens.shape, dtype=np.float32)
        self._plain_logprobs = np.zeros(self._slots.tokens.shape, dtype=np.float32)
        self._stop_strings = StopStrings(tokenizer)
        self._is_eos = np.zeros(self.vocab_size, dtype=np.bool_)
        self._is_eos[list(eos_ids)] = True
        self._events: list[Event] = []

    def info(self, model: str, policy: str = POLICY) -> EngineInfo:
        """What a client of a policy needs to know; `model` is where its tokenizer is."""
        return EngineInfo(
            model=model,
            max_context=self.max_context,
            max_concurrency=self.max_concurrency,
            vocab_size=self.vocab_size,
            eos_ids=self.eos_ids,
            version=self.policies.versions[self.policies.find(policy)],
            scores_prompts=True,
        )

    @property
    def running(self) -> int:
        """Requests being computed."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests submitted and not yet admitted."""
        return len(self._queue) + self._queue.compiling

    @property
    def active(self) -> bool:
        """Whether a step has anything to do."""
        return bool(self._running or self.waiting)

    def load_of(self, policy: str) -> tuple[int, int]:
        """How many of a policy's requests are being computed, and how many wait."""
        running = sum(running.request.policy == policy for running in self._running.values())
        return running, sum(request.policy == policy for request in self._queue.requests())

    def submit(self, request: Request) -> None:
        """Queue a request. Raises `ModelError` or `ConfigError` if it can never be sampled."""
        self.policies.find(request.policy)
        check_params(request.params)
        check_prompt(request.prompt_ids, self.max_context, self.vocab_size)
        check_bias(request.params, self.vocab_size)
        if request.request_id in self._running or request.request_id in self._queue:
            raise EngineError(f"Request {request.request_id} is being sampled already; use another id.")
        self._queue.add(request)

    def abort(self, request_id: int) -> None:
        """Drop a request; nothing more comes out for it. An id that is not there (any more) is fine."""
        self._queue.remove(request_id)
        running = self._running.get(request_id)
        if running is not None:
            self._leave(running)

    def abort_all(self, policies: Collection[str] | None = None) -> list[int]:
        """Drop every request of these policies (None: of all) and what is cached for them; returns the requests' ids.
        For the state after a failed step."""
        names = self.policies.names if policies is None else policies
        requests = [*(running.request for running in self._running.values()), *self._queue.requests()]
        ids = [request.request_id for request in requests if request.policy in names]
        for request_id in ids:
            self.abort(request_id)
        self._forget_contexts(names)
        return ids

    def weights_changed(self, version: int, policy: str = POLICY) -> list[Event]:
        """A policy has other weights now: nothing of it that was computed with the old ones is used again.

        Its requests that are running go on under the new weights, their contexts computed again; what they sampled so
        far comes out at once, under the old version. A caller who wants each response from one version lets them finish
        first, with `step(admit=…)`, and has nothing computed for the policy from the change to this call (`held`).
        """
        parts = [self._part(running) for running in self._running.values() if running.request.policy == policy]
        self.policies.changed(policy, version)
        if isinstance(self._model, SlotModel) and self._model.graphs is not None:
            self._model.graphs.weights_changed()
        self._forget_contexts([policy])
        return [part for part in parts if part is not None]

    def _oldest_first(self) -> list[int]:
        """The slots of running requests, in the order in which they began."""
        return [running.slot for running in self._running.values()]

    def _part(self, running: Running) -> Event | None:
        """What a request sampled and did not give out yet."""
        chunk = self._take(running, None, None)
        return PartialSample(request_id=running.request.request_id, chunk=chunk) if len(chunk.ids) else None

    def add_policy(self, policy: str, version: int = 0) -> None:
        """Sample from one more of the adapters."""
        self.policies.add(policy, version)

    def remove_policy(self, policy: str) -> list[int]:
        """Sample from an adapter no more. Its requests are dropped; their ids."""
        dropped = self.abort_all([policy])
        self.policies.remove(policy)
        return dropped

    def reseed(self, seed: int, policy: str = POLICY) -> None:
        """Go on for a policy as a fresh engine with this seed would: nothing cached, the same draws for the same
        requests."""
        self.policies.reseed(policy, seed)
        self._forget_contexts([policy])

    def can_step(self, admitted: Collection[str], held: Collection[str] = ()) -> bool:
        """Whether a step would compute, or start, anything."""
        if self._queue.compiling or any(running.request.policy not in held for running in self._running.values()):
            return True
        waiting = self._queue.count([name for name in admitted if name not in held])
        return waiting > 0 and max(self._admission.places(self.running)) > 0

    def step(self, *, admit: bool | Collection[str] = True, held: Collection[str] = ()) -> list[Event]:
        """Compute the next token of every running request.

        Only waiting requests of the policies `admit` are started: True is all, False none. Nothing is computed for
        policies that are `held`, whose weights are in the middle of a change.
        """
        names = self.policies.names if admit is True else admit or ()
        admitted = [name for name in names if name not in held]
        self._hold(held)
        idle = not (self._slots.busy & ~self._slots.held).any() and not self._queue.count(admitted)
        self._events = list(self._queue.look_at_grammars(_GRAMMAR_WAIT if idle else 0.0))
        with torch.inference_mode():
            if self._memory is not None:
                self._memory.unpark(self._oldest_first())
            self._admit(admitted)
            self._prefill()
            self._decode()
        return self._events

    def _hold(self, held: Collection[str]) -> None:
        """Set the requests of these policies aside, and no others; what they have computed is void, so its memory is
        free for others."""
        if not held and not self._slots.held.any():
            return
        self._slots.held = self._slots.busy & self.policies.among(self._slots.policy, held)
        if self._memory is not None:
            for slot in np.flatnonzero(self._slots.held & ~self._slots.parked).tolist():
                self._memory.park(slot)

    def _admit(self, admitted: Collection[str]) -> None:
        """Start waiting requests of these policies, fairly among their owners, as long as there is room.

        One whose prefix is being computed by another right now is passed over until that is done.
        """
        waiting = self._queue.count(admitted)
        if not waiting or (self._slots.parked & ~self._slots.held).any():
            return
        self._charge()
        if not self._admission.is_worthwhile(waiting, self.running):
            return
        passed_over: list[Request] = []
        while len(passed_over) < self.max_concurrency:
            request = self._queue.pop(admitted, *self._admission.places(self.running))
            if request is None:
                break
            scored = request.params.prompt_logprobs is not None  # of tokens that are not computed nothing is known
            owner = NOBODY if scored else self.policies.find(request.policy)
            placement = self._slots.place(request.prompt_ids, owner)
            if placement is None:
                passed_over.append(request)
                continue
            if self._memory is not None:
                placement = self._memory.admit(placement, len(request.prompt_ids), len(self._running))
            if placement is None:
                passed_over.append(request)
                break
            self._start(request, placement)
        for request in reversed(passed_over):
            self._queue.put_back(request)

    def _charge(self) -> None:
        """Charge owners for what was sampled since the last time."""
        for running in self._running.values():
            sampled = int(self._slots.length[running.slot]) - len(running.request.prompt_ids)
            self._queue.charge(running.request, sampled - running.charged)
            running.charged = sampled

    def _start(self, request: Request, placement: SlotPlacement) -> None:
        params, slot, prompt = request.params, placement.slot, request.prompt_ids
        if placement.source != slot:
            self._model.cache.copy(placement.source, slot, placement.reused)
        self._slots.occupy(placement, prompt, self.policies.find(request.policy))
        running = Running.of(request, placement, self._queue.take_matcher(request.request_id))
        self._running[request.request_id] = self._by_slot[slot] = running
        limit = self.max_context if params.max_tokens is None else len(prompt) + params.max_tokens
        self._columns.set(slot, request, min(limit, self.max_context))
        self.counters.cached += placement.reused
        self._queue.charge(request, len(prompt) - placement.reused)

    def _prefill(self) -> None:
        """Compute prompts' missing tokens, as many as a step may; sample where a prompt is complete.

        While others decode, a step computes a piece that does not hold them up for long. Short prompts go first.
        """
        if not self._slots.unready().any():
            return
        decoding = len(self._slots.ready())
        budget = min(max(self._piece_tokens, 4 * decoding), self._prefill_tokens) if decoding else self._prefill_tokens
        work: list[tuple[int, int]] = []
        for running in sorted(self._running.values(), key=lambda r: self._slots.missing(r.slot)):
            missing = self._slots.missing(running.slot)
            scores = running.scored is not None and not running.scored.complete
            most = min(budget, self._scored_tokens) if scores else budget
            count = min(missing, most) if self.contexts.continues else missing * (budget > 0)
            if count > 1 and scores:
                self._score_pass(running, count)
            elif count > 1:
                work.append((count, running.slot))
            budget -= count if count > 1 else 0
        for batch, counts in of_like_length(work):
            for together in self.policies.passes(self._slots.policy[batch]):
                self._prefill_pass(batch[together], counts[together])

    def _score_pass(self, running: Running, count: int) -> None:
        """Compute a piece of a prompt whose own log-probs are wanted."""
        assert running.scored is not None, running
        slot = running.slot
        start = int(self._slots.computed[slot])
        with self.policies.computing(self._slots.policy[[slot]]):
            logits = self._model.score(self._slots.tokens[slot, start : start + count], slot, start)
        running.scored.take(logits, start)
        self._slots.computed[slot] += count
        self.counters.prefilled += count
        if not self._slots.missing(slot):
            self._sample(np.array([slot]), logits[-1:])

    def _prefill_pass(self, rows: np.ndarray, counts: np.ndarray) -> None:
        starts = self._slots.computed[rows]
        ends = starts + counts
        tokens = [self._slots.tokens[r, s:e] for r, s, e in zip(rows, starts, ends, strict=True)]
        with self.policies.computing(self._slots.policy[rows]):
            logits = self._model.prefill(tokens, rows, starts)
        self._slots.computed[rows] = ends
        self.counters.prefilled += int(counts.sum())
        complete = ends == self._slots.length[rows]
        if complete.all():
            self._sample(rows, logits)
        elif complete.any():
            self._sample(rows[complete], logits[torch.from_numpy(complete).to(logits.device)])

    def _decode(self) -> None:
        """One token for every request that only misses its last one."""
        rows = self._slots.ready()
        if self._memory is not None:
            rows = self._memory.grow(rows, self._oldest_first())
        if not len(rows):
            return
        rows = self._compact(rows)
        for together in self.policies.passes(self._slots.policy[rows]):
            self._decode_pass(rows[together])

    def _decode_pass(self, rows: np.ndarray) -> None:
        span = int(rows[-1]) + 1
        positions = self._slots.computed[:span].copy()
        ids = self._slots.tokens[np.arange(span), positions]
        policies = np.full(span, self._slots.policy[rows[0]])  # of idle slots any will do
        policies[rows] = self._slots.policy[rows]
        with self.policies.computing(policies):
            logits = self._model.decode(ids, positions, rows)
        self._slots.computed[rows] += 1
        self._sample(rows, logits)

    def _compact(self, rows: np.ndarray) -> np.ndarray:
        """Move the highest of these slots down until at most an eighth of those below them are idle."""
        allowed = len(rows) + len(rows) // 8
        while rows[-1] >= allowed:
            gap = int(np.flatnonzero(rows != np.arange(len(rows)))[0])
            self._swap(gap, int(rows[-1]))
            rows = np.insert(rows[:-1], gap, gap)
        return rows

    def _swap(self, a: int, b: int) -> None:
        known = int(self._slots.length[[a, b]].max())
        self._model.cache.swap(a, b, *self._slots.swap(a, b))
        if self._memory is not None:
            self._memory.swapped(a, b)
        self._columns.swap(a, b)
        for array in (self._logprobs, self._plain_logprobs):
            array[[a, b], :known] = array[[b, a], :known]
        self._by_slot[a], self._by_slot[b] = self._by_slot[b], self._by_slot[a]
        for slot in (a, b):
            running = self._by_slot[slot]
            if running is not None:
                running.slot = slot

    def _sample(self, rows: np.ndarray, logits_BV: torch.Tensor) -> None:
        """Draw the next token of these slots, write it down, and look at those requests where something happens."""
        columns = self._columns
        settings = RowSettings(*(c[rows] for c in (columns.temperature, columns.top_k, columns.top_p, columns.min_p)))
        chosen = [self._by_slot[slot] for slot in rows.tolist()]
        allowed = allowed_tokens(chosen, columns.constrained[rows])
        numbers = own_draws(chosen, self.policies.draws(self._slots.policy[rows]))
        moved = shifts(chosen, columns.shifted[rows], self._slots, self._is_eos)
        drawn = draw(logits_BV, settings, numbers, allowed, moved, columns.keeps[rows])
        at = (rows, self._slots.length[rows])
        self._slots.tokens[at] = drawn.ids
        self._logprobs[at] = drawn.logprobs
        self._plain_logprobs[at] = drawn.plain_logprobs
        self._slots.length[rows] += 1
        self.counters.sampled += len(rows)
        ended = self._is_eos[drawn.ids] & ~columns.ignores_eos[rows]
        is_over = ended | (self._slots.length[rows] >= columns.limit[rows])
        is_wrong = ~np.isfinite(drawn.plain_logprobs)
        streamed: list[int] = []
        for index in np.flatnonzero(is_over | is_wrong | columns.watched[rows]).tolist():
            running = chosen[index]
            assert running is not None, rows[index]
            if is_wrong[index]:
                self._fail(running, _DIVERGED)
            elif running.matcher is not None and index not in allowed:
                self._fail(running, _TOO_COMPLEX, ConfigError)  # which no other engine could follow either
            elif not self._look_at(running, drawn, index):
                streamed.append(index)
        self._give_out(rows, streamed, drawn)

    def _look_at(self, running: Running, drawn: Draw, index: int) -> bool:
        """Note a request's newest token; end the request if that token ends it. Whether there is nothing to stream."""
        params, slot = running.request.params, running.slot
        running.note(drawn, index, self.vocab_size)
        token, length = int(drawn.ids[index]), int(self._slots.length[slot])
        if running.matcher is not None:
            running.matcher.take(token)
        reason = stop_string = None
        if (self._is_eos[token] and not params.ignore_eos) or token in params.stop_token_ids:
            reason = "stop"
        elif params.stop and length - len(running.request.prompt_ids) >= params.min_tokens:
            response = self._slots.tokens[slot, len(running.request.prompt_ids) : length]
            stop_string = self._stop_strings.find(response, params.stop)
            reason = None if stop_string is None else "stop"
        if reason is None and length >= self._columns.limit[slot]:
            reason = "length"
        if reason is None:
            return not running.request.stream
        chunk = self._take(running, reason, stop_string)
        self._events.append(Ended(request_id=running.request.request_id, chunk=chunk))
        self._leave(running)
        return True

    def _take(self, running: Running, reason: str | None, stop_string: str | None) -> Chunk:
        """The tokens of a request that were not given out yet."""
        slot = running.slot
        start = len(running.request.prompt_ids) + running.emitted
        end = int(self._slots.length[slot])
        running.emitted += end - start
        top_ids, top_logprobs, kept = running.take_noted()
        return Chunk(
            ids=self._slots.tokens[slot, start:end].copy(),
            logprobs=self._logprobs[slot, start:end].copy(),
            plain_logprobs=self._plain_logprobs[slot, start:end].copy(),
            version=self._version(running),
            top_ids=top_ids,
            top_logprobs=top_logprobs,
            kept=kept,
            finish_reason=reason,
            stop_string=stop_string,
            cached_tokens=running.cached,
            prompt=running.scored.whole() if reason is not None and running.scored is not None else None,
        )

    def _give_out(self, rows: np.ndarray, streamed: list[int], drawn: Draw) -> None:
        """The newest token of streaming requests: together in one event, those of which more was asked in one each."""
        together: dict[int, tuple[list[int], list[int]]] = {}
        for index in streamed:
            running = self._by_slot[rows[index]]
            assert running is not None, rows[index]
            running.emitted += 1
            request_id, version = running.request.request_id, self._version(running)
            if running.top or running.kept:
                self._events.append(sampled([request_id], drawn, [index], version, *running.take_noted()))
            else:
                ids, indices = together.setdefault(version, ([], []))
                ids.append(request_id)
                indices.append(index)
        self._events += [sampled(ids, drawn, indices, version) for version, (ids, indices) in together.items()]

    def _version(self, running: Running) -> int:
        """Of the weights that a request is sampled from."""
        return self.policies.versions[self._slots.policy[running.slot]]

    def _fail(self, running: Running, message: str, error: type[AgentLightningError] = EngineError) -> None:
        slot = running.slot
        self._leave(running)
        self._slots.forget(slot)
        self._model.cache.clear(slot)
        if self._memory is not None:
            self._memory.forget(slot)
        self._events.append(Failed(request_id=running.request.request_id, message=message, error=error.__name__))

    def _leave(self, running: Running) -> None:
        """Take a request out of its slot, which keeps the computed tokens for reuse."""
        del self._running[running.request.request_id]
        self._queue.leave(running.request)
        self._by_slot[running.slot] = None
        self._slots.release(running.slot)

    def _forget_contexts(self, policies: Collection[str]) -> None:
        for slot in np.flatnonzero(self.policies.among(self._slots.policy, policies)).tolist():
            if self._by_slot[slot] is None:
                self._slots.forget(slot)
            else:
                self._slots.computed[slot] = 0
