"""A session: the tree of message histories that one attempt was served, with their exact tokens.

The invariant: a request that extends a known history gets the tokens of that history unchanged, followed by the tokens
of its new messages. Any other request is rendered anew, shares the longest prefix of known tokens, and gets a cause for
why it diverged, as far as its messages show one.

Two trees, both grown only: *entries* arrange messages (which request extends which history), *pieces* arrange tokens
(which tokens precede which). A *turn* ties a served call to both. Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from types import MappingProxyType
from typing import Any

from agentlightning.gateway.history.memory import Memory, SessionBudget, Shared
from agentlightning.gateway.history.tree import (
    Entry,
    MessageKeys,
    Piece,
    Prompt,
    Turn,
    Walk,
    begins_with,
    common_length,
    digest,
    path_ids,
    similar_key,
    turn_at,
    walk_to,
)
from agentlightning.rendering import Rendering
from agentlightning.rendering.messages import Message, Tool, with_tool_names
from agentlightning.types.arrays import Float32Array, Int32Array, np
from agentlightning.types.call import Call, Divergence, Segment, SegmentSource, VersionRun

NO_ARGUMENTS: Mapping[str, Any] = MappingProxyType({})


@dataclass(slots=True, frozen=True)
class SessionRequest:
    """A request as the session sees it."""

    messages: Sequence[Message]
    tools: Sequence[Tool] | None
    walk: Walk
    known: Prompt | None
    """The prompt, if the same was asked before."""
    cause: str | None
    """Why it diverges, should it turn out to do so."""
    keys: MessageKeys
    arguments: Mapping[str, Any]
    """What the request gives to the chat template."""
    left: str | None = None
    """The call that it goes on from, if that has left the session's memory."""

    @property
    def goes_on(self) -> bool:
        """Whether all of its answers are those of known turns, one after another."""
        return self.walk.turn is not None and all(
            m["role"] != "assistant" for m in self.messages[self.walk.turn_depth :]
        )


@dataclass(slots=True, frozen=True, eq=False)
class Bridging:
    """What follows a turn, to be tokenised by `Rendering.bridge`."""

    after: Turn
    messages: Sequence[Message]
    tools: Sequence[Tool] | None
    arguments: Mapping[str, Any]

    @property
    def prompt_ids(self) -> Int32Array:
        return path_ids(self.after.prompt)

    @property
    def response_ids(self) -> Int32Array:
        return self.after.response.segment.ids

    @property
    def keep_reasoning(self) -> bool:
        return not self.after.reasoned

    def by(self, rendering: Rendering) -> Int32Array | None:
        return rendering.with_arguments(self.arguments).bridge(
            self.prompt_ids, self.response_ids, self.messages, self.tools, keep_reasoning=self.keep_reasoning
        )


@dataclass(slots=True, frozen=True, eq=False)
class Tokens:
    """A request's tokens: those after a turn, or all of them."""

    ids: Int32Array
    after: Turn | None


class Session:
    """See the module's docstring. `rerender=True` renders every prompt anew, as a plain server would. `budget` is what
    it may hold, `shared` what it may together with others.
    """

    def __init__(
        self,
        rendering: Rendering,
        *,
        rerender: bool = False,
        budget: SessionBudget | None = None,
        shared: Shared | None = None,
    ) -> None:
        self._rendering = rendering
        self._rerender = rerender
        self.memory = Memory(budget or SessionBudget(), shared)
        self._turns = 0

    def plan(self, messages: Sequence[Message], tools: Sequence[Tool] | None, segment_id: str) -> Prompt:
        """The prompt for a request. `segment_id` names the segment of tokens it adds, if it adds any."""
        question = self.look_up(messages, tools)
        return question.known or self.place(question, self.tokenise(question), segment_id)

    def look_up(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None,
        keys: MessageKeys | None = None,
        arguments: Mapping[str, Any] = NO_ARGUMENTS,
    ) -> SessionRequest:
        """What the session knows of a request, before anything is tokenised. `keys` of its messages, if made before;
        `arguments` that it gives to the chat template.
        """
        root = self._root(tools, arguments)
        keys = keys or MessageKeys(messages)
        walk = walk_to(root, keys)
        if walk.entry.depth == len(messages) and walk.entry.prompt is not None:
            return SessionRequest(messages, tools, walk, walk.entry.prompt, None, keys, arguments)
        left = self.memory.left(root.key, keys, walk.turn_depth)
        return SessionRequest(messages, tools, walk, None, self._cause(keys, root, walk), keys, arguments, left)

    def tokenise(self, question: SessionRequest) -> Tokens:
        """The tokens of a request. Changes nothing."""
        bridging = self.bridging(question)
        added = None if bridging is None else bridging.by(self._rendering)
        if bridging is not None and added is not None:
            return Tokens(added, bridging.after)
        rendering = self._rendering.with_arguments(question.arguments)
        return Tokens(rendering.render(with_tool_names(question.messages), question.tools), None)

    def bridging(self, question: SessionRequest) -> Bridging | None:
        """What of a request is to be tokenised after a turn; None if it is rendered anew."""
        turn, new = question.walk.turn, with_tool_names(question.messages)[question.walk.turn_depth :]
        if turn is None or not new or self._rerender or any(m["role"] == "assistant" for m in new):
            return None
        return Bridging(turn, new, question.tools, question.arguments)

    def place(self, question: SessionRequest, tokens: Tokens, segment_id: str) -> Prompt:
        """Add a request's tokens and messages to the trees."""
        start = question.walk.entry
        if start.gone or start.parent is None:  # it has left meanwhile, or is a root that none was placed below yet
            start = walk_to(self._root(question.tools, question.arguments, keep=True), question.keys).entry
        entry = self._insert(start, question.keys)
        if entry.prompt is None or tokens.after is not entry.prompt.parent:
            entry.prompt = self._prompt(question, tokens, entry, segment_id)
            # Otherwise the same request was placed while this one was tokenised.
        self.memory.hold(entry, entry.prompt.piece)
        self.memory.trim(entry)
        return entry.prompt

    def _prompt(self, question: SessionRequest, tokens: Tokens, entry: Entry, segment_id: str) -> Prompt:
        walk = question.walk
        if tokens.after is not None:
            response = tokens.after.response
            piece = self._grow(response, response.end, tokens.ids, segment_id)
            return Prompt(piece, entry, tokens.after, walk.turn_depth, None)
        turn = walk.turn
        if turn is not None and begins_with(tokens.ids, path_ids(turn.response)):
            piece, _ = self._share(tokens.ids, segment_id, turn.response)
            return Prompt(piece, entry, turn, walk.turn_depth, None)
        piece, common = self._share(tokens.ids, segment_id)
        return Prompt(piece, entry, None, 0, self._divergence(common, piece, walk.turn, question.cause))

    def begin(self, prompt: Prompt, ids: Int32Array, segment_id: str) -> Prompt:
        """The prompt with the first tokens of its answer behind it, which are not sampled."""
        piece, _ = self._share(np.concatenate([path_ids(prompt.piece), ids]), segment_id, prompt.piece)
        self.memory.hold(prompt.entry, piece)
        return replace(prompt, piece=piece)

    def plan_tokens(self, ids: Int32Array, segment_id: str) -> Prompt:
        """The prompt for a request that comes as tokens; it continues the last turn it begins with."""
        piece, common = self._share(ids, segment_id)
        turn = turn_at(piece, common)
        entry = Entry(parent=None, depth=0)
        self.memory.hold(entry, piece)
        self.memory.trim(entry)
        return Prompt(piece, entry, turn, 0, None)

    def restore(
        self,
        call: Call,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None,
        answer: Message,
        parent: Turn | None,
        arguments: Mapping[str, Any] = NO_ARGUMENTS,
    ) -> Turn:
        """Add a call that an earlier session served; its response's segment is stored, its prompt's is made anew."""
        call_id = call.info.call_id
        piece, _ = self._share(call.prompt_ids, f"{call_id}/restored")
        if piece.segment.segment_id == f"{call_id}/restored" and call.prompt_segment_id:
            piece.segment = replace(piece.segment, source=SegmentSource(call.info.attempt_id, call.prompt_segment_id))
        keys = MessageKeys(messages)
        known = walk_to(
            self._root(tools, arguments, keep=True), keys
        ).entry  # as it was then, though the client left reasoning out
        prompt = Prompt(piece, self._insert(known, keys), parent, 0, None)
        self.memory.hold(prompt.entry, piece)
        turn = self.commit(
            prompt,
            answer,
            call_id,
            segment_id=f"{call_id}/r",
            ids=call.response_ids,
            logprobs=call.logprobs,
            plain_logprobs=call.plain_logprobs,
            versions=call.versions,
            kept=call.kept,
            complete=call.info.error is None,
        )
        turn.response.recorded = True
        return turn

    def has_unknown_answer(self, messages: Sequence[Message]) -> bool:
        """Whether a request holds an answer that this session has never seen."""
        return any(m["role"] == "assistant" and similar_key(m) not in self.memory.seen for m in messages)

    def commit(
        self,
        prompt: Prompt,
        message: Message,
        call_id: str,
        *,
        segment_id: str,
        ids: Int32Array,
        logprobs: Float32Array,
        plain_logprobs: Float32Array,
        versions: tuple[VersionRun, ...],
        kept: Int32Array | None = None,
        complete: bool = True,
    ) -> Turn:
        """Add a response to the prompt. A later request may extend it if it is `complete`."""
        piece = prompt.piece
        parent = piece.segment
        segment = Segment(segment_id, parent.segment_id, len(parent.ids), ids, logprobs, plain_logprobs, versions, kept)
        response = self._attach(segment, piece, piece.end)
        reasoning = message.get("reasoning_content")
        reasoned = reasoning is not None or (prompt.parent is not None and prompt.parent.reasoned)
        self._turns += 1
        turn = Turn(call_id, self._turns, piece, response, reasoned)
        response.turn = turn
        if piece.turn is None:
            piece.turn = turn
        entry = prompt.entry
        if complete:
            entry = self._insert(entry, MessageKeys([message]), depth=0)
            entry.turns = [*entry.turns, turn]
        self.memory.hold(entry, piece, response)
        if prompt.entry.gone:  # it left while this was sampled; who goes on from it has all of it read back
            self.memory.leave(entry)
        self.memory.trim(entry)
        return turn

    # ---- messages --------------------------------------------------------------------------------------------------

    def _root(self, tools: Sequence[Tool] | None, arguments: Mapping[str, Any], *, keep: bool = False) -> Entry:
        """Where the histories with these tools and arguments begin; a new one stays if it is to be kept."""
        loose = digest(list(tools) if tools else None)
        key = digest((loose.hex(), sorted(arguments.items()))) if arguments else loose
        root = self.memory.roots.get(key) or Entry(parent=None, depth=0, key=key, loose=loose)
        return self.memory.roots.setdefault(key, root) if keep else root

    def _insert(self, entry: Entry, keys: MessageKeys, depth: int | None = None) -> Entry:
        """The entry of the last of the messages, of which those before `depth` are `entry` and its parents."""
        messages = keys.messages
        for index in range(entry.depth if depth is None else depth, len(messages)):
            message, key = messages[index], keys.exact(index)
            reasoning = message.get("reasoning_content")
            child = next((e for e in entry.children.get(key, ()) if e.reasoning == reasoning), None)
            entry = child or self._new(entry, message, key, keys.similar(index))
        return entry

    def _new(self, parent: Entry, message: Message, key: bytes, loose: bytes) -> Entry:
        reasoning = message.get("reasoning_content")
        child = Entry(parent, parent.depth + 1, reasoning=reasoning, key=key, loose=loose)
        if not parent.children:
            parent.children, parent.similar = {}, {}
        parent.children.setdefault(key, []).append(child)
        parent.similar.setdefault(loose, []).append(child)
        if message["role"] == "system":
            child.text = message["content"]
            parent.systems = [*parent.systems, child]
        self.memory.add(child)
        return child

    def _cause(self, keys: MessageKeys, root: Entry, walk: Walk) -> str | None:
        return _cause_of(keys, root, self.memory.roots.values(), walk, self.memory.seen) if self._turns else None

    # ---- tokens ----------------------------------------------------------------------------------------------------

    def _share(self, ids: Int32Array, segment_id: str, within: Piece | None = None) -> tuple[Piece, int]:
        """Place `ids` on the longest known prefix; returns the last piece and how many tokens were known.

        With `within`, on the longest one that goes through that piece, of whose tokens `ids` hold all.
        """
        best: Piece | None = None
        common = 0
        stack = [(piece, 0) for piece in self.memory.pieces] if within is None else [(within, within.start)]
        while stack:
            piece, start = stack.pop()
            matched = start + common_length(piece.segment.ids, ids[start:])
            if matched > common or best is None:
                best, common = piece, matched
            first = piece.end if piece is within else 0
            stack.extend((child, child.start) for child in piece.children if first <= child.start <= matched)
        if best is None or common == 0:
            return self._attach(Segment(segment_id, None, 0, ids), None, 0), 0
        if common == len(ids) == best.end:
            return best, common
        return self._grow(best, common, ids[common:], segment_id), common

    def _grow(self, parent: Piece, at: int, ids: Int32Array, segment_id: str) -> Piece:
        return self._attach(Segment(segment_id, parent.segment.segment_id, at - parent.start, ids), parent, at)

    def _attach(self, segment: Segment, parent: Piece | None, start: int) -> Piece:
        piece = Piece(segment, parent, start)
        self.memory.attach(piece)
        return piece

    def _divergence(self, common: int, piece: Piece, turn: Turn | None, cause: str | None) -> Divergence | None:
        if cause is None:
            return None
        left = turn or (piece.parent.turn if piece.parent else None)
        if cause == "new_conversation" or left is None:
            return Divergence(common, 0, cause)
        return Divergence(common, max(0, min(left.response.end, piece.end) - common), cause)


_MOST_PROMPTS = 8
"""How many of the latest system prompts a new one is compared with."""


def _cause_of(keys: MessageKeys, root: Entry, roots: Collection[Entry], walk: Walk, seen: Collection[bytes]) -> str:
    """The cause, should the request turn out to diverge.

    root, roots: where histories with the request's tools and template arguments begin, and where all do.
    walk: how far its messages are known.
    seen: keys of all messages that the session has seen.
    """
    messages = keys.messages
    if any(m["role"] == "assistant" for m in messages[walk.turn_depth :]) and walk.turn is not None:
        return "history_edited"
    if walk.turn is not None:
        return "reasoning_stripped" if walk.turn.reasoned else "tokenizer_seam"
    others = [other for other in roots if other is not root and walk_to(other, keys).turn]
    if others:
        return "template_changed" if any(other.loose == root.loose for other in others) else "tools_changed"
    known = [keys.similar(i) in seen for i in range(len(messages))]
    answers = [k for k, m in zip(known, messages, strict=True) if m["role"] == "assistant"]
    if messages[0]["role"] == "system" and not known[0] and any(known[1:]):
        return "system_prompt_changed" if _is_edited(messages[0]["content"], roots) else "new_conversation"
    if messages[0]["role"] != "system" and any(walk_to(e, keys).turn for e in root.systems):
        return "system_prompt_changed"  # there was one
    if any(answers):
        return "history_edited" if _comes_after(known) else "compaction"
    if answers and walk.entry.depth and messages[walk.entry.depth - 1]["role"] != "system":
        return "history_edited"
    return "new_conversation"


def _is_edited(prompt: str, roots: Collection[Entry]) -> bool:
    """Whether a system prompt is a known one that was edited, and not another agent's: the prompt of an agent that
    writes a title, is a member of a team or took over says something else.
    """
    known = [entry.text for root in roots for entry in islice(reversed(root.systems), _MOST_PROMPTS)]
    return any(_alike(prompt, text) for text in known if text is not None)


def _alike(a: str, b: str) -> bool:
    """Whether one text is the other with a part changed, or with one put in. Agents of one program may share how their
    prompts end (the tools' rules, the folder): that alone does not count.
    """
    shorter, longer = sorted((len(a), len(b)))
    begin = _largest(shorter, lambda k: a[:k] == b[:k])
    both = begin + _largest(shorter - begin, lambda k: a[len(a) - k :] == b[len(b) - k :])
    return 2 * both >= longer or 2 * begin >= shorter or 10 * both >= 9 * shorter


def _largest(n: int, holds: Callable[[int], bool]) -> int:
    """The largest number up to n that passes a test; every smaller number passes it too."""
    low = 0
    while low < n:
        middle = (low + n + 1) // 2
        low, n = (middle, n) if holds(middle) else (low, middle - 1)
    return low


def _comes_after(known: Sequence[bool]) -> bool:
    """Whether what is unknown comes after what is known (an edit) rather than in its place (a compaction)."""
    first_unknown = known.index(False) if False in known else len(known)
    return not any(known[first_unknown:])
