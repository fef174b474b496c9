"""The store against a model of a few dozen lines: any sequence of operations, with concurrent clients, leaves both in
the same state, and no status ever changes in a way that the tables forbid.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from agentlightning.errors import ConflictError
from agentlightning.store import (
    InMemoryLightningStore,
    LightningStore,
    LightningStoreClient,
    LightningStoreServer,
    PostgresLightningStore,
    SqliteLightningStore,
)
from agentlightning.types import (
    ATTEMPT_TRANSITIONS,
    FINISHED_ROLLOUT,
    ROLLOUT_TRANSITIONS,
    AttemptedRollout,
    AttemptStatus,
    Outcome,
    RolloutConfig,
    RolloutStatus,
)
from agentlightning.types.status import ROLLOUT_BY_HAND
from tests.store.builders import make_span

T = TypeVar("T")
R, A = RolloutStatus, AttemptStatus
CONFIGS = [
    RolloutConfig(),
    RolloutConfig(max_attempts=2, retry_condition=[A.FAILED]),
    RolloutConfig(max_attempts=3, retry_condition=[A.TIMEOUT, A.FAILED]),
]
Opener = Callable[[AsyncExitStack], Awaitable[LightningStore]]
"""Opens an empty store; the stack closes what was opened."""

ENDS = [A.SUCCEEDED, A.FAILED, A.TIMEOUT, A.UNRESPONSIVE, A.CANCELLED]


@dataclass
class Modelled:
    """What the model knows of a rollout."""

    config: RolloutConfig
    status: RolloutStatus = R.QUEUING
    attempts: dict[str, AttemptStatus] = field(default_factory=dict)
    failures: int = 0
    infra: int = 0
    spans: int = 0

    @property
    def latest(self) -> str:
        return list(self.attempts)[-1]

    def open(self) -> bool:
        return bool(self.attempts) and self.attempts[self.latest] in (A.PREPARING, A.RUNNING)

    def finish(self, attempt_id: str, status: AttemptStatus, outcome: Outcome | None) -> bool:
        """False where the store must refuse."""
        old = self.attempts[attempt_id]
        if old == status:
            return True
        if status not in ATTEMPT_TRANSITIONS[old] or attempt_id != self.latest:
            return False
        self.attempts[attempt_id] = status
        if self.status in FINISHED_ROLLOUT:
            return True
        new = self._verdict(status, outcome)
        if self.status is R.REQUEUING and new in (R.REQUEUING, R.FAILED):
            return True
        if new is R.REQUEUING and (status is A.UNRESPONSIVE or outcome is Outcome.INFRA_ERROR) and self.infra < 3:
            self.infra += 1
        elif new in (R.REQUEUING, R.FAILED):
            self.failures += 1
        self.status = new
        return True

    def _verdict(self, status: AttemptStatus, outcome: Outcome | None) -> RolloutStatus:
        if status in (A.SUCCEEDED, A.CANCELLED):
            return R(status.value)
        if (status is A.UNRESPONSIVE or outcome is Outcome.INFRA_ERROR) and self.infra < 3:
            return R.REQUEUING
        if status in self.config.retry_condition and self.failures + 1 < self.config.max_attempts:
            return R.REQUEUING
        return R.FAILED


class StoreAgainstModel(RuleBasedStateMachine):
    """Rules are what clients do; each compares the store's answer with the model's."""

    rollouts = Bundle("rollouts")

    def __init__(self, opener: Opener):
        super().__init__()
        self.opener = opener

    @initialize()
    def open(self) -> None:
        self.runner = asyncio.Runner()
        self.model: dict[str, Modelled] = {}
        self.seen: dict[str, RolloutStatus] = {}
        self.opened = AsyncExitStack()

        async def make() -> LightningStore:
            return await self.opener(self.opened)

        self.store = self.run(make())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    def teardown(self) -> None:
        self.run(self.opened.aclose())
        self.runner.close()

    @rule(target=rollouts, config=st.sampled_from(CONFIGS), repeat=st.booleans())
    def enqueue(self, config: RolloutConfig, repeat: bool) -> str:
        rollout_id = f"r{len(self.model)}"
        for _ in range(1 + repeat):
            self.run(self.store.enqueue_rollout(rollout_id, config=config, rollout_id=rollout_id))
        self.model[rollout_id] = Modelled(config)
        return rollout_id

    @rule(clients=st.integers(1, 6))
    def claim(self, clients: int) -> None:
        """Concurrent claims: the first ones in are the first ones out, and nobody gets what another has."""

        async def work() -> list[AttemptedRollout | None]:
            claims = [self.store.dequeue_rollout(f"w{n}") for n in range(clients)]
            return list(await asyncio.gather(*claims))

        queued = [rollout_id for rollout_id, rollout in self.model.items() if rollout.status is R.QUEUING]
        claims = [claim for claim in self.run(work()) if claim is not None]
        # Retries wait for their back-off, which no test run is long enough for (or, seldom, just is).
        fresh = [claim.rollout_id for claim in claims if self.model[claim.rollout_id].status is R.QUEUING]
        assert sorted(fresh, key=queued.index) == queued[: len(fresh)]
        assert len(claims) >= min(clients, len(queued))
        for claim in claims:
            self._claimed(claim)

    def _claimed(self, claim: AttemptedRollout) -> None:
        rollout = self.model[claim.rollout_id]
        assert claim.attempt.sequence_id == len(rollout.attempts) + 1
        rollout.attempts[claim.attempt.attempt_id] = A.PREPARING
        rollout.status = R.PREPARING

    @rule(rollout_id=rollouts, attempt_id=st.booleans())
    def start_attempt(self, rollout_id: str, attempt_id: bool) -> None:
        rollout = self.model[rollout_id]
        given = f"{rollout_id}-{len(rollout.attempts)}" if attempt_id else None
        try:
            claim = self.run(self.store.start_attempt(rollout_id, "w0", given))
        except ConflictError:
            assert R.PREPARING not in ROLLOUT_TRANSITIONS[rollout.status]
            return
        assert R.PREPARING in ROLLOUT_TRANSITIONS[rollout.status]
        self._claimed(claim)
        if given is not None:
            again = self.run(self.store.start_attempt(rollout_id, "w0", given))
            assert (again.attempt.attempt_id, again.attempt.sequence_id) == (given, claim.attempt.sequence_id)

    @rule(rollout_id=rollouts, pick=st.integers(0, 9), copies=st.integers(1, 3))
    def report_spans(self, rollout_id: str, pick: int, copies: int) -> None:
        rollout = self.model[rollout_id]
        if not rollout.attempts:
            return
        attempt_id = list(rollout.attempts)[pick % len(rollout.attempts)]
        claim = self._claim_of(rollout_id, attempt_id)
        span = make_span(claim)

        async def work() -> list[object]:
            return list(await asyncio.gather(*[self.store.add_span(span) for _ in range(copies)]))

        stored = self.run(work())
        assert sum(result is not None for result in stored) == 1
        rollout.spans += 1
        self._sign_of_life(rollout, attempt_id, running=True)

    def _claim_of(self, rollout_id: str, attempt_id: str) -> AttemptedRollout:
        attempts = self.run(self.store.query_attempts(rollout_id))
        attempt = next(attempt for attempt in attempts if attempt.attempt_id == attempt_id)
        rollout = self.run(self.store.get_rollout_by_id(rollout_id))
        assert rollout is not None
        return AttemptedRollout.model_validate({**rollout.__dict__, "attempt": attempt})

    def _sign_of_life(self, rollout: Modelled, attempt_id: str, *, running: bool) -> None:
        status = rollout.attempts[attempt_id]
        latest = attempt_id == rollout.latest
        revived = status is A.UNRESPONSIVE and latest and rollout.status is R.REQUEUING
        if revived or (running and status is A.PREPARING):
            rollout.attempts[attempt_id] = A.RUNNING
            if latest:
                rollout.status = R.RUNNING

    @rule(rollout_id=rollouts, pick=st.integers(0, 9))
    def heartbeat(self, rollout_id: str, pick: int) -> None:
        rollout = self.model[rollout_id]
        if not rollout.attempts:
            return
        attempt_id = list(rollout.attempts)[pick % len(rollout.attempts)]
        self._sign_of_life(rollout, attempt_id, running=False)
        answer = self.run(self.store.update_attempt(rollout_id, attempt_id, last_heartbeat_time=1.0))
        assert answer.status is rollout.attempts[attempt_id]

    @rule(
        rollout_id=rollouts,
        pick=st.integers(0, 9),
        ends=st.lists(st.sampled_from(ENDS), min_size=1, max_size=3),
        infra=st.booleans(),
    )
    def finish(self, rollout_id: str, pick: int, ends: list[AttemptStatus], infra: bool) -> None:
        """Concurrent, contradicting finishes are taken in some order, and each gets the answer that fits it."""
        rollout = self.model[rollout_id]
        if not rollout.attempts:
            return
        attempt_id = list(rollout.attempts)[pick % len(rollout.attempts)]
        outcome = Outcome.INFRA_ERROR if infra else Outcome.AGENT_ERROR

        async def work() -> list[object]:
            update = self.store.update_attempt
            jobs = [update(rollout_id, attempt_id, status=status, outcome=outcome) for status in ends]
            return list(await asyncio.gather(*jobs, return_exceptions=True))

        results = self.run(work())
        assert all(isinstance(result, ConflictError) for result in results if isinstance(result, BaseException))
        stored = self.run(self.store.get_rollout_by_id(rollout_id))
        assert isinstance(stored, AttemptedRollout)
        for order in itertools.permutations(range(len(ends))):
            tried = copy.deepcopy(rollout)
            accepted = {n: tried.finish(attempt_id, ends[n], outcome) for n in order}
            agree = all(accepted[n] != isinstance(result, BaseException) for n, result in enumerate(results))
            if agree and (tried.status, tried.attempts[tried.latest]) == (stored.status, stored.attempt.status):
                self.model[rollout_id] = tried
                return
        raise AssertionError(f"no order of {ends} explains {results}")

    @rule(rollout_id=rollouts, status=st.sampled_from([R.CANCELLED, R.REQUEUING, R.SUCCEEDED, R.FAILED]))
    def set_by_hand(self, rollout_id: str, status: RolloutStatus) -> None:
        rollout = self.model[rollout_id]
        allowed = status is rollout.status or status in ROLLOUT_BY_HAND[rollout.status]
        try:
            self.run(self.store.update_rollout(rollout_id, status=status))
        except ConflictError:
            assert not allowed
            return
        assert allowed
        if status is rollout.status:
            return
        if rollout.open():
            follower = {R.SUCCEEDED: A.SUCCEEDED, R.FAILED: A.FAILED}.get(status, A.CANCELLED)
            rollout.attempts[rollout.latest] = follower
        rollout.status = status

    @invariant()
    def agrees(self) -> None:
        stored = {r.rollout_id: r for r in self.run(self.store.query_rollouts(limit=-1))}
        assert {rollout_id: r.status for rollout_id, r in stored.items()} == {
            rollout_id: r.status for rollout_id, r in self.model.items()
        }
        for rollout_id, rollout in self.model.items():
            attempts = self.run(self.store.query_attempts(rollout_id))
            assert {a.attempt_id: a.status for a in attempts} == rollout.attempts
            assert (stored[rollout_id].end_time is not None) == (rollout.status in FINISHED_ROLLOUT)
            before = self.seen.get(rollout_id)
            if before in FINISHED_ROLLOUT:
                assert rollout.status is before
            self.seen[rollout_id] = rollout.status

    @invariant()
    def counts(self) -> None:
        statistics = self.run(self.store.statistics())
        rollouts = Counter(rollout.status.value for rollout in self.model.values())
        attempts = Counter(status.value for rollout in self.model.values() for status in rollout.attempts.values())
        assert Counter(statistics["rollouts"]) - Counter() == rollouts
        assert Counter(statistics["attempts"]) - Counter() == attempts
        assert statistics["total_spans"] == sum(rollout.spans for rollout in self.model.values())


async def in_memory(stack: AsyncExitStack) -> LightningStore:
    store = InMemoryLightningStore(watchdog_seconds=3600)
    stack.push_async_callback(store.close)
    return store


def on_a_file(path: Path) -> Opener:
    async def opener(stack: AsyncExitStack) -> LightningStore:
        for file in path.parent.glob(path.name + "*"):
            file.unlink()
        store = SqliteLightningStore(path, watchdog_seconds=3600)
        stack.push_async_callback(store.close)
        return store

    return opener


async def over_http(stack: AsyncExitStack) -> LightningStore:
    server = LightningStoreServer(InMemoryLightningStore(watchdog_seconds=3600), port=0)
    stack.push_async_callback(server.store.close)
    await server.start()
    stack.push_async_callback(server.stop)
    client = LightningStoreClient(server.endpoint)
    stack.push_async_callback(client.close)
    return client


def on_postgres(dsn: str) -> Opener:
    import psycopg

    tables = "rollouts, attempts, spans, segments, calls, resources, workers, counters"

    async def opener(stack: AsyncExitStack) -> LightningStore:
        # Before the store is open: its watchdog looks at the tables at once, and the two would lock each other out.
        with psycopg.connect(dsn, autocommit=True) as connection, suppress(psycopg.errors.UndefinedTable):
            connection.execute(f"TRUNCATE {tables}".encode())
        store = PostgresLightningStore(dsn, watchdog_seconds=3600)
        stack.push_async_callback(store.close)
        return store

    return opener


EXAMPLES = {"memory": 8, "file": 4, "http": 3, "postgres": 3}


@pytest.fixture(params=EXAMPLES)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def opener(request: pytest.FixtureRequest, backend: str, tmp_path: Path) -> Opener:
    if backend == "postgres":
        return on_postgres(request.getfixturevalue("postgres_dsn"))
    return {"memory": in_memory, "file": on_a_file(tmp_path / "store.db"), "http": over_http}[backend]


def _run(opener: Opener, examples: int, steps: int) -> None:
    run_state_machine_as_test(
        lambda: StoreAgainstModel(opener),  # pyright: ignore[reportArgumentType]
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )


@pytest.mark.contract
def test_any_sequence_of_operations(opener: Opener, backend: str) -> None:
    _run(opener, EXAMPLES[backend], steps=20)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_any_sequence_of_operations_for_long(opener: Opener, backend: str) -> None:
    _run(opener, 8 * EXAMPLES[backend], steps=30)
