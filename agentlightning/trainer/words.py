"""What a training run says of itself before its first step and after its last one."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Any

from agentlightning.algorithm.base import Algorithm
from agentlightning.algorithm.settings import TrainingSettings
from agentlightning.algorithm.unusual import unusual
from agentlightning.errors import AgentError, AgentLightningError, EngineError, JudgeError
from agentlightning.installation import command_name
from agentlightning.litagent import LitAgent
from agentlightning.metrics import Console, Reporter
from agentlightning.metrics.sink import RUN_FILE
from agentlightning.models.hardware import refuse_what_does_not_fit
from agentlightning.models.shape import ModelShape, count_of
from agentlightning.trainer.checks import shared_tasks
from agentlightning.trainer.result import RunResult
from agentlightning.types import Dataset
from agentlightning.types.finding import counted
from agentlightning.variables import new_warnings

NO_VALIDATION = (
    "There are no validation tasks: only the training rewards show whether it gets better, and nothing shows which "
    "checkpoint is the best. Keep some tasks for validation: fit(agent, tasks, val_dataset=others), or "
    "--val-tasks FILE."
)
NO_VALIDATION_OF_EXAMPLES = (
    "There are no validation tasks: the loss shows how well the examples are learned, and nothing shows whether an "
    "agent does better. Give tasks to validate on: fit(agent, examples, val_dataset=tasks), or --val-tasks FILE with "
    "--agent."
)
NOTHING_LEARNED = (
    "Nothing was learned: in every step all siblings earned the same, so the weights are those it began with. Take "
    "tasks that the model solves now and then, give partial rewards, or take a larger group_size."
)

_LOOKED_AT = 20
_NUMBER = re.compile(r"[-+]?[0-9]+([.,][0-9]+)?")
FAR_TOO_HIGH = 30
"""Times the default learning rate from which on a warning is due before training."""


def introduce(
    reporter: Reporter,
    algorithm: Algorithm,
    run_dir: Path,
    train: Dataset[Any] | None,
    val: Dataset[Any] | None,
    resumed: str | None = None,
) -> None:
    """Before the model is loaded. Raises ModelError for one that is nowhere or does not fit this machine."""
    for words in new_warnings():
        reporter.warn(words)
    if not isinstance(algorithm, TrainingSettings):
        return
    shape = algorithm.shape
    if shape is not None:
        refuse_what_does_not_fit(
            algorithm.model,
            shape,
            dtype=algorithm.dtype,
            device=algorithm.device,
            adapter=algorithm.trains_adapter,
            offload=algorithm.offload,
        )
    reporter.note(opening(algorithm, shape, run_dir, train, val))
    if resumed is not None:
        reporter.note(resumed)
    for words in _doubtful(algorithm, shape, train, val):
        reporter.warn(words)
    if val is None or len(val) == 0:
        reporter.note(NO_VALIDATION if algorithm.samples else NO_VALIDATION_OF_EXAMPLES)
    reporter.note("")


def _doubtful(
    settings: TrainingSettings, shape: ModelShape | None, train: Dataset[Any] | None, val: Dataset[Any] | None
) -> Iterator[str]:
    """What is probably a mistake, and could be meant."""
    if shared := shared_tasks(train, val):
        yield (
            f"{counted(shared, 'validation task is a training task', 'validation tasks are training tasks')}, too, of "
            f"{len(val or ())}: the validation reward will "
            "look better than the model is. Keep them apart."
        )
    usual = None if shape is None else shape.learning_rate(adapter=settings.trains_adapter)
    if usual is not None and settings.peak_rate > FAR_TOO_HIGH * usual:
        yield (
            f"The learning rate {settings.peak_rate:g} is {settings.peak_rate / usual:,.0f} times the default for this "
            f"model ({usual:g}), which usually destroys the weights. Leave learning_rate out to take the default."
        )
    yield from unusual(settings)
    yield from _of_tasks("training", train)
    yield from _of_tasks("validation", val)


def _of_tasks(what: str, tasks: Dataset[Any] | None) -> Iterator[str]:
    """Tasks of several kinds among the first, and those that hold nothing."""
    first = [tasks[number] for number in range(min(len(tasks), _LOOKED_AT))] if tasks is not None else []
    kinds = Counter(_KINDS.get(type(task), type(task).__name__) for task in first)
    if len(kinds) > 1:
        counts = ", ".join(f"{count} × {kind}" for kind, count in kinds.most_common())
        yield f"The first {what} tasks are of several kinds: {counts}. An agent is given each as it is."
    nothing = [number for number, task in enumerate(first, 1) if task is None or task in ("", [], {})]
    if nothing and (len(nothing) < len(first) or first[0] == ""):
        empty = counted(len(nothing), "is empty", "are empty")
        yield f"Of the first {len(first)} {what} tasks {empty}, number {nothing[0]} first."


_KINDS = {dict: "dict", str: "text", int: "number", float: "number", list: "list", tuple: "list", type(None): "None"}


def resuming(
    checkpoint: Path, step: int, recorded: int, before: Mapping[str, Any], now: Mapping[str, Any], steps: int | None
) -> str:
    """Where a run goes on, which steps are done again, and which settings are others than before."""
    of = "" if steps is None else f" of {steps}"
    again = "" if recorded <= step else f" Steps {step + 1} to {recorded} were not saved and are done again."
    changed = {name: value for name, value in now.items() if name in before and before[name] != value}
    what = "; ".join(f"{name} was {before[name]}, is {value}" for name, value in changed.items())
    others = f"\nChanged settings: {what}." if what else ""
    if changed.keys() - {"steps", "epochs"}:
        run = checkpoint.parent.parent / RUN_FILE
        others += f" To go on with those of before, give them again, or  --config {run}  with agl train."
    return f"Goes on after step {step}{of}, from {checkpoint}.{again}{others}"


_ANSWERS = frozenset({"answer", "expected", "target", "label", "solution", "result", "gold", "ground_truth", "output"})


def numbers_as_text(tasks: Dataset[Any] | None) -> list[str]:
    """The words for a field of the first tasks that is a number in quotes, as everything in a CSV file is, or for a
    right answer that is a number, which no text is equal to."""
    first = [tasks[number] for number in range(min(len(tasks), _LOOKED_AT))] if tasks is not None else []
    if not first or not all(isinstance(task, Mapping) for task in first):
        return []
    names = [name for name in first[0] if all(_NUMBER.fullmatch(str(t.get(name))) for t in first)]
    found = [name for name in names if all(isinstance(task[name], str) for task in first)]
    if found:
        shown = f"task[{found[0]!r}]"
        text = f"The tasks' field {found[0]!r} is text, such as {first[0][found[0]]!r}"
        return [f"{text}: compare texts, or take float({shown})."]
    return [
        f"The tasks' field {name!r} is a number, such as {first[0][name]!r}, and what a model says is text, which "
        f"never equals one: if the reward compares them with ==, take str(task[{name!r}])."
        for name in names
        if name in _ANSWERS and all(type(task[name]) in (int, float) for task in first)
    ][:1]


def conclude(
    console: Console,
    algorithm: Algorithm,
    agent: LitAgent[Any],
    result: RunResult,
    resumed_at: int | None = None,
    tasks: Dataset[Any] | None = None,
) -> None:
    """After the last step. `resumed_at`: the step after which the run went on."""
    if not isinstance(algorithm, TrainingSettings):
        return
    if resumed_at is not None and not result.stopped and last_step(result.metrics) <= resumed_at:
        console.note(
            "\nThe run was finished already: "
            f"{'its one step is' if resumed_at == 1 else f'all {resumed_at} steps are'} done, and nothing was "
            "learned now. To go on, "
            f"give more steps: --steps {2 * resumed_at}, or steps={2 * resumed_at} in the script."
        )
        return
    known = agent.origin[1] is not None or agent.environment is not None
    console.note(closing(command_name(), result, agent_known=known))
    if not result.learned:
        nothing = not any(row.get("reward") for row in result.metrics)
        console.warn(" ".join([NOTHING_LEARNED, *(numbers_as_text(tasks) if nothing else [])]))


def opening(
    settings: TrainingSettings,
    shape: ModelShape | None,
    run_dir: Path,
    train: Dataset[Any] | None,
    val: Dataset[Any] | None,
) -> str:
    """The model, what is trained of it at which learning rate, how many steps, and where the run leaves its files."""
    steps = settings.steps_of(len(train)) if train is not None else settings.steps
    how_many = "" if steps is None else f"{counted(steps, 'step')} of "
    step = f"{counted(settings.tasks_per_step, 'task')} × {counted(settings.group_size, 'rollout')}"
    of_what = f"{_tasks(train, 'training')} and {_tasks(val, 'validation')}"
    if settings.examples is not None:
        step = f"{settings.tasks_per_step} {settings.examples}"
        of_what = f"{0 if train is None else len(train)} {settings.examples} and {_tasks(val, 'validation')}"
    return (
        f"{type(settings).__name__} trains {_trained(settings, shape)} at {_rate(settings)}.\n"
        f"{how_many}{step}, on {of_what}{_context(settings, shape)}.\n"
        f"Everything is recorded in {run_dir}. Ctrl-C stops cleanly."
    )


def _trained(settings: TrainingSettings, shape: ModelShape | None) -> str:
    size = "" if shape is None else f" ({count_of(shape.parameters)} parameters)"
    if settings.adapters:
        return f"the adapters {', '.join(settings.adapters)} on {settings.model}{size}"
    if settings.lora_rank is not None:
        return f"a LoRA adapter of rank {settings.lora_rank} on {settings.model}{size}"
    return f"{'the adapter' if shape and shape.adapter else 'all weights of'} {settings.model}{size}"


def _rate(settings: TrainingSettings) -> str:
    default = "" if settings.learning_rate is not None else ", the default for that size"
    return f"learning rate {settings.peak_rate:g}{default}"


def _context(settings: TrainingSettings, shape: ModelShape | None) -> str:
    if shape is None or shape.max_context is None or settings.max_context <= shape.max_context:
        return ""
    context = f" (max_context={settings.max_context})" if settings.chooses("max_context") else ""
    return f"; contexts of at most {shape.max_context} tokens, which is all that the model can do{context}"


def closing(command: str, result: RunResult, *, agent_known: bool) -> str:
    """How the reward went, and what to type next.

    `command` is how `agl` is called here; `agent_known`: the run's folder says which file or environment has its agent.
    """
    metrics, run_dir, checkpoint = result.metrics, result.run_dir, result.checkpoint
    rewards = [m["reward"] for m in metrics if m.get("reward") is not None]
    validated = [m["val_reward"] for m in metrics if m.get("val_reward") is not None]
    before = "before training" if metrics and metrics[0].get("step") == 0 else "at first"
    lines = [""]
    folder = quote(str(run_dir))
    again = f"Go on with the same command and  --resume {folder}  or Trainer(resume='{run_dir}')."
    if result.stopped and not any(m.get("step") for m in metrics):
        nothing = "\nStopped before the first step was finished: nothing is learned yet."
        return nothing if checkpoint is None else f"{nothing}\n{again}"
    losses = [m["loss"] for m in metrics if m.get("loss") is not None]
    if losses and not rewards:
        lines.append(f"Loss of the first step {losses[0]:.4f}, of the last {losses[-1]:.4f}, in nats per token.")
    if rewards:
        lines.append(f"Reward of the first step {rewards[0]:.3f}, of the last {rewards[-1]:.3f}.")
    if len(validated) > 1:
        lines.append(f"Validation reward {validated[0]:.3f} {before}, {validated[-1]:.3f} at the last.")
    if result.stopped and checkpoint is not None:
        lines.append(f"Stopped. {again}")
    look = f"show {folder}     read what was said in its rollouts"
    if losses and not rewards and not validated:
        look = f"why {folder}     see what it measured"
    lines += ["Next:", f"  {command} {look}"]
    if checkpoint is not None:
        saved = quote(str(checkpoint))
        tasks = f"{'' if agent_known else ' --agent AGENT'}{'' if validated else ' --tasks FILE'}"
        tasks += " --trust" if agent_known else ""
        lines += [
            f"  {command} eval {saved}{tasks}     compare it with the model it came from",
            f"  {command} serve {saved}     serve it over the OpenAI API",
        ]
    return "\n".join(lines)


def last_step(metrics: Sequence[Mapping[str, Any]]) -> int:
    """The last step that there is a row of; 0 for none."""
    return max((int(m.get("step") or 0) for m in metrics), default=0)


def with_next_step(error: AgentLightningError, run_dir: Path) -> None:
    """Add to an error that ended a run's work where to look, ready to paste."""
    if isinstance(error, AgentError | EngineError | JudgeError) and not getattr(error, "__notes__", ()):
        command, folder = command_name(), quote(str(run_dir))
        error.add_note(f"The run is in {run_dir}. Look at it:  {command} why {folder}   or   {command} show {folder}")


def _tasks(tasks: Dataset[Any] | None, kind: str) -> str:
    return counted(len(tasks), f"{kind} task") if tasks is not None else f"no {kind} tasks"
