"""`agl judge` on a stored run, beside a judge behind a real HTTP endpoint that is made to be wrong in known ways."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from agentlightning.cli import interrupt
from agentlightning.errors import ConfigError, JudgeError
from agentlightning.store import SqliteLightningStore
from agentlightning.types import Outcome, Span
from agentlightning.types.reward import reward_attributes
from tests.algorithm.test_group_judge import Answers, by, serving
from tests.cli.test_looking import agl, as_json, record
from tests.doctor.recorded import Recording, Said, Told


@contextmanager
def judge_at(answers: Answers, **how: Any) -> Iterator[tuple[str, list[Any]]]:
    """Its address, and what it is asked, from a thread of its own."""
    loop, ready, found = asyncio.new_event_loop(), threading.Event(), list[Any]()

    async def serve() -> None:
        async with serving(answers, **how) as (url, asked):
            found.extend([url, asked, ending := asyncio.Event()])
            ready.set()
            await ending.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert ready.wait(20)
    try:
        yield found[0], found[1]
    finally:
        loop.call_soon_threadsafe(found[2].set)
        thread.join()
        loop.close()


def score_of(text: str) -> float:
    return float(text.rsplit("score ", 1)[1].split()[0])


fair = by(lambda n, text: score_of(text) if "score " in text else 1.0)
first_wins = by(lambda n, text: 1.0 - n)

SAID = [[0.9, 0.1], [0.2, 0.8], [0.7, 0.3], [0.5, 0.5], [0.6, 0.4], [0.4, 0.4]]
LABELS = [[1.0, 0.0], [0.0, 5.0], [1.0, 0.0], [1.0, 0.0], [1.0, 1.0], [0.0, 0.0]]
"""By hand: κ 1/2 over six pairs, agreement 7/8 over four; see tests/doctor/test_judge.py."""


def told(said: list[list[float]], rewards: list[list[float]]) -> Recording:
    pairs = [zip(a, b, strict=True) for a, b in zip(said, rewards, strict=True)]
    groups = [[Told(reward=r, calls=(Said(text=f"score {s} "),)) for s, r in group] for group in pairs]
    return Recording(groups=groups, settings={"group_size": 2, "seed": 3})


@pytest.fixture
def run(tmp_path: Path) -> Path:
    record(tmp_path / "run", told(SAID, LABELS))
    return tmp_path / "run"


def digest(folder: Path) -> dict[str, str]:
    """Of what the run is; SQLite's own files beside the store come and go."""
    files = [f for f in folder.rglob("*") if f.is_file() and not f.name.endswith(("-wal", "-shm"))]
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


def test_kappa_and_agreement_of_a_known_judge_are_those_of_the_hand(run: Path) -> None:
    before = digest(run)
    with judge_at(fair) as (url, asked):
        price = '--set=price={"input": 1.0, "output": 2.0}'
        found = as_json("judge", run, "--labels", "reward", "--url", url, "--model", "j", price)
        text = " ".join(agl("judge", run, "--labels", "reward", "--url", url, "--model", "j", width=160).stdout.split())
    assert found["kappa"]["value"] == pytest.approx(0.5)
    assert (found["kappa"]["pairs"], found["kappa"]["groups"]) == (6, 6)
    assert found["agreement"]["value"] == pytest.approx(7 / 8)
    assert (found["agreement"]["pairs"], found["agreement"]["groups"]) == (4, 4)
    assert (found["order_bias"]["value"], found["self_agreement"]["value"]) == (0.0, 1.0)
    assert (found["groups"], found["masked"], found["failed"], found["level"]) == (6, 0, 0, 0.95)
    questions = len(asked) // 2
    assert questions == 13
    assert (found["tokens"], found["cost"]) == (11 * questions, pytest.approx(questions * (10 * 1.0 + 1 * 2.0) / 1e6))
    for words in ("kappa 0.50", "agreement 0.88", "4 pairs, 4 groups", "Intervals of 95%", "143 tokens"):
        assert words in text
    assert digest(run) == before, "nothing of the run is changed"


def test_a_judge_that_favours_the_first_shown_is_found_out_without_labels(run: Path) -> None:
    with judge_at(first_wins) as (url, _):
        found = as_json("judge", run, "--url", url, "--model", "j")
        text = " ".join(agl("judge", run, "--url", url, "--model", "j", width=160).stdout.split())
    assert found["order_bias"]["value"] == pytest.approx(1.0)
    assert found["order_bias"]["low"] > 0
    assert (found["self_agreement"]["value"], found["masked"], found["agreement"]) == (-1.0, 6, None)
    assert "order bias +1.00" in text
    assert "6 groups agree by less than min_agreement=0.5" in text


def test_people_label_a_file_that_it_writes(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "labels.jsonl"
    agl("judge", run, "--write-labels", file)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(rows) == 12
    assert {row["label"] for row in rows} == {None}
    assert all(row["answer"].startswith("assistant: score ") for row in rows)
    with pytest.raises(ConfigError, match="is there already"):
        agl("judge", run, "--write-labels", file)
    with pytest.raises(ConfigError, match="has no label yet"):
        agl("judge", run, "--labels", file, "--url", "http://127.0.0.1:1/v1", "--model", "j")
    by_hand = [{**row, "label": score_of(row["answer"]) > 0.45} for row in rows[2:]]
    file.write_text("".join(json.dumps(row) + "\n" for row in (*rows[:2], *by_hand)))
    with judge_at(fair) as (url, asked):
        found = as_json("judge", run, "--labels", file, "--url", url, "--model", "j", "--set", "max_tokens=99")
    assert found["agreement"]["value"] == 1.0
    assert found["groups"] == 5, "the other one has no label"
    assert {body["max_tokens"] for body in asked} == {99}


def test_a_named_reward_that_came_later_is_a_label(run: Path) -> None:
    async def label() -> None:
        store = SqliteLightningStore(run / "store.db")
        for rollout in await store.query_rollouts(group_in=["g0", "g1"], limit=-1):
            (span,) = (
                s for s in await store.query_spans(rollout.rollout_id) if "gen_ai.output.messages" in s.attributes
            )
            value = score_of(str(span.attributes["gen_ai.output.messages"]).replace('"', " "))
            attempt: Any = await store.get_latest_attempt(rollout.rollout_id)
            reward = reward_attributes({"human": -value}, "human")
            where = {"rollout_id": rollout.rollout_id, "attempt_id": attempt.attempt_id}
            await store.add_span(Span.from_attributes(name="agentlightning.reward", attributes=reward, **where))
        await store.close()

    asyncio.run(label())
    with judge_at(fair) as (url, _):
        found = as_json("judge", run, "--labels", "reward/human", "--url", url, "--model", "j")
    assert (found["groups"], found["agreement"]["value"], found["kappa"]["value"]) == (2, 0.0, -1.0)


def test_the_runs_own_judge_is_measured_unless_another_is_named(tmp_path: Path, monkeypatch: Any) -> None:
    with judge_at(fair) as (url, asked):
        own = {"base_url": url, "model": "own", "rubric": "Short wins.", "price": {"input": 5.0}, "max_tokens": 7}
        recording = told(SAID, LABELS)
        record(tmp_path, Recording(groups=recording.groups, settings={"group_judge": own}))
        found = as_json("judge", tmp_path)
        assert (found["judge"], found["place"]) == ("own", url)
        assert found["cost"] > 0
        assert all("Short wins." in body["messages"][0]["content"] for body in asked)
        assert as_json("judge", tmp_path, "--model", "other")["cost"] is None, "the price was of the run's own"
        assert {(body["model"], body["max_tokens"]) for body in asked} == {("own", 7), ("other", 4096)}
        assert "Short wins." in asked[-1]["messages"][0]["content"]
        monkeypatch.setenv("AGL_JUDGE_KEY", "secret")
        with pytest.raises(ConfigError, match=r"it gets your AGL_JUDGE_KEY.*--trust"):
            agl("judge", tmp_path)
        assert as_json("judge", tmp_path, "--trust")["judge"] == "own"
        assert as_json("judge", tmp_path, "--url", url, "--model", "j")["judge"] == "j"


def test_the_base_as_judge_is_named_with_how_to_serve_it(tmp_path: Path) -> None:
    settings = {"group_judge": {"model": "base"}, "frozen": "base", "model": "calc"}
    record(tmp_path, Recording(groups=told(SAID, LABELS).groups, settings=settings))
    with pytest.raises(ConfigError, match=r"'base' ran on the run's own engine.*agl serve calc.*--url"):
        agl("judge", tmp_path)


def test_a_judges_own_score_labels_no_judge(tmp_path: Path) -> None:
    settings = {"group_judge": {"model": "j", "base_url": "http://127.0.0.1:1/v1"}, "reward_weights": {"judge": 1.0}}
    record(tmp_path, Recording(groups=told(SAID, LABELS).groups, settings=settings))
    for labels in ("reward", "reward/judge"):
        with pytest.raises(ConfigError, match="its judge's own score, 'judge', in it"):
            agl("judge", tmp_path, "--labels", labels)
    with pytest.raises(ConfigError, match="No group has two rollouts with a label of 'reward/correct'"):
        agl("judge", tmp_path, "--labels", "reward/correct")


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        ([{"rollout_id": "ro-1", "label": 1}], "in no group of this run, such as ro-1"),
        (["no JSON"], r'line 1 is not \{"rollout_id"'),
        ([{"rollout_id": "ro-1"}], "line 1 is not"),
        ([{"rollout_id": "ro-1", "label": "good"}], "the label is 'good'; give a number"),
        ([{"rollout_id": "ro-1", "label": 1}, {"rollout_id": "ro-1", "label": 0}], "line 2: .* has two labels"),
    ],
)
def test_labels_that_are_none(run: Path, tmp_path: Path, lines: list[Any], cause: str) -> None:
    file = tmp_path / "l.jsonl"
    file.write_text("\n".join(one if isinstance(one, str) else json.dumps(one) for one in lines))
    with pytest.raises(ConfigError, match=cause):
        agl("judge", run, "--labels", file, "--url", "http://127.0.0.1:1/v1", "--model", "j")


def test_what_cannot_be_measured_says_why(tmp_path: Path, run: Path) -> None:
    there = ("--url", "http://127.0.0.1:1/v1", "--model", "j")
    record(tmp_path / "single", told([[0.1]], [[1.0]]))
    with pytest.raises(ConfigError, match="The run has no groups"):
        agl("judge", tmp_path / "single", *there)
    record(tmp_path / "flat", told(SAID, [[1.0, 1.0]] * 6))
    with pytest.raises(ConfigError, match="all labels of 'reward' are equal"):
        agl("judge", tmp_path / "flat", "--labels", "reward", *there)
    record(tmp_path / "bad", Recording(groups=[[Told(outcome=Outcome.AGENT_ERROR)] * 2]))
    with pytest.raises(ConfigError, match="No group has two rollouts that ended well"):
        agl("judge", tmp_path / "bad", *there)
    with pytest.raises(ConfigError, match="--url URL --model NAME"):
        agl("judge", run)
    with pytest.raises(ConfigError, match="'reward' for the run's own rewards"):
        agl("judge", run, "--labels", "rewards", *there)
    with pytest.raises(ConfigError, match="did you mean max_tokens"):
        agl("judge", run, *there, "--set", "max_token=3")
    with pytest.raises(JudgeError, match=r"judge j at http://127.0.0.1:1/v1 did not answer"):
        agl("judge", run, "--labels", "reward", *there)


def test_groups_without_an_answer_are_counted_and_masked_ones_are_shown_again(tmp_path: Path) -> None:
    recording = told(SAID, LABELS)
    groups = [list(group) for group in recording.groups]
    groups[0] = [Told(outcome=Outcome.JUDGE_ERROR, calls=one.calls) for one in groups[0]]
    record(tmp_path, Recording(groups=groups, settings=recording.settings))
    silent = lambda shown: 401 if "score 0.2 " in str(shown) else fair(shown)  # noqa: E731
    with judge_at(silent) as (url, _):
        found = as_json("judge", tmp_path, "--url", url, "--model", "j")
        assert (found["groups"], found["failed"]) == (5, 1)
        assert (
            "1 group without an answer: The judge j at" in agl("judge", tmp_path, "--url", url, "--model", "j").stdout
        )


def test_ctrl_c_shows_what_was_answered_by_then(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The judge answers about all groups but one, for which it takes for ever."""
    monkeypatch.setattr(interrupt, "_ctrl_c", False)  # what the command leaves there is gone after the test
    with ExitStack() as stack:
        answered = threading.Event()

        def slow(shown: Any) -> Any:
            if "score 0.7 " in str(shown):
                return None
            return fair(shown)

        url, asked = stack.enter_context(judge_at(slow))

        def stop() -> None:
            while len(asked) < 13:
                answered.wait(0.05)
            answered.wait(1.0)
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=stop)
        thread.start()
        result = agl("judge", run, "--url", url, "--model", "j", "--json")
        thread.join()
    assert result.exit_code == 130
    assert 1 <= json.loads(result.stdout)["groups"] <= 5, "all that was answered, however slow this machine is"
