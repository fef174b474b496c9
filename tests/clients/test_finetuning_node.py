"""OpenAI's client for Node drives each method of a fine-tuning job, from the upload to a chat with its model."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.clients import node

pytest.importorskip("multipart")

from agentlightning.finetuning.app import ServerSettings, TrainingServer
from agentlightning.finetuning.queue import TRAINING
from agentlightning.finetuning.recipe import BaseModel

pytestmark = [
    pytest.mark.clients,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not (node.HOME / "node_modules" / "openai").is_dir(), reason=f"npm install in {node.HOME}"),
]
ASKED: list[Any] = [[{"role": "user", "content": f"{i} + 1?"}] for i in range(16)]
SEVEN, NINE = ([{"role": "assistant", "content": text}] for text in ("Seven.", "Nine."))
SOURCE = "def grade(sample, item):\n    return 1 / (1 + len(sample['output_text']))"
GRADER = {"type": "python", "name": "short", "source": SOURCE}
ROWS: dict[str, list[Any]] = {
    "supervised": [{"messages": [*one, *SEVEN]} for one in ASKED],
    "dpo": [{"input": {"messages": one}, "preferred_output": SEVEN, "non_preferred_output": NINE} for one in ASKED],
    "reinforcement": [{"messages": one} for one in ASKED],
}
OWN: dict[str, Any] = {
    "supervised": {"hyperparameters": {"n_epochs": 6, "batch_size": 4, "learning_rate_multiplier": 3}},
    "dpo": {"hyperparameters": {"n_epochs": 2, "batch_size": 4, "beta": 0.2}},
    "reinforcement": {"grader": GRADER, "hyperparameters": {"n_epochs": 1, "batch_size": 8, "compute_multiplier": 0.5}},
}
STEPS = {"supervised": 24, "dpo": 8, "reinforcement": 2}


@pytest.mark.parametrize("kind", ROWS)
async def test_a_job_from_its_file_to_a_chat(tmp_path: Path, kind: str) -> None:
    bases = {"calc": BaseModel("calc", "calc", {"device": "cpu"})}
    server = TrainingServer(tmp_path / "served", bases, ServerSettings(port=0, max_context=512, command=TRAINING))
    await server.start()
    try:
        given = {"train": ROWS[kind], "validation": ROWS[kind][:4], "method": {"type": kind, kind: OWN[kind]}}
        process = await asyncio.create_subprocess_exec(
            *("node", str(node.HOME / "finetuning.mjs"), server.endpoint, kind, json.dumps(given)),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await process.communicate()
        assert process.returncode == 0, err.decode()[-3000:]
    finally:
        await server.stop()
    said = json.loads(out)
    assert said["status"] == "succeeded", said["error"]
    first = 0 if kind == "reinforcement" else 1
    assert sorted(step["step"] for step in said["steps"]) == list(range(first, STEPS[kind] + 1))
    assert said["checkpoints"][0] == STEPS[kind]
    assert said["response"] in ("completed", "incomplete")
    assert (said["deleted"], said["gone"]) == (True, [404, "model_not_found"])
    assert said["table"].startswith("step,train_mean_reward" if kind == "reinforcement" else "step,train_loss")
    if kind == "supervised":
        assert said["chat"] == "Seven."
