"""Stands in for the process that trains a job: `python fake_trainer.py FOLDER`.

It takes steps of no time, writes a line of metrics for each and a checkpoint after every second one, goes on from the
last checkpoint, and stops when its input ends. `script.json` in the server's folder says how it misbehaves.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import sys
import time
from contextlib import suppress
from pathlib import Path

FOLDER = Path(sys.argv[1])
MODEL = next(path for place in sys.path if (path := Path(place, "agentlightning/models/calc")).is_dir())
SCRIPT = FOLDER.parent.parent / "script.json"


def write(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    work = path.with_name(f".{path.name}.new")
    work.write_text(json.dumps(value))
    work.replace(path)


def stopped() -> bool:
    return bool(select.select([0], [], [], 0)[0]) and not os.read(0, 1)


def say() -> None:
    with suppress(OSError):
        os.write(1, b"\n")


def train(steps: int, seconds: float, dies_at: int | None) -> str:
    done = sorted(int(path.parent.name[5:]) for path in FOLDER.glob("checkpoints/step-*/checkpoint.json"))
    last = done[-1] if done else 0
    metrics = FOLDER / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows if row["step"] <= last))
    for step in range(last + 1, steps + 1):
        ends = stopped()
        if not ends:
            time.sleep(seconds)
            with metrics.open("a") as file:
                file.write(json.dumps({"step": step, "steps": steps, "loss": 1 / step, "trained_tokens": 5}) + "\n")
            say()
        if step % 2 == 0 or step == steps or ends:
            at = step - 1 if ends else step
            if at:
                checkpoint = FOLDER / f"checkpoints/step-{at:06d}"
                checkpoint.mkdir(parents=True, exist_ok=True)
                if not (checkpoint / "model").exists():
                    (checkpoint / "model").symlink_to(MODEL)
                write(checkpoint / "checkpoint.json", {"step": at, "base_model": "calc", "seed": 0})
            say()
        if ends:
            return "stopped"
        if step == dies_at:
            os._exit(3)
    return "succeeded"


def main() -> None:
    script = json.loads(SCRIPT.read_text()) if SCRIPT.exists() else {}
    with (FOLDER / "process.lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        if stopped():
            return
        if "fails" in script:
            write(FOLDER / "outcome.json", {"status": "failed", "code": "training_failed", "message": script["fails"]})
            return
        status = train(script.get("steps", 4), script.get("seconds", 0.0), script.get("dies_at"))
        write(FOLDER / "outcome.json", {"status": status})


main()
