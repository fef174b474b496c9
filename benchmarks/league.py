"""A league against plain self-play, on repeated rock, paper, scissors: who does better against opponents never met?

    python benchmarks/league.py [--steps 40] [--seeds 3] [--learning-rate 0.02] [--quick] [--json] [--minutes 60]
                                [--results FILE.jsonl] [--only "plain self-play;league, pfsp"]

Two players throw three times and see what the other threw. Any way of throwing is beaten by another, so plain self-play
has no end to arrive at. A tiny model, made here in about half a minute, has been taught games of players of many
habits: who always throw the same, copy, counter, or throw anything. It is then trained as a LoRA adapter, at the
default learning rate unless another is given, once against its newest self only (`latest`), once against a pool of
earlier selves (`uniform`, `pfsp`), for as many rollouts, and validated against habits: a throw that never changes, one
that copies the last throw of the other side, one that counters it. No training meets them. With `--results` a run that
is there already is not run again.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import agentlightning as agl
from agentlightning.cli.example import load_example
from agentlightning.metrics import SilentConsole

THROWS = ("rock", "paper", "scissors")
ROUNDS = 3
SYSTEM = "Rock, paper or scissors."
ARMS: dict[str, dict[str, Any]] = {
    "plain self-play": {"draw": "latest", "size": 1, "every": 1},
    "league, uniform": {"draw": "uniform", "size": 8, "every": 4},
    "league, pfsp": {"draw": "pfsp", "size": 8, "every": 4},
}
SETTINGS: dict[str, Any] = {"tasks_per_step": 4, "group_size": 8, "max_context": 128, "val_repeats": 8}


def counter(throw: str) -> str:
    """What beats it."""
    return THROWS[(THROWS.index(throw) + 1) % 3]


def points(mine: str | None, other: str | None) -> int:
    """1 for a round won, −1 for one lost; what is no throw loses."""
    if mine == other:
        return 0
    return 1 if other is None or (mine is not None and counter(other) == mine) else -1


Habit = Callable[[Sequence[str], Sequence[str], random.Random], str]
"""(own throws, the other's throws, chance) → the next throw."""
HABITS: dict[str, Habit] = {
    **{throw: lambda own, others, rng, throw=throw: throw for throw in THROWS},
    "copies": lambda own, others, rng: others[-1] if others else rng.choice(THROWS),
    "counters": lambda own, others, rng: counter(others[-1]) if others else rng.choice(THROWS),
    "counters the counter": lambda own, others, rng: counter(counter(others[-1])) if others else rng.choice(THROWS),
    "goes on": lambda own, others, rng: counter(own[-1]) if own else rng.choice(THROWS),
    "anything": lambda own, others, rng: rng.choice(THROWS),
}
HELD_OUT = (*THROWS, "copies", "counters")


def news(other: str | None) -> str:
    """What a player is told before a throw."""
    return "Throw." if other is None else f"It threw {other}. Throw."


class Player:
    """One side: a conversation with a model."""

    def __init__(self, llm: agl.LLM, model: str) -> None:
        client: Any = load_example("bidding", "bidding_agent").client
        self._chat = client.with_options(base_url=llm.endpoint, api_key=llm.api_key).chat.completions
        self._model = model
        self._messages: list[Any] = [{"role": "system", "content": SYSTEM}]

    async def throw(self, other: str | None) -> str | None:
        """The next throw, the other side having thrown this before; None if it says something else."""
        self._messages.append({"role": "user", "content": news(other)})
        answer = await self._chat.create(model=self._model, messages=self._messages, max_tokens=4)
        text = answer.choices[0].message.content or ""
        self._messages.append({"role": "assistant", "content": text})
        return text if text in THROWS else None


@agl.rollout
async def thrower(task: dict[str, Any], llm: agl.LLM, rollout: agl.AttemptedRollout) -> float:
    """Rounds ahead, as a share of all: against the opponent that the league drew, or the habit that the task names."""
    one, habit = Player(llm, llm.model), HABITS.get(task["habit"])
    two = Player(llm, rollout.metadata["opponent"]) if habit is None else None
    mine: list[str | None] = []
    others: list[str | None] = []
    rng, ahead = random.Random(rollout.rollout_id), 0
    for _ in range(ROUNDS):
        last = mine[-1] if mine else None
        throw = await one.throw(others[-1] if others else None)
        if two is not None:
            other = await two.throw(last)
        else:
            known = [t or "rock" for t in mine]
            other = habit([t or "rock" for t in others], known, rng) if habit else None
        ahead += points(throw, other)
        mine.append(throw)
        others.append(other)
    return ahead / ROUNDS


def make_model(folder: Path, steps: int = 500, seed: int = 0) -> None:
    """A network of 0.1 million parameters that has seen games of two players with habits drawn by chance."""
    import torch

    maker = load_example("bidding", "make_model")
    rng = random.Random(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        games = [_game(rng) for _ in range(4000)]
        frame = [SYSTEM, "user\n", "assistant\n", "system\n"] * 300
        tokenizer = maker.words.make_tokenizer([text for told, said in games for text in (*told, *said)] + frame)
        rows = [_row(maker, tokenizer, game) for game in games]
        model = maker._network(tokenizer)
        maker._teach(model, rows, rng, steps)
    maker._save(model, tokenizer, folder)


def _game(rng: random.Random) -> tuple[list[str], list[str]]:
    """What one side is told, and what it throws."""
    mine: list[str] = []
    others: list[str] = []
    habit, opposite = (HABITS[rng.choice(list(HABITS))] for _ in range(2))
    for _ in range(ROUNDS):
        throws = habit(mine, others, rng), opposite(others, mine, rng)
        mine.append(throws[0])
        others.append(throws[1])
    return [news(other) for other in (None, *others[:-1])], mine


def _row(maker: Any, tokenizer: Any, game: tuple[list[str], list[str]]) -> tuple[list[int], list[int]]:
    """Ids in Qwen3's format, and for each the id that follows where the model says it."""
    ids: list[int] = []
    targets: list[int] = []
    before = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n"
    for told, throw in zip(*game, strict=True):
        prompt = tokenizer.encode(f"{before}<|im_start|>user\n{told}<|im_end|>\n<|im_start|>assistant\n")
        said = [*tokenizer.encode(throw), tokenizer.get_vocab()[maker.words.TURN_END]]
        ids += [*prompt, *said]
        targets += [*([maker.IGNORED] * (len(prompt) - 1)), *said, maker.IGNORED]
        before = "\n"
    return ids, targets


def run(model: Path, arm: str, steps: int, seed: int, learning_rate: float | None = None) -> list[dict[str, Any]]:
    """One training run; the metrics of its steps."""
    train = [{"habit": None}] * 64
    held_out = [{"habit": name} for name in HELD_OUT for _ in range(2)]
    given = {**SETTINGS, "steps": steps, "seed": seed, "val_every": steps, "save_every": steps}
    given |= {} if learning_rate is None else {"learning_rate": learning_rate}
    algorithm = agl.GRPO(model=str(model), league=agl.League(**ARMS[arm]), **given)
    with tempfile.TemporaryDirectory() as folder:
        trainer = agl.Trainer(algorithm=algorithm, run_dir=Path(folder, "run"), concurrency=96, console=SilentConsole())
        return [dict(row) for row in trainer.fit(thrower, train, held_out).metrics]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--learning-rate", type=float)
    parser.add_argument("--quick", action="store_true", help="two arms, three steps, one seed")
    parser.add_argument("--json", action="store_true", help="end with the figures as one line of JSON")
    parser.add_argument("--results", type=Path, help="write runs into this file, and take those that are there")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no run after so long")
    parser.add_argument("--only", help="arms, separated by semicolons")
    arguments = parser.parse_args()
    arms = arguments.only.split(";") if arguments.only else list(ARMS)
    if arguments.quick:
        arms, arguments.steps, arguments.seeds = arms[:2], 3, 1
    done: dict[str, list[dict[str, Any]]] = {}
    if arguments.results is not None and arguments.results.exists():
        lines = map(json.loads, arguments.results.read_text().splitlines())
        done = {json.dumps(line["asked"]): line["rows"] for line in lines}
    until = time.monotonic() + 60 * arguments.minutes
    figures: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for seed, arm in [(seed, arm) for seed in range(arguments.seeds) for arm in arms]:
            rate = {} if arguments.learning_rate is None else {"learning_rate": arguments.learning_rate}
            key = json.dumps({"arm": arm, "steps": arguments.steps, "seed": seed, **rate})
            if key not in done and time.monotonic() < until:
                if not (model := Path(folder, "model")).exists():
                    make_model(model, steps=100 if arguments.quick else 500)
                done[key] = run(model, arm, arguments.steps, seed, arguments.learning_rate)
                if arguments.results is not None:
                    with arguments.results.open("a") as file:
                        file.write(json.dumps({"asked": json.loads(key), "rows": done[key]}, default=str) + "\n")
            if key in done:
                validated = [row["val_reward"] for row in done[key] if row.get("val_reward") is not None]
                of_arm = figures.setdefault(arm, {"before": [], "after": []})
                of_arm["before"].append(validated[0])
                of_arm["after"].append(validated[-1])
                print(f"{arm}, seed {seed}: {' → '.join(f'{v:.3f}' for v in validated)}", flush=True)
    for arm, found in figures.items():
        print(f"{arm}: " + ", ".join(f"{when} {statistics.mean(values):.3f}" for when, values in found.items()))
    if arguments.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
