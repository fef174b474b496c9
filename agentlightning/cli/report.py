"""`agl report`: one HTML file about a run that needs nothing else: no script, no font, no address.

Everything that a model, an agent or a task said is escaped; there is no JavaScript in the page, and its policy forbids
any.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import typer

from agentlightning.algorithm.episode import Episode
from agentlightning.cli.commands.look import ReportOptions
from agentlightning.cli.opened import OpenedRun, opened_run
from agentlightning.cli.show import as_record
from agentlightning.cli.why import decoder_of
from agentlightning.console import safe
from agentlightning.doctor import Diagnosis, Evidence, diagnose
from agentlightning.errors import ConfigError
from agentlightning.files import atomic_write
from agentlightning.metrics.svg import curve_svg, points_of
from agentlightning.trainer.sync import run_sync
from agentlightning.types.rollout import step_in

REPORT_FILE = "report.html"
TELLING = 10
"""Rollouts that are shown."""
_LONGEST = 4000
"""Characters of one message."""

_STYLE = """
:root{color-scheme:light dark}
body{font:16px/1.55 system-ui,sans-serif;max-width:860px;margin:2rem auto;padding:0 1rem}
h1{font-size:1.6rem;margin-bottom:.2rem}h2{font-size:1.15rem;margin-top:2.2rem}
.dim{opacity:.65}.verdict{padding:.8rem 1rem;border-left:4px solid #2a6f97;background:#8881}
.problem{border-left-color:#b23a48}.warning{border-left-color:#bc6c25}
table{border-collapse:collapse;width:100%}td{padding:.15rem .8rem .15rem 0;vertical-align:top}
td:first-child{opacity:.65;white-space:nowrap}
details{border:1px solid #8884;border-radius:6px;margin:.5rem 0;padding:.4rem .8rem}summary{cursor:pointer}
pre{white-space:pre-wrap;overflow-wrap:anywhere;margin:.2rem 0 .8rem;font-size:.85rem}
.role{font-weight:600;font-size:.8rem;opacity:.7}.good{color:#2d7d46}.bad{color:#b23a48}
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def write_report(options: ReportOptions) -> None:
    """Write the report of a run, and print where it is."""
    if options.to is not None and options.to.is_dir():
        raise ConfigError(f"--to {options.to} is a folder. Give a file, such as {options.to / REPORT_FILE}.")
    if options.to is not None and options.to.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"--to {options.to}: a report is HTML, so the name of the file should end in .html.")
    typer.echo(safe(str(run_sync(_write(options.run, options.to, options.run_id)))))


async def _write(path: Path, to: Path | None, run_id: str | None) -> Path:
    async with opened_run(path, run_id) as opened:
        evidence = await opened.evidence()
        found = diagnose(evidence, decoder_of(opened))
        steps = await opened.steps()
        chosen = telling(evidence)
        spans = {
            e.rollout.rollout_id: await opened.store.query_spans(e.rollout.rollout_id, "latest") for _, e in chosen
        }
        records = [(why, as_record(e, spans[e.rollout.rollout_id].items)) for why, e in chosen]
        target = to or opened.folder / REPORT_FILE
        try:
            atomic_write(target, page(opened, found, steps, records))
        except OSError as error:
            why = error.strerror or error
            raise ConfigError(f"The report cannot be written to {target}: {why}. Give a file: --to FILE.") from error
        return target


def telling(evidence: Evidence) -> list[tuple[str, Episode]]:
    """A few rollouts that say much: first and last ones, best and worst siblings, the longest, and failures."""
    good = [e for e in evidence.episodes if e.good and e.reward is not None]
    differ = [g for g in evidence.groups if len({e.reward for e in g}) > 1]
    chosen: list[tuple[str, Episode]] = []
    if evidence.early:
        chosen.append(("one of the first", evidence.early[0]))
    for group in differ[-2:]:
        ordered = sorted(group, key=lambda e: e.reward or 0.0)
        chosen += [("the best of its siblings", ordered[-1]), ("the worst of its siblings", ordered[0])]
    if good:
        chosen.append(("the longest", max(good, key=lambda e: e.sampled_tokens)))
        chosen.append(("the shortest", min(good, key=lambda e: e.sampled_tokens)))
    chosen += [("failed", e) for e in [e for e in evidence.episodes if not e.good][-2:]]
    chosen += [("one of the last", e) for e in reversed(evidence.episodes)]
    seen: dict[str, tuple[str, Episode]] = {}
    for why, e in chosen:
        seen.setdefault(e.rollout.rollout_id, (why, e))
    return list(seen.values())[:TELLING]


def page(
    opened: OpenedRun,
    found: Diagnosis,
    steps: Sequence[Mapping[str, Any]],
    records: Sequence[tuple[str, dict[str, Any]]],
) -> str:
    """The whole page."""
    run, name = opened.run, opened.name
    words = [] if run is None else [run.algorithm, f"agent {run.agent}" if run.agent else "", str(opened.standing)]
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        f"<title>{_text(name)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{_text(name)}</h1><p class='dim'>{_text(' · '.join(filter(None, words)))}</p>",
        *_verdicts(found),
        "<h2>Reward</h2>",
        curve_svg({"training": points_of(steps, "reward"), "validation": points_of(steps, "val_reward")}, "reward"),
        *_curves(steps),
        "<h2>Rollouts</h2>",
        *[_rollout(why, record) for why, record in records],
        "<h2>Measured</h2>",
        _table(found.measured),
        "<h2>Settings</h2>",
        _table(opened.settings),
        "</body></html>",
    ]
    return "\n".join(parts)


def _verdicts(found: Diagnosis) -> list[str]:
    worst = found.findings[0].severity.value if found.findings else ""
    parts = [f"<p class='verdict {worst}'>{_text(found.verdict)}</p>"]
    others = [f for f in found.findings if f.words not in found.verdict]
    parts += [
        f"<p class='verdict {f.severity.value}'>{_text(f.words)}<br><span class='dim'>{_text(f.fix)}</span></p>"
        for f in others
    ]
    return parts


def _curves(steps: Sequence[Mapping[str, Any]]) -> list[str]:
    parts = []
    for name in ("entropy", "grad_norm", "clip_fraction", "tokens"):
        points = points_of(steps, name)
        if any(y for _, y in points):
            parts.append(f"<details><summary>{name}</summary>{curve_svg({name: points}, name)}</details>")
    return parts


def _rollout(why: str, record: Mapping[str, Any]) -> str:
    reward = "no reward" if record["reward"] is None else f"reward {record['reward']:g}"
    good = "good" if record["reward"] and record["outcome"] == "ok" else "bad"
    step = step_in(record["metadata"])
    where = f" · step {step}" if step is not None else ""
    task = json.dumps(record["task"], ensure_ascii=False, default=repr)
    head = (
        f"<summary>{_text(why)}: <b class='{good}'>{_text(reward)}</b>, {_text(record['outcome'])}{where}"
        f"<br><span class='dim'>{_text(task[:160])}</span></summary>"
    )
    body = [_message(message) for message in _conversation(record["calls"])]
    if record["error"]:
        body.append(f"<div class='role bad'>error</div><pre>{_text(record['error'])}</pre>")
    return f"<details>{head}<p class='dim'>{_text(record['rollout_id'])}</p>{''.join(body)}</details>"


def _conversation(calls: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages of a rollout, each once: those of the last call, or where it is another conversation, of each."""
    transcript: list[Mapping[str, Any]] = []
    for call in calls:
        messages = [*call["messages"], *([call["answer"]] if call["answer"] else [])]
        transcript = messages if messages[: len(transcript)] == transcript else [*transcript, *messages]
    return transcript


def _message(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False, default=repr)
    for call in message.get("tool_calls") or ():
        function = call.get("function", {})
        text = f"{text or ''}\n{function.get('name')}({function.get('arguments')})".strip()
    cut = text if len(text or "") <= _LONGEST else f"{text[:_LONGEST]} …"
    return f"<div class='role'>{_text(str(message.get('role', '')))}</div><pre>{_text(cut or '')}</pre>"


def _table(values: Mapping[str, Any]) -> str:
    rows = [
        f"<tr><td>{_text(name)}</td><td>{_text(json.dumps(value, ensure_ascii=False, default=repr))}</td></tr>"
        for name, value in values.items()
        if value not in (None, {}, [])
    ]
    return f"<table>{''.join(rows)}</table>"


def _text(value: object) -> str:
    """Escaped, with control characters and marks of direction written out."""
    return escape(safe(str(value)), quote=True)
