"""A league against plain self-play, on rock, paper, scissors with unequal prizes: who is exploited less?

    python benchmarks/league.py [--steps 60] [--seeds 3] [--learning-rate 0.06] [--quick] [--json] [--minutes 60]
                                [--results FILE.jsonl] [--only "plain self-play;league"]

Two players throw once, without seeing the other's throw. Paper beats rock for 3, rock beats scissors for 1, scissors
beat paper for 2, and the loser pays. Every throw is beaten by another, so always playing one's newest self goes round
in circles; the only play that nobody can exploit throws rock, paper and scissors in 2, 1 and 3 of 6 games (the
equilibrium, worth 0). A tiny model, made here in seconds, begins with rock in 6 of 10.

It is trained as a LoRA adapter once against its newest self only, once against all of its earlier selves alike
(fictitious self-play: Heinrich et al., ICML 2015). In both runs the policy joins the pool every second step, and both
are played afterwards by one who no training has met: he has watched 128 throws, and gives the best answer to how often
they were what in 128 games. He plays against the newest self, and against the pool, of which one self is drawn for each
game: fictitious play brings that average to the equilibrium, not the newest self. The figure is what he earns a game (0
at the equilibrium, 3 at most), over the validations of the last half of the steps. With `--results` a run that is there
already is not run again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import agentlightning as agl
from agentlightning.metrics import SilentConsole
from agentlightning.trainer.example import load_example

THROWS = ("rock", "paper", "scissors")
PRIZES = {("paper", "rock"): 3, ("rock", "scissors"): 1, ("scissors", "paper"): 2}
GAMES = 128
"""That the exploiter watches, and then plays."""
PROMPT = [{"role": "user", "content": "Rock, paper or scissors?"}]
START = ("rock",) * 6 + ("paper",) * 2 + ("scissors",) * 2
"""What the model is taught to throw."""
POOL = {"size": 30, "every": 2}
ARMS: dict[str, dict[str, Any]] = {
    "plain self-play": {"draw": "latest", **POOL},
    "league": {"draw": "uniform", **POOL},
}
SETTINGS: dict[str, Any] = {"tasks_per_step": 8, "group_size": 8, "max_context": 64, "save_every": 1000}
VAL_EVERY = 3


def points(mine: str | None, other: str | None) -> int:
    """What a game brings; what is no throw loses 3."""
    if mine not in THROWS:
        return -3
    if other not in THROWS:
        return 3
    return PRIZES.get((mine, other), 0) - PRIZES.get((other, mine), 0)


def best_against(throws: Sequence[str | None]) -> str:
    """What would have earned most against these throws."""
    return max(THROWS, key=lambda mine: sum(points(mine, other) for other in throws))


async def throws_of(llm: agl.LLM, model: str, count: int) -> list[str | None]:
    """So many throws of a model, each in a conversation of its own."""
    client: Any = load_example("bidding", "bidding_agent").client
    chat = client.with_options(base_url=llm.endpoint, api_key=llm.api_key).chat.completions
    counts = [min(64, count - done) for done in range(0, count, 64)]
    answers = [await chat.create(model=model, messages=PROMPT, max_tokens=2, n=n) for n in counts]
    return [choice.message.content for answer in answers for choice in answer.choices]


OPPOSED: dict[str, asyncio.Task[list[str | None]]] = {}
"""The opponent's throws by group: one request for all siblings."""


@agl.rollout
async def thrower(task: dict[str, str], llm: agl.LLM, rollout: agl.AttemptedRollout) -> float:
    """In training one game against the opponent that was drawn; in validation all games against the exploiter."""
    if rollout.mode == agl.RolloutMode.TRAIN:
        group, opponent = rollout.metadata["group"], rollout.metadata["opponent"]
        asked = throws_of(llm, opponent, SETTINGS["group_size"])
        if group in OPPOSED:
            asked.close()
        else:
            OPPOSED[group] = asyncio.ensure_future(asked)
        (mine,) = await throws_of(llm, llm.model, 1)
        return points(mine, (await OPPOSED[group]).pop())
    pool = rollout.metadata["pool"] if task["plays"] == "pool" else []
    drawn = random.Random(rollout.rollout_id).choices(pool or [llm.model], k=2 * GAMES)
    of_model = {model: await throws_of(llm, model, drawn.count(model)) for model in set(drawn)}
    throws = [of_model[model].pop() for model in drawn]
    answer = best_against(throws[:GAMES])
    earned = sum(points(answer, mine) for mine in throws[GAMES:]) / GAMES
    SEEN.append((rollout.metadata["step"], task["plays"], earned))
    return -earned


SEEN: list[tuple[int, str, float]] = []
"""Step, who played (newest or pool), and what the exploiter earned a game, of the run that goes on."""


def make_model(folder: Path, steps: int = 60) -> None:
    """A network of 0.1 million parameters that throws as `START` says."""
    import torch

    maker = load_example("bidding", "make_model")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        prompt = f"<|im_start|>user\n{PROMPT[0]['content']}<|im_end|>\n<|im_start|>assistant\n"
        frame = ["user\n", "assistant\n", "system\n", PROMPT[0]["content"], *THROWS] * 300
        tokenizer = maker.words.make_tokenizer(frame)
        model = maker._network(tokenizer)
        rows = [_row(maker, tokenizer, prompt, said) for said in START] * 10
        maker._teach(model, rows, random.Random(0), steps)
    load_example("calc", "make_model").save(model, tokenizer, folder)


def _row(maker: Any, tokenizer: Any, prompt: str, said: str) -> tuple[list[int], list[int]]:
    """Ids of one game, and for each the id that follows where the model says it."""
    before = tokenizer.encode(prompt)
    after = [*tokenizer.encode(said), tokenizer.get_vocab()[maker.words.TURN_END]]
    return [*before, *after], [*([maker.IGNORED] * (len(before) - 1)), *after, maker.IGNORED]


def run(model: Path, arm: str, steps: int, seed: int, learning_rate: float) -> list[tuple[int, str, float]]:
    """One training run; the matches of its validations."""
    SEEN.clear()
    OPPOSED.clear()
    given = {**SETTINGS, "steps": steps, "seed": seed, "val_every": VAL_EVERY, "learning_rate": learning_rate}
    algorithm = agl.GRPO(model=str(model), league=agl.League(**ARMS[arm]), **given)
    held_out = [{"plays": "newest"}, {"plays": "pool"}]
    with tempfile.TemporaryDirectory() as folder:
        trainer = agl.Trainer(algorithm=algorithm, run_dir=Path(folder, "run"), concurrency=64, console=SilentConsole())
        if trainer.fit(thrower, [{"plays": "newest"}] * 64, held_out).stopped:
            raise SystemExit("The run was stopped and is not kept.")
    return list(SEEN)


def summary(seen: Sequence[Sequence[Any]], steps: int) -> dict[str, float]:
    """What the exploiter earned a game of each player, in the validations of the last half of the steps."""
    return {
        plays: statistics.mean(earned for step, who, earned in seen if who == plays and step > steps // 2)
        for plays in ("newest", "pool")
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--learning-rate", type=float, default=0.06)
    parser.add_argument("--quick", action="store_true", help="four steps, one seed")
    parser.add_argument("--json", action="store_true", help="end with the figures as one line of JSON")
    parser.add_argument("--results", type=Path, help="write runs into this file, and take those that are there")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no run after so long")
    parser.add_argument("--only", help="arms, separated by semicolons")
    arguments = parser.parse_args()
    arms = arguments.only.split(";") if arguments.only else list(ARMS)
    if arguments.quick:
        arguments.steps, arguments.seeds = 4, 1
    done: dict[str, Any] = {}
    if arguments.results is not None and arguments.results.exists():
        lines = map(json.loads, arguments.results.read_text().splitlines())
        done = {json.dumps(line["asked"]): line["matches"] for line in lines}
    until = time.monotonic() + 60 * arguments.minutes
    figures: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for seed, arm in [(seed, arm) for seed in range(arguments.seeds) for arm in arms]:
            asked = {"arm": arm, "steps": arguments.steps, "seed": seed, "learning_rate": arguments.learning_rate}
            key = json.dumps(asked)
            if key not in done and time.monotonic() < until:
                if not (model := Path(folder, "model")).exists():
                    make_model(model)
                done[key] = run(model, arm, arguments.steps, seed, arguments.learning_rate)
                if arguments.results is not None:
                    with arguments.results.open("a") as file:
                        file.write(json.dumps({"asked": asked, "matches": done[key]}) + "\n")
            if key in done:
                found = summary(done[key], arguments.steps)
                figures.setdefault(arm, []).append(found)
                print(f"{arm}, seed {seed}: " + ", ".join(f"{k} {v:.2f}" for k, v in found.items()), flush=True)
    for arm, runs in figures.items():
        print(f"{arm}: " + ", ".join(f"{name} {statistics.mean(r[name] for r in runs):.2f}" for name in runs[0]))
    if arguments.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
