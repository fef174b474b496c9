"""Few-shot demonstrations out of the agent's own good runs: which runs can be shown, and which of them are tried.

No language model is asked: a set is drawn at random from the good runs on training tasks, or a set that is known is
changed in one place, and validation tasks say which is best. After BootstrapFewShotWithRandomSearch of Khattab et al.,
"DSPy: Compiling Declarative Language Model Calls into Self-Improving Pipelines", arXiv 2310.03714.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from agentlightning.algorithm.prompts.evaluation import EvaluationRequest, Trial
from agentlightning.types import Demonstrations

if TYPE_CHECKING:
    from agentlightning.algorithm.prompts.candidate import Candidate
    from agentlightning.algorithm.prompts.run import PromptRun

Turns = tuple[tuple[str, str], ...]
"""One demonstration: roles and what they say, from a user's turn to the model's last."""
_SPARE = 4
"""Times as many good runs as may be shown are looked for."""
_TRIES = 8
"""Draws until one is a candidate that was not there before."""


async def bootstrap(run: PromptRun) -> None:
    """Run the first prompt on training tasks until there are many more good runs than may be shown, or no tasks.

    Does nothing where no demonstrations are tuned. Raises BudgetSpent and Stopped.
    """
    tuned = {name: t for name, t in run.templates.items() if isinstance(t, Demonstrations)}
    if not tuned:
        return
    wanted = _SPARE * max(t.most for t in tuned.values())
    order = run.train_order
    for start in range(0, len(order), wanted):
        await run.evaluate([EvaluationRequest(run.seed, "train", order[start : start + wanted])], "runs to demonstrate")
        if all(len(good_runs(run, run.seed, name)) >= wanted for name in tuned):
            return
    for name, template in tuned.items():
        found = len(good_runs(run, run.seed, name))
        advice = " Lower its good_reward, name the field with the answer, or give more training tasks."
        run.note(
            f"{found} of {len(order)} runs on training tasks are good enough to be shown as {name}: text only, and "
            f"{_good(run, template):g} earned.{'' if found else advice}"
        )


def propose(
    run: PromptRun, parent: Candidate, name: str, *seed: int, apart_from: Sequence[int] = ()
) -> Candidate | None:
    """The parent with other demonstrations; None where there are none to choose from.

    `apart_from` are training tasks that it will be measured on, so that none of them is shown with its answer.
    """
    template = run.templates[name]
    assert isinstance(template, Demonstrations)
    pool = [turns for task, turns in sorted(good_runs(run, parent, name).items()) if task not in apart_from]
    rng = random.Random(repr((*seed, parent.key)))
    for _ in range(_TRIES):
        now = demonstrations_in(parent.by_name[name])
        chosen = changed(now, pool, template.most, rng)
        made = parent.edited(name, _written(chosen))
        if chosen and chosen != now and made.key not in run.candidates:
            return run.candidates.setdefault(made.key, made)
    return None


def changed(now: Sequence[Turns], pool: Sequence[Turns], most: int, rng: random.Random) -> list[Turns]:
    """Other demonstrations than those of now: a set drawn anew, or one added, exchanged, left out or put elsewhere."""
    fresh = [turns for turns in pool if turns not in now]
    ways = ["draw", *["add", "add"] * (len(now) < most), *["exchange"] * 2] if fresh else []
    ways += ["drop"] * (len(now) > 1) + ["move"] * (len(now) > 1)
    if not ways:
        return list(now)
    way, made = rng.choice(ways) if now else "draw", list(now)
    match way:
        case "draw":
            count = min(len(pool), rng.randint(1, most))
            return rng.sample(list(pool), count)
        case "add":
            made.insert(rng.randint(0, len(made)), rng.choice(fresh))
        case "exchange":
            made[rng.randrange(len(made))] = rng.choice(fresh)
        case "drop":
            del made[rng.randrange(len(made))]
        case _:
            made.insert(rng.randrange(len(made)), made.pop(rng.randrange(len(made))))
    return made


def good_runs(run: PromptRun, parent: Candidate, name: str) -> dict[int, Turns]:
    """The good runs on training tasks, by task: of candidates that differ from this one in this template alone, since
    what a run shows depends on all the others.
    """
    template = run.templates[name]
    assert isinstance(template, Demonstrations)
    least = _good(run, template)
    found: dict[int, Turns] = {}
    for candidate in run.candidates.values():
        if {**candidate.by_name, name: ""} != {**parent.by_name, name: ""}:
            continue
        shown = Demonstrations(template=candidate.by_name[name]).messages
        for task, trial in run.known(candidate, "train").items():
            turns = turns_of(trial, shown, template.agent)
            if turns is not None and template.answer is not None:
                turns = _corrected(turns, trial.input, template.answer)
            elif trial.reward is None or trial.reward < least:
                turns = None
            if turns is not None:
                found.setdefault(task, turns)
    return found


def _corrected(turns: Turns, task: Any, field: str) -> Turns | None:
    """The turns with the task's right answer as the last one; None for a task without one."""
    right = task.get(field) if isinstance(task, Mapping) else None
    return None if right is None else (*turns[:-1], ("assistant", str(right)))


def turns_of(trial: Trial, shown: Sequence[Mapping[str, str]], agent: str | None) -> Turns | None:
    """What was said in a run, without the system prompt and what was `shown` before; None if it is more than text."""
    named = [messages for who, messages in trial.messages_by.items() if agent is None or re.search(agent, who)]
    messages = [m for m in (named[-1] if named else ()) if m.get("role") not in ("system", "developer")]
    if [_plain(m) for m in messages[: len(shown)]] == [(m["role"], m["content"]) for m in shown]:
        messages = messages[len(shown) :]
    turns = tuple(map(_plain, messages))
    whole = all(role in ("user", "assistant") and text for role, text in turns)
    if len(turns) < 2 or not whole or turns[0][0] != "user" or turns[-1][0] != "assistant":
        return None
    return None if any(m.get("tool_calls") for m in messages) else turns


def demonstrations_in(text: str) -> list[Turns]:
    """The demonstrations of a template."""
    return [tuple(map(_plain, messages)) for messages in Demonstrations(template=text).demonstrations]


def _written(chosen: Sequence[Turns]) -> str:
    return Demonstrations.of([[{"role": r, "content": text} for r, text in turns] for turns in chosen]).template


def _plain(message: Mapping[str, Any]) -> tuple[str, str]:
    content = message.get("content")
    return str(message.get("role")), content if isinstance(content, str) else ""


def _good(run: PromptRun, template: Demonstrations) -> float:
    return run.settings.reward_range[1] if template.good_reward is None else template.good_reward
