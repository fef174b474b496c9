# pyright: basic, reportMissingImports=false
"""The worker of `inspect:`; see `foreign`. It runs where inspect_ai is installed, and imports nothing of ours."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

LETTERS = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0}
"""Of scorers: correct, partial, incorrect, no answer."""


def load(name: str, arguments: dict[str, Any]) -> Any:
    """The task of FILE@function; without a function the only one in the file."""
    file, at, function = name.rpartition("@")
    file, function = (file, function) if at else (name, "")
    sys.path.insert(0, str(Path(file).parent))
    spec = importlib.util.spec_from_file_location("inspect_task", file)
    if spec is None or spec.loader is None or not Path(file).is_file():
        raise SystemExit(f"There is no file {file}.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    if not function:
        kinds = {n: getattr(getattr(one, "__registry_info__", None), "type", None) for n, one in vars(module).items()}
        tasks = [one for one, kind in kinds.items() if kind == "task"]
        if len(tasks) != 1:
            raise SystemExit(f"{file} has the tasks {', '.join(tasks) or '(none)'}: name one, {file}@NAME")
        function = tasks[0]
    if not hasattr(module, function):
        raise SystemExit(f"{file} has no task {function}.")
    return getattr(module, function)(**arguments)


def number_of(value: Any) -> dict[str, float]:
    """A score as numbers, by the name behind the scorer's; none where it is no number."""
    if isinstance(value, dict):
        return {f"/{name}": found for name, one in value.items() for found in number_of(one).values()}
    if isinstance(value, str):
        value = LETTERS.get(value, value)
    try:
        return {"": float(value)}
    except (TypeError, ValueError):
        return {}


def text_of(sample: Any) -> str:
    return sample.input if isinstance(sample.input, str) else " ".join(m.text for m in sample.input)


def key_of(sample: Any) -> str:
    """What a sample is, whatever its number."""
    return hashlib.sha256(json.dumps([text_of(sample), sample.target, sample.choices]).encode()).hexdigest()


def samples(task: Any, sandbox: str | None) -> dict[Any, Any]:
    """By their ids, which inspect numbers where they have none. None of them acts on this machine unless the user says
    so."""
    if sandbox is None and "local" in (getattr(one.sandbox, "type", None) for one in (task, *task.dataset)):
        raise SystemExit(
            "Its samples' sandbox is local: the tools that the model calls act on this machine, with all that you "
            "may do on it. Say sandbox=local to allow that, or sandbox=docker."
        )
    return {one.id if one.id is not None else number: one for number, one in enumerate(task.dataset, 1)}


def listed(task: Any, sandbox: str | None) -> None:
    for number, sample in samples(task, sandbox).items():
        print(json.dumps({"id": number, "key": key_of(sample), "input": text_of(sample)[:2000]}))  # noqa: T201


def run(task: Any, settings: dict[str, Any]) -> dict[str, Any]:
    from inspect_ai import eval as evaluate

    os.environ["ROLLOUT_BASE_URL"] = os.environ["OPENAI_BASE_URL"]
    os.environ["ROLLOUT_API_KEY"] = os.environ["OPENAI_API_KEY"]
    names = ("message_limit", "time_limit", "sandbox")
    limits = {name: settings[name] for name in names if settings[name] is not None}
    given = json.load(sys.stdin)
    wanted = given["id"]
    found = samples(task, settings["sandbox"]).get(wanted)
    if found is not None and given.get("key", key_of(found)) != key_of(found):
        return {"error": f"sample {wanted} is another one now than when samples were listed: their order must stay"}
    model = f"openai-api/rollout/{os.environ['OPENAI_MODEL']}"
    with tempfile.TemporaryDirectory() as logs:  # from which samples are read when they are asked for
        [log] = evaluate(
            task, model=model, sample_id=wanted, epochs=1, display="none", log_dir=logs, fail_on_error=False, **limits
        )
        if not log.samples:
            return {"error": f"inspect ended with {log.status}: {getattr(log.error, 'message', 'no sample')}"}
        sample = log.samples[0]
        if sample.error is not None:
            return {"error": sample.error.message}
        scores = {n + end: v for n, s in (sample.scores or {}).items() for end, v in number_of(s.value).items()}
        return {"rewards": scores} if scores else {"error": "no scorer gave a number"}


if __name__ == "__main__":
    what, name, given = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    try:
        if what == "list":
            listed(load(name, given["arguments"]), given["sandbox"])
        else:
            print("\n" + json.dumps(run(load(name, given["arguments"]), given)))  # noqa: T201
    except Exception as error:
        if type(error).__name__ != "PrerequisiteError":
            raise
        raise SystemExit(str(error)) from None  # inspect's own words for what is missing, which it prints on stdout
