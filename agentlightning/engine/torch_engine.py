"""The embedded engine: continuous batching over an unmodified Hugging Face forward. Synchronous; one thread calls it.

Requests join and leave at every `step`. A step admits waiting prompts, computes those of their tokens that no slot of
the KV cache holds yet (prefill), then samples one token for every request whose context is computed (decode). Requests
that decode sit in the lowest slots, so the cache is read as one view; a few idle slots between them are computed along
and ignored, more are swapped away.

It is not a server: no threads, no sockets, no clock. The model process drives it.

Shape letters: B requests, V vocabulary.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agentlightning.engine.base import Chunk, EngineInfo
from agentlightning.engine.contexts import make_contexts
from agentlightning.engine.events import Ended, Event, Failed, Part, Request
from agentlightning.engine.grammar import Grammars
from agentlightning.engine.limits import check_bias, check_end_ids, check_engine, check_params, check_prompt
from agentlightning.engine.queue import Queue
from agentlightning.engine.room import Room
from agentlightning.engine.running import Columns, Counters, Running, sampled, shift_of
from agentlightning.engine.sampler import Draw, RowSettings, draw
from agentlightning.engine.slot_model import SlotModel
from agentlightning.engine.slots import Placement, Slots
from agentlightning.engine.stop_strings import StopStrings
from agentlightning.errors import EngineError

DEFAULT_CONTEXT = 4096
"""Longest context in tokens where neither the caller nor the model asks for less."""
PREFILL_COST = 0.25
"""What a prefill costs however short it is, in steps; measured best on small models between 0.1 and 0.5."""

KEPT_FREE = 8
"""One of so many places is kept from owners who hold many."""
_PIECE_FLOPS = 2e10
"""About a quarter of a second of one core."""
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
        version: int = 0,
        max_context: int | None = None,
        max_concurrency: int = 64,
        kv_budget_bytes: int = 2 << 30,
        prefill_tokens: int = 2048,
        seed: int | None = None,
    ) -> None:
        """`kv_budget_bytes` bounds the KV cache; its memory is taken as it is used. `prefill_tokens` bounds the prompt
        tokens computed per step, so that long prompts do not hold up requests that are decoding. `seed` is for requests
        that bring none.

        Raises `ModelError` for a model it cannot sample from, `ConfigError` for a budget too small.
        """
        model.eval()
        # Not every configuration names a longest position; a model without one has no limit of its own.
        own_limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
        self.max_context = min(DEFAULT_CONTEXT if max_context is None else max_context, own_limit)
        check_engine(self.max_context, max_concurrency, prefill_tokens)
        self.contexts = make_contexts(model, self.max_context, kv_budget_bytes, max_concurrency)
        slots = self.contexts.slots
        self.max_concurrency = min(max_concurrency, slots)
        self.version = version
        self.eos_ids = eos_ids
        self.counters = Counters()
        self._model = self.contexts.model
        self.vocab_size = self.contexts.vocab_size
        check_end_ids(eos_ids, self.vocab_size)
        self._prefill_tokens = prefill_tokens
        self._piece_tokens = min(_piece_tokens(model), prefill_tokens)
        self._queue = Queue(Grammars(tokenizer, self.vocab_size, eos_ids))
        self._running: dict[int, Running] = {}
        self._by_slot: list[Running | None] = [None] * slots
        self._slots = Slots(slots, self._model.capacity, cuts=self.contexts.cuts, reuses=self.contexts.continues)
        self._memory: Room | None = None
        if self.contexts.budget is not None and isinstance(self._model, SlotModel):
            self._memory = Room(self._model.cache, self._slots, self.contexts.budget)
        self._columns = Columns.of(slots)
        self._logprobs = np.zeros(self._slots.tokens.shape, dtype=np.float32)
        self._plain_logprobs = np.zeros(self._slots.tokens.shape, dtype=np.float32)
        self._held = 0
        self._random = np.random.default_rng(seed)
        self._stop_strings = StopStrings(tokenizer)
        self._is_eos = np.zeros(self.vocab_size, dtype=np.bool_)
        self._is_eos[list(eos_ids)] = True
        self._events: list[Event] = []

    def info(self, model: str) -> EngineInfo:
        """What a client needs to know; `model` is where its tokenizer is."""
        return EngineInfo(
            model=model,
            max_context=self.max_context,
            max_concurrency=self.max_concurrency,
            vocab_size=self.vocab_size,
            eos_ids=self.eos_ids,
            version=self.version,
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

    def submit(self, request: Request) -> None:
        """Queue a request. Raises `ModelError` or `ConfigError` if it can never be sampled."""
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

    def abort_all(self) -> list[int]:
        """Drop every request and everything cached; returns the requests' ids. For the state after a failed step."""
        ids = [*self._running, *self._queue]
        for request_id in ids:
            self.abort(request_id)
        self._forget_contexts()
        return ids

    def weights_changed(self, version: int) -> list[Event]:
        """The model has other weights now: nothing computed with the old ones is used again.

        Requests that are running go on under the new weights, their contexts computed again; what they sampled so far
        comes out at once, under the old version. A caller who wants each response from one version lets them finish
        first, with `step(admit=False)`.
        """
        parts = [self._part(running) for running in self._running.values()]
        self.version = version
        self._forget_contexts()
        return [part for part in parts if part is not None]

    def _oldest_first(self) -> list[int]:
        """The slots of running requests, in the order in which they began."""
        return [running.slot for running in self._running.values()]

    def _part(self, running: Running) -> Event | None:
        """What a request sampled and did not give out yet."""
        chunk = self._take(running, None, None)
        return Part(request_id=running.request.request_id, chunk=chunk) if len(chunk.ids) else None

    def reseed(self, seed: int) -> None:
        """Go on as a fresh engine with this seed would: nothing cached, and the same draws for the same requests."""
        self._random = np.random.default_rng(seed)
        self._forget_contexts()

    def step(self, *, admit: bool = True) -> list[Event]:
        """Compute the next token of every running request. With `admit=False` no waiting request is started."""
        idle = not self._running and not len(self._queue)
        self._events = list(self._queue.look_at_grammars(_GRAMMAR_WAIT if idle else 0.0))
        with torch.inference_mode():
            if self._memory is not None:
                self._memory.unpark(self._oldest_first())
            if admit:
                self._admit()
            self._prefill()
            self._decode()
        return self._events

    def _admit(self) -> None:
        """Start waiting requests, fairly among their owners, as long as there is room.

        One whose prefix is being computed by another right now is passed over until that is done.
        """
        if not len(self._queue) or self._slots.parked.any():
            return
        self._charge()
        if not self._worth_admitting():
            return
        passed_over: list[Request] = []
        while len(passed_over) < self.max_concurrency:
            request = self._queue.pop(*self._room())
            if request is None:
                break
            placement = self._slots.place(request.prompt_ids)
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

    def _room(self) -> tuple[int, int]:
        """How many more requests may start: of anyone, and of owners of whom none is running.

        The second is more when one owner holds many: a few places are beyond their reach, so that nobody waits for the
        end of another's long responses.
        """
        running = len(self._running)
        kept_free = max(1, self.max_concurrency // KEPT_FREE)
        if max(self._queue.running.values(), default=0) <= kept_free:
            room = self.max_concurrency - running
            return room, room
        most = min(self.max_concurrency + kept_free, self._slots.count)
        return most - kept_free - running, most - running

    def _charge(self) -> None:
        """Charge owners for what was sampled since the last time."""
        for running in self._running.values():
            sampled = int(self._slots.length[running.slot]) - len(running.request.prompt_ids)
            self._queue.charge(running.request, sampled - running.charged)
            running.charged = sampled

    def _worth_admitting(self) -> bool:
        """Whether waiting requests should start now rather than be joined by others.

        A prefill costs part of a step, however few tokens it computes; a request held back for a step costs its share
        of that step. So they are held until the second sum reaches the first; not where one owner holds many places.
        """
        room, room_for_new = self._room()
        self._held += min(len(self._queue), max(room, room_for_new))
        if self._held < self.running * PREFILL_COST and room == room_for_new:
            return False
        self._held = 0
        return True

    def _start(self, request: Request, placement: Placement) -> None:
        params, slot, prompt = request.params, placement.slot, request.prompt_ids
        if placement.source != slot:
            self._model.cache.copy(placement.source, slot, placement.reused)
        self._slots.occupy(placement, prompt)
        random = None if params.seed is None else np.random.Generator(np.random.PCG64(params.seed & (2**64 - 1)))
        running = Running(request, slot, placement.reused, random, self._queue.take_matcher(request.request_id))
        self._running[request.request_id] = self._by_slot[slot] = running
        limit = self.max_context if params.max_tokens is None else len(prompt) + params.max_tokens
        watched = request.stream or bool(params.stop or params.stop_token_ids or params.top_logprobs or params.grammar)
        watched |= params.keeps
        self._columns.set(slot, params, min(limit, self.max_context), watched)
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
            count = min(missing, budget) if self.contexts.continues else missing * (budget > 0)
            if count > 1:
                work.append((count, running.slot))
                budget -= count
        work.sort(reverse=True)
        while work:
            longest = work[0][0]
            # Rows of very different lengths do not go into one pass: it would compute mostly padding.
            batch = [slot for count, slot in work if 2 * count + 32 >= longest]
            counts = [count for count, _ in work[: len(batch)]]
            del work[: len(batch)]
            self._prefill_batch(np.array(batch), np.array(counts))

    def _prefill_batch(self, rows: np.ndarray, counts: np.ndarray) -> None:
        starts = self._slots.computed[rows]
        ends = starts + counts
        tokens = [self._slots.tokens[r, s:e] for r, s, e in zip(rows, starts, ends, strict=True)]
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
        span = int(rows[-1]) + 1
        positions = self._slots.computed[:span].copy()
        ids = self._slots.tokens[np.arange(span), positions]
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
        allowed = self._allowed(rows)
        drawn = draw(logits_BV, settings, self._uniform(rows), allowed, self._shifts(rows), columns.keeps[rows])
        at = (rows, self._slots.length[rows])
        self._slots.tokens[at] = drawn.ids
        self._logprobs[at] = drawn.logprobs
        self._plain_logprobs[at] = drawn.plain_logprobs
        self._slots.length[rows] += 1
        self.counters.sampled += len(rows)
        is_over = self._is_eos[drawn.ids] | (self._slots.length[rows] >= columns.limit[rows])
        is_wrong = ~np.isfinite(drawn.plain_logprobs)
        streamed: list[int] = []
        for index in np.flatnonzero(is_over | is_wrong | columns.watched[rows]).tolist():
            running = self._by_slot[rows[index]]
            assert running is not None, rows[index]
            if is_wrong[index]:
                self._fail(running, _DIVERGED)
            elif running.matcher is not None and index not in allowed:
                self._fail(running, _TOO_COMPLEX)
            elif not self._look_at(running, drawn, index):
                streamed.append(index)
        self._give_out(rows, streamed, drawn)

    def _uniform(self, rows: np.ndarray) -> np.ndarray:
        """One number per row, from the request's own generator if it brought a seed."""
        numbers = self._random.random(len(rows))
        for index, slot in enumerate(rows.tolist()):
            running = self._by_slot[slot]
            if running is not None and running.random is not None:
                numbers[index] = running.random.random()
        return numbers

    def _allowed(self, rows: np.ndarray) -> dict[int, torch.Tensor]:
        """The tokens that the grammars of these slots' requests allow next, bool [V] by row."""
        allowed: dict[int, torch.Tensor] = {}
        for index in np.flatnonzero(self._columns.constrained[rows]).tolist():
            running = self._by_slot[rows[index]]
            mask = None if running is None or running.matcher is None else running.matcher.allowed()
            if mask is not None:
                allowed[index] = mask
        return allowed

    def _shifts(self, rows: np.ndarray) -> dict[int, torch.Tensor]:
        """What is added to the logits of these slots' requests, [V] by row."""
        shifts: dict[int, torch.Tensor] = {}
        for index in np.flatnonzero(self._columns.shifted[rows]).tolist():
            slot = int(rows[index])
            if (running := self._by_slot[slot]) is not None:
                response = self._slots.tokens[slot, len(running.request.prompt_ids) : self._slots.length[slot]]
                shifts[index] = shift_of(running.request.params, response, self.vocab_size)
        return shifts

    def _look_at(self, running: Running, drawn: Draw, index: int) -> bool:
        """Note a request's newest token; end the request if that token ends it. Whether there is nothing to stream."""
        params, slot = running.request.params, running.slot
        running.note(drawn, index, self.vocab_size)
        token, length = int(drawn.ids[index]), int(self._slots.length[slot])
        if running.matcher is not None:
            running.matcher.take(token)
        reason = stop_string = None
        if self._is_eos[token] or token in params.stop_token_ids:
            reason = "stop"
        elif params.stop:
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
            version=self.version,
            top_ids=top_ids,
            top_logprobs=top_logprobs,
            kept=kept,
            finish_reason=reason,
            stop_string=stop_string,
            cached_tokens=running.cached,
        )

    def _give_out(self, rows: np.ndarray, streamed: list[int], drawn: Draw) -> None:
        """The newest token of streaming requests: together in one event, those of which more was asked in one each."""
        together: list[int] = []
        ids: list[int] = []
        for index in streamed:
            running = self._by_slot[rows[index]]
            assert running is not None, rows[index]
            running.emitted += 1
            if running.top or running.kept:
                one = [running.request.request_id]
                self._events.append(sampled(one, drawn, [index], self.version, *running.take_noted()))
            else:
                together.append(index)
                ids.append(running.request.request_id)
        if together:
            self._events.append(sampled(ids, drawn, together, self.version))

    def _fail(self, running: Running, message: str) -> None:
        slot = running.slot
        self._leave(running)
        self._slots.forget(slot)
        self._model.cache.clear(slot)
        if self._memory is not None:
            self._memory.forget(slot)
        self._events.append(Failed(request_id=running.request.request_id, message=message))

    def _leave(self, running: Running) -> None:
        """Take a request out of its slot, which keeps the computed tokens for reuse."""
        del self._running[running.request.request_id]
        self._queue.leave(running.request)
        self._by_slot[running.slot] = None
        self._slots.release(running.slot)

    def _forget_contexts(self) -> None:
        for slot, running in enumerate(self._by_slot):
            if running is None:
                self._slots.forget(slot)
            else:
                self._slots.computed[slot] = 0


def _piece_tokens(model: PreTrainedModel) -> int:
    """Prompt tokens that are computed beside decoding: a piece that takes a CPU about as long as a few steps."""
    if model.device.type != "cpu":
        return sys.maxsize
    return max(int(_PIECE_FLOPS / (2 * sum(p.numel() for p in model.parameters()))), 64)
