"""The official client from the upload to a chat with what came of it, on the calculator model."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import openai
import pytest

from agentlightning.finetuning.app import ServerSettings, TrainingServer
from agentlightning.finetuning.queue import TRAINING
from agentlightning.finetuning.recipe import BaseModel
from scripts.tuning_curves import SOURCE, curves, items

from .conftest import Serve, chats, events, pairs, until, upload

ROOT = Path(__file__).parents[2]
TIMEOUT = 120


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["supervised", "dpo"])
async def test_a_job_from_its_file_to_a_chat(serve: Serve, kind: str) -> None:
    rows = chats(16) if kind == "supervised" else pairs(16)
    async with serve(command=TRAINING) as (_, client):
        train, val = await upload(client, rows), await upload(client, rows[:3])
        hyper: Any = {
            "n_epochs": 6,
            "batch_size": 4,
            "learning_rate_multiplier": 3,
            **({"beta": 0.2} if kind == "dpo" else {}),
        }
        method: Any = {"type": kind, kind: {"hyperparameters": hyper}}
        job = await client.fine_tuning.jobs.create(
            model="gpt-4.1-mini", training_file=train, validation_file=val, method=method, suffix="seven", seed=1
        )
        assert (job.status, job.fine_tuned_model) == ("validating_files", None)
        done = await until(client, job.id, seconds=TIMEOUT)
        assert done.status == "succeeded", done.error
        assert done.fine_tuned_model == f"ft:gpt-4.1-mini:local:seven:{job.id[6:14]}"
        assert done.trained_tokens
        events = [e async for e in client.fine_tuning.jobs.list_events(job.id, limit=3)]
        assert len({e.id for e in events}) == len(events)
        steps: list[Any] = [e.data for e in events if e.type == "metrics"]
        assert [s["step"] for s in steps] == list(range(24, 0, -1))
        assert all({"train_loss", "valid_loss"} <= s.keys() for s in steps)
        assert steps[0]["full_valid_loss"] < steps[-1]["valid_loss"]
        accuracies = ("train_mean_token_accuracy", "valid_mean_token_accuracy")
        assert all((name in s) == (kind == "supervised") for s in steps for name in accuracies)
        kept = [c async for c in client.fine_tuning.jobs.checkpoints.list(job.id, limit=1)]
        assert [c.step_number for c in kept] == [24, 20, 16]
        if kind == "supervised":
            assert 0 <= steps[-1][accuracies[0]] < steps[0][accuracies[0]] <= 1
            assert kept[0].metrics.full_valid_mean_token_accuracy == steps[0]["full_valid_mean_token_accuracy"]
        table = (await client.files.content(done.result_files[0])).text.splitlines()
        assert table[0].startswith("step,train_loss,valid_loss,full_valid_loss")
        assert len(table) == 25
        await chat_and_delete(client, done.fine_tuned_model, kept[2].fine_tuned_model_checkpoint, kind)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_reinforcement_job_with_a_python_grader(serve: Serve) -> None:
    rows = items(20)
    grader = {"type": "python", "name": "call", "source": SOURCE}
    hyper: Any = {"batch_size": 8, "compute_multiplier": 0.5, "eval_interval": 1, "eval_samples": 2}
    async with serve(command=TRAINING) as (server, client):
        method: Any = {"type": "reinforcement", "reinforcement": {"grader": grader, "hyperparameters": hyper}}
        asked = {"training_file": await upload(client, rows[:16]), "validation_file": await upload(client, rows[16:])}
        job = await client.fine_tuning.jobs.create(model="calc", method=method, **asked)
        done = await until(client, job.id, seconds=TIMEOUT)
        assert done.status == "succeeded", done.error
        steps: list[Any] = [e.data for e in await events(client, job.id) if e.type == "metrics"]
        assert [s["step"] for s in steps] == [0, 1, 2]
        assert all("full_valid_mean_reward" in s for s in steps)
        assert 0 <= steps[1]["train_mean_reward"] == steps[1]["scores"]["train_reward_mean"] <= 1
        assert [g["name"] for g in steps[1]["timing"]["graders"]] == ["call"]
        table = (await client.files.content(done.result_files[0])).text.splitlines()
        assert table[0].startswith("step,train_mean_reward,full_valid_mean_reward,completion_tokens_mean")
        wrong = {**grader, "source": "def grade(sample, item):\n    return item['nothing']"}
        method["reinforcement"]["grader"] = wrong
        job = await client.fine_tuning.jobs.create(model="calc", method=method, **asked)
        failed = await until(client, job.id, seconds=TIMEOUT)
        assert failed.status == "failed"
        assert "KeyError: 'nothing'" in failed.error.message
        assert server.queue.busy_with is None


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_a_reinforcement_job_rises() -> None:
    """The curve of the page, for one of its seeds."""
    (points,) = (await curves(1)).values()
    assert points[0][0] == 0
    assert points[-1][1] > max(points[0][1] + 0.3, 0.85), points


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_grader_asks_a_model_of_this_server_as_the_jobs_owner(serve: Serve) -> None:
    judge: Any = {
        "type": "score_model",
        "name": "judged",
        "model": "calc",
        "input": [{"role": "user", "content": "Rate {{ sample.output_text }}"}],
        "sampling_params": {"max_completions_tokens": 60, "temperature": 0},
    }
    async with serve(command=TRAINING, key="boss", admin_key="boss") as (_, boss):
        made: Any = await boss.post("/organization/admin_api_keys", body={"name": "anna"}, cast_to=object)
        anna = boss.with_options(api_key=made["value"])
        tried = await anna.fine_tuning.alpha.graders.run(grader=judge, model_sample="7", item={})
        assert not tried.metadata.errors.model_grader_server_error
        file = await upload(anna, [{"messages": chat["messages"][:1]} for chat in chats(4)])
        hyper: Any = {"batch_size": 2, "compute_multiplier": 0.25}
        method: Any = {"type": "reinforcement", "reinforcement": {"grader": judge, "hyperparameters": hyper}}
        job = await anna.fine_tuning.jobs.create(model="calc", training_file=file, validation_file=file, method=method)
        done = await until(anna, job.id, seconds=TIMEOUT)
        said = [e.message for e in await events(anna, job.id)]
        assert "server_error" not in str(done.error), done.error
        assert any(one.startswith("Step 0") for one in said), said


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_job_trains_an_agent(serve: Serve) -> None:
    tasks = [{"question": f"How much is {n} and 3?", "answer": n + 3} for n in range(8)]
    agents = {"sums": f"{ROOT}/examples/calc/calc_agent.py:calc_agent"}
    async with serve(command=TRAINING, agents=agents) as (_, client):
        file = await upload(client, tasks)
        method = {"type": "reinforcement", "reinforcement": {"agent": "sums", "hyperparameters": {"batch_size": 4}}}
        job = await client.fine_tuning.jobs.create(
            model="calc", training_file=file, validation_file=file, extra_body={"method": method}
        )
        done = await until(client, job.id, seconds=TIMEOUT)
        assert done.status == "succeeded", done.error
        steps: list[Any] = [e.data for e in await events(client, job.id) if e.type == "metrics"]
        assert [s["step"] for s in steps] == [0, 1, 2]


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_grader_asks_a_provider_that_the_owner_names(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its key, its name for the model and its limits; the server itself has no such model."""
    judge: Any = {
        "type": "score_model",
        "name": "judged",
        "model": "critic",
        "input": [{"role": "user", "content": "Rate {{ sample.output_text }}"}],
        "range": [-1000000, 1000000],
        "sampling_params": {"max_completions_tokens": 200, "temperature": 0},
    }
    other = TrainingServer(
        tmp_path / "other", {"calc": BaseModel("calc", "calc")}, ServerSettings(port=0, admin_key="theirs")
    )
    await other.start()
    limits = {"limits": {"run_calls": 4}}
    provider: dict[str, Any] = {"base_url": other.endpoint, "model": "calc", "key_variable": "CRITIC_KEY"}
    file = tmp_path / "graders.json"
    monkeypatch.setenv("CRITIC_KEY", "theirs")
    monkeypatch.setenv("AGL_GRADERS", str(file))
    try:
        async with serve(command=TRAINING) as (_, client):
            file.write_text(json.dumps({"providers": {"critic": provider}}))
            tried = await client.fine_tuning.alpha.graders.run(grader=judge, model_sample="7", item={})
            assert not tried.metadata.errors.model_grader_server_error, tried.metadata
            asked = {"messages": [{"role": "user", "content": "5 + 1?"}]}
            train = await upload(client, [asked] * 4)
            hyper: Any = {"batch_size": 2, "compute_multiplier": 0.25}
            method: Any = {"type": "reinforcement", "reinforcement": {"grader": judge, "hyperparameters": hyper}}
            given: Any = {"model": "calc", "training_file": train, "validation_file": train, "method": method}
            free = await until(client, (await client.fine_tuning.jobs.create(**given)).id, seconds=TIMEOUT)
            assert "limit" not in str(free.error)
            file.write_text(json.dumps({"providers": {"critic": {**provider, **limits}}}))
            bound = await until(client, (await client.fine_tuning.jobs.create(**given)).id, seconds=TIMEOUT)
            said = [e.data async for e in client.fine_tuning.jobs.list_events(bound.id)]
            assert "run_calls" in str(bound.error) + str(said)
            monkeypatch.setenv("CRITIC_KEY", "wrong")
            tried = await client.fine_tuning.alpha.graders.run(grader=judge, model_sample="7", item={})
            assert tried.metadata.errors.model_grader_server_error
    finally:
        await other.stop()


PROGRAM = """
import json, os, sys, urllib.request
task = json.load(sys.stdin)
model = os.environ["OPENAI_MODEL"]
body = {"model": model, "messages": [{"role": "user", "content": task["question"]}], "max_tokens": 8}
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
answer = json.load(urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)))
print(1.0 / (1 + len(answer["choices"][0]["message"]["content"] or "")))
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_job_trains_a_program(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    async with serve(command=TRAINING, agents={"own": f"{sys.executable} {tmp_path}/program.py"}) as (_, client):
        file = await upload(client, [{"question": f"How much is {n} and 3?"} for n in range(4)])
        method = {"type": "reinforcement", "reinforcement": {"agent": "own", "hyperparameters": {"batch_size": 4}}}
        job = await client.fine_tuning.jobs.create(
            model="calc", training_file=file, validation_file=file, extra_body={"method": method}
        )
        done = await until(client, job.id, seconds=TIMEOUT)
        assert done.status == "succeeded", done.error
        steps: list[Any] = [e.data for e in await events(client, job.id) if e.type == "metrics"]
        assert 0 < steps[-1]["train_mean_reward"] < 1


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_an_adapter_is_trained_served_and_trained_further(serve: Serve) -> None:
    async with serve(command=TRAINING) as (_, client):
        train, model, said = await upload(client, chats(8)), "adapted", []
        for _ in range(2):
            job = await client.fine_tuning.jobs.create(
                model=model, training_file=train, hyperparameters={"n_epochs": 2, "batch_size": 4}
            )
            done = await until(client, job.id, seconds=TIMEOUT)
            assert done.status == "succeeded", done.error
            steps: list[Any] = [e.data for e in await events(client, job.id) if e.type == "metrics"]
            said += [s["train_loss"] for s in steps]
            model = done.fine_tuned_model
        assert said[4] < said[0], "the second job went on from the first one's adapter"
        answer = await client.responses.create(model=model, input="5 + 1?", max_output_tokens=8)
        assert answer.output_text is not None


async def chat_and_delete(client: openai.AsyncOpenAI, model: str, checkpoint: str, kind: str) -> None:
    asked: Any = [{"role": "user", "content": "5 + 1?"}]
    said = await client.chat.completions.create(model=model, messages=asked, temperature=0, max_tokens=16)
    if kind == "supervised":
        assert said.choices[0].message.content == "Seven."
    answer = await client.responses.create(model=model, input="5 + 1?", max_output_tokens=16)
    assert answer.output_text
    for name in (checkpoint, "calc"):  # more than are loaded at the same time
        assert (await client.chat.completions.create(model=name, messages=asked, max_tokens=4)).choices
    assert model in [m.id async for m in client.models.list()]
    assert (await client.models.delete(model)).deleted
    with pytest.raises(openai.NotFoundError) as refused:
        await client.chat.completions.create(model=model, messages=asked)
    assert refused.value.code == "model_not_found"
