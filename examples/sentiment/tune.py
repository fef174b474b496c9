"""Tunes the agent's prompt on a real model: `python -m examples.sentiment.tune`, by APO, with no model but the agent's.

What is tuned are few-shot demonstrations: reviews with their right answers, out of which APO chooses. With
`--tune prompt_template` it is the text of the question, and `mutations.Mutations` is the critic: random changes, which
APO tries and selects. The agent's model is SmolLM2-135M-Instruct behind `agl serve`, which this starts; with `--url`
and `--model` any other.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import fmean
from typing import Any

import agentlightning as agl
from agentlightning.errors import ConfigError
from agentlightning.metrics.intervals import paired_difference

from .mutations import Mutations
from .reviews import make_tasks
from .sentiment_agent import FIRST_PROMPT, answer_to, asking_agent, grade, prompted_agent
from .smollm2 import smollm2

SETTINGS: dict[str, Any] = {
    "beam_width": 2,
    "branch_factor": 4,
    "beam_rounds": 2,
    "val_batch_size": 25,
    "gradient_batch_size": 8,
}
FIRST: dict[str, agl.PromptTemplate] = {
    "demonstrations": agl.Demonstrations(most=4, answer="label"),
    "prompt_template": agl.PromptTemplate(template=FIRST_PROMPT),
}
"""What may be tuned, as it is at first: none, and a plain question."""
TRAIN, VAL, TEST = 128, 150, 200
MAX_CONTEXT = 512
START_SECONDS = 300


@contextmanager
def served(model: str, log: Path) -> Iterator[str]:
    """The base URL of `agl serve MODEL`, while it runs."""
    command = [sys.executable, "-m", "agentlightning", "serve", model, "--port", "0"]
    command += ["--max-context", str(MAX_CONTEXT)]
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


def tune(url: str, model: str, what: str, seed: int, run_dir: Path, **settings: Any) -> agl.PromptTemplate | None:
    """The best that is found; None where the search was stopped."""
    train, val, _ = make_tasks(TRAIN, VAL, TEST)
    alone = what == "demonstrations"
    tuner = agl.APO(None if alone else Mutations(seed), seed=seed, **{**SETTINGS, **settings})
    trainer = agl.Trainer(
        algorithm=tuner,
        models={"llm": agl.Provider(base_url=url, model=model)},
        initial_resources={what: FIRST[what]},
        run_dir=run_dir,
    )
    result = trainer.fit(asking_agent if alone else prompted_agent, train, val)
    return None if result.stopped else tuner.get_best_prompt()


async def rewards(url: str, model: str, prompt: agl.PromptTemplate) -> list[float]:
    """What a prompt earns on each of the reviews that the search has not seen, without a gateway between."""
    _, _, test = make_tasks(TRAIN, VAL, TEST)
    llm = agl.LLM(endpoint=url, model=model)
    template = FIRST["prompt_template"] if isinstance(prompt, agl.Demonstrations) else prompt
    shown = prompt.messages if isinstance(prompt, agl.Demonstrations) else []
    answers = await asyncio.gather(*(answer_to(llm, template, task, shown) for task in test))
    return [grade(answer, task["label"]) for answer, task in zip(answers, test, strict=True)]


async def compare(url: str, model: str, first: agl.PromptTemplate, best: agl.PromptTemplate) -> str:
    before, after = [await rewards(url, model, prompt) for prompt in (first, best)]
    gain, (low, high) = paired_difference(before, after)
    return (
        f"On {TEST} other reviews {fmean(before):.3f} with the first prompt, {fmean(after):.3f} with the best: "
        f"{gain:+.3f} (95 % interval {low:+.3f} to {high:+.3f})."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="an OpenAI-compatible base URL; SmolLM2 on this machine if not given")
    parser.add_argument("--model", default="policy", help="the agent's model there")
    parser.add_argument("--tune", choices=list(FIRST), default="demonstrations")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=SETTINGS["beam_rounds"])
    parser.add_argument("--run-dir", type=Path)
    given = parser.parse_args()
    run_dir = given.run_dir or Path("runs") / f"sentiment-prompt-{time.strftime('%Y%m%d-%H%M%S')}"
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("Terminated."))  # so that the server is stopped with this process
    log = run_dir.with_name(f"{run_dir.name}-serve.log")
    with nullcontext(given.url) if given.url else served(smollm2(), log) as url:
        best = tune(url, given.model, given.tune, given.seed, run_dir, beam_rounds=given.rounds)
        if best is not None and best != FIRST[given.tune]:
            print(asyncio.run(compare(url, given.model, FIRST[given.tune], best)))


if __name__ == "__main__":
    main()
