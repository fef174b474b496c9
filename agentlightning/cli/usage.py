"""What is said of a command line that cannot be understood: the option, the argument or the command that was meant.

Typer keeps the classes of its errors to itself, so they are recognised by their names and by what they hold.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

from typer.core import TyperGroup

from agentlightning.arguments import Hints, as_number, nearest, of_validator, setting_meant
from agentlightning.cli.panels import GROUPED, group_options
from agentlightning.errors import ConfigError
from agentlightning.files import with_the_latest
from agentlightning.other_names import OTHER_LIBRARIES_NAMES

_OF_TASKS = (".jsonl", ".ndjson", ".json", ".csv", ".parquet")
_OF_ARGUMENTS = ("run", "model", "checkpoint", "folder", "run-dir", "path")
"""What people call the run or model that a command is given by its place."""
_RUNS = {"run": 1, "checkpoint": 1, "source": 1, "first": 2}
"""How many runs are missing with this argument."""
_OF_FIT = {"train_dataset": "tasks", "val_dataset": "val_tasks"}
"""What are options here, by the arguments of `fit`."""
_HOW_MANY = ("head", "tail", "last", "count", "num", "n", "top")
"""What other tools call `--limit`."""
_OTHER_COMMANDS = {
    "resume": "A run is gone on with by the command that began it, and --resume RUN.",
    "test": "agl eval RUN compares a trained model with the one it came from; agl run tries an agent.",
    "init": "There is nothing to set up: agl train --agent FILE.py:NAME --tasks FILE begins.",
    "help": "agl -h lists the commands, agl COMMAND -h their options.",
    "list": "agl runs lists the runs, agl demo --list the examples.",
    "stop": "Ctrl-C in the run's terminal stops it cleanly.",
    "logs": "agl show RUN prints what was said, agl watch RUN how it goes.",
    "sft": "agl train --data CHATS.jsonl --model MODEL fine-tunes on conversations.",
    "finetune": "agl train --data CHATS.jsonl --model MODEL fine-tunes on conversations.",
    "dpo": "agl train --algorithm DPO --agent FILE.py:NAME --tasks FILE learns from best and worst rollouts, "
    "and with --data PAIRS.jsonl in place of these from preferences.",
    "grpo": "agl train --agent FILE.py:NAME --tasks FILE trains by GRPO; --algorithm names another.",
    "ppo": "agl train --algorithm PPO --agent FILE.py:NAME --tasks FILE.",
    "version": "agl --version prints it.",
    "ls": "agl runs lists the runs.",
    "status": "agl runs lists the runs, agl watch RUN shows how one goes.",
    "merge": "agl export RUN --to FOLDER --merged writes the model whole.",
    "convert": "agl export RUN --to FOLDER writes the model; --gguf for llama.cpp.",
    "push": "agl export RUN --push NAME/REPOSITORY puts the model on the Hub.",
    "generate": "agl serve RUN serves the model, and prints a command to try it.",
    "chat": "agl serve RUN serves the model, and prints a command to try it.",
}


class Commands(TyperGroup):
    """All commands. What cannot be understood is answered with what was meant, in others' words too."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        return group_options(command) if command is not None and cmd_name in GROUPED else command

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        _refuse_pasted_signs(args)
        try:
            return super().parse_args(ctx, [*args])
        except Exception as error:
            _explain(error, args)
            raise

    def invoke(self, ctx: Any) -> Any:
        typed = [*getattr(ctx, "_protected_args", ()), *ctx.args]
        try:
            return super().invoke(ctx)
        except Exception as error:
            _explain(error, typed)
            raise


_PASTED = {"\u2013": "--", "\u2014": "--", "\u2212": "-", "\u201c": '"', "\u201d": '"', "\u2018": "'", "\u2019": "'"}
"""Signs that web pages and word processors put in place of those that are typed."""


def _refuse_pasted_signs(typed: Sequence[str]) -> None:
    """Raises ConfigError for an option or a quoted word with the long dashes and curly quotes of a page."""
    for word in typed:
        dashed = re.match(r"[\u2013\u2014\u2212][-\u2013\u2014\u2212]?[a-z]", word) is not None
        if dashed or (len(word) > 1 and word[0] in _PASTED and word[-1] in _PASTED):
            plain = "".join(_PASTED.get(sign, sign) for sign in word)
            shown = f"--{plain.lstrip('-')}" if dashed else plain
            raise ConfigError(f"{word} has the dash or the quotes that pages print. Type {shown}")


def _explain(error: Any, typed: Sequence[str] = ()) -> None:
    """Put into an error of Typer's what was meant; others are left as they are. `typed`: the whole command line."""
    of = getattr(error, "ctx", None)
    if of is None or not hasattr(error, "message"):
        return
    options = [option for p in of.command.params for option in p.opts if option.startswith("-")]
    arguments = [p.opts[0] for p in of.command.params if not p.opts[0].startswith("-")]
    if name := getattr(error, "option_name", None):
        if arguments and name.lstrip("-") in (*arguments, *_OF_ARGUMENTS):
            error.message += f". It is given without an option: agl {of.command.name} {arguments[0].upper()}"
            return
        meant = _meant(name, options) or _with_one_dash(name, typed, options) or _of_one_letter(name, options)
        if not meant:
            error.message += (
                f".{_before_the_command(of.command, name, typed)}" if of.parent is None else _of_others(of, name)
            )
        vars(error)["possibilities"] = meant
    elif type(error).__name__ == "MissingParameter":
        error.message = error.message or getattr(error.param, "help", None) or ""
        alone = [word for word in typed[1:] if not word.startswith("-")]
        if error.param.opts[0].startswith("-") and len(alone) == len(typed) - 1 == 1:
            error.message += f" Type {error.param.opts[0]} {alone[0]}"
        elif error.param.opts[0] in _RUNS:
            error.message += with_the_latest(of.command.name, _RUNS[error.param.opts[0]])
    elif (wrong := _refused_value(error, options)) is not None:
        error.message = wrong
    elif extra := re.search(r"unexpected extra arguments? ?(?:\(s\))? ?\((.*)\)$", error.message):
        meant = _of_train(extra[1], typed, options) or _of_extra(extra[1].split(), options)
        error.message += f". {meant or _of_place(of, arguments, extra[1])}"
    elif command := re.match(r"No such command '(.+?)'\.", error.message):
        if of.parent is None and command[1] in _OTHER_COMMANDS:
            error.message = f"{command[0]} {_OTHER_COMMANDS[command[1]]}"
        elif "--path" in options and re.search(r"[./\\]", command[1]):
            error.message = f"{command[0]} A file is given by an option: agl {of.command.name} --path {command[1]}"
        elif "Did you mean" not in error.message:
            error.message += f" There are: {', '.join(of.command.commands)}."


def _refused_value(error: Any, options: Sequence[str]) -> str | None:
    """The words for an option's value that pydantic refused, with what the option is if it was to be a number."""
    reasons = getattr(error.__cause__, "errors", None)
    if type(error).__name__ != "BadParameter" or reasons is None:
        return None
    reason, given = of_validator(reasons()[0]["msg"]), reasons()[0]["input"]
    if not reason.startswith("it must be"):
        if "--critic-model" in options and str(given).lower() in _OTHER_COMMANDS:
            return f"{reason} Weights are trained by  agl train --algorithm {given}"
        return f"{reason} --{given} is an option of its own." if f"--{given}" in options else reason
    decimal = "" if "whole" in reason else as_number(given)
    return f"it is {given!r}; {reason}.{decimal} {getattr(error.param, 'help', None) or ''}".rstrip()


def _with_one_dash(name: str, typed: Sequence[str], options: list[str]) -> list[str]:
    """The option of several letters that was given with one dash."""
    words = (word.partition("=")[0] for word in typed if word.startswith(name) and not word.startswith("--"))
    return [f"-{word}" for word in words if f"-{word}" in options][:1]


def _of_one_letter(name: str, options: list[str]) -> list[str]:
    """The options that begin with the letter of a short one: here all have their whole names."""
    return [option for option in options if re.fullmatch("-[a-z]", name) and option.startswith(f"-{name}")]


def _before_the_command(commands: Any, option: str, typed: Sequence[str]) -> str:
    """What to type for an option that was given in front of the command."""
    if option in ("-v", "-V", "--verbose", "--debug"):
        return " AGL_DEBUG=1 in front of the command shows whole tracebacks; agl --version the version."
    have = [name for name, command in commands.commands.items() if any(option in p.opts for p in command.params)]
    named = [word for word in typed if word in commands.commands]
    command = next((name for name in (*named, "train") if name in have), have[0] if have else "COMMAND")
    return f" Options of a command stand behind it: agl {command} {option if have else '--option'} …"


def _of_others(of: Any, option: str) -> str:
    """Which commands have an option that this one lacks."""
    root = of.find_root().command
    have = [name for name, command in root.commands.items() if any(option in p.opts for p in command.params)]
    if have:
        return f". It is an option of agl {', agl '.join(have[:3])}; agl {of.command.name} -h lists those of this."
    if all("--set" not in p.opts for p in of.command.params):
        return ""
    from agentlightning.algorithm.hints import OF_TRAINING

    words = OF_TRAINING.get(option.lstrip("-").replace("-", "_"))
    return f". {words} Settings are given as --set NAME=VALUE." if words else ""


def _of_train(word: str, typed: Sequence[str], options: list[str]) -> str | None:
    """What one word by itself belongs to: a file of an agent, or the choice of an algorithm."""
    before = typed[typed.index(word) - 1] if word in typed[1:] else ""
    if "--agent" in options and before.endswith(".py") and word.isidentifier():
        return f"An agent is named with its file: --agent {before}:{word}"
    if "--algorithm" in options and word.lower() in ("grpo", "ppo", "sft", "dpo", "dapo", "rloo", "apo", "gepa"):
        return f"The algorithm is given by an option: --algorithm {word}"
    return None


def _of_extra(words: list[str], options: list[str]) -> str | None:
    """Which option the words that stand by themselves belong to."""
    slashed = [word.replace("/", "--", 1) for word in words if word.startswith("/")]
    if known := [option for option in slashed if option in options]:
        return f"Options begin with two hyphens: {' … '.join(known)} …"
    tasks = [f"--tasks {word}" for word in words if "--tasks" in options and PurePath(word).suffix in _OF_TASKS]
    agents = [f"--agent {word}" for word in words if "--agent" in options and ".py" in word]
    if tasks and agents:
        return f"Agent and tasks are given by options: {agents[0]} {tasks[0]}"
    if tasks or agents:
        return f"{'Tasks are' if tasks else 'The agent is'} given by an option: {(tasks or agents)[0]}"
    if "--gguf" in options and words[-1].endswith(".gguf"):
        return "--gguf takes no name: the file is model.gguf in the folder of --to."
    if "--to" in options and len(words) == 1 and not words[0].startswith("-"):
        return f"Where it goes is given by an option: --to {words[0]}"
    if "--set" in options:
        return "A setting is given as --set NAME=VALUE, and what holds blanks stands in quotes."
    return None


_OF_OTHER_COMMANDS = {
    "models": "What one model takes here:  agl plan --model {}",
    "doctor": "What a run suffers from:  agl why {}",
    "agents": "One is tried by  agl doctor --agent {} --tasks FILE",
}
"""Commands that take nothing without an option, and who answers for what was typed."""


def _of_place(of: Any, arguments: list[str], typed: str) -> str:
    """What a command takes without an option."""
    command = of.info_name if of.parent is None or of.parent.parent is None else f"{of.parent.info_name} {of.info_name}"
    if not arguments:
        return " ".join(
            [f"agl {command} takes options alone.", _OF_OTHER_COMMANDS.get(command, "").format(typed)]
        ).rstrip()
    return f"agl {command} takes {' '.join(arguments).upper()}; what holds blanks stands in quotes."


def _meant(typed: str, options: list[str]) -> list[str]:
    """The option that was probably meant, or the setting that `--set` takes."""
    name = typed.lstrip("-").replace("-", "_")
    known = {option.lstrip("-").replace("-", "_"): option for option in options if option != "--help"}
    name = _OF_FIT.get(OTHER_LIBRARIES_NAMES.get(name, name), name)
    name = "limit" if name in _HOW_MANY and "limit" in known else name
    if "--set" in options:
        from agentlightning.algorithm import GRPO
        from agentlightning.algorithm.hints import KINDS
        from agentlightning.algorithm.records import names_of

        known = {**{setting: f"--set {setting}=…" for setting in names_of(GRPO)}, **known}
        meant = name if name in known else setting_meant(name, known, Hints(KINDS, {}))
    else:
        meant = nearest(name, known)
    return [] if meant is None else [known[meant]]
