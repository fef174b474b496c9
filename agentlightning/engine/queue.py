"""Requests that were submitted and have not begun, and when they begin. Plain bookkeeping, no tensors.

Owners take turns by the tokens that were computed for them (Sheng et al., Fairness in Serving Large Language Models,
OSDI 2024, arXiv 2401.00588): next is the oldest request of the owner that got least. An owner that comes anew begins
level with the one that got least so far, so that waiting earns no credit. Each policy counts its owners separately.
Requests whose grammar is being compiled wait apart from these turns. `Admission` says how many requests begin, and
whether they begin now or wait to be joined by others.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection

import msgspec

from agentlightning.engine.events import Failed, Request
from agentlightning.engine.grammar import Compiling, Grammars, Matcher
from agentlightning.errors import AgentLightningError

Owner = tuple[str, str]
"""A policy, and who sends requests to it."""


class RequestQueue:
    """Waiting requests, and what each owner got. A request is in it from `add` to `pop` or `remove`."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._compiling: dict[int, tuple[Request, Compiling]] = {}
        self._matchers: dict[int, Matcher] = {}
        self._by_owner: dict[Owner, OrderedDict[int, Request]] = {}
        self._owner: dict[int, Owner] = {}
        self._waiting: Counter[str] = Counter()
        self._served: dict[Owner, int] = {}
        self.running: Counter[Owner] = Counter()
        """How many requests of each owner are being computed."""

    def __len__(self) -> int:
        """Requests that could begin."""
        return len(self._owner)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._owner or request_id in self._compiling

    def requests(self) -> list[Request]:
        """All that wait, those whose grammar is being compiled included."""
        waiting = [request for requests in self._by_owner.values() for request in requests.values()]
        return waiting + [request for request, _ in self._compiling.values()]

    def count(self, policies: Collection[str]) -> int:
        """Requests of these policies that could begin."""
        return sum(self._waiting[policy] for policy in policies)

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
        owner = _account(request)
        if owner not in self._served:
            self._served[owner] = min(self._served.values(), default=0)
        self._owner[request.request_id] = owner
        self._waiting[request.policy] += 1
        self._by_owner.setdefault(owner, OrderedDict())[request.request_id] = request

    def remove(self, request_id: int) -> None:
        """Forget a request, if it is here."""
        self._compiling.pop(request_id, None)
        self._matchers.pop(request_id, None)
        owner = self._owner.pop(request_id, None)
        if owner is not None:
            self._drop(owner, request_id)

    def _drop(self, owner: Owner, request_id: int) -> None:
        del self._by_owner[owner][request_id]
        self._waiting[owner[0]] -= 1
        if not self._by_owner[owner]:
            del self._by_owner[owner]
            self._forget_if_gone(owner)

    def pop(self, policies: Collection[str], places: int, places_for_new: int) -> Request | None:
        """The next request of these policies, which counts as running from now on.

        With so much room for anyone, and so much for owners without a running request; None if nobody fits.
        """
        fits = [o for o in self._by_owner if places > 0 or (places_for_new > 0 and not self.running[o])]
        found = [owner for owner in fits if owner[0] in policies]
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
        owner = _account(request)
        self._by_owner[owner].move_to_end(request.request_id, last=False)
        self._leave(owner)

    def take_matcher(self, request_id: int) -> Matcher | None:
        return self._matchers.pop(request_id, None)

    def charge(self, request: Request, tokens: int) -> None:
        """So many tokens were computed for a running request."""
        self._served[_account(request)] += tokens

    def leave(self, request: Request) -> None:
        """A running request is done."""
        self._leave(_account(request))

    def _leave(self, owner: Owner) -> None:
        self.running[owner] -= 1
        if not self.running[owner]:
            del self.running[owner]
        self._forget_if_gone(owner)

    def _forget_if_gone(self, owner: Owner) -> None:
        if owner not in self._by_owner and not self.running[owner]:
            self._served.pop(owner, None)


_PREFILL_COST = 0.25
"""What a prefill costs in steps, however short it is; on small models values from 0.1 to 0.5 measured best."""
_KEPT_FREE = 8
"""One in so many places is kept from owners who hold many."""


class Admission:
    """Lets requests of a queue into `most` places, in so many slots."""

    def __init__(self, queue: RequestQueue, most: int, slots: int) -> None:
        self._queue = queue
        self._most = most
        self._slots = slots
        self._held_back = 0

    def places(self, running: int) -> tuple[int, int]:
        """How many more requests may start: of anyone, and of owners without a running request.

        The second is more when one owner holds many: a few places are beyond their reach, so that nobody waits for the
        end of another's long responses.
        """
        kept_free = max(1, self._most // _KEPT_FREE)
        if max(self._queue.running.values(), default=0) <= kept_free:
            return self._most - running, self._most - running
        most = min(self._most + kept_free, self._slots)
        return most - kept_free - running, most - running

    def is_worthwhile(self, waiting: int, running: int) -> bool:
        """Whether waiting requests should start now rather than be joined by others. Asked once per step.

        A prefill costs part of a step, however few tokens it computes; a request held back for a step costs its share
        of that step. So they are held until the second sum reaches the first; not where one owner holds many places.
        """
        places, places_for_new = self.places(running)
        self._held_back += min(waiting, max(places, places_for_new))
        if self._held_back < running * _PREFILL_COST and places == places_for_new:
            return False
        self._held_back = 0
        return True


def owner_of(request: Request) -> str:
    """Whose turn a request takes; a request without an owner is an owner by itself."""
    return request.params.owner or f"#{request.request_id}"


def _account(request: Request) -> Owner:
    return request.policy, owner_of(request)
