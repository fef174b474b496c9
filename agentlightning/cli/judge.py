"""`agl judge`: how far a judge of groups can be believed, measured on the groups that a run has stored."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from shlex import quote
from typing import Any

from rich.text import Text

from agentlightning.algorithm.parts.group_judge import GroupJudge, Judge, as_judge
from agentlightning.cli.commands.look import JudgeOptions
from agentlightning.cli.configuration import parsed_settings
from agentlightning.cli.interrupt import exit_interrupted, interrupted
from agentlightning.cli.opened import OpenedRun, opened_run
from agentlightning.cli.trust import code_in, require_trust
from agentlightning.console import fitting_table, one_line, safe, terminal
from agentlightning.doctor.judge import (
    LEVEL,
    Estimate,
    LabelledGroup,
    LabelOf,
    MeasuredJudge,
    choose_groups,
    groups_of,
    judge_groups,
    labels_in,
    measure,
    refuse_without_order,
    reward_labels,
    template_of,
)
from agentlightning.errors import ConfigError, JudgeError
from agentlightning.trainer.sync import run_sync
from agentlightning.types import Rollout
from agentlightning.types.finding import counted
from agentlightning.types.reward import weights_in

REWARD = "reward"
_OF_ANY_JUDGE = ("rubric", "min_agreement", "most_characters", "part")
"""What another judge than the run's is asked with, too."""
_WORDS: Mapping[str, str] = {
    "agreement": "pairs with different labels that it orders as they do; a tie is one half",
    "kappa": "Cohen's κ of the order of all labelled pairs: better, equal, worse",
    "order_bias": "more for the first shown than for the last, all else the same",
    "self_agreement": "of its two answers, from -1 to 1",
}


def measure_judge(options: JudgeOptions) -> None:
    """Ask the judge and print what it is worth; or write a file for people to label."""
    for option in ("labels", "url", "model", "rubric", "settings"):
        if options.write_labels is not None and getattr(options, option):
            name = "set" if option == "settings" else option
            raise ConfigError(f"--write-labels asks no judge, so --{name} would have no effect: leave it out.")
    if run_sync(_measure(options)):
        exit_interrupted()


async def _measure(options: JudgeOptions) -> bool:
    """Whether Ctrl-C ended it."""
    async with opened_run(options.run, options.run_id) as opened:
        settings = opened.settings
        store_id = None if opened.run is None else opened.run.run_id
        stored = await groups_of(opened.store, store_id, settings.get("group_size"))
        if options.write_labels is not None:
            await _write_template(opened, stored, options.write_labels, options.limit)
            return False
        part = _judge_of(opened, options)
        label_of = None if options.labels is None else _labels(options.labels, stored, settings)
        groups = await choose_groups(opened.store, stored, label_of, options.limit)
        refuse_without_order(groups, options.labels)
        judge = Judge(part)
        try:
            stopped, (judged, failed) = await _ask(judge, part, opened, groups)
        finally:
            await judge.close()
    if not judged and not stopped:
        raise JudgeError(failed[0])
    if not judged:
        return True
    found = measure(judged, min_agreement=part.min_agreement, equal=options.equal)
    cost = None if part.price is None else judge.cost
    about = {"judge": part.model, "place": part.place, "labels": options.labels, "run_groups": len(stored)}
    known = {**about, "failed": len(failed), "tokens": judge.tokens, "cost": cost, "level": LEVEL}
    if options.as_json:
        terminal().print_json(json.dumps({**known, "equal": options.equal, **asdict(found)}))
    else:
        _print(found, known, part, failed)
    return stopped


async def _ask(judge: Judge, part: GroupJudge, opened: OpenedRun, groups: Sequence[LabelledGroup]) -> Any:
    """Whether the user ended it, and what was answered by then."""

    async def work() -> Any:
        await judge.check()
        seed = int(opened.settings.get("seed") or 0)
        return await judge_groups(judge, opened.store, groups, seed, part.at_once)

    doing, stopping = asyncio.create_task(work()), asyncio.create_task(interrupted())
    try:
        await asyncio.wait({doing, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopped = not doing.done()
        if stopped:
            doing.cancel()
        await asyncio.wait({doing})
        return stopped, ([], []) if doing.cancelled() else doing.result()
    finally:
        stopping.cancel()
        await asyncio.gather(stopping, return_exceptions=True)


async def _write_template(opened: OpenedRun, stored: Mapping[str, Sequence[Rollout]], to: Path, limit: int) -> None:
    groups = await choose_groups(opened.store, stored, None, limit)
    try:
        with to.open("x", encoding="utf-8") as file:
            file.write(await template_of(opened.store, groups))
    except FileExistsError:
        raise ConfigError(f"'{to}' is there already; write the labels to a new file.") from None
    rollouts = sum(len(group.records) for group in groups)
    words = (
        f"{to}: {counted(rollouts, 'rollout')} of {counted(len(groups), 'group')}. Put a number, true or false "
        "in place of each null, leave "
        f"out what you like, and say --labels {quote(str(to))}"
    )
    terminal().print(Text(safe(words)))


def _judge_of(opened: OpenedRun, options: JudgeOptions) -> GroupJudge:
    """The run's judge, changed by what the command line says; or one that it names alone."""
    own = opened.settings.get("group_judge") or {}
    given = parsed_settings(options.settings, [f.name for f in fields(GroupJudge)])
    typed = {"base_url": options.url, "model": options.model, "rubric": options.rubric}
    given |= {name: value for name, value in typed.items() if value is not None}
    if given.keys() & {"base_url", "model"}:  # another one: what is good stays
        of_any = [*_OF_ANY_JUDGE, *(["base_url"] if "base_url" not in given else [])]
        own = {name: own[name] for name in of_any if name in own}
    if "base_url" not in given:
        require_trust(opened.folder, code_in({"group_judge": own}), trust=options.trust)
    part = as_judge({**own, **given} or None)
    if part is None:
        raise ConfigError("The run was trained without a judge. Name the one to measure: --url URL --model NAME.")
    if part.base_url is None:
        raise ConfigError(
            f"The judge {part.model!r} ran on the run's own engine, which has stopped. Serve the model, agl serve "
            f"{opened.settings.get('model')}, and give its address: --url URL."
        )
    return part


def _labels(labels: str, stored: Mapping[str, Sequence[Rollout]], settings: Mapping[str, Any]) -> LabelOf:
    kind, slash, part = labels.partition("/")
    if kind == REWARD and (part or not slash):
        judge = as_judge(settings.get("group_judge"))
        return reward_labels(part or None, weights_in(settings), judge and judge.part)
    if not Path(labels).is_file():
        raise ConfigError(
            f"--labels {labels}: there is no such file. Give one, or '{REWARD}' for the run's own rewards, or "
            f"'{REWARD}/NAME' for a part of them; --write-labels makes a file to fill in."
        )
    found = labels_in(Path(labels), [r.rollout_id for group in stored.values() for r in group])
    return lambda record: found.get(record.rollout.rollout_id)


# ---- showing it ------------------------------------------------------------------------------------------------------


def _print(found: MeasuredJudge, known: Mapping[str, Any], part: GroupJudge, failed: Sequence[str]) -> None:
    print_ = terminal().print
    labels = "no labels" if known["labels"] is None else f"labels: {known['labels']}"
    print_(
        Text(
            f"{one_line(part.model)} on {found.groups} of {counted(known['run_groups'], 'group')}; {one_line(labels)}",
            "bold",
        )
    )
    print_(fitting_table([_cells(name, getattr(found, name)) for name in _WORDS], terminal()))
    if found.masked:
        print_(Text(f"{found.masked} groups agree by less than min_agreement={part.min_agreement:g}: they would train "
                    "nothing, and agreement and κ leave them out."))  # fmt: skip
    if failed:
        print_(Text(f"{counted(len(failed), 'group')} without an answer: {one_line(failed[0])}", "yellow"))
    cost = "" if known["cost"] is None else f", cost {known['cost']:.4f}"
    print_(Text(f"{known['tokens']:,} tokens{cost}. Intervals of {LEVEL:.0%}; each group counts the same.", "dim"))


def _cells(name: str, one: Estimate | None) -> dict[str, Text]:
    title = Text(name.replace("_", " "))
    if one is None:
        return {
            "": title,
            "is": Text("–"),
            "from … to": Text("–"),
            "of": Text("nothing to compare"),
            "means": Text(_WORDS[name]),
        }
    of = f"{one.groups} groups" if one.pairs is None else f"{one.pairs} pairs, {one.groups} groups"
    sign = "+" if name == "order_bias" else ""
    numbers = f"{one.low:{sign}.2f} … {one.high:{sign}.2f}"
    return {
        "": title,
        "is": Text(f"{one.value:{sign}.2f}", "bold"),
        "from … to": Text(numbers),
        "of": Text(of),
        "means": Text(_WORDS[name]),
    }
