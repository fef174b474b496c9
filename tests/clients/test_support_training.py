"""`examples/support` with the real tau2: two steps on a model that knows nothing yet, and a run that learns."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest

from agentlightning.metrics import read_metrics
from examples.support import recipe
from examples.support.cases import make_tasks
from tests.e2e.test_train_elsewhere import free_port, reached, start
from tests.typed import typed

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("default")]  # other people's packages

DOMAINS = {
    "airline": {"train": 30, "test": 20},
    "retail": {"train": 74, "test": 40},
    "telecom": {"train": 74, "test": 40},
}
"""How many tasks tau2's domains have in the parts that the commands of the pages name."""
AGENT = Path(__file__).parents[2] / "examples" / "support" / "support_agent.py"


def installed() -> None:
    pytest.importorskip("tau2.registry", reason="tau2 is not installed here: examples/support/requirements.txt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a model that was taught for three steps and knows nothing, four tasks, and settings for two steps."""
    installed()
    made = tmp_path_factory.mktemp("support")
    make = "from agentlightning.trainer.example import load_example; load_example('tools', 'make_model').main()"
    done = typed(made, "-c", make, "support", "--quick", "--out", "model", timeout=200)
    assert done.returncode == 0, done.stderr
    tasks = make_tasks()["train"][:4]
    (made / "tasks.jsonl").write_text("".join(f"{json.dumps(task)}\n" for task in tasks))
    short = {"model": "./model", "steps": 2, "tasks_per_step": 2, "group_size": 4, "preflight": "warn"}
    (made / "config.json").write_text(json.dumps(recipe.SETTINGS | short))
    return made


def two_steps_were_graded(run: Path) -> None:
    rows = [row for row in read_metrics(run / "metrics.jsonl") if row["step"] > 0]
    assert [(row["failed"], row["reward"]) for row in rows] == [(0, 0), (0, 0)]
    assert all({"reward/score", "reward/calls", "reward/errors", "reward/questions"} <= set(row) for row in rows)


@pytest.mark.timeout(500)
def test_two_steps_of_it(folder: Path) -> None:
    """Nothing is learned, and every rollout is graded."""
    command = f"train --agent {AGENT}:support_agent --tasks tasks.jsonl --config config.json --run-dir run"
    done = typed(folder, "-m", "agentlightning", *command.split(), timeout=400)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Nothing was learned" in done.stdout
    two_steps_were_graded(folder / "run")


@pytest.mark.timeout(1200)
async def test_two_steps_with_tau2_in_a_process_of_its_own(folder: Path) -> None:
    """`agl train --remote` and `agl runner`; only the second one loads the agent."""
    both = {"AGL_STORE_KEY": "a-key", "AGL_SERVER_PORT": str(port := free_port())}
    settings = "--tasks tasks.jsonl --config config.json --run-dir elsewhere"
    trainer, runner = start(folder, "train", "--remote", *settings.split(), **both), None
    try:
        await reached(port, trainer)
        here = f"runner --server http://127.0.0.1:{port} --agent {AGENT}:support_agent"
        runner = start(folder, *here.split(), **both)
        said, _ = await asyncio.to_thread(trainer.communicate, timeout=900)
    finally:
        for process in (trainer, runner):
            if process is not None and process.poll() is None:
                process.kill()
    assert "Nothing was learned" in said, said
    two_steps_were_graded(folder / "elsewhere")


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("domain", "sizes"), DOMAINS.items())
def test_the_tasks_of_a_domain_are_written_as_files(domain: str, sizes: dict[str, int], tmp_path: Path) -> None:
    installed()
    done = typed(tmp_path, "-m", "examples.support.domains", domain, f"data/{domain}")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = {part: (tmp_path / "data" / domain / f"{part}.jsonl").read_text().splitlines() for part in sizes}
    assert {part: len(rows) for part, rows in lines.items()} == sizes
    assert {json.loads(line)["domain"] for rows in lines.values() for line in rows} == {domain}
    assert not set(lines["train"]) & set(lines["test"])


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_it_learns(tmp_path: Path) -> None:
    """On 200 cases that neither training nor validation saw, the gain is above nothing with 95 % confidence."""
    installed()
    own = {"AGL_CACHE": str(tmp_path / "cache")}
    command = "-m agentlightning demo support --run-dir run"
    done = typed(tmp_path, *command.split(), environment=own, timeout=2400)
    assert done.returncode == 0, done.stdout + done.stderr
    done = typed(tmp_path, "-m", "agentlightning", "eval", "run", environment=own, timeout=900)
    found = re.search(r"95 % interval ([+-]\d\.\d+) to", done.stdout)
    assert found is not None, done.stdout + done.stderr
    assert float(found[1]) > 0, done.stdout
