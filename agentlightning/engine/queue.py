"""Requests that were submitted and have not begun: those whose grammar is being compiled, and the rest by owner.

Owners take turns by the tokens that were computed for them (Sheng et al., Fairness in Serving Large Language Models,
OSDI 2024, arXiv 2401.00588): next is the oldest request of the owner that got least. Who comes anew begins level with
the one who got least so far, so that waiting earns no credit. Plain bookkeeping, no tensors.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator

import msgspec

from agentlightning.engine.events import Failed, Request
from agentlightning.engine.grammar import Compiling, Grammars, Matcher
from agentlightning.errors import AgentLightningError


def owner_of(request: Request) -> str:
    """Whose turn a request takes; one without an owner is its own."""
    return request.params.owner or f"#{request.request_id}"


class Queue:
    """Waiting requests, and what each owner got. A request is in it from `add` to `pop` or `remove`."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._compiling: dict[int, tuple[Request, Compiling]] = {}
        self._matchers: dict[int, Matcher] = {}
        self._by_owner: dict[str, OrderedDict[int, Request]] = {}
        self._owner: dict[int, str] = {}
        self._served: dict[str, int] = {}
        self.running: Counter[str] = Counter()
        """How many requests of each owner are being computed."""

    def __len__(self) -> int:
        """Requests that could begin."""
        return len(self._owner)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._owner or request_id in self._compiling

    def __iter__(self) -> Iterator[int]:
        return iter([*self._owner, *self._compiling])

    @property
    def compiling(self) -> int:
        """Requests that wait for their grammar."""
        return len(self._compiling)

    def add(self, request: Request) -> None:
        """Queue a request. Raises what is wrong with its grammar, if that is known already."""
        if request.params.grammar is None:
            self._append(request)
            return
        compiling = self._grammars.begin(request.params.grammar, owner_of(request))
        # Requests with the same grammar hold one text: of a hundred choices each comes with a copy.
        params = msgspec.structs.replace(request.params, grammar=compiling.grammar)
        request = msgspec.structs.replace(request, params=params)
        self._compiling[request.request_id] = (request, compiling)
        self._look_at(request.request_id, 0.0)

    def look_at_grammars(self, wait: float = 0.0) -> list[Failed]:
        """Let those go on whose grammar is there, after so many seconds at most; those that cannot be sampled."""
        failed: list[Failed] = []
        for request_id in list(self._compiling):
            try:
                self._look_at(request_id, wait)
            except AgentLightningError as error:
                failed.append(Failed(request_id=request_id, message=str(error), error=type(error).__name__))
            wait = 0.0
        return failed

    def _look_at(self, request_id: int, wait: float) -> None:
        request, compiling = self._compiling.pop(request_id)
        matcher = compiling.matcher(wait)
        if matcher is None:
            self._compiling[request_id] = (request, compiling)
        else:
            self._matchers[request_id] = matcher
            self._append(request)

    def _append(self, request: Request) -> None:
        owner = owner_of(request)
        if owner not in self._served:
            self._served[owner] = min(self._served.values(), default=0)
        self._owner[request.request_id] = owner
        self._by_owner.setdefault(owner, OrderedDict())[request.request_id] = request

    def remove(self, request_id: int) -> None:
        """Forget a request, if it is here."""
        self._compiling.pop(request_id, None)
        self._matchers.pop(request_id, None)
        owner = self._owner.pop(request_id, None)
        if owner is not None:
            self._drop(owner, request_id)

    def _drop(self, owner: str, request_id: int) -> None:
        del self._by_owner[owner][request_id]
        if not self._by_owner[owner]:
            del self._by_owner[owner]
            self._forget_if_gone(owner)

    def pop(self, room: int, room_for_new: int) -> Request | None:
        """The next request, which counts as running from now on.

        With so much room for anyone, and so much for owners of whom nothing is running; None if nobody fits.
        """
        found = [o for o in self._by_owner if room > 0 or (room_for_new > 0 and not self.running[o])]
        if not found:
            return None
        owner = min(found, key=self._served.__getitem__)  # the first of equals came first
        request_id, request = next(iter(self._by_owner[owner].items()))
        self.running[owner] += 1
        del self._owner[request_id]
        self._drop(owner, request_id)
        return request

    def put_back(self, request: Request) -> None:
        """A popped request could not begin; it is its owner's next."""
        self._append(request)
        owner = owner_of(request)
        self._by_owner[owner].move_to_end(request.request_id, last=False)
        self._leave(owner)

    def take_matcher(self, request_id: int) -> Matcher | None:
        return self._matchers.pop(request_id, None)

    def charge(self, request: Request, tokens: int) -> None:
        """So many tokens were computed for a running request."""
        self._served[owner_of(request)] += tokens

    def leave(self, request: Request) -> None:
        """A running request is done."""
        self._leave(owner_of(request))

    def _leave(self, owner: str) -> None:
        self.running[owner] -= 1
        if not self.running[owner]:
            del self.running[owner]
        self._forget_if_gone(owner)

    def _forget_if_gone(self, owner: str) -> None:
        if owner not in self._by_owner and not self.running[owner]:
            self._served.pop(owner, None)
