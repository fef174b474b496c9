"""The commands that look at runs, as a user types them: what they print, as text and as JSON, and how they exit."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from agentlightning.algorithm.catalogue import CATALOGUE
from agentlightning.cli.app import app
from agentlightning.cli.runs import _seconds_per_step
from agentlightning.errors import ConfigError
from agentlightning.metrics.catalogue import find_measured
from agentlightning.metrics.intervals import mean_interval
from agentlightning.store import SqliteLightningStore
from agentlightning.types import Outcome, RunStatus
from tests.doctor.recorded import Recording, Said, Told, write
from tests.doctor.test_why import SICK, WELL


def agl(*arguments: object, width: int = 100) -> Result:
    """Run a command in this process; an error of ours is raised as it is."""
    result = CliRunner(env={"COLUMNS": str(width)}).invoke(app, [str(a) for a in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def as_json(*arguments: object) -> Any:
    return json.loads(agl(*arguments, "--json").stdout)


def record(folder: Path, *recordings: Recording) -> list[str]:
    """A run's folder with these runs in its store; their ids."""

    async def fill() -> list[str]:
        store = SqliteLightningStore(folder / "store.db")
        found = [await write(store, recording) for recording in recordings]
        await store.close()
        return found

    folder.mkdir(parents=True, exist_ok=True)
    return asyncio.run(fill())


@pytest.fixture
def well(tmp_path: Path) -> Path:
    record(tmp_path / "well", WELL)
    return tmp_path / "well"


@pytest.fixture
def sick(tmp_path: Path) -> Path:
    record(tmp_path / "sick", SICK["no reward"][2])
    return tmp_path / "sick"


def test_why_says_that_a_run_learns(well: Path) -> None:
    result = agl("why", well)
    assert "It is learning" in result.stdout
    assert result.exit_code == 0
    found = as_json("why", well, "--breaks")
    assert (found["findings"], found["breaks"]) == ([], [])


def test_why_names_the_problem_and_exits_with_1(sick: Path) -> None:
    result = agl("why", sick)
    assert "32 of 32 (100%) rollouts ended without a reward" in result.stdout
    assert "First thing to try: Return a number" in " ".join(result.stdout.split())
    assert result.exit_code == 1
    assert as_json("why", sick)["findings"][0]["code"] == "no_reward"


def test_why_gives_every_number_a_title_and_a_unit(well: Path) -> None:
    measured = as_json("why", well)["measured"]
    printed = agl("why", well).stdout
    for name, value in measured.items():
        metric = find_measured(name) or CATALOGUE.find(name)
        assert metric is not None, name
        if value not in (None, {}):
            assert metric.title in printed
    assert re.search(r"Rollouts that were read +\d+ rollouts", printed)
    assert re.search(r"Groups without a difference +[\d.]+%", printed)


@pytest.mark.parametrize(
    ("status", "error", "word"),
    [
        (RunStatus.RUNNING, None, "died"),
        (RunStatus.STOPPED, None, "stopped by you"),
        (RunStatus.STOPPED, "nothing to learn", "stopped"),
        (RunStatus.FAILED, "no disk", "failed"),
        (RunStatus.SUCCEEDED, None, "succeeded"),
    ],
)
def test_a_run_stands_in_the_same_words_everywhere(
    tmp_path: Path, status: RunStatus, error: str | None, word: str
) -> None:
    (run_id,) = record(tmp_path, WELL)

    async def end() -> None:
        store = SqliteLightningStore(tmp_path / "store.db")
        await store.update_run(run_id, status=status, error=error)
        await store.close()

    if status is not RunStatus.RUNNING:
        asyncio.run(end())
    assert as_json("watch", tmp_path, "--once")["standing"] == word
    assert word in agl("watch", tmp_path).stdout, "and nothing is waited for"
    assert ("This run died" in agl("why", tmp_path).stdout) == (word == "died")
    agl("report", tmp_path, "--to", tmp_path / "report.html")
    assert word in (tmp_path / "report.html").read_text()


def test_a_pause_before_a_run_went_on_is_no_step() -> None:
    rows = [{"step": n, "time": 10.0 * n, "sampling_from": 10.0 * n - 9} for n in (1, 2, 3)]
    rows += [{"step": n, "time": 5000 + 10.0 * n, "sampling_from": 5000 + 10.0 * n - 9} for n in (4, 5)]
    assert _seconds_per_step(rows) == pytest.approx((10 + 10 + 9 + 10) / 4, abs=1)
    assert _seconds_per_step(rows[:1]) is None
    assert _seconds_per_step([rows[0], {**rows[1], "time": -5000.0}]) is None


def test_why_shows_breaks(tmp_path: Path) -> None:
    record(tmp_path, SICK["other tools"][2])
    text = agl("why", tmp_path, "--breaks").stdout
    assert "tools_changed" in text
    assert "Offer the same tools" in " ".join(text.split())


def test_one_of_several_runs_in_a_store(tmp_path: Path) -> None:
    first, second = record(tmp_path, SICK["no reward"][2], WELL)
    assert as_json("why", tmp_path)["run_id"] == second
    assert as_json("why", tmp_path, "--run-id", first)["findings"][0]["code"] == "no_reward"


def test_show_in_full_has_system_prompts_and_tools(tmp_path: Path) -> None:
    system = json.dumps([{"role": "system", "parts": [{"type": "text", "content": "Be brief."}]}])
    told = Told(reward=1.0, calls=(Said(tools=True),), spans=({"gen_ai.input.messages": system},))
    record(tmp_path, Recording(groups=[[told]]))
    full, short = (agl("show", tmp_path, *options).stdout for options in (["--full"], []))
    for words in ("Be brief.", '"name": "calc"'):
        assert words in full
        assert words not in short
    assert "The answer is 4." in full
    assert "The answer is 4." in short


# ---- markup in what a model said -------------------------------------------------------------------------------------

EVIL = '<script>alert(1)</script>\x1b[2J\x1b]0;owned\x07[bold red]x[/bold red] ‮txt.exe <img src=x onerror="y"> \x9b31m'


@pytest.fixture
def evil(tmp_path: Path) -> Path:
    """Task, answer, tool arguments, tool results and errors all hold markup."""
    said = Said(text=EVIL, tool={"a": EVIL}, results=[EVIL], tools=True)
    good = [Told(reward=float(n % 2), calls=(said,), task={"q": EVIL}) for n in range(4)]
    failed = Told(outcome=Outcome.AGENT_ERROR, error=EVIL, task=EVIL, calls=(said,))
    folder = tmp_path / "evil"
    record(folder, Recording(groups=[[*good, failed, failed, failed]], steps=WELL.steps, settings={"note": EVIL}))
    (folder / "run.json").write_text(json.dumps({"algorithm": "GRPO", "agent": EVIL, "settings": {"note": EVIL}}))
    return folder


@pytest.mark.parametrize(
    "command",
    [("show", "--full"), ("show", "--group", "g0"), ("show", "--failed"), ("why",), ("watch", "--once"), ("runs",)],
    ids=" ".join,
)
@pytest.mark.parametrize("width", [80, 120])
def test_no_markup_reaches_the_terminal(evil: Path, command: tuple[str, ...], width: int) -> None:
    text = agl(command[0], evil, *command[1:], width=width).stdout
    assert text
    assert not {c for c in text if ord(c) < 32 or 127 <= ord(c) < 160} - {"\n"}, "control characters"
    assert "\u202e" not in text
    if command[0] == "show":
        assert "\\x1b[2J" in text
        assert "[bold" in text, "it is shown, not obeyed"
    assert max(map(len, text.splitlines())) <= width


def test_no_markup_is_obeyed_by_the_report(evil: Path) -> None:
    agl("report", evil)
    page = (evil / "report.html").read_text()
    assert "<script" not in page
    assert "<img" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert not {c for c in page if ord(c) < 32 or 127 <= ord(c) < 160} - {"\n"}
    assert "\u202e" not in page
    assert "default-src &#x27;none&#x27;" in page or "default-src 'none'" in page
    assert page.count("http") == page.count("http://www.w3.org") + page.count("http-equiv"), "nothing is fetched"


# ---- runs, compare, watch, show, report ------------------------------------------------------------------------------


def with_files(folder: Path, rewards: list[float], **settings: Any) -> Path:
    record(folder, WELL)
    (folder / "run.json").write_text(json.dumps({"algorithm": "GRPO", "agent": "calc", "settings": settings}))
    rows = [{"step": n, "reward": r, "time": 10.0 * n, "steps": 9} for n, r in enumerate(rewards, 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_runs_are_listed(tmp_path: Path) -> None:
    with_files(tmp_path / "runs" / "a", [0.1, 0.9])
    with_files(tmp_path / "runs" / "b", [0.25])
    text = agl("runs", tmp_path / "runs", width=240).stdout  # a narrow table leaves columns out
    assert "0.100 → 0.900" in text
    assert "2/9" in text
    found = as_json("runs", tmp_path / "runs")
    assert {(Path(run["folder"]).name, run["reward_last"], run["going_on"]) for run in found} == {
        ("a", 0.9, False),
        ("b", 0.25, False),
    }
    with pytest.raises(ConfigError, match="There is no run"):
        agl("runs", tmp_path / "runs" / "a" / "nowhere")


def test_the_best_validation_is_shown_beside_the_last_with_an_interval_that_knows_the_looks(tmp_path: Path) -> None:
    folder = with_files(tmp_path / "runs" / "a", [0.4] * 7)
    rng = np.random.default_rng(3)
    rows = []
    for step in range(1, 8):  # a flat run, validated on 20 tasks
        won = int(rng.binomial(20, 0.4))
        low, high = mean_interval([1.0] * won + [0.0] * (20 - won))
        rows.append({"step": step, "reward": 0.4, "val_reward": won / 20, "val_low": low, "val_high": high})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (found,) = as_json("runs", tmp_path / "runs")
    best = max(rows, key=lambda row: row["val_reward"])
    assert (found["val_last"], found["val_best"], found["validations"]) == (
        rows[-1]["val_reward"],
        best["val_reward"],
        7,
    )
    assert found["val_best_low"] < best["val_low"] < best["val_high"] < found["val_best_high"]
    assert found["val_best_low"] <= 0.4 <= found["val_best_high"]
    copy = str(shutil.copytree(folder, f"{folder}-again"))
    text = agl("compare", folder, copy).stdout
    assert "val last" in text
    assert f"{best['val_reward']:.3f} ({found['val_best_low']:.2f}–{found['val_best_high']:.2f})" in text


def test_two_runs_are_compared(tmp_path: Path) -> None:
    first = with_files(tmp_path / "a", [0.1, 0.5, 0.9], learning_rate=1e-5, group_size=8)
    second = with_files(tmp_path / "b", [0.1, 0.2, 0.2], learning_rate=1e-3, group_size=8)
    text = agl("compare", first, second).stdout
    assert "learning_rate" in text
    assert "group_size" not in text, "it is the same"
    assert "reward last" in text
    found = as_json("compare", first, second)
    assert found["settings"] == {"learning_rate": [1e-5, 1e-3]}
    assert found["curves"][str(first)] == [[1, 0.1], [2, 0.5], [3, 0.9]]


@pytest.mark.parametrize("width", [80, 120])
def test_a_run_is_watched(well: Path, width: int) -> None:
    text = agl("watch", well, "--once", width=width).stdout
    assert "step 12" in text
    assert "under way" not in text
    assert "│" in text
    assert max(map(len, text.splitlines())) <= width


def test_how_a_run_stands_is_told_to_programs(well: Path) -> None:
    found = as_json("watch", well)
    assert (found["status"], found["step"], found["under_way"], found["said"]) == ("running", 12, 0, [])
    assert len(found["rewards"]) == 12
    assert found["reward"] == found["rewards"][-1][1]
    store = SqliteLightningStore(well / "store.db")

    async def enqueue() -> None:
        await store.enqueue_rollout({"q": EVIL}, run_id=found["run_id"])
        await store.close()

    asyncio.run(enqueue())
    (waiting,) = as_json("watch", well)["oldest"]
    assert (waiting["last_heard"], waiting["task"]) == ("waiting for a runner", {"q": EVIL})
    assert as_json("store", "statistics", well)["rollouts"]["queuing"] == 1


def test_rollouts_are_found_by_what_they_were(well: Path) -> None:
    assert [r["reward"] for r in as_json("show", well, "--reward-min", "1", "--limit", "5")] == [1.0] * 5
    assert {r["metadata"]["step"] for r in as_json("show", well, "--step", "1", "--limit", "50")} == {1}
    siblings = as_json("show", well, "--group", "g3")
    assert [r["reward"] for r in siblings] == sorted((r["reward"] for r in siblings), reverse=True)
    assert sum(r["advantage"] for r in siblings) == pytest.approx(0.0, abs=1e-5)
    assert siblings[0]["advantage"] > 0 > siblings[-1]["advantage"]
    assert siblings[0]["calls"][0]["answer"]["content"] == "The answer is 4."
    assert "advantage +" in agl("show", well, "--group", "g3", width=120).stdout
    with pytest.raises(ConfigError, match="There is no finished rollout with --outcome timeout"):
        agl("show", well, "--outcome", "timeout")


def test_a_log_of_agents_that_emit_nothing_is_one_sentence(well: Path) -> None:
    shown = agl("show", well, "--log", "--limit", "3").stdout
    assert "No message in 3 rollouts" in " ".join(shown.split())
    assert "task" not in shown


def test_a_report_is_one_file(well: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.html"
    assert str(target) in agl("report", well, "--to", target).stdout.replace("\n", "")
    page = target.read_text()
    assert page.count("<details>") >= 10
    assert "It is learning" in page
    assert "<polyline" in page


def test_every_command_shows_an_example_in_its_help() -> None:
    for name in ("why", "doctor", "show", "runs", "compare", "watch", "report"):
        assert f"agl {name} " in " ".join(agl(name, "--help").stdout.split()).replace("agl runs my", "agl runs  my")
