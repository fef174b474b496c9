"""What the dashboard's pages are told: runs, the table, a rollout, its tokens, its group, resources and news."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest

from agentlightning.dashboard import served_with_dashboard
from agentlightning.dashboard.diagnoses import Diagnoses
from agentlightning.dashboard.runs import neighbours
from agentlightning.metrics.catalogue import TOKENS, Metric
from agentlightning.store import LightningStoreServer, SqliteLightningStore
from agentlightning.types import LLM, Run, RunEvent, RunStatus
from agentlightning.types.names import CALL_ID
from agentlightning.types.recording import FORK_OF, STATES
from tests.dashboard.conftest import EVIL, Ask, add_broken_rollout, send
from tests.store.builders import make_span


async def test_runs_have_curves_settings_and_verdicts(ask: Ask) -> None:
    (run,) = (await ask("/runs"))["runs"]
    assert (run["run_id"], run["curve"], run["validated"]) == ("run-1", [[1, 0.5]], [[0, 0.25]])
    assert (await ask("/runs/run-1"))["settings"]["advantage"] == "grpo"
    told = await ask("/runs/run-1/steps?from=1")
    assert [row["step"] for row in told["steps"]] == [1]
    assert told["metrics"]["reward"]["title"] == "Reward"
    assert (run["name"], run["standing"]) == ("run-1", {"word": "running", "why": None}), "it has no folder"
    assert await ask("/runs/run-1/rewards") == {"low": 0.0, "high": 1.0}
    (said,) = (await ask("/runs/run-1/events"))["events"]
    assert said["data"] == {"text": "Not learning.", "fix": "More."}


async def test_runs_are_called_by_their_folders_and_say_how_they_ended(ask: Ask, store: SqliteLightningStore) -> None:
    state = {"run_dir": "/somewhere/mail-3"}
    await store.begin_run(Run(run_id="run-2", algorithm="GRPO", agent="agent", settings={}, state=state))
    rollout = await store.enqueue_rollout("x", run_id="run-2")
    assert (await ask(f"/rollouts/{rollout.rollout_id}"))["run_name"] == "mail-3"
    assert (await ask(f"/rollouts/{rollout.rollout_id}/group"))["run_name"] == "mail-3"
    assert await ask("/runs/run-2/rewards") == {"low": None, "high": None}
    ends = ((RunStatus.STOPPED, None, "stopped by you"), (RunStatus.STOPPED, "No reward.", "stopped"))
    for status, error, word in (
        *ends,
        (RunStatus.FAILED, "No disk.", "failed"),
        (RunStatus.SUCCEEDED, None, "succeeded"),
    ):
        await store.update_run("run-2", status=status, error=error)
        run = await ask("/runs/run-2")
        assert (run["name"], run["standing"]) == ("mail-3", {"word": word, "why": error})


async def test_the_table_is_filtered_paged_and_counted(ask: Ask) -> None:
    assert [r["rollout_id"] for r in (await ask("/rollouts?reward_min=0.5"))["rollouts"]] == ["good"]
    assert [r["rollout_id"] for r in (await ask("/rollouts?q=bad"))["rollouts"]] == ["bad"]
    first = await ask("/rollouts?limit=1&sort=reward")
    assert [r["rollout_id"] for r in first["rollouts"]] == ["good"]
    second = await ask("/rollouts", params={"limit": 1, "sort": "reward", "cursor": first["next"]})
    assert [r["rollout_id"] for r in second["rollouts"]] == ["bad"]
    assert await ask("/rollouts/count?run=run-1&outcome=ok&outcome=timeout&step=1") == {"count": 2}
    assert "step_in" in (await ask("/rollouts?step=x", 422))["detail"]
    assert "number" in (await ask("/rollouts?reward_min=x", 422))["detail"]


async def test_a_rollout_is_told_call_by_call(ask: Ask) -> None:
    told = await ask("/rollouts/good")
    assert told["task"] == {"question": EVIL}  # as it is: the page shows it as text
    (call,) = told["calls"]
    assert call["output"] == [{"role": "assistant", "parts": [{"type": "text", "content": "good"}]}]
    assert (call["trained"], call["versions"], told["reward"]) == (True, [3], 1.0)
    assert [span["name"] for span in told["spans"]] == ["chat policy", "reward"]
    assert "gen_ai.input.messages" not in told["spans"][0]["attributes"]
    assert "pruned" in (await ask("/rollouts/none", 404))["detail"]
    assert "attempt" in (await ask("/rollouts/good?attempt=none", 404))["detail"]


async def test_those_that_went_on_from_a_rollout_stand_where_they_did(ask: Ask, store: SqliteLightningStore) -> None:
    assert (await ask("/rollouts/good"))["forks"] == []
    assert (await ask("/rollouts/good"))["calls"][0]["answered_before"] == 0
    state = {"run_dir": "/somewhere/my mail"}
    await store.begin_run(Run(run_id="run-2", algorithm="GRPO", agent="agent", settings={}, state=state))
    forks = [await store.enqueue_rollout("x", metadata={FORK_OF: "good", "at": 0}) for _ in range(2)]
    ids = [fork.rollout_id for fork in forks]
    good = await store.get_rollout_by_id("good")
    assert good is not None
    await store.update_rollout("good", metadata={**good.metadata, STATES: {"of": "good", "trained": ids}})
    told = await ask("/rollouts/good")
    call = told["calls"][0]["call_id"]
    assert told["forks"] == [{"rollout_id": i, "call_id": call, "reward": None, "outcome": None} for i in ids]
    assert (await ask("/rollouts/bad"))["forks"] == []
    (fork,) = [await store.enqueue_rollout("x", run_id="run-2")]
    command = (await ask(f"/rollouts/{fork.rollout_id}"))["fork_command"]
    assert command.endswith(f" fork '/somewhere/my mail' {fork.rollout_id} --trust")
    evil = await store.enqueue_rollout("x", rollout_id="a;touch x $(id)")
    command = (await ask(f"/rollouts/{quote(evil.rollout_id)}"))["fork_command"]
    assert shlex.split(command)[-3:] == ["RUN", "a;touch x $(id)", "--trust"], "it is pasted into a shell"


@pytest.mark.parametrize(
    "about", [{}, {"trained": None}, {"trained": "abc"}, {"trained": [None, 3, {"a": 1}, "bad", "nobody"]}, 7], ids=str
)
async def test_what_a_rollout_says_of_its_forks_may_be_anything(
    ask: Ask, store: SqliteLightningStore, about: Any
) -> None:
    """Metadata is whatever who enqueues writes; runs of before named no continuations."""
    await store.update_rollout("good", metadata={STATES: {"of": "good", **about} if isinstance(about, dict) else about})
    assert (await ask("/rollouts/good"))["forks"] == []


async def test_messages_of_any_shape_are_shown(ask: Ask, store: SqliteLightningStore) -> None:
    claim = await store.start_rollout("x", worker_id="w", rollout_id="odd")
    for number, shape in enumerate(("not json", "[1]", '{"role": 1}', '[{"role": "user", "parts": [3]}]')):
        attributes = {CALL_ID: f"c{number}", "gen_ai.input.messages": shape, "gen_ai.response.finish_reasons": "stop"}
        await store.add_span(make_span(claim, "chat", **attributes))
    calls = (await ask("/rollouts/odd"))["calls"]
    assert [call["input"][0]["role"] for call in calls] == ["unknown", "unknown", "1", "user"]


async def test_tokens_come_with_what_was_recorded_of_them(ask: Ask) -> None:
    told = await ask("/rollouts/good/tokens")
    prompt, response = sorted(told["segments"], key=lambda segment: segment["keep"])
    assert (prompt["ids"], prompt["response"], prompt["logprobs"]) == ([1, 2], None, None)
    assert (response["ids"], response["logprobs"], response["versions"]) == ([7, 8], [0.0, -1.0], [[0, 3]])
    (call,) = told["calls"]
    assert call["advantages"] == pytest.approx([1.0, 1.0], rel=1e-3)  # GRPO of the rewards 1 and 0


async def test_a_group_shows_where_siblings_part(ask: Ask) -> None:
    told = await ask("/rollouts/bad/group")
    assert (told["best"], told["worst"], told["group"]) == ("good", "bad", "1-0")
    assert [s["advantage"] > 0 for s in told["siblings"]] == [True, False]
    parting = told["partings"]["bad"]
    assert (parting["call"], parting["position"], len(parting["before"])) == (0, 1, 1)


async def test_advantages_that_cannot_be_known_say_why(ask: Ask, store: SqliteLightningStore) -> None:
    await store.begin_run(Run(run_id="other", algorithm="Mine", settings={}))
    rollout = await store.enqueue_rollout("x", metadata={"group": "g"}, run_id="other")
    assert "Mine" in (await ask(f"/rollouts/{rollout.rollout_id}/tokens"))["advantages"]
    alone = await store.enqueue_rollout("x")
    told = await ask(f"/rollouts/{alone.rollout_id}/group")
    assert (told["siblings"][0]["advantage"], told["best"]) == (None, None)


async def test_keys_are_not_shown(ask: Ask, store: SqliteLightningStore) -> None:
    await store.add_resources({"judge": LLM(endpoint="http://localhost/v1", model="m", api_key="sk-secret")})
    for path in ("/runs/run-1", "/resources"):
        assert "secret" not in json.dumps(await ask(path)).replace('"api_key"', "")


async def test_workers_and_queue_are_counted(ask: Ask) -> None:
    told = await ask("/workers")
    assert [worker["worker_id"] for worker in told["workers"]] == ["w"]
    assert told["rollouts"]["succeeded"] == 2


async def test_news_come_at_once_when_something_changes_and_when_it_ends(
    server: LightningStoreServer, store: SqliteLightningStore
) -> None:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{server.endpoint}/dashboard/api/news") as response,
    ):
        first = json.loads((await response.content.readline()).removeprefix(b"data: "))
        assert first["rollouts"]["queuing"] == 0
        await response.content.readline()
        await store.enqueue_rollout("new")
        second = json.loads((await response.content.readline()).removeprefix(b"data: "))
        assert second["rollouts"]["queuing"] == 1
        await response.content.readline()
        await store.enqueue_rollout("newer")
        await server.stop()  # tells how it stands, and then ends the stream
        third = json.loads((await response.content.readline()).removeprefix(b"data: "))
        assert third["rollouts"]["queuing"] == 2
        assert (await response.content.read()).strip() == b""


async def test_the_doctor_says_what_a_run_comes_to(ask: Ask) -> None:
    told = await ask("/why?run=run-1")
    assert told["verdict"]
    assert all({"severity", "words", "fix", "evidence"} <= set(finding) for finding in told["findings"])
    assert told["measured"]["rollouts_read"] == 2
    assert "no such run" in (await ask("/why?run=none", 404))["detail"]


async def test_curves_are_read_on_from_where_they_ended(ask: Ask, store: SqliteLightningStore) -> None:
    async def reach(step: int, reward: float, life: str) -> None:
        row = {"step": step, "reward": reward, "val_reward": reward}
        event = RunEvent(run_id="run-1", event_id=f"{life}-{step}", kind="step", time=float(step), step=step, data=row)
        await store.add_run_events([event])
        await store.update_run("run-1", state={"step": step})

    async def listed() -> dict[str, Any]:
        (run,) = (await ask("/runs"))["runs"]
        return run

    assert (await listed())["curve"] == [[1, 0.5]]
    await reach(2, 0.75, "a")
    await reach(3, 1.0, "a")
    run = await listed()
    assert run["curve"] == [[1, 0.5], [2, 0.75], [3, 1.0]]
    assert run["validated"] == [[0, 0.25], [2, 0.75], [3, 1.0]]
    assert (run["reward"], run["steps_done"]) == (1.0, 3)
    await store.begin_run(Run(run_id="run-1", algorithm="GRPO", agent="agent", settings={}), first_step=2)
    await reach(2, 0.25, "b")
    assert (await listed())["curve"] == [[1, 0.5], [2, 0.25]]


async def test_a_run_is_diagnosed_again_when_something_changed(
    store: SqliteLightningStore,
) -> None:
    diagnoses = Diagnoses(store, share=1e-9)
    run = await store.get_run_by_id("run-1")
    assert run is not None
    first = await diagnoses.of(run)
    assert await diagnoses.of(run) is first, "nothing changed: it was not computed again"
    await store.add_run_events(
        [RunEvent(run_id="run-1", event_id="w", kind="warning", time=9.0, step=2, data={"text": "slow"})]
    )
    assert await diagnoses.of(run) is first, "so soon after the last one a run that goes on is left alone"
    await store.update_run("run-1", status=RunStatus.SUCCEEDED)
    ended = await store.get_run_by_id("run-1")
    assert ended is not None
    assert await diagnoses.of(ended) is not first, "how it ended is always looked at"


async def test_runs_in_folders_beside_can_be_compared(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "other"
    folder.mkdir(parents=True)
    own = Metric("mean_tokens", "Tokens of a rollout", TOKENS, "tokens", "How long rollouts are.")
    described = [
        own._asdict(),
        own._replace(name="reward")._asdict(),
        {"name": "mine"},
        own._asdict() | {"kind": "x"},
        3,
    ]
    known = {
        "run_id": "other",
        "algorithm": "RLOO",
        "settings": {"steps": 3},
        "start_time": 2.0,
        "own_metrics": described,
    }
    (folder / "run.json").write_text(json.dumps(known))
    (folder / "metrics.jsonl").write_text('{"step": 1, "reward": 0.75, "time": 5.0, "mean_tokens": 3, "mine": 1}\n')
    (tmp_path / "runs" / "broken").mkdir()
    (tmp_path / "runs" / "broken" / "run.json").write_text("[")
    found = neighbours(tmp_path / "runs")
    assert (found["other"]["algorithm"], found["other"]["rows"][0]["reward"]) == ("RLOO", 0.75)
    assert neighbours(tmp_path / "nowhere") == {}
    store = SqliteLightningStore(tmp_path / "store.db")
    server = served_with_dashboard(store, port=0, folder=tmp_path / "runs")
    await server.start()
    async with aiohttp.ClientSession(f"{server.endpoint}/dashboard/api/") as session:
        (run,) = json.loads((await send(session, "GET", "runs"))[2])["runs"]
        assert (run["run_id"], run["curve"], run["elsewhere"]) == ("other", [[1, 0.75]], str(folder))
        assert (run["name"], run["standing"]["word"]) == ("other", "ended")
        assert (run["start_time"], run["end_time"]) == (2.0, 5.0), "and not when its files were copied"
        assert '"steps":3' in (await send(session, "GET", "runs/other"))[2]
        steps = json.loads((await send(session, "GET", "runs/other/steps"))[2])
        assert steps["steps"][0]["reward"] == 0.75
        titles = {name: metric["title"] for name, metric in steps["metrics"].items() if name != "time"}
        assert titles == {"step": "Step", "reward": "Reward", "mean_tokens": "Tokens of a rollout", "mine": "Mine"}
    await server.stop()
    await store.close()


async def test_where_a_call_left_its_history_is_told_in_text(ask: Ask, store: SqliteLightningStore) -> None:
    begins = await add_broken_rollout(store)
    for path in ("/rollouts/broke", "/rollouts/broke/tokens"):
        left = next(call["divergence"] for call in (await ask(path))["calls"] if call["call_id"] == "c2")
        assert (left["cause"], left["position"]) == ("clock", begins)
        assert (left["was"][:2], left["now"][:2]) == ("7 ", "9 ")
        assert left["before"].endswith("10:31:0")
        assert "last user message" in left["advice"]


async def test_weights_that_cannot_be_asked_say_why(ask: Ask, store: SqliteLightningStore, tmp_path: Path) -> None:
    assert "While the run goes on" in (await ask("/rollouts/good/scores"))["reason"]
    await store.update_run("run-1", status=RunStatus.SUCCEEDED)
    told = await ask("/rollouts/good/scores")
    assert (told["calls"], told["reason"]) == ({}, "The run's checkpoints are not on this machine.")
    alone = await store.start_rollout("x", worker_id="w")
    assert "belongs to no run" in (await ask(f"/rollouts/{alone.rollout_id}/scores"))["reason"]
