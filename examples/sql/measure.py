"""Plays the graph on many tasks in this process, without LangGraph or HTTP: for measuring a model while making it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agentlightning.trainer.example import load_example

from . import prompts
from .demonstrations import databases
from .grading import describe, extract_query, score
from .sandbox import run_query

MAX_REWRITES = 2


def measure(model: Any, renderer: Any, tasks: int = 200) -> str:
    """How often each role is right, and the whole graph, sampled at temperature 1."""
    (_, parts), batch = databases(), load_example("tools", "batch").Batch(model, renderer)

    def ask(conversations: list[list[tuple[str, str]]]) -> list[str]:
        return batch.ask([[{"role": role, "content": text} for role, text in c] for c in conversations])

    states: list[dict[str, Any]] = [{**t, "schema": describe(Path(t["database"]))} for t in parts["test"][:tasks]]
    _write(states, ask([prompts.writer(s["schema"], s["question"]) for s in states]))
    first = sum(s["right"] for s in states)
    verdicts, rewritten = [], []
    for turn in range(MAX_REWRITES + 1):
        open_ = [s for s in states if not s.get("accepted")]
        said = ask([prompts.checker(s["question"], s["sql"], s["result"]) for s in open_])
        for state, verdict in zip(open_, said, strict=True):
            state["accepted"], state["feedback"] = verdict.strip().startswith(prompts.RIGHT), verdict.strip()
            verdicts.append(state["accepted"] == bool(state["right"]))
        again = [s for s in open_ if not s["accepted"]] if turn < MAX_REWRITES else []
        asked = [prompts.rewriter(s["schema"], s["question"], s["sql"], s["result"], s["feedback"]) for s in again]
        _write(again, ask(asked))
        rewritten += [s["right"] for s in again]
    shares = {
        "writer": first / len(states),
        "checker": sum(verdicts) / len(verdicts),
        "rewriter": sum(rewritten) / max(1, len(rewritten)),
        "whole": sum(s["right"] for s in states) / len(states),
    }
    return ", ".join(f"{name} {share:.1%}" for name, share in shares.items())


def _write(states: list[dict[str, Any]], said: list[str]) -> None:
    """Take what was written, and what it gives."""
    for state, text in zip(states, said, strict=True):
        database = Path(state["database"])
        state["sql"] = extract_query(text)
        state["result"] = run_query(database, state["sql"]).show()
        state["right"] = score(database, state["sql"], state["query"])
