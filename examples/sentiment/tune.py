"""Tunes the agent's prompt on a real model: `python -m examples.sentiment.tune`, by APO, with no model but the agent's.

The agent's model is SmolLM2-135M-Instruct behind `agl serve`, which this starts; with `--url` and `--model` any other.
The critic is `mutations.Mutations`: random changes, which APO tries and selects.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import agentlightning as agl
from agentlightning.errors import ConfigError

from .mutations import Mutations
from .reviews import Review, make_tasks
from .sentiment_agent import FIRST_PROMPT, answer_to, grade, prompted_agent
from .smollm2 import smollm2

SETTINGS: dict[str, Any] = {"beam_width": 2, "branch_factor": 6, "beam_rounds": 3, "val_batch_size": 20}
TRAIN, VAL, TEST = 32, 100, 100
START_SECONDS = 300


@contextmanager
def served(model: str, log: Path) -> Iterator[str]:
    """The base URL of `agl serve MODEL`, while it runs."""
    command = [sys.executable, "-m", "agentlightning", "serve", model, "--port", "0"]
    with log.open("w") as out:
        server = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    try:
        yield _url(server, log)
    finally:
        server.terminate()
        server.wait()


def _url(server: subprocess.Popen[bytes], log: Path) -> str:
    """What the server says when it is ready."""
    until = time.monotonic() + START_SECONDS
    while server.poll() is None and time.monotonic() < until:
        if found := re.search(r"http://127\.0\.0\.1:\d+/v1", log.read_text()):
            return found[0]
        time.sleep(0.2)
    raise ConfigError(f"The model is not served: {log} says why.")


def tune(url: str, model: str, seed: int, run_dir: Path, **settings: Any) -> str:
    """The best prompt that is found."""
    train, val, _ = make_tasks(TRAIN, VAL, TEST)
    tuner = agl.APO(Mutations(seed), seed=seed, **{**SETTINGS, **settings})
    trainer = agl.Trainer(
        algorithm=tuner,
        models={"llm": agl.Provider(base_url=url, model=model)},
        initial_resources={"prompt_template": agl.PromptTemplate(template=FIRST_PROMPT)},
        run_dir=run_dir,
    )
    trainer.fit(prompted_agent, train, val)
    return tuner.get_best_prompt().template


async def mean_reward(url: str, model: str, prompt: str, tasks: Sequence[Review]) -> float:
    """What a prompt earns on tasks that the search has not seen."""
    llm, template = agl.LLM(endpoint=url, model=model), agl.PromptTemplate(template=prompt)
    answers = await asyncio.gather(*(answer_to(llm, template, task) for task in tasks))
    return sum(grade(a, task["label"]) for a, task in zip(answers, tasks, strict=True)) / len(tasks)


async def compare(url: str, model: str, prompts: Sequence[str]) -> list[float]:
    _, _, test = make_tasks(TRAIN, VAL, TEST)
    return [await mean_reward(url, model, prompt, test) for prompt in prompts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="an OpenAI-compatible base URL; SmolLM2 on this machine if not given")
    parser.add_argument("--model", default="policy", help="the agent's model there")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=SETTINGS["beam_rounds"])
    parser.add_argument("--run-dir", type=Path)
    given = parser.parse_args()
    run_dir = given.run_dir or Path("runs") / f"sentiment-prompt-{time.strftime('%Y%m%d-%H%M%S')}"
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    with (
        nullcontext(given.url)
        if given.url
        else served(smollm2(), run_dir.with_name(f"{run_dir.name}-serve.log")) as url
    ):
        best = tune(url, given.model, given.seed, run_dir, beam_rounds=given.rounds)
        before, after = asyncio.run(compare(url, given.model, (FIRST_PROMPT, best)))
    print(f"\n{best}\n\nOn {TEST} other reviews the first prompt earns {before:.3f}, this one {after:.3f}.")


if __name__ == "__main__":
    main()
