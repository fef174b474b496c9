"""Recipes of tinker-cookbook against the training server: base URL, model and data set changed, and nothing else."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

pytest.importorskip("tinker_cookbook")

from agentlightning.finetuning.app import ServerSettings, TrainingServer
from agentlightning.finetuning.recipe import BaseModel
from tests.clients.cookbook import BOXED, MODEL

pytestmark = pytest.mark.clients
SECONDS = 240.0


@pytest_asyncio.fixture
async def server(tmp_path: Path) -> AsyncIterator[TrainingServer]:
    bases = {MODEL: BaseModel(MODEL, "calc", {"device": "cpu"}, stable_reinforce="cispo")}
    server = TrainingServer(tmp_path / "served", bases, ServerSettings(port=0, max_context=1024))
    await server.start()
    yield server
    await server.stop()


async def run(server: TrainingServer, recipe: str, log: Path, *options: str) -> list[dict[str, Any]]:
    """What the recipe says of each of its steps."""
    url = server.endpoint.removesuffix("/v1")
    given = [f"base_url={url}", f"model_name={MODEL}", f"log_path={log}", *options]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.clients.cookbook", recipe, *given),
        env={**os.environ, "TINKER_API_KEY": "tml-any", "TINKER_TELEMETRY": "0"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    async with asyncio.timeout(SECONDS):
        said, _ = await process.communicate()
    assert process.returncode == 0, said.decode()[-4000:]
    return [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]


async def test_supervised_loop_and_its_resuming(server: TrainingServer, tmp_path: Path) -> None:
    log, options = tmp_path / "log", ("batch_size=16", "learning_rate=1e-3", "save_every=1")
    first = await run(server, "sl_loop", log, *options, "max_steps=2")
    (log / "checkpoints.jsonl").write_text((log / "checkpoints.jsonl").read_text().splitlines()[0] + "\n")
    steps = await run(server, "sl_loop", log, *options, "max_steps=4")
    assert [one["step"] for one in first] == [1, 2]
    assert [one["step"] for one in steps][-3:] == [2, 3, 4], "it went on from the checkpoint before step 2"
    again = next(one for one in steps[2:] if one["step"] == 2)
    assert again["train_mean_nll"] == pytest.approx(first[1]["train_mean_nll"], rel=1e-5)
    assert steps[-1]["train_mean_nll"] < first[0]["train_mean_nll"] - 1
    assert {one["name"] for one in server.records.rows("SELECT name FROM tinker_checkpoints")} >= {"000001", "final"}


@pytest.mark.timeout(300)
async def test_reinforcement_loop(server: TrainingServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on from chats that taught it to box an answer, right or wrong, and learns which; by each loss it has. The
    one that it asks for by itself is not published, and the server's owner has named another."""
    monkeypatch.setenv(BOXED, "1")
    options = ("batch_size=16", "learning_rate=5e-3", "save_every=0", "train_on_what=last_assistant_message")
    await run(server, "sl_loop", tmp_path / "chats", *options)
    (taught,) = (tmp_path / "chats" / "checkpoints.jsonl").read_text().splitlines()
    for loss in (None, "importance_sampling", "gspo"):
        log = tmp_path / str(loss)
        log.mkdir()
        (log / "checkpoints.jsonl").write_text(json.dumps({**json.loads(taught), "name": "000000", "batch": 0}) + "\n")
        named = () if loss is None else (f"loss_fn={loss}",)
        options = (*named, "batch_size=4", "group_size=8", "max_tokens=24", "max_steps=6", "learning_rate=1e-3")
        rewards = [one["reward/total"] for one in await run(server, "rl_loop", log, *options)]
        assert len(rewards) == 6
        assert 0 < rewards[0] < max(rewards) - 0.15, (loss, rewards)


async def test_reinforcement_with_its_trainer(server: TrainingServer, tmp_path: Path) -> None:
    options = ("max_tokens=16", "max_steps=2", "remove_constant_reward_groups=False")
    steps = await run(server, "rl_basic", tmp_path / "log", *options)
    trained = [one for one in steps if "optim/kl_sample_train_v1" in one]
    assert len(trained) >= 2
    assert all(abs(one["optim/kl_sample_train_v1"]) < 1e-4 for one in trained), "what sampled is what is trained"


async def test_chats_from_a_file(server: TrainingServer, tmp_path: Path) -> None:
    chats = tmp_path / "chats.jsonl"
    said = [{"role": "assistant", "content": "Seven."}]
    lines = [{"messages": [{"role": "user", "content": f"{i} + 1?"}, *said]} for i in range(64)]
    chats.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = (f"dataset={chats}", "batch_size=16", "save_every=2", "eval_every=0", "learning_rate=1e-3")
    steps = await run(server, "chat_sl.train", tmp_path / "log", *options)
    found = [one["train_mean_nll"] for one in steps if "train_mean_nll" in one]
    assert len(found) == 4
    assert found[-1] < found[0]
