"""The parts of GRPO that need no model: the data's order, checkpoints, credit, preflight."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from agentlightning.algorithm import GRPO
from agentlightning.algorithm.checkpoint import (
    CheckpointInfo,
    held_checkpoint,
    kept_while_used,
    latest_checkpoint,
    list_checkpoints,
    prune_checkpoints,
    read_checkpoint,
    save_checkpoint,
    set_aside_later,
)
from agentlightning.algorithm.credit.assignment import credit, groups_that_differ
from agentlightning.algorithm.credit.units import OUTCOME_USE, CreditRule
from agentlightning.algorithm.episode import Earned, Episode, make_episode
from agentlightning.algorithm.parts.preflight import FLAT_STEPS, SOLVED_ROLLOUTS, Preflight
from agentlightning.algorithm.sampling.schedule import TaskSchedule
from agentlightning.errors import AgentError, ConfigError
from agentlightning.metrics import JsonlSink, Reporter, SilentConsole, read_metrics
from agentlightning.models import resolve_model
from agentlightning.types import Attempt, Call, CallInfo, Outcome, Rollout, Span
from agentlightning.types.names import REWARD, REWARD_AGENT
from agentlightning.types.reward import reward_attributes

from .fakes import CountingBackend

# ---- data ----------------------------------------------------------------------------------------------------------


@given(st.integers(1, 30), st.integers(1, 10), st.integers(0, 5))
def test_every_task_once_per_epoch_and_their_number_is_the_position(size: int, per_step: int, seed: int) -> None:
    position = 0
    for epoch in range(2):
        taken: list[int] = []
        while TaskSchedule(list(range(size)), per_step, seed).epochs_taken(position) == epoch:
            schedule = TaskSchedule(list(range(size)), per_step, seed)
            taken += schedule.take(position, schedule.per_step)
            position = epoch * size + len(taken)
        assert Counter(taken) == Counter(range(size))
    assert position == 2 * size


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    first = TaskSchedule(list(range(50)), 50, seed=0)
    assert first.take(0, 50) != first.take(50, 50)
    assert first.take(0, 50) != TaskSchedule(list(range(50)), 50, seed=1).take(0, 50)


def test_no_tasks_is_an_error() -> None:
    with pytest.raises(ConfigError, match="data set is empty"):
        TaskSchedule([], 4, 0)


# ---- checkpoints ---------------------------------------------------------------------------------------------------


async def test_the_last_ones_and_the_best_one_are_kept(tmp_path: Path) -> None:
    backend = CountingBackend()
    for step, reward in [(1, 0.2), (2, 0.9), (3, 0.5), (4, None), (5, 0.6)]:
        info = CheckpointInfo(step=step, base_model="m", seed=0, val_reward=reward)
        await save_checkpoint(tmp_path, backend, info)
        prune_checkpoints(tmp_path, keep_last=2)
    assert [read_checkpoint(c).step for c in list_checkpoints(tmp_path)] == [2, 4, 5]
    assert latest_checkpoint(tmp_path).name == "step-000005"


@pytest.mark.parametrize("lost", ["renamed", "deleted"])
async def test_a_folder_that_goes_while_the_run_goes_on_ends_it_and_no_weights_are_lost(
    tmp_path: Path, lost: str
) -> None:
    run, info = tmp_path / "run", CheckpointInfo(step=1, base_model="m", seed=0)
    run.mkdir()
    run.rename(tmp_path / "other") if lost == "renamed" else run.rmdir()
    with pytest.raises(ConfigError, match=r"run was moved, renamed or deleted .* --resume FOLDER"):
        await save_checkpoint(run, CountingBackend(), info)
    assert read_checkpoint(latest_checkpoint(run)).step == 1


async def test_the_best_checkpoint_is_the_one_that_is_surely_good(tmp_path: Path) -> None:
    backend = CountingBackend()
    for step, reward, low in [(1, 0.8, 0.7), (2, 0.9, 0.4), (3, 0.1, 0.0), (4, 0.2, 0.1)]:
        info = CheckpointInfo(step=step, base_model="m", seed=0, val_reward=reward, val_low=low)
        await save_checkpoint(tmp_path, backend, info)
    prune_checkpoints(tmp_path, keep_last=1)
    assert [read_checkpoint(c).step for c in list_checkpoints(tmp_path)] == [1, 4]


async def test_a_checkpoint_that_somebody_reads_is_kept_until_it_is_read(tmp_path: Path) -> None:
    backend = CountingBackend()
    await save_checkpoint(tmp_path, backend, CheckpointInfo(step=1, base_model="m", seed=0))
    with held_checkpoint(tmp_path) as held:
        for step in (2, 3):
            await save_checkpoint(tmp_path, backend, CheckpointInfo(step=step, base_model="m", seed=0))
            prune_checkpoints(tmp_path, keep_last=1)
        assert held is not None
        assert [read_checkpoint(c).step for c in list_checkpoints(tmp_path)] == [1, 3]
    prune_checkpoints(tmp_path, keep_last=1)
    assert [read_checkpoint(c).step for c in list_checkpoints(tmp_path)] == [3]
    with held_checkpoint(tmp_path / "elsewhere") as none:
        assert none is None


async def test_a_file_system_without_locks_takes_no_checkpoint_away_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lock(file: Any, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", lock)
    backend = CountingBackend()
    for step in (1, 2):
        await save_checkpoint(tmp_path, backend, CheckpointInfo(step=step, base_model="m", seed=0))
    with held_checkpoint(tmp_path) as held, kept_while_used(list_checkpoints(tmp_path)[0], tmp_path, keep_last=1):
        assert held is not None
    assert [read_checkpoint(c).step for c in list_checkpoints(tmp_path)] == [1, 2]


async def test_what_is_left_of_older_checkpoints_is_removed(tmp_path: Path) -> None:
    backend = CountingBackend()
    for step in (1, 3):
        await save_checkpoint(tmp_path, backend, CheckpointInfo(step=step, base_model="m", seed=0))
    for step in (2, 4):  # an old one that was never finished, and one that is being written
        (tmp_path / "checkpoints" / f"step-00000{step}" / "model").mkdir(parents=True)
    prune_checkpoints(tmp_path, keep_last=2)
    assert sorted(p.name[-1] for p in (tmp_path / "checkpoints").iterdir()) == ["1", "3", "4"]


async def test_a_checkpoint_that_was_not_finished_is_none(tmp_path: Path) -> None:
    backend = CountingBackend()
    await save_checkpoint(tmp_path, backend, CheckpointInfo(step=1, base_model="m", seed=0))
    (tmp_path / "checkpoints" / "step-000002" / "model").mkdir(parents=True)
    assert latest_checkpoint(tmp_path).name == "step-000001"
    with pytest.raises(ConfigError, match="not a whole checkpoint"):
        read_checkpoint(tmp_path / "checkpoints" / "step-000002")
    with pytest.raises(ConfigError, match="no checkpoint to resume"):
        latest_checkpoint(tmp_path / "elsewhere")


async def test_a_step_that_is_saved_again_counts_only_when_it_is_whole(tmp_path: Path) -> None:
    """The disk is full, or the process dies, between its weights and its optimiser's state."""

    class FullDisk(CountingBackend):
        async def checkpoint(self, uri: str) -> None:
            (Path(uri) / "model").mkdir(parents=True, exist_ok=True)
            raise OSError("No space left on device")

    backend = CountingBackend()
    for step in (1, 2):
        await save_checkpoint(tmp_path, backend, CheckpointInfo(step=step, base_model="m", seed=0))
    full = FullDisk()
    with pytest.raises(OSError, match="No space"):
        await save_checkpoint(tmp_path, full, CheckpointInfo(step=2, base_model="m", seed=0))
    assert latest_checkpoint(tmp_path).name == "step-000001"


async def test_what_came_after_the_checkpoint_to_resume_is_set_aside(tmp_path: Path) -> None:
    backend = CountingBackend()
    for step in (1, 2, 3):
        await save_checkpoint(tmp_path, backend, CheckpointInfo(step=step, base_model="m", seed=0))
    first = list_checkpoints(tmp_path)[0]
    assert set_aside_later(tmp_path / "elsewhere", first) == []
    assert len(set_aside_later(tmp_path, first)) == 2
    assert latest_checkpoint(tmp_path) == first
    assert len(list((tmp_path / "checkpoints").iterdir())) == 3, "nothing is lost"
    assert set_aside_later(tmp_path, first) == []


def test_a_resumed_run_goes_on_in_the_same_metrics_file(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    sink = JsonlSink(file)
    for step in range(5):
        sink.step({"step": step})
    sink.close()
    file.write_text(file.read_text() + '{"step": 5, "rew')  # the process died here
    sink = JsonlSink(file, first_step=3)
    sink.step({"step": 3, "again": True})
    sink.close()
    assert [m["step"] for m in read_metrics(file)] == [0, 1, 2, 3]
    assert read_metrics(file)[-1]["again"]


# ---- credit --------------------------------------------------------------------------------------------------------


def episode(
    group: str, reward: float | None, outcome: Outcome = Outcome.OK, tokens: tuple[int, ...] = (2, 3)
) -> Episode:
    """A rollout with one call of so many sampled tokens for each of `tokens`."""
    info = CallInfo("c", "c", "r", "a", 0, "p", True, None, None, "p", "chat", "stop", 0.0, 0.0, 1.0)
    calls = []
    for n in tokens:
        zeros = np.zeros(n, np.float32)
        calls.append(Call(info, np.zeros(4, np.int32), np.ones(n, np.int32), zeros, zeros, ()))
    attempt = Attempt(rollout_id="r", attempt_id="a", sequence_id=1, start_time=0.0, outcome=outcome, error="why")
    rollout = Rollout(rollout_id="r", input=1, start_time=0.0, metadata={"group": group})
    return Episode(rollout, attempt, reward, calls)


def credited(episodes: list[Episode], minibatches: int = 1, **options: Any) -> list[list[Any]]:
    return credit(episodes, CreditRule(**options), minibatches=minibatches)


def test_the_advantage_of_a_rollout_goes_to_all_its_tokens() -> None:
    (batch,) = credited([episode("g", 1.0), episode("g", 0.0)])
    assert [c.advantages.tolist() for c in batch] == [[1.0, 1.0], [1.0] * 3, [-1.0, -1.0], [-1.0] * 3]
    assert sum(c.weights.sum() for c in batch) == pytest.approx(1.0)


failures = st.sampled_from([o for o in Outcome if OUTCOME_USE[o] == "mask"])
members = st.tuples(st.sampled_from(["g", "h"]), st.sampled_from([0.0, 0.5, 1.0]), st.booleans())


@given(st.lists(members, min_size=1, max_size=8), failures, st.floats(-5, 5))
def test_a_failed_sibling_changes_nothing_about_the_others(
    given_members: list[tuple[str, float, bool]], outcome: Outcome, its_reward: float
) -> None:
    """The update is the same as if the failed rollouts had never been there, whatever reward they left behind."""
    ok = [episode(g, r) for g, r, failed in given_members if not failed]
    everything = [episode(g, its_reward, outcome) if failed else episode(g, r) for g, r, failed in given_members]

    def values(batches: list[list[Any]]) -> list[tuple[list[float], list[float]]]:
        return [(c.advantages.tolist(), c.weights.tolist()) for batch in batches for c in batch]

    assert values(credited(everything)) == values(credited(ok) if ok else [])


def test_a_truncated_rollout_that_earned_nothing_counts_zero() -> None:
    (batch,) = credited([episode("g", 1.0), episode("g", None, Outcome.TRUNCATED)])
    assert [float(c.advantages[0]) for c in batch] == [1.0, 1.0, -1.0, -1.0]


def test_an_outcome_can_be_counted_as_zero() -> None:
    episodes = [episode("g", 1.0), episode("g", None, Outcome.TIMEOUT)]
    assert credited(episodes) == []
    uses = {**OUTCOME_USE, Outcome.TIMEOUT: "zero"}
    (batch,) = credited(episodes, uses=uses)
    assert [float(c.advantages[0]) for c in batch] == [1.0, 1.0, -1.0, -1.0]


def test_minibatches_keep_groups_whole() -> None:
    episodes = [episode(str(g), float(i % 2)) for g in range(5) for i in range(4)]
    batches = credited(episodes, minibatches=2)
    groups = [{c.group for c in batch} for batch in batches]
    assert [len(g) for g in groups] == [3, 2]
    assert not groups[0] & groups[1]


def test_calls_that_are_not_trained_are_left_out() -> None:
    a, b = episode("g", 1.0, tokens=(2,)), episode("g", 0.0, tokens=(2,))
    frozen = replace(a.calls[0], info=replace(a.calls[0].info, trained=False))
    (batch,) = credited([replace(a, calls=[frozen, *a.calls]), b])
    assert [float(c.advantages[0]) for c in batch] == [1.0, -1.0]


# ---- preflight -----------------------------------------------------------------------------------------------------


@pytest.fixture
def reporter(tmp_path: Path) -> Iterator[Reporter]:
    reporter = Reporter(JsonlSink(tmp_path / "m.jsonl"), SilentConsole())
    yield reporter
    reporter.close()


def test_preflight_names_the_most_common_failure(reporter: Reporter) -> None:
    failed = [episode("g", None, Outcome.AGENT_ERROR) for _ in range(4)]
    with pytest.raises(AgentError, match=r"4 of 4 .* agent_error: why"):
        Preflight(reporter, CreditRule()).check(failed)


def test_preflight_tells_when_the_model_is_called_no_longer(reporter: Reporter) -> None:
    preflight = Preflight(reporter, CreditRule())
    preflight.check([episode("g", reward) for reward in (0.0, 1.0)])
    with pytest.raises(AgentError, match="keeps answers"):
        preflight.check([episode("g", reward, tokens=()) for reward in (0.0, 1.0)])


def test_preflight_tells_when_the_model_is_never_called(reporter: Reporter) -> None:
    silent = [episode("g", 1.0, tokens=()), episode("g", 0.0, tokens=())]
    with pytest.raises(AgentError, match=r"never called the model.*base_url=llm.endpoint"):
        Preflight(reporter, CreditRule()).check(silent)


@pytest.mark.parametrize("siblings", [2, 8, SOLVED_ROLLOUTS])
def test_a_run_whose_rollouts_all_earn_the_highest_reward_is_solved(reporter: Reporter, siblings: int) -> None:
    """Steps alone are no evidence: five steps of two rollouts would end most runs by luck."""
    preflight, patient = (Preflight(reporter, CreditRule(), flat_steps=n) for n in (FLAT_STEPS, 0))
    for one in (preflight, patient):
        one.check([episode("g", 0.0), episode("g", 1.0)])
    steps = 0
    while not preflight.solved:
        assert steps < FLAT_STEPS or steps * siblings < SOLVED_ROLLOUTS
        for one in (preflight, patient):
            one.check([episode("g", 1.0)] * siblings)
        steps += 1
    assert steps >= FLAT_STEPS
    assert steps * siblings >= SOLVED_ROLLOUTS
    assert not patient.solved, "flat_steps=0 was set"


def test_an_unknown_schedule_is_an_error() -> None:
    with pytest.raises(ConfigError, match="'constant', 'linear' or 'cosine'"):
        GRPO(model="calc", schedule="square")  # pyright: ignore[reportArgumentType]


def test_preflight_stops_when_siblings_never_differ(reporter: Reporter) -> None:
    same = [episode("g", 0.0), episode("g", 0.0)]
    preflight = Preflight(reporter, CreditRule(), flat_steps=3)
    for _ in range(2):
        preflight.check(same)
    with pytest.raises(AgentError, match=r"same reward.*flat_steps"):
        preflight.check(same)
    patient = Preflight(reporter, CreditRule(), flat_steps=0)
    for _ in range(4 * FLAT_STEPS):
        patient.check(same)


def test_a_run_that_has_learned_outlives_flat_steps(reporter: Reporter) -> None:
    """Half of the tasks are mastered, the other half impossible."""
    preflight = Preflight(reporter, CreditRule())
    preflight.check([episode("g", 0.0), episode("g", 1.0)])
    same = [episode("g", 0.0), episode("g", 0.0), episode("h", 1.0), episode("h", 1.0)]
    stuck = []
    for _ in range(2 * FLAT_STEPS):
        preflight.check(same)
        stuck.append(preflight.stuck)
    assert stuck == [n == FLAT_STEPS - 1 for n in range(2 * FLAT_STEPS)], "saved once"
    assert not preflight.solved


def test_a_refusal_is_told_from_a_call_that_never_came(reporter: Reporter) -> None:
    silent = [episode("g", r, tokens=()) for r in (1.0, 0.0)]
    refused = [replace(e, refused=["No tool here.", "Another."]) for e in silent]
    with pytest.raises(AgentError, match=r"4 arrived .* refused. Most common \(2×\): No tool here"):
        Preflight(reporter, CreditRule()).check(refused)
    with pytest.raises(AgentError, match=r"3 arrived .* \(3×\): This call needs the API key"):
        Preflight(reporter, CreditRule(), refused_requests={"This call needs the API key": 3}).check(silent)


def test_preflight_tells_when_rewards_name_agents_who_made_no_call(reporter: Reporter) -> None:
    episodes = [replace(episode("g", r), rewards=[Earned(r, 1, "black")]) for r in (0.0, 1.0)]
    with pytest.raises(AgentError, match=r"agents \['black'\].*without a name.*for_agent"):
        Preflight(reporter, CreditRule()).check(episodes)
    Preflight(reporter, CreditRule(), policies=["black", "white"]).check(episodes)


def test_a_pattern_that_chooses_nobody_is_named_with_the_agents_it_saw(reporter: Reporter) -> None:
    def of(agent: str | None, reward: float) -> Episode:
        e = episode("g", reward)
        return replace(e, calls=[replace(c, info=replace(c.info, agent=agent, trained=False)) for c in e.calls])

    preflight = Preflight(reporter, CreditRule(), selected_by={"train_agents": "judge"})
    with pytest.raises(AgentError, match=r"train_agents='judge' chooses none .* 'writer', calls without an"):
        preflight.check([of("writer", 1.0), of(None, 0.0)])


def test_a_game_is_rated_by_what_the_trained_agents_earned() -> None:
    """A zero-sum pair would show 0 at every step otherwise."""

    def reward(agent: str, value: float) -> Span:
        attributes = {**reward_attributes(value), REWARD_AGENT: agent}
        return Span.from_attributes(name=REWARD, attributes=attributes, rollout_id="r", attempt_id="a", start_time=9.0)

    e = episode("g", None)
    black, white = (
        replace(c, info=replace(c.info, agent=name, trained=name == "black"))
        for c, name in zip(e.calls, ("black", "white"), strict=True)
    )
    spans = [reward("black", 0.9), reward("white", -0.9)]
    assert make_episode(e.rollout, e.attempt, [black, white], spans).reward == 0.9
    assert make_episode(e.rollout, e.attempt, [white], spans).reward == 0.9, "it gave up before its first call"
    assert make_episode(e.rollout, e.attempt, [], spans).reward == 0.0


def test_preflight_bears_an_outage_in_a_run_that_has_learned(reporter: Reporter) -> None:
    preflight = Preflight(reporter, CreditRule(), learned=True)
    failed = [episode("g", None, Outcome.JUDGE_ERROR) for _ in range(4)]
    for _ in range(2):
        for _ in range(FLAT_STEPS - 1):
            preflight.check(failed)
        preflight.check([episode("g", 0.0), episode("g", 1.0)])
    for _ in range(FLAT_STEPS - 1):
        preflight.check(failed)
    with pytest.raises(AgentError, match="4 of 4"):
        preflight.check(failed)


@pytest.mark.parametrize("rule", [CreditRule(advantage="reinforce"), CreditRule(mode="gae")], ids=["alone", "critic"])
def test_without_siblings_to_compare_rollouts_of_different_tasks_are(reporter: Reporter, rule: CreditRule) -> None:
    preflight = Preflight(reporter, rule)
    for _ in range(2 * FLAT_STEPS):
        preflight.check([episode(str(g), float(g % 2)) for g in range(4)])
    assert not preflight.solved
    same = [episode(str(g), 0.5) for g in range(4)]
    for _ in range(FLAT_STEPS - 1):
        preflight.check(same)
    assert not preflight.stuck
    preflight.check(same)
    assert preflight.stuck


def test_siblings_differ_where_the_credit_mode_sees_a_difference() -> None:
    early, late = (
        replace(episode("g", 1.0), rewards=[Earned(first, 0), Earned(1.0, 1)]) for first in (0.0, 1.0)
    )  # the same final reward
    assert groups_that_differ([early, late], CreditRule()) == set()
    assert groups_that_differ([early, late], CreditRule(total=True)) == {"g"}
    assert groups_that_differ([early, late], CreditRule(mode="return_to_go")) == {"g"}
    timed_out = replace(
        late, attempt=Attempt(rollout_id="r", attempt_id="a", sequence_id=1, start_time=0.0, outcome=Outcome.TIMEOUT)
    )
    rule = CreditRule(total=True)
    assert groups_that_differ([early, timed_out], rule) == set(), "masked, whatever it earned before"
    assert groups_that_differ([early, timed_out], replace(rule, uses={**rule.uses, Outcome.TIMEOUT: "zero"})) == {"g"}


# ---- settings ------------------------------------------------------------------------------------------------------


async def test_a_runs_folder_is_a_model(tmp_path: Path) -> None:
    backend = CountingBackend()
    for step in (1, 12):
        await save_checkpoint(tmp_path, backend, CheckpointInfo(step=step, base_model="m", seed=0))
        model = tmp_path / "checkpoints" / f"step-{step:06d}" / "model"
        (model / "config.json").write_text("{}")
        (model / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    assert resolve_model(tmp_path) == str((tmp_path / "checkpoints" / "step-000012" / "model").resolve())
