"""`agl optimize`: what it is given, and a program that cannot be edited from its first prompt to a better one."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

import agentlightning as agl
from agentlightning.cli.commands.train import OptimizeOptions
from agentlightning.cli.optimize import only_model, optimize_agent, read_prompts
from examples.room_booking.make_tasks import make_tasks

ROOT = Path(__file__).parents[2]


AGENT = """import agentlightning as agl
import aiohttp

@agl.rollout
def without_a_model(task, prompt_template: agl.PromptTemplate):
    return 0.5

@agl.rollout
async def gives_up(task, prompt_template: agl.PromptTemplate, llm: agl.LLM):
    # takes a call that failed for a wrong answer
    async with aiohttp.ClientSession() as session:
        body = {"model": llm.model, "messages": [{"role": "user", "content": task["question"]}]}
        async with session.post(f"{llm.endpoint}/chat/completions", json=body) as answer:
            return 0.5 * (answer.status == 200)

@agl.rollout
async def raises(task, prompt_template: agl.PromptTemplate, llm: agl.LLM):
    return await gives_up(task, prompt_template, llm) or 1 / 0
"""


def options(folder: Path, agent: str = "without_a_model", **given: Any) -> OptimizeOptions:
    """The command's, for a prompt that is no good, with a critic that is not there."""
    (folder / "agents.py").write_text(AGENT)
    (folder / "tasks.jsonl").write_text("".join(json.dumps({"question": f"{n}"}) + "\n" for n in range(8)))
    (folder / "prompt.txt").write_text("{question}")
    settings: dict[str, Any] = {
        "agent": f"{folder}/agents.py:{agent}",
        "tasks": folder / "tasks.jsonl",
        "prompt": [str(folder / "prompt.txt")],
        "endpoint_model": "m",
        "critic_url": "http://127.0.0.1:9/v1",
        "critic_model": "m",
        "budget_rollouts": 40,
        "settings": ["beam_rounds=1", "beam_width=1", "branch_factor=1", "val_batch_size=4", "critic_timeout=5"],
        "concurrency": 4,
        "run_dir": folder / "run",
    }
    return OptimizeOptions(**{**settings, **given})


def optimize(folder: Path, **given: Any) -> None:
    optimize_agent(options(folder, **given))


def test_prompts_come_from_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Answer {question}\n")
    (tmp_path / "b.txt").write_text("Answer {{ question }}\n")
    a, b = str(tmp_path / "a.txt"), str(tmp_path / "b.txt")
    assert read_prompts(
        options(
            tmp_path,
            prompt=[a, f"second={b}"],
            system_prompt=[a, f"writer={b}"],
            tool_description=[f"find={a}"],
            prompt_place="after",
        )
    ) == {
        "prompt_template": agl.PromptTemplate(template="Answer {question}"),
        "second": agl.PromptTemplate(template="Answer {{ question }}", engine="jinja"),
        "system_prompt": agl.SystemPrompt(template="Answer {question}", how="after"),
        "system_writer": agl.SystemPrompt(template="Answer {{ question }}", how="after", agent="writer"),
        "tool_find": agl.ToolDescription(template="Answer {question}", tool="find"),
    }
    shown = read_prompts(options(tmp_path, prompt=[], demonstrations=3, answer="label"))
    assert shown == {"demonstrations": agl.Demonstrations(most=3, answer="label")}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"prompt": []}, "no prompt to tune"),
        ({"prompt": [], "answer": "label"}, "--answer is for --demonstrations"),
        ({"prompt": ["missing.txt"]}, "no file 'missing.txt'"),
    ],
)
def test_prompts_that_are_not_there(given: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(agl.ConfigError, match=says):
        read_prompts(options(tmp_path, **given))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"critic_url": None}, "no critic"),
        ({"critic_model": None}, "--critic-model NAME"),
        ({"model": "calc", "endpoint": "http://127.0.0.1:9/v1"}, "give one"),
        ({"prompt": [], "demonstrations": 3}, "puts in demonstrations: give --endpoint or --model"),
        ({"prices": "1,x"}, "up to four numbers"),
        ({"settings": ["beam_size=3"]}, "beam_width"),
        ({"budget_rollouts": None, "budget_cost": 1.0}, "prices"),
    ],
)
def test_wrong_options_are_named(given: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(agl.ConfigError, match=says):
        optimize(tmp_path, **given)


def test_a_critic_that_is_not_there_ends_the_run_and_is_asked_again_after_a_resume(tmp_path: Path) -> None:
    for resume in (None, tmp_path / "run"):
        with pytest.raises(agl.ConfigError, match=r"(?s)answered none of its first 1 questions.*model \('m'\)"):
            optimize(tmp_path, prices="1,2", resume=resume)
        assert not (tmp_path / "run" / "critic.jsonl").read_text(), "a failure that ends the run is not its answer"


@pytest.mark.quick_with("gives_up")
@pytest.mark.parametrize("agent", ["gives_up", "raises"])
def test_a_model_that_is_not_there_ends_the_run_before_a_critic_is_asked(tmp_path: Path, agent: str) -> None:
    with pytest.raises(agl.ConfigError, match=r"model answered none of its calls.*127\.0\.0\.1:9"):
        optimize(tmp_path, agent=agent, endpoint="http://127.0.0.1:9/v1")
    assert not (tmp_path / "run" / "critic.jsonl").read_text()


async def _models(request: web.Request) -> web.Response:
    if request.match_info["many"] == "moved":
        raise web.HTTPFound("/1/v1/models")
    return web.json_response({"data": [{"id": f"model-{n}"} for n in range(int(request.match_info["many"]))]})


@pytest.mark.parametrize(
    ("many", "says"),
    [
        ("0", "serves 0 models"),
        ("1", None),
        ("2", "model-0, model-1"),
        ("moved", "redirects are not followed"),
        ("x/y", "HTTP 404"),
    ],
)
async def test_the_only_model_of_an_endpoint_needs_no_name(many: str, says: str | None) -> None:
    app = web.Application()
    app.router.add_get("/{many}/v1/models", _models)
    async with TestServer(app) as server:
        url = str(server.make_url(f"/{many}/v1"))
        if says is None:
            assert await only_model(url, "key") == "model-0"
        else:
            with pytest.raises(agl.ConfigError, match=says):
                await only_model(url, "key")


@pytest.mark.slow
def test_a_local_model_is_served_to_the_agent(tmp_path: Path) -> None:
    with pytest.raises(agl.ConfigError, match="The critic answered none"):
        optimize(tmp_path, agent="gives_up", model="calc", prices="1,2")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_program_in_node_is_tuned_through_the_gateway(tmp_path: Path) -> None:
    """Its code is not touched: the text that is tuned comes after its own system prompt."""
    if shutil.which("node") is None:
        pytest.skip("node is not installed")
    for name, count, seed in (("train", 40, 1), ("val", 100, 2)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(t) + "\n" for t in make_tasks(count, seed)))
    (tmp_path / "prompt.txt").write_text("Think about what is asked for.\n")
    (tmp_path / "grade.py").write_text(
        "import json, sys\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "from examples.room_booking.rooms import grade\n"
        "run = json.load(sys.stdin)\n"
        "print(grade(run['stdout'], run['task']))\n"
    )
    server = [sys.executable, "-m", "examples.room_booking.stand_in", "--port", "0"]
    with subprocess.Popen(server, cwd=ROOT, stdout=subprocess.PIPE, text=True) as served:
        assert served.stdout is not None
        url = served.stdout.readline().strip()
        command = [sys.executable, "-m", "agentlightning", "optimize", "--algorithm", "gepa", "--endpoint", url]
        command += ["--agent", f"node {ROOT / 'examples' / 'room_booking' / 'agent.js'}"]
        command += ["--grader", f"{sys.executable} {tmp_path / 'grade.py'}", "--prompt-place", "after"]
        command += ["--tasks", str(tmp_path / "train.jsonl"), "--val-tasks", str(tmp_path / "val.jsonl")]
        command += ["--system-prompt", str(tmp_path / "prompt.txt"), "--endpoint-model", "agent"]
        command += ["--critic-model", "critic", "--set", "iterations=40", "--set", "reflection_minibatch_size=5"]
        command += ["--budget-rollouts", "900", "--run-dir", str(tmp_path / "run")]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        served.kill()
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["val_reward"] < 0.7
    assert rows[-1]["val_reward"] >= 0.8, done.stdout
