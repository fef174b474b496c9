"""Runs the agents that have a name (`agl agents`) as they are installed, and writes what was seen into docs/clients.md.

    python scripts/agents.py [--path FOLDER …] [--only NAME …] [--write]

Looks for their programs in PATH and in the folders given. In place of a good model a script reads a file by whatever
tool an agent declares, and answers; starts a sub-agent; and, where an agent can be told to sum up early, reads until it
does. What is not installed is named and has no row. With --only, the
other rows stay as they are.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import agentlightning as agl
from agentlightning.engine.base import Chunk, SamplingParams
from agentlightning.gateway import Gateway, load_rendering
from agentlightning.litagent.known_agents import KNOWN_AGENTS, KnownAgent, with_llm
from agentlightning.models import resolve_model
from agentlightning.runner import LitAgentRunner
from agentlightning.store import InMemoryLightningStore
from agentlightning.store.sql import SqlLightningStore
from agentlightning.types import Call, NamedResources, Span
from agentlightning.types.call import Int32Array, left_out_of

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.clients.stand_ins import DELEGATES, LONG, READS, SUB_TASK, SUMMARY, WORD, compacting, delegating, reading  # noqa: E402
from tests.gateway.scripted import Script, ScriptedEngine  # noqa: E402

PAGE = ROOT / "docs" / "clients.md"
BEGIN, END = "<!-- agents: python scripts/agents.py --write -->\n", "<!-- /agents -->"
HEAD = (
    "| agent | version | worked | calls | streamed | continued exactly | conversations "
    "| sub-agents as own roots | named | compaction | not known here | run on |"
)
NOT_HAD = {
    "Amp": "it works with an account alone, through its maker's servers (@sourcegraph/amp)",
    "crush": "its npm package downloads the program when it is installed, from a host that could not be reached",
    "Cursor CLI": "no package registry has it, and it needs an account",
    "goose": "no package registry has it: the packages of that name are others",
    "Terminus-2": "harbor 0.26.0 installs, but runs its agents only in containers or in a cloud, and neither was "
    "available",
}
"""Agents that could not be run, and why."""


@dataclass(frozen=True, kw_only=True)
class Early:
    """How an agent is told to sum up early."""

    replaced: tuple[str, str] | None = None
    """A part of its command or configuration, and what stands in its place."""
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    """Of its home, by path."""


_LIMIT = Early(replaced=('{"tool_call": true}', '{"tool_call": true, "limit": {"context": 100000, "output": 4000}}'))
EARLY: Mapping[str, Early] = {
    "claude-code": Early(
        environment={"CLAUDE_CODE_AUTO_COMPACT_WINDOW": "100000", "CLAUDE_AUTOCOMPACT_PCT_OVERRIDE": "60"}
    ),
    "codex": Early(replaced=("codex exec ", "codex exec -c model_auto_compact_token_limit=30000 ")),
    "opencode": _LIMIT,
    "qwen-code": Early(files={".qwen/settings.json": '{"model": {"generationConfig": {"contextWindowSize": 90000}}}'}),
    "gemini-cli": Early(replaced=('{"security":', '{"model":{"compressionThreshold":0.04},"security":')),
    "kilo": _LIMIT,
}
_MOST_SECONDS = 300.0


class Engine(ScriptedEngine):
    """Says what a script says, and notes which calls were streamed."""

    streamed = 0

    async def generate(
        self, prompt_ids: Int32Array, params: SamplingParams, *, stream: bool = False, request_id: str | None = None
    ) -> AsyncGenerator[Chunk, None]:
        self.streamed += stream
        async for chunk in super().generate(prompt_ids, params, stream=stream, request_id=request_id):
            yield chunk


@dataclass(frozen=True)
class Seen:
    """What became of a run of one agent."""

    output: str
    error: str | None
    calls: Sequence[Call]
    texts: Sequence[tuple[str, str]]
    """Prompt and response of each call."""
    streamed: int
    spans: Sequence[Span]

    @property
    def worked(self) -> bool:
        return self.error is None and WORD in self.output

    @property
    def later(self) -> list[Call]:
        """The calls that go on from an earlier one, or lost what they would go on from."""
        return [call for call in self.calls if call.info.parent_call_id is not None or _has_lost(call)]

    @property
    def exact(self) -> int:
        """How many of them begin with its tokens."""
        earlier = {call.info.call_id: call for call in self.calls}
        found = [earlier.get(call.info.parent_call_id or "") for call in self.later]
        return sum(p is not None and _continues(p, call) for p, call in zip(found, self.later, strict=True))

    @property
    def of_sub_agents(self) -> list[Call]:
        """The calls of sub-agents: they know their own task, and not the main agent's."""
        pairs = zip(self.calls, self.texts, strict=True)
        return [call for call, (prompt, _) in pairs if SUB_TASK in prompt and DELEGATES["prompt"] not in prompt]

    @property
    def summed_up(self) -> bool:
        """Whether a call went on from the summary."""
        return any(SUMMARY in prompt for prompt, _ in self.texts)


def row(agent: KnownAgent, version: str, read: Seen, delegated: Seen, compacted: Seen | None) -> str:
    """A line of the table."""
    worked = "yes" if read.worked else f"no: {read.error or 'another answer'}"
    unknown = sorted({one.field for one in left_out_of(read.spans) if one.kind != "harmless"})
    subs = delegated.of_sub_agents
    own = sum(call.info.parent_call_id is None and not _has_lost(call) for call in subs[:1])
    named = {(call.info.agent or "").partition("/")[0] for call in subs} - {""}
    cells = [
        agent.name,
        version,
        worked.replace("|", "/").replace("\n", " ")[:120],
        str(len(read.calls)),
        str(read.streamed),
        f"{read.exact} of {len(read.later)}",
        str(len(read.calls) - len(read.later)),
        ("yes" if own else "no") if subs else "none started",
        ", ".join(f"`{name}`" for name in sorted(named)) or ("no" if subs else "–"),
        "–" if compacted is None else _compaction(compacted),
        ", ".join(f"`{name}`" for name in unknown) or "nothing",
        datetime.date.today().isoformat(),
    ]
    return f"| {' | '.join(cells)} |"


def _compaction(seen: Seen) -> str:
    """Whether it summed up and went on, how many of the later calls continue exactly, and why the others do not."""
    if not seen.summed_up:
        return "did not begin"
    lost = sorted({call.info.divergence.cause for call in seen.calls if call.info.divergence and _has_lost(call)})
    why = f" ({'; '.join(lost)})" if lost else ""
    return f"{'worked' if seen.worked else 'failed'}, {seen.exact} of {len(seen.later)}{why}".replace("|", "/")


def _has_lost(call: Call) -> bool:
    return call.info.divergence is not None and call.info.divergence.tokens_lost > 0


def _continues(parent: Call, call: Call) -> bool:
    before = [*parent.prompt_ids.tolist(), *parent.response_ids.tolist()]
    return call.prompt_ids[: len(before)].tolist() == before


def early(agent: KnownAgent) -> KnownAgent:
    """The agent, told to sum up early."""
    changes = EARLY[agent.name]
    old, new = changes.replaced or ("", "")
    changed = [part.replace(old, new) if old else part for part in agent.command]
    environment = {name: value.replace(old, new) if old else value for name, value in agent.environment.items()}
    assert not old or (changed, environment) != (list(agent.command), agent.environment), agent.name
    return replace(agent, command=changed, environment={**environment, **changes.environment})


async def run(
    agent: KnownAgent,
    script: Script = reading,
    task: Mapping[str, str] = READS,
    text: str = f"{WORD}\n",
    store: SqlLightningStore | None = None,
) -> Seen:
    """One rollout of the agent, through a gateway of its own, in a folder with a notes.txt of this text.

    store: is closed after it; one in memory if not given.
    """
    outputs: list[agl.ProgramRun] = []

    def grade(ended: agl.ProgramRun) -> float:
        outputs.append(ended)
        return 1.0

    rendering, store = load_rendering(resolve_model("calc")), store or InMemoryLightningStore()
    engine = Engine(rendering, script, max_context=400_000)
    with tempfile.TemporaryDirectory() as files, tempfile.TemporaryDirectory() as home:
        _write(Path(files, "notes.txt"), text)
        if text == LONG:
            for name, written in EARLY[agent.name].files.items():
                _write(Path(home, name), written)
        async with Gateway(store, engine, rendering) as gateway:
            runner = LitAgentRunner(agl.DummyTracer(), gateway=gateway)
            llm = gateway.as_resource()
            runner.init(agl.Program(**_started(agent, llm, home), grader=grade, files=files))
            runner.init_worker(0, store)
            resources: NamedResources = {"llm": llm}
            async with asyncio.timeout(_MOST_SECONDS):
                rollout = await runner.step(dict(task), resources=resources)
            runner.teardown()
    calls = (await store.query_calls([rollout.rollout_id]))[rollout.rollout_id]
    spans = list(await store.query_spans(rollout.rollout_id))
    error = rollout.attempt.error
    await store.close()
    said = outputs[0].stdout + outputs[0].stderr if outputs else ""
    texts = [(rendering.decode(call.prompt_ids), rendering.decode(call.response_ids)) for call in calls]
    return Seen(said, error, calls, texts, engine.streamed, spans)


def _started(agent: KnownAgent, llm: agl.LLM, home: str) -> dict[str, Any]:
    """The agent by its name, or the command of one that was changed."""
    if agent is KNOWN_AGENTS[agent.name]:
        return {"command": agent.name}
    environment = {name: with_llm(value, llm) for name, value in agent.environment.items()}
    return {"command": [with_llm(part, llm) for part in agent.command], "env": {**environment, "HOME": home}}


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


async def row_of(agent: KnownAgent, program: str) -> str:
    """All that is run of one agent."""
    read, delegated = await run(agent), await run(agent, delegating, DELEGATES)
    compacted = await run(early(agent), compacting, READS, LONG) if agent.name in EARLY else None
    return row(agent, version_of(agent, program), read, delegated, compacted)


def version_of(agent: KnownAgent, program: str) -> str:
    """What the program says of itself."""
    given = {**os.environ, **agent.environment}
    asked = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=200, check=False, env=given)
    found = re.search(r"\d+(?:\.\w+)+(?:-[\w.]+)?", asked.stdout + asked.stderr)
    return found[0] if found else "?"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", type=Path, nargs="*", default=[], help="further folders with programs")
    parser.add_argument("--only", nargs="*", choices=KNOWN_AGENTS, help="these agents")
    parser.add_argument("--write", action="store_true", help="write the table into docs/clients.md")
    options = parser.parse_args()
    os.environ["PATH"] = os.pathsep.join([*(str(folder.resolve()) for folder in options.path), os.environ["PATH"]])
    for name in options.only or KNOWN_AGENTS:
        program = shutil.which(KNOWN_AGENTS[name].program)
        if program is None:
            print(f"Not installed: {name} ({KNOWN_AGENTS[name].install})", flush=True)
            continue
        try:
            line = asyncio.run(row_of(KNOWN_AGENTS[name], program))
        except TimeoutError:
            print(f"{name} took longer than {_MOST_SECONDS:g} s", flush=True)
            continue
        print(line, flush=True)
        if options.write:
            PAGE.write_text(with_row(PAGE.read_text(), name, line))


def with_row(page: str, name: str, line: str) -> str:
    """The page with this row in place of the agent's older one, in the order of `agl agents`."""
    before, rest = page.split(BEGIN)
    old, after = rest.split(END)
    rows = {row.split("|")[1].strip(): row for row in old.splitlines() if row.startswith("| ")}
    rows[name] = line
    table = [HEAD, "|---" * (HEAD.count("|") - 1) + "|", *(rows[known] for known in KNOWN_AGENTS if known in rows)]
    missing = [known for known in KNOWN_AGENTS if known not in rows]
    table += ["", f"Not run, as they were not installed: {', '.join(missing)}."] if missing else []
    cannot = "; ".join(f"{agent}: {why}" for agent, why in NOT_HAD.items())
    return before + BEGIN + "\n".join([*table, "", f"Not tested: {cannot}."]) + "\n" + END + after


if __name__ == "__main__":
    main()
