"""`agl fork`: a rollout again from one of its calls on, several times, and what came of it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

from rich.table import Table

from agentlightning.adapter.conversations import Conversation, conversations
from agentlightning.algorithm import Baseline, PolicySpec
from agentlightning.algorithm.checkpoint import latest_checkpoint
from agentlightning.algorithm.episode import Episode, collect
from agentlightning.cli.agents import environment_of, find_agent
from agentlightning.cli.commands.look import ForkOptions
from agentlightning.cli.evaluate import agent_of_run, own_agent, resolve
from agentlightning.cli.interrupt import exit_interrupted
from agentlightning.cli.opened import check_order, described, opened_run
from agentlightning.cli.trust import require_trust
from agentlightning.console import one_line, safe, terminal
from agentlightning.errors import ConfigError
from agentlightning.files import text_of
from agentlightning.gateway.replay import EDITABLE, EDITED, REPLAYED, missing_for
from agentlightning.installation import command_name
from agentlightning.litagent import LitAgent, Program
from agentlightning.metrics import SilentConsole
from agentlightning.trainer import Trainer
from agentlightning.trainer.sync import run_sync
from agentlightning.types import Call, RecordedAttempt, RolloutMode, recorded_tools, recording_of
from agentlightning.types.finding import counted
from agentlightning.types.recording import EditRole, tool_call_ids_of


class _Original(NamedTuple):
    """The rollout that is forked."""

    episode: Episode
    recording: RecordedAttempt
    sampled: int
    """Its calls that a model of ours answered."""


def fork_rollout(options: ForkOptions) -> None:
    """Run the forks, and print what each came to beside the original."""
    check_order(options.run, options.rollout)
    edits = edits_in(options.edit)
    original = run_sync(_recorded(options, edits))
    agent = _agent(options)
    if not options.tools_again:
        _check_tools(agent, original, options)
    mode = original.episode.rollout.mode or RolloutMode.TEST
    served = _sampled_as(original.episode, _served(options))
    algorithm = Baseline(served=served, repeats=options.times, mode=mode)
    trainer = Trainer(
        algorithm=algorithm,
        run_dir=options.run_dir,
        initial_resources={"recording": original.recording},
        console=SilentConsole(),
    )
    result = trainer.fit(agent, [original.episode.rollout.input])
    if result.stopped:
        exit_interrupted()
    rows = [_row(episode) for episode in algorithm.episodes]
    if options.as_json:
        known = {"rollout": options.rollout, "reward": original.episode.reward, "at": len(original.recording.calls)}
        about = {"original": known, "edits": edits, "forks": rows, "run_dir": str(result.run_dir)}
        terminal().print_json(json.dumps(about))
        return
    _print(rows, original, edits)
    shown = f"{command_name()} show {quote(str(result.run_dir))}"
    terminal().print(f"Read what was said:  {shown}", soft_wrap=True, markup=False)


def edits_in(given: Sequence[str]) -> dict[EditRole, str]:
    """The texts of `--edit ROLE=TEXT` by role; `@FILE` is read. Raises ConfigError where one is not of that form."""
    found: dict[EditRole, str] = {}
    roles: dict[str, EditRole] = {role: role for role in EDITABLE}
    for one in given:
        name, equals, text = one.partition("=")
        role = roles.get(name)
        if not equals:
            raise ConfigError(
                f"--edit '{one_line(one, 60)}' has no '=': write ROLE=TEXT, such as --edit 'user=Try again.', or "
                "ROLE=@FILE."
            )
        if role is None:
            raise ConfigError(f"--edit {one_line(one, 60)}: the role must be one of {', '.join(EDITABLE)}.")
        if role in found:
            raise ConfigError(f"--edit {role} is given twice. A fork edits one message of each role; leave one out.")
        found[role] = text_of(Path(text[1:]), f"--edit {role}={text}") if text.startswith("@") else text
    return found


def _print(rows: Sequence[dict[str, Any]], original: _Original, edits: Mapping[EditRole, str]) -> None:
    table = Table("from the record", "sampled", "outcome", "reward", box=None)
    table.add_column("fork", overflow="fold")
    for row in rows:
        counts = str(row["replayed"]), str(row["sampled"])
        table.add_row(*counts, row["outcome"], _number(row["reward"]), row["rollout"])
    terminal().print(table)
    left = Counter(row["diverged"] for row in rows if row["diverged"])
    for cause, count in left.most_common():
        terminal().print(f"{count} of {len(rows)} left the record, because {cause}.")
    mean = _mean(rows)
    earned = "none of the forks earned a reward" if mean is None else f"the forks earned {mean:g} on average"
    terminal().print(
        f"The original had {_calls(original.sampled)} and earned {_number(original.episode.reward)}; {earned}."
    )
    if all(row["outcome"] == "ok" and not row["replayed"] + row["sampled"] for row in rows):
        terminal().print("The agent asked the model nothing: no call of a fork arrived at the gateway.")
    if edits:
        terminal().print(_edited(rows, edits), markup=False)


def _calls(count: int) -> str:
    return counted(count, "call")


def _edited(rows: Sequence[dict[str, Any]], edits: Mapping[EditRole, str]) -> str:
    """What was edited, or why nothing was."""
    what = " and ".join(f"the {EDITABLE[role]}" for role in edits)
    forks, calls = sum(row["edited"] > 0 for row in rows), sum(row["edited"] for row in rows)
    if forks:
        return (
            f"Edited from the first call after the record on: {what}, in {_calls(calls)} of {counted(forks, 'fork')}."
        )
    error = next((row["error"] for row in rows if row["error"]), None)
    why = (
        f"a fork failed with {safe(error)}"
        if error
        else "the record answered all that the forks asked the model. Answer fewer calls from it: --at N."
    )
    return f"No call was edited ({', '.join(edits)}): {why}"


async def _recorded(options: ForkOptions, edits: Mapping[EditRole, str]) -> _Original:
    """The rollout with its recording up to the fork. Raises ConfigError where there is none, or not so many calls."""
    async with opened_run(options.run) as opened:
        found = list(await collect(opened.store, [options.rollout]))
        if not found:
            raise ConfigError(
                f"There is no rollout {options.rollout} in {options.run}: see  agl show {quote(str(options.run))}"
            )
        episode = found[0]
        spans = (await opened.store.query_spans(options.rollout, "latest")).items
    calls = [call for call in episode.calls if len(call.response_ids)]
    at = max(0, len(calls) - 1) if options.at is None else options.at
    if at > len(calls):
        raise ConfigError(f"--at {at}: rollout {options.rollout} has {_calls(len(calls))} that a model here answered.")
    _check_unedited(options.rollout, calls[:at])
    if at < len(calls):
        _check_edits(edits, next((t for t in conversations(spans) if t.call_id == calls[at].info.call_id), None))
    recording = recording_of(
        options.rollout,
        calls[:at],
        tool_call_ids_of(spans),
        diverged="refuse" if options.refuse else "live",
        tools=() if options.tools_again else recorded_tools(spans, calls[at:]),
        edits=edits,
    )
    return _Original(episode, recording, len(calls))


def _check_unedited(rollout: str, calls: Sequence[Call]) -> None:
    """Raise ConfigError for a fork of an edited call: the agent asks for it unedited, so the record has no answer."""
    edited = next((number for number, call in enumerate(calls) if EDITED in call.info.used), None)
    if edited is not None:
        raise ConfigError(
            f"Call {edited + 1} of rollout {rollout} was edited, so it cannot be answered from the record. Fork at or "
            f"before it: --at {edited}, with the same --edit if it is to be edited again."
        )


def _check_edits(edits: Mapping[EditRole, str], first: Conversation | None) -> None:
    """Raise ConfigError for an edit of a role that the first call after the record had no message of: no fork of it
    could be edited. A developer's message is a system message to the model."""
    messages = first.messages if first is not None else ()
    roles = {"system" if message["role"] == "developer" else message["role"] for message in messages}
    for role in edits if roles else ():
        if role not in roles:
            raise ConfigError(f"--edit {role}: {missing_for(role, messages)}")


def _agent(options: ForkOptions) -> LitAgent[Any]:
    environment = environment_of(options.environment, options.agent)
    if environment is not None:
        return environment.agent
    if options.agent is not None:
        return find_agent(options.agent)
    run = described(options.run if options.run.is_dir() else options.run.parent)
    require_trust(options.run, own_agent(None, run), trust=options.trust)
    return agent_of_run(run)


def _check_tools(agent: LitAgent[Any], original: _Original, options: ForkOptions) -> None:
    """Say that tools run again. Raises ConfigError for an agent whose tools would not find what they found then."""
    if agent.shared_state is not None:
        raise ConfigError(
            f"{agent.shared_state} Tools that run again would find there what earlier attempts left, and not what they "
            "found in the rollout. To run it all the same: --tools-again."
        )
    calls_tools = any(call.tool_call_ids for call in original.recording.calls)
    own = not isinstance(agent, Program) and agent.environment is None
    if own and calls_tools and all(tool.result is None for tool in original.recording.tools):
        terminal(stderr=options.as_json).print(
            "The agent's tools run again, with their side effects; @agl.replayed makes them answer from the record.",
            soft_wrap=True,
        )


def _served(options: ForkOptions) -> PolicySpec:
    """The model that goes on. Raises ConfigError where the run has none."""
    if options.model:
        return resolve(Path(options.model))[0].spec
    try:
        latest_checkpoint(options.run)
    except (ConfigError, OSError):
        raise ConfigError(f"{options.run} has no checkpoint: say which model goes on, --model MODEL.") from None
    return resolve(options.run)[0].spec


def _sampled_as(original: Episode, spec: PolicySpec) -> PolicySpec:
    """What is served, sampled as the run of the original sampled, whatever its agent asks for."""
    if not original.calls:
        return spec
    info = original.calls[0].info
    if original.rollout.mode is RolloutMode.TRAIN:
        given = {name: info.used[name] for name in ("temperature", "top_p", "top_k", "min_p") if name in info.used}
    else:
        temperature = info.used.get("temperature")
        given = {"val_temperature": None if temperature == info.asked.get("temperature") else temperature}
    return replace(spec, calls=replace(spec.calls, **given))


def _row(episode: Episode) -> dict[str, Any]:
    calls = episode.calls
    causes = [call.info.divergence.cause for call in calls if call.info.divergence is not None]
    left = [cause for cause in causes if cause.startswith("replay: ")]
    replayed = sum(REPLAYED in call.info.used for call in calls)
    error = episode.attempt.error if episode.attempt else None
    return {
        "rollout": episode.rollout.rollout_id,
        "replayed": replayed,
        "sampled": len(calls) - replayed,
        "edited": sum(EDITED in call.info.used for call in calls),
        "diverged": left[0].removeprefix("replay: ") if left else None,
        "outcome": episode.outcome.value,
        "reward": episode.reward,
        "error": error.partition("\n")[0] if error else None,
    }


def _mean(rows: Sequence[dict[str, Any]]) -> float | None:
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    return sum(rewards) / len(rewards) if rewards else None


def _number(value: float | None) -> str:
    return "no reward" if value is None else f"{value:g}"
