"""A supervised job on a real pretrained model, SmolLM2-135M-Instruct, by the official client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from agentlightning.finetuning.app import ServerSettings, TrainingServer
from agentlightning.finetuning.recipe import BaseModel
from examples.sentiment.packages import Unavailable
from examples.sentiment.smollm2 import smollm2

from .conftest import events, until, upload

TOWNS = ("Oslo", "Lima", "Cairo", "Hanoi", "Quito", "Dakar", "Turin", "Perth", "Kyoto", "Leeds", "Lyon", "Bergen")


def chats() -> list[Any]:
    """Each town has the same code, which the model cannot know."""
    return [
        {
            "messages": [
                {"role": "user", "content": f"Which code does {town} have?"},
                {"role": "assistant", "content": f"The code of {town} is blue heron."},
            ]
        }
        for town in TOWNS
    ]


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_a_supervised_job_teaches_a_pretrained_model(tmp_path: Path) -> None:
    try:
        path = smollm2()
    except Unavailable as error:
        pytest.skip(str(error))
    base = BaseModel("smollm2", path, {"lora_rank": 8, "device": "cpu"})
    server = TrainingServer(tmp_path / "served", {"smollm2": base}, ServerSettings(port=0, max_context=256))
    await server.start()
    try:
        async with openai.AsyncOpenAI(base_url=server.endpoint, api_key="any", timeout=300) as client:
            asked: Any = [{"role": "user", "content": "Which code does Porto have?"}]
            before = await client.chat.completions.create(model="smollm2", messages=asked, temperature=0, max_tokens=12)
            assert "blue heron" not in str(before.choices[0].message.content)
            file = await upload(client, chats())
            held_out = await upload(client, chats()[:4])
            hyper: Any = {"n_epochs": 6, "batch_size": 4, "learning_rate_multiplier": 2}
            method: Any = {"type": "supervised", "supervised": {"hyperparameters": hyper}}
            job = await client.fine_tuning.jobs.create(
                model="smollm2", training_file=file, validation_file=held_out, method=method, seed=1
            )
            done = await until(client, job.id, seconds=600)
            assert done.status == "succeeded", done.error
            steps: list[Any] = [e.data for e in await events(client, job.id) if e.type == "metrics"]
            assert len(steps) == 18
            assert steps[-1]["train_loss"] < steps[0]["train_loss"] / 3
            assert steps[-1]["train_mean_token_accuracy"] > max(steps[0]["train_mean_token_accuracy"], 0.7)
            assert done.fine_tuned_model
            after = await client.chat.completions.create(
                model=done.fine_tuned_model, messages=asked, temperature=0, max_tokens=12
            )
            assert "Porto is blue heron" in str(after.choices[0].message.content)
    finally:
        await server.stop()
