"""Makes the tasks. `python -m examples.room_booking.make_tasks` writes them to train.jsonl and val.jsonl; the same
seed makes the same tasks."""

from __future__ import annotations

import json
import random
from pathlib import Path

from examples.room_booking.rooms import Room, Task, fitting

HERE = Path(__file__).parent
ITEMS: tuple[str, ...] = ("whiteboard", "projector", "video", "phone")
NAMES = ("A101", "A102", "A205", "B110", "B111", "B220", "C301", "C302", "D012", "D014")


def make_task(rng: random.Random) -> Task:
    """A request with exactly one smallest room that satisfies it, and several that nearly do."""
    while True:
        task = _draw(rng)
        good = sorted((r for r in task["rooms"] if all(fitting(r, task).values())), key=lambda r: r["seats"])
        if len(good) >= 2 and good[0]["seats"] < good[1]["seats"]:
            return {**task, "expected": good[0]["id"]}


def make_tasks(count: int, seed: int) -> list[Task]:
    rng = random.Random(seed)
    return [make_task(rng) for _ in range(count)]


def _draw(rng: random.Random) -> Task:
    date = f"2026-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"
    start = f"{rng.randint(8, 16):02}:{rng.choice((0, 15, 30, 45)):02}"
    minutes, people = rng.choice((30, 45, 60, 90)), rng.randint(2, 14)
    items, step_free = sorted(rng.sample(ITEMS, rng.randint(1, 2))), rng.random() < 0.5
    wishes = [*(f"a {item}" for item in items), *(["step-free entry"] if step_free else [])]
    request = f"We are {people} people and meet on {date} at {start} for {minutes} minutes."
    request += f" We need {' and '.join(wishes)}." if wishes else ""
    return {
        "request": request,
        "date": date,
        "start": start,
        "minutes": minutes,
        "people": people,
        "items": items,
        "step_free": step_free,
        "rooms": [_room(rng, name) for name in NAMES],
        "expected": "",
    }


def _room(rng: random.Random, name: str) -> Room:
    booked = sorted(rng.sample(range(8, 18), rng.randint(0, 4)))
    return {
        "id": name,
        "seats": rng.choice((4, 6, 8, 10, 12, 16, 20)),
        "items": sorted(rng.sample(ITEMS, rng.randint(1, 4))),
        "step_free": rng.random() < 0.6,
        "booked": [f"{hour:02}:00-{hour + 1:02}:00" for hour in booked],
    }


def main() -> None:
    for name, count, seed in (("train", 60, 1), ("val", 120, 2)):
        lines = [json.dumps(task) + "\n" for task in make_tasks(count, seed)]
        (HERE / f"{name}.jsonl").write_text("".join(lines))
        print(f"{HERE / name}.jsonl: {count} tasks")


if __name__ == "__main__":
    main()
