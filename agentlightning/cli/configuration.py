"""What `agl train` trains with: an algorithm by name, and settings of a file and of the command line."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from agentlightning import algorithm as algorithms
from agentlightning.algorithm.grpo import GRPO
from agentlightning.algorithm.hints import OF_TRAINING
from agentlightning.algorithm.records import flattened, merged, names_of, paths_of
from agentlightning.arguments import FEW, setting_meant
from agentlightning.cli.options import BackendOptions, value_in
from agentlightning.cli.trust import code_in, require_trust
from agentlightning.errors import ConfigError
from agentlightning.files import meant_by, reason_of_file, text_of
from agentlightning.reading import parsed_toml, within_depth, within_size
from agentlightning.trainer.live import RUN_FILE
from agentlightning.trainer.provenance import TASKS_FILE, VAL_TASKS_FILE

_NUMBER = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$")
FAMILY: dict[str, type[GRPO]] = {
    name: kind
    for name in algorithms.__all__
    if isinstance(kind := getattr(algorithms, name), type) and issubclass(kind, GRPO)
}
"""GRPO and the algorithms that are settings of it, by name."""
_OF_THE_COMMAND = ("rollout_config",)
_ON_THE_COMMAND_LINE = (
    *("agent", "tasks", "val_tasks", "run_dir", "resume", "timeout", "concurrency", "n_runners", "strategy"),
    *("remote", "grader", "reward", "files", "workspaces", "isolation", "task_as"),
)
"""What `agl train` is told by options, and no file of settings says."""


def make_algorithm(
    name: str | None,
    model: str | None,
    config: Path | None,
    settings: Sequence[str],
    *,
    trust: bool = False,
    **others: Any,
) -> GRPO:
    """The command line wins over the file, whose code is imported only with `trust`. Raises ConfigError for names that
    mean nothing, with those there are."""
    given = dict(read_config(config)) if config is not None else {}
    file = dict(given)
    chosen = _algorithm(str(name or given.pop("algorithm", "GRPO")))
    given.pop("algorithm", None)
    known = sorted(set(paths_of(chosen)) - set(_OF_THE_COMMAND))
    typed = parsed_settings(settings, known)
    if config is not None:
        require_trust(config, code_in({k: v for k, v in given.items() if k not in {**typed, **others}}), trust=trust)
    given = merged(chosen, given, typed)
    given["model"] = model or given.get("model", "calc")
    try:
        return chosen(**others, **given)
    except ConfigError as error:
        if any(name in str(error) for name in file):
            error.add_note(f"Settings were read from {config}.")
        raise


def backend_settings(given: BackendOptions) -> dict[str, Any]:
    """`--backend` and its `--backend-option NAME=VALUE`s as settings; values are JSON or plain text."""
    found: dict[str, Any] = {} if given.backend is None else {"backend": given.backend}
    for text in given.backend_option:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--backend-option {text}: give NAME=VALUE, for example replicas=2.")
        found.setdefault("backend_options", {})[name] = value_in(value)
    return found


def read_config(file: Path) -> Mapping[str, Any]:
    """Settings by name from JSON, YAML or TOML, told by the file's ending."""
    _check_file(file)
    try:
        found = _parse(file)
    except ValueError as error:
        raise ConfigError(f"{file} cannot be read: {reason_of_file(error)}.") from error
    if found is None:
        raise ConfigError(f"{file} is empty. It holds settings by name, for example  steps: 20")
    if not isinstance(found, dict):
        written = {list: "Leave the dashes at the left out.", str: "Behind each colon stands a blank:  steps: 20"}
        hint = written.get(type(found), "Write each on a line of its own, such as  steps: 20")
        raise ConfigError(f"{file} holds a {type(found).__name__}, not settings by name. {hint}")
    if is_of_a_run(found):
        return of_a_run(found)
    _refuse_other_names(file, found)
    _refuse_variables(file, found)
    return found


def _refuse_variables(file: Path, found: Mapping[str, Any]) -> None:
    """Raises ConfigError for a value that another program would take from the environment."""
    for name, value in found.items():
        if isinstance(value, str) and re.match(r"\$(\{\w+|[A-Z_])", value):
            option = "--model " if name == "model" else f"--set {name}="
            raise ConfigError(
                f"{file} has {name}: {value}, and no variables of the environment are filled in. Write the value "
                f'itself, or give it on the command line:  {option}"{value}"'
            )


def _check_file(file: Path) -> None:
    """Raises ConfigError where there is no file of settings."""
    if (of_a_run := file / RUN_FILE).is_file():
        raise ConfigError(f"'{file}' is the folder of a run. Its settings are in {of_a_run}: --config {of_a_run}")
    if not file.is_file():
        raise ConfigError(f"There is no file '{file}' with settings.{meant_by(file)}")


def _refuse_other_names(file: Path, found: Mapping[str, Any]) -> None:
    """Raises ConfigError for what the command line says, and for settings below a heading."""
    settings = {name for kind in FAMILY.values() for name in names_of(kind)}
    if "actor_rollout_ref" in found:
        raise ConfigError(
            f"{file} is verl's configuration, which a script reads: agl.VERL(config). Here settings stand at the top, "
            "by the names of docs/from-0.3.md, such as model, group_size and tasks_per_step."
        )
    for name, value in found.items():
        if name in _ON_THE_COMMAND_LINE:
            raise ConfigError(f"{file} has '{name}', which is given on the command line: --{name.replace('_', '-')} …")
        if name not in settings and difflib.get_close_matches(name, ["algorithm"]) not in ([], [name]):
            raise ConfigError(f"{file} has '{name}'. Did you mean algorithm?")
        if isinstance(value, dict) and name not in settings and settings & value.keys():
            raise ConfigError(f"{file} has settings below '{name}'; they stand at the top, without a heading.")


def is_of_a_run(found: Mapping[str, Any]) -> bool:
    """Whether this is what a run says of itself in `run.json`. Raises ConfigError where no run says it like this."""
    if not {"run_id", "algorithm", "settings"} <= found.keys():
        return False
    for name in ("settings", "environment"):
        if not isinstance(found.get(name) or {}, dict):
            raise ConfigError(
                f"The file is a run's, but its '{name}' is no object. Take the run.json that a run wrote."
            )
    return True


def of_a_run(about: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that repeat a run; those of the command are given there."""
    kind = _algorithm(str(about["algorithm"]))
    known = {*names_of(kind)} - set(_OF_THE_COMMAND)
    return {"algorithm": about["algorithm"], **{k: v for k, v in (about["settings"] or {}).items() if k in known}}


def algorithm_of_a_run(about: Mapping[str, Any], source: Path, *, trust: bool) -> GRPO:
    """The algorithm as a run says that it was set. Raises ConfigError for what cannot be read back, such as functions
    of the user's own, and for code that it names where there is no `trust`."""
    given = of_a_run(about)
    require_trust(source, code_in(given), trust=trust)
    return _algorithm(str(given.pop("algorithm")))(**given)


def settings_for_file(algorithm: GRPO) -> dict[str, Any]:
    """All settings of an algorithm by name, as a file that `read_config` reads would hold them."""
    settings = {name: value for name, value in flattened(algorithm, shown=False).items() if name not in _OF_THE_COMMAND}
    return {"algorithm": type(algorithm).__name__, **json.loads(json.dumps(settings, default=_plain))}


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else repr(value)


_LONGEST_NAME = 200
"""Of a run, in bytes: what file systems allow, less what is put behind it."""


def folder_of_run(name: str, run_dir: Path | None) -> Path:
    """Where a run of this name leaves its files. Raises ConfigError for what is no name, or where a folder is given,
    too."""
    if run_dir is not None:
        raise ConfigError(f"--name {name} means the folder runs/{name}, and --run-dir names another: give one of them.")
    if not name or name in (".", "..") or PurePath(name).name != name:
        raise ConfigError(f"--name {name!r} is no name of a run. For any other folder give --run-dir {name}")
    if (length := len(name.encode())) > _LONGEST_NAME:
        raise ConfigError(f"--name has {length} bytes, and at most {_LONGEST_NAME} fit. Give a shorter one.")
    return Path("runs") / name


def of_data(
    data: Path, algorithm: str | None, tasks: Path | None, settings: Sequence[str]
) -> tuple[str, Path, list[str]]:
    """The algorithm, the training data and the settings that `--data` stands for. Raises ConfigError for options that
    say otherwise."""
    if tasks is not None:
        raise ConfigError("--data has the examples to learn, --tasks what an agent is run on: give one of them.")
    source = {"sft": "chats", "dpo": "pairs"}.get((algorithm or "SFT").lower())
    if source is None:
        raise ConfigError(
            "--data has what is learned as it stands: conversations, which SFT learns, or preferences, which DPO does. "
            f"{algorithm} learns what an --agent does on --tasks."
        )
    return algorithm or "SFT", data, [f"source={source}", *settings]


class RepeatedRun(NamedTuple):
    """Of a run that is to be repeated; None for what is not known."""

    agent: str | None = None
    """As file.py:name."""
    environment: Mapping[str, Any] | None = None
    """As `LitAgent.environment` says it."""
    tasks: Path | None = None
    """The file with its tasks."""
    val_tasks: Path | None = None


def run_of_config(config: Path | None) -> RepeatedRun:
    """The run whose `run.json` is given as `--config`; nothing is known of other files of settings."""
    if config is None:
        return RepeatedRun()
    _check_file(config)
    read_config(config)  # mistakes in the file come before what is missing besides
    about = _parse(config)
    if not is_of_a_run(about):
        return RepeatedRun()
    agent = f"{about['source']}:{about['agent']}" if about.get("source") and about.get("agent") else None
    files = [config.parent / name for name in (TASKS_FILE, VAL_TASKS_FILE)]
    train, val = (file if file.is_file() else None for file in files)
    return RepeatedRun(agent, about.get("environment"), train, val)


def _of_toml(text: str) -> Any:
    try:
        return parsed_toml(text)
    except ValueError as error:
        lines = re.finditer(r"(?m)^([\w.-]+) *= *([A-Za-z][\w./-]*) *$", text)
        bare = next((line for line in lines if line[2] not in ("true", "false", "inf", "nan")), None)
        quotes = f'. Text stands in quotes: {bare[1]} = "{bare[2]}"' if bare is not None else ""
        raise ValueError(f"{error}{quotes}") from error


def _each_once(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """The pairs as a mapping. Raises ValueError where one would take another's place."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"'{name}' stands in it twice. Keep the one that you mean")
        found[name] = value
    return found


def _parse(file: Path) -> Any:
    text = text_of(file, str(file))
    if file.suffix == ".json":
        try:
            with within_depth():
                return json.loads(text, object_pairs_hook=_each_once)
        except ValueError as error:
            comma = ". A comma stands before a bracket that closes: take it out" if re.search(r",\s*[]}]", text) else ""
            raise ValueError(f"{error}{comma}") from error
    if file.suffix == ".toml":
        return _of_toml(text)
    if file.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"'{file}' ends in none of .json, .yaml, .toml.")
    try:
        import yaml
    except ImportError:
        raise ConfigError(f"Reading {file} needs the package 'pyyaml': pip install pyyaml, or write JSON.") from None

    class Loader(yaml.SafeLoader):
        """Reads 1e-4 as a number, as YAML 1.2 and everybody else does; YAML 1.1 wants 1.0e-4."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            _each_once((key.value, None) for key, _ in node.value if isinstance(key.value, str))
            return super().construct_mapping(node, deep)

    Loader.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+.0123456789"))
    try:
        with within_depth():
            return within_size(yaml.load(text, Loader))
    except yaml.YAMLError as error:
        tab = ". Indent with blanks: YAML takes no tabs" if r"'\t'" in str(error) else ""
        nested = ". Settings stand below each other, each at the left" if "mapping values" in str(error) else ""
        words = str(error).replace('in "<unicode string>", ', "")
        raise ValueError(f"{words}{tab or nested}") from error


_TUNE_PROMPTS = {"dspy", "mipro", "miprov2", "opro", "textgrad", "bootstrapfewshot"}
_NEAREST = {
    **dict.fromkeys(("rlhf", "rlvr", "rlaif", "rl", "actor-critic", "a2c"), ("GRPO", "PPO")),
    **dict.fromkeys(("kto", "orpo", "simpo", "ipo"), ("DPO",)),
    **dict.fromkeys(("finetune", "fine-tune", "fine-tuning", "lora", "supervised"), ("SFT",)),
}
"""Names of other libraries, and what does the same here."""


def _algorithm(name: str) -> type[GRPO]:
    by_name = {known.lower(): kind for known, kind in FAMILY.items()}
    if name.lower() in ("apo", "gepa"):
        raise ConfigError(f"{name.upper()} tunes prompts, and no weights:  agl optimize --algorithm {name.lower()} …")
    if name.lower() in _TUNE_PROMPTS:
        raise ConfigError(
            f"There is no algorithm '{name}'. Prompts are tuned by  agl optimize --algorithm gepa  (or apo)."
        )
    if name.lower() not in by_name:
        meant = [by_name[one].__name__ for one in difflib.get_close_matches(name.lower(), by_name, n=2)]
        meant = meant or list(_NEAREST.get(name.lower(), ()))
        hint = f" Did you mean {' or '.join(meant)}?" if meant else ""
        raise ConfigError(f"There is no algorithm '{name}'; there are: {', '.join(FAMILY)}.{hint}")
    return by_name[name.lower()]


def parsed_settings(settings: Sequence[str], known: Collection[str]) -> dict[str, Any]:
    """`name=value` as keyword arguments; values are JSON or plain text. Raises ConfigError for other names."""
    given: dict[str, Any] = {}
    for text in settings:
        name, equals, value = text.partition("=")
        if not equals and name in known:
            raise ConfigError(f"--set {text}: give NAME=VALUE, without blanks: --set {text}=…")
        if not equals or name not in known:
            others = OF_TRAINING if "learning_rate" in known else {}
            meant = setting_meant(name, known, others)
            setting, colon, rest = text.partition(":")
            listed = (
                f"they are: {', '.join(sorted(known))}" if len(known) <= FEW else "agl train --print-config prints all"
            )
            words = others.get(name)
            hint = f"there is no such setting. {words}" if words else f"there is no such setting; {listed}."
            if not equals:
                hint = "give NAME=VALUE, once for each setting: --set steps=5 --set group_size=4"
            if colon and setting in known:
                hint = f"give NAME=VALUE: --set {setting}={rest}"
            elif meant and equals:
                hint = f"did you mean {meant}=…?"
            raise ConfigError(f"--set {text}: {hint}")
        given[name] = value_in(value)
    return given
