"""A program written against `agent_lightning` runs as it is: client, server, tool rewards, training."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agentlightning.store import SqliteLightningStore
from agentlightning.types.names import REWARD_RESPONSE
from agentlightning.types.reward import find_reward_spans

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

CONFIG = """
model: {name: calc}
training: {algorithm: grpo, learning_rate: 5.0e-4, batch_size: 6, group_size: 8, steps: 5, max_context: 512}
runtime: {nworkers: 4, auto_instrumentation: true, air_enabled: true}
"""
SNIPPET = """
import json, re, sys
from openai import OpenAI
from agent_lightning import Client
from agent_lightning.runtime import air

TOOL = {"type": "function", "function": {"name": "calc", "description": "One operation on two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"},
        "op": {"type": "string", "enum": ["+", "-", "*", "/"]}, "b": {"type": "number"}},
        "required": ["a", "op", "b"]}}}

@air.on_tool_success
def reward_tool_success(tool_name, output):
    return 0.1

@air.on_tool_failure
def penalize_failure(tool_name, error):
    return -0.1

def calc(text):
    try:
        given = json.loads(text)
        a, op, b = given["a"], given["op"], given["b"]
        value = {"+": a + b, "-": a - b, "*": a * b, "/": a / b if b else 0}[op]
        return str(int(value) if value == int(value) else round(value, 4))
    except Exception:
        return "Error: give a, op and b"

def agent_fn(resource, task):
    with OpenAI(base_url=resource.model_api) as llm:
        messages = [{"role": "system", "content": "Answer the question. Use the calc tool for every operation."},
                    {"role": "user", "content": task.question}]
        for _ in range(4):
            reply = llm.chat.completions.create(model="gpt-4o", messages=messages, tools=[TOOL], max_tokens=64)
            message = reply.choices[0].message
            if not message.tool_calls:
                numbers = re.findall(r"-?[0-9]+(?:[.][0-9]+)?", message.content or "")
                return 1.0 if numbers and float(numbers[-1]) == task.ground_truth else 0.0
            messages.append(message)
            for call in message.tool_calls:
                messages.append({"role": "tool", "tool_call_id": call.id, "content": calc(call.function.arguments)})
    return 0.0

client = Client(sys.argv[1])
client.upload_data("train.jsonl")
print(client.train(agent_fn, nworkers=4))
"""


async def test_the_documented_snippet(tmp_path: Path) -> None:
    source = Path(__file__).parents[2] / "examples" / "programs" / "tasks.jsonl"
    tasks = [json.loads(line) for line in source.read_text().splitlines()]
    lines = [json.dumps({"question": t["question"], "ground_truth": t["answer"]}) for t in tasks]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    (tmp_path / "config.yaml").write_text(CONFIG)
    (tmp_path / "program.py").write_text(SNIPPET)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    unwanted = ("OPENAI_API_KEY", "LIGHTNING_MODEL_PATH")
    environment = {k: v for k, v in os.environ.items() if k not in unwanted} | {"HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "agent_lightning.server", "--port", str(port), "--config", "config.yaml"]
    server = subprocess.Popen(command, cwd=tmp_path, env=environment)  # noqa: ASYNC220
    try:
        wait_for(port, server)
        program = [sys.executable, "program.py", f"http://127.0.0.1:{port}"]
        done = subprocess.run(program, cwd=tmp_path, env=environment, capture_output=True, text=True)  # noqa: ASYNC221
    finally:
        server.terminate()
        server.wait(30)
    assert done.returncode == 0, done.stderr
    assert "steps=5" in done.stdout, done.stdout
    run_dir = next((tmp_path / "runs").iterdir())
    rewards = [json.loads(line)["reward"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert max(rewards[-2:]) > rewards[0] + 0.1, rewards
    await check_tool_rewards(run_dir / "store.db")


async def check_tool_rewards(path: Path) -> None:
    """Every tool call that was answered earned a reward, bound to the response that made it."""
    store = SqliteLightningStore(path)
    try:
        rollouts = list(await store.query_rollouts(limit=-1))
        assert len(rollouts) == 5 * 6 * 8
        values: set[float] = set()
        for rollout in rollouts[:40]:
            spans = list(await store.query_spans(rollout.rollout_id))
            responses = {s.attributes.get("gen_ai.response.id") for s in spans} - {None}
            bound = [s for s in find_reward_spans(spans) if REWARD_RESPONSE in s.attributes]
            values |= {s.attributes["agentlightning.reward.0.value"] for s in bound}
            assert {s.attributes[REWARD_RESPONSE] for s in bound} <= responses
    finally:
        await store.close()
    assert values == {0.1, -0.1}


def wait_for(port: int, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while True:
        assert server.poll() is None, "the server ended"
        assert time.monotonic() < deadline
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            time.sleep(0.2)
        else:
            return
