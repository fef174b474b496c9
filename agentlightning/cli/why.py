"""`agl why`: why a run is not learning, in words; and how any diagnosis is shown."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from agentlightning.algorithm.catalogue import CATALOGUE
from agentlightning.cli.commands.look import WhyOptions
from agentlightning.cli.opened import OpenedRun, opened_run
from agentlightning.console import one_line, safe, terminal
from agentlightning.doctor import Break, Diagnosis, Finding, Severity, diagnose, find_breaks, lost_by_cause
from agentlightning.doctor.breaks import Decode
from agentlightning.doctor.template import Template
from agentlightning.errors import AgentLightningError
from agentlightning.metrics.catalogue import find_measured
from agentlightning.trainer.sync import run_sync

STYLES = {Severity.PROBLEM: "bold red", Severity.WARNING: "yellow", Severity.NOTE: "dim"}
_DIED = (
    "This run died: its process ended without a word. The machine ended it, its terminal was closed (nohup or tmux "
    "keeps a run), or an agent ended its process (os._exit, a crash in a library); with --strategy processes "
    "(strategy='processes') a run outlives such agents. Where it has a checkpoint, go on with the same command and "
    "--resume."
)
MARKS = {Severity.PROBLEM: "✗", Severity.WARNING: "!", Severity.NOTE: "·"}


def explain_run(options: WhyOptions) -> bool:
    """Print the diagnosis. Returns whether there is a problem."""
    return run_sync(_explain(options))


async def _explain(options: WhyOptions) -> bool:
    breaks = options.breaks
    async with opened_run(options.run, options.run_id) as opened:
        decode = decoder_of(opened)
        evidence = await opened.evidence()
        found = diagnose(evidence, decode, template_of_model(opened.settings.get("model")))
        broken = find_breaks(evidence.episodes, decode) if breaks else []
        if options.as_json:
            terminal().print_json(json.dumps(found.to_json() | ({"breaks": _records(broken)} if breaks else {})))
        else:
            if opened.standing.word == "died":
                terminal().print(_DIED)
            terminal().print(shown(found))
            if breaks:
                terminal().print(_table_of_breaks(broken))
        return bool(found.problems)


def _records(breaks: list[Break]) -> list[dict[str, Any]]:
    return [{name: getattr(one, name) for name in Break.__slots__} for one in breaks]


def decoder_of(opened: OpenedRun) -> Decode | None:
    """Token ids → text by the tokenizer of the run's model; None where it cannot be had here."""
    return decoder_of_model(opened.settings.get("model"))


def decoder_of_model(model: str | None) -> Decode | None:
    """The decoder of a model by its name; None for no model."""
    tokenizer = _tokenizer(model)
    return tokenizer and (lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False))


def template_of_model(model: str | None) -> Template | None:
    """Messages and tools → a prompt's tokens by the model's own chat template; None where there is none."""
    tokenizer = _tokenizer(model)
    if tokenizer is None or not tokenizer.chat_template:
        return None
    from jinja2 import TemplateError

    def apply(messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]) -> list[int] | None:
        given = {"tools": list(tools) or None, "add_generation_prompt": True, "return_dict": False}
        try:
            return list(tokenizer.apply_chat_template([dict(m) for m in messages], **given))
        except (TemplateError, TypeError, ValueError):
            return None

    return apply


@functools.cache
def _tokenizer(model: str | None) -> Any:
    """None where there is no model, or its tokenizer cannot be had here."""
    if not model:
        return None
    try:
        from agentlightning.models import resolve_model
        from agentlightning.rendering.tokenizer import load_tokenizer

        return load_tokenizer(str(resolve_model(model)))
    except (AgentLightningError, ImportError, OSError):
        return None


def shown(found: Diagnosis) -> RenderableType:
    """A diagnosis for people: the verdict, the findings with their fixes, the numbers."""
    problem = any(f.severity is Severity.PROBLEM for f in found.findings)
    style = "bold red" if problem else "bold green" if found.healthy else "bold yellow"
    sentence, _, first = safe(found.verdict).partition(" First thing to try: ")
    parts: list[RenderableType] = [Text(sentence, style=style)]
    if first:
        parts.append(Text(f"First thing to try: {first}", style="cyan"))
    parts.append(Text())
    for f in found.findings:
        parts += _finding(f, shown=f.words in found.verdict)
    lines = _numbers(found.measured)
    if lines.row_count:
        parts.append(lines)
    return Group(*parts)


def _finding(finding: Finding, *, shown: bool) -> list[RenderableType]:
    """`shown`: the verdict has its words and its fix."""
    head = Text(f"{MARKS[finding.severity]} ", style=STYLES[finding.severity])
    head.append(safe(finding.words), style="default")
    parts: list[RenderableType] = [] if shown else [head]
    if finding.fix and not shown:
        parts.append(Padding(Text(f"try: {safe(finding.fix)}", style="cyan"), (0, 0, 0, 2)))
    if finding.evidence.get("error"):
        parts.append(Padding(Text(safe(str(finding.evidence["error"])), style="dim"), (0, 0, 0, 2)))
    rollouts = finding.evidence.get("rollouts")
    if rollouts:
        parts.append(Padding(Text(f"look at: {' '.join(map(str, rollouts))}", style="dim"), (0, 0, 0, 2)))
    return [*parts, Text()] if parts else []


def _numbers(measured: Any) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), title="measured", title_justify="left")
    table.add_column(style="dim")
    table.add_column()
    for name, value in measured.items():
        if value is not None and value != {}:
            metric = find_measured(name) or CATALOGUE.find(name)
            title = metric.title if metric else name.replace("_", " ").capitalize()
            table.add_row(title, _value(value, name, metric.unit if metric else ""))
    return table


def _value(value: Any, name: str = "", unit: str = "") -> str:
    if name.endswith("_bytes"):
        return f"{value / 2**30:,.2f} GiB" if value >= 2**27 else f"{value / 2**20:,.1f} MiB"
    if "seconds" in name:
        return f"{value:,.1f} s"
    if unit == "share" and isinstance(value, int | float):
        return f"{value:.1%}"
    if isinstance(value, dict):
        inner = {k: v["groups"] if isinstance(v, dict) and "groups" in v else v for k, v in value.items()}
        return ", ".join(f"{k}: {_value(v, unit=unit)}" for k, v in inner.items() if v)
    shown = f"{value:.3g}" if isinstance(value, float) else str(value)
    return f"{shown} {unit}".rstrip()


def _table_of_breaks(breaks: list[Break]) -> RenderableType:
    if not breaks:
        return Text("No call left the tokens of the calls before it.")
    table = Table("cause", "calls", "tokens lost", "first difference", title="Breaks of token histories", expand=True)
    for cause, found in lost_by_cause(breaks).items():
        example = max(found, key=lambda one: one.tokens_lost)
        text = Text()
        text.append(one_line(example.before, 60), style="dim")
        text.append(f" {one_line(example.was, 50)}", style="red")
        text.append(f" → {one_line(example.now, 50)}", style="green")
        text.append(f"\n{example.advice}", style="cyan")
        text.append(f"\n{example.rollout_id} at token {example.position}", style="dim")
        table.add_row(cause, str(len(found)), f"{sum(one.tokens_lost for one in found):,}", text)
    return table
