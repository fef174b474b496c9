"""Tunes the agent's prompt: `python -m examples.room_booking.tune --algorithm apo`, offline against the stand-in, or
with `--url` and `--model` on real models."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import Any

import agentlightning as agl
from examples.room_booking.make_tasks import make_tasks
from examples.room_booking.room_agent import FIRST_PROMPT, room_agent
from examples.room_booking.stand_in import StandIn

TRAIN, VAL = make_tasks(60, seed=1), make_tasks(120, seed=2)
SETTINGS: dict[str, dict[str, Any]] = {
    "apo": {
        "beam_width": 3,
        "branch_factor": 3,
        "beam_rounds": 7,
        "val_batch_size": 24,
        "budget_rollouts": 1500,
        "budget_critic_tokens": 300_000,
    },
    "gepa": {
        "iterations": 60,
        "reflection_minibatch_size": 5,
        "budget_rollouts": 1500,
        "budget_critic_tokens": 300_000,
    },
}


def trainer_for(
    algorithm: str, url: str, model: str, critic: str, *, seed: int = 0, key: str | None = None, **of_the_trainer: Any
) -> tuple[agl.Trainer, agl.APO | agl.GEPA]:
    """A trainer for the example; agent and critic are models of the same server."""
    kinds = {"apo": agl.APO, "gepa": agl.GEPA}
    settings = {"critic_url": url, "critic_key": key, "seed": seed, **SETTINGS[algorithm]}
    if algorithm == "apo":
        settings |= {"gradient_model": critic, "apply_edit_model": critic}
    else:
        settings |= {"reflection_model": critic}
    tuner = kinds[algorithm](**settings)
    trainer = agl.Trainer(
        algorithm=tuner,
        models={"llm": agl.Provider(base_url=url, api_key=key, model=model)},
        initial_resources={"prompt_template": agl.PromptTemplate(template=FIRST_PROMPT)},
        **of_the_trainer,
    )
    return trainer, tuner


async def tune(given: argparse.Namespace) -> None:
    stand_in = StandIn()
    url = given.url or await stand_in.start()
    models = (given.model, given.critic) if given.url else ("agent", "critic")
    trainer, _ = trainer_for(
        given.algorithm, url, *models, seed=given.seed, key=given.key, run_dir=given.run_dir, resume=given.resume
    )
    await trainer.fit_async(room_agent, TRAIN, VAL)
    await stand_in.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--algorithm", choices=list(SETTINGS), default="apo")
    parser.add_argument("--url", help="an OpenAI-compatible base URL; the stand-in if not given")
    parser.add_argument("--key", help="the API key for it")
    parser.add_argument("--model", default="gpt-5-mini", help="the agent's model there")
    parser.add_argument("--critic", default="gpt-5-mini", help="the critic's model there")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run-dir", type=Path)
    parser.add_argument("--resume", type=Path, help="go on with the run in this folder")
    asyncio.run(tune(parser.parse_args()))


if __name__ == "__main__":
    main()
