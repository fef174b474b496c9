"""Runs the agents that have a name (`agl agents`) as they are installed, and writes what was seen into docs/clients.md.

    python scripts/agents.py [--path FOLDER …] [--only NAME …] [--write]

Looks for their programs in PATH and in the folders given. A stand-in for a good model reads a file by whatever tool an
agent declares, and answers. What is not installed is named and has no row.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import agentlightning as agl
from agentlightning.engine.base import Chunk, SamplingParams
from agentlightning.gateway import Gateway, load_rendering
from agentlightning.litagent.known_agents import KNOWN_AGENTS, KnownAgent
from agentlightning.models import resolve_model
from agentlightning.runner import LitAgentRunner
from agentlightning.store import InMemoryLightningStore
from agentlightning.types import Call, NamedResources, Span
from agentlightning.types.call import Int32Array
from agentlightning.types.left_out import left_out_of

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.gateway.scripted import ScriptedEngine  # noqa: E402

PAGE = ROOT / "docs" / "clients.md"
BEGIN, END = "<!-- agents: python scripts/agents.py --write -->\n", "<!-- /agents -->"
HEAD = "| agent | version | worked | calls | streamed | continued exactly | conversations | not known here | run on |"
WORD = "heliotrope"
TASK = {"prompt": "Read the file notes.txt in this folder and tell me the word that stands in it."}
_SHELLS = re.compile(r"bash|shell|exec|terminal|command", re.IGNORECASE)
_READERS = re.compile(r"^(read|view|cat|open)", re.IGNORECASE)
_COMMANDS = ("cat notes.txt", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
"""The second one is how mini-swe-agent's model says that it is done."""
_MOST_SECONDS = 120.0


class Engine(ScriptedEngine):
    """Says what a script says, and notes which calls were streamed."""

    streamed = 0

    async def generate(
        self, prompt_ids: Int32Array, params: SamplingParams, *, stream: bool = False, request_id: str | None = None
    ) -> AsyncGenerator[Chunk, None]:
        self.streamed += stream
        async for chunk in super().generate(prompt_ids, params, stream=stream, request_id=request_id):
            yield chunk


def stand_in(prompt: str, _params: object) -> str:
    """What a good agent's model would say: a call of a tool that reads, and the answer."""
    declared = prompt.partition("<tools>\n")[2].partition("\n</tools>")[0].splitlines()
    tools = [tool["function"] for tool in map(json.loads, declared)] if declared else []
    done = prompt.count("<tool_response>\n")
    shell = next((tool for tool in tools if _SHELLS.search(tool["name"])), None)
    reader = next((tool for tool in tools if _READERS.search(tool["name"])), None)
    tool = shell if reader is None or done else reader
    if tool is None or done >= len(_COMMANDS):
        return f"The word is {WORD}."
    if tool is reader or shell is not None:
        call = {"name": tool["name"], "arguments": arguments_for(tool["parameters"], done)}
        return f"<think>\nI read it.\n</think>\n\n<tool_call>\n{json.dumps(call)}\n</tool_call>"
    return f"The word is {WORD}."


def arguments_for(schema: dict[str, Any], done: int) -> dict[str, Any]:
    """What a tool that reads or runs something has to be given."""
    properties = schema.get("properties", {})
    wanted = schema.get("required") or list(properties)[:1]
    return {name: _value(name, properties.get(name, {}), done) for name in wanted}


def _value(name: str, schema: dict[str, Any], done: int) -> Any:
    kind = schema.get("type", "string")
    if kind == "array":
        return ["bash", "-c", _COMMANDS[done]] if re.search("command|cmd", name) else []
    if kind in ("boolean", "integer", "number", "object"):
        return {"boolean": False, "integer": 1, "number": 1, "object": {}}[kind]
    if re.search("path|file", name, re.IGNORECASE):
        return "notes.txt"
    return _COMMANDS[done] if re.search("command|cmd|script", name, re.IGNORECASE) else "Read the file."


@dataclass(frozen=True)
class Seen:
    """What became of a run of one agent."""

    agent: KnownAgent
    version: str
    output: str
    error: str | None
    calls: Sequence[Call]
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

    def row(self) -> str:
        worked = "yes" if self.worked else f"no: {self.error or 'another answer'}"
        unknown = sorted({one.field for one in left_out_of(self.spans) if one.kind != "harmless"})
        cells = [
            self.agent.name,
            self.version,
            worked.replace("|", "/").replace("\n", " ")[:120],
            str(len(self.calls)),
            str(self.streamed),
            f"{self.exact} of {len(self.later)}",
            str(len(self.calls) - len(self.later)),
            ", ".join(f"`{name}`" for name in unknown) or "nothing",
            datetime.date.today().isoformat(),
        ]
        return f"| {' | '.join(cells)} |"


def _has_lost(call: Call) -> bool:
    return call.info.divergence is not None and call.info.divergence.tokens_lost > 0


def _continues(parent: Call, call: Call) -> bool:
    before = [*parent.prompt_ids.tolist(), *parent.response_ids.tolist()]
    return call.prompt_ids[: len(before)].tolist() == before


def _write(file: Path) -> None:
    file.write_text(f"{WORD}\n")


async def run(agent: KnownAgent, program: str) -> Seen:
    """One rollout of the agent, through a gateway of its own."""
    outputs: list[agl.ProgramRun] = []

    def grade(ended: agl.ProgramRun) -> float:
        outputs.append(ended)
        return 1.0

    rendering, store = load_rendering(resolve_model("calc")), InMemoryLightningStore()
    engine = Engine(rendering, stand_in, max_context=200_000)
    with tempfile.TemporaryDirectory() as files:
        _write(Path(files, "notes.txt"))
        async with Gateway(store, engine, rendering) as gateway:
            runner = LitAgentRunner(agl.DummyTracer(), gateway=gateway)
            runner.init(agl.Program(agent.name, grader=grade, files=files))
            runner.init_worker(0, store)
            resources: NamedResources = {"llm": gateway.as_resource()}
            async with asyncio.timeout(_MOST_SECONDS):
                rollout = await runner.step(TASK, resources=resources)
            runner.teardown()
    calls = (await store.query_calls([rollout.rollout_id]))[rollout.rollout_id]
    spans = list(await store.query_spans(rollout.rollout_id))
    error = rollout.attempt.error
    await store.close()
    said = outputs[0].stdout + outputs[0].stderr if outputs else ""
    return Seen(agent, version_of(program), said, error, calls, engine.streamed, spans)


def version_of(program: str) -> str:
    """What the program says of itself."""
    asked = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=60, check=False)
    found = re.search(r"\d+(?:\.\w+)+(?:-[\w.]+)?", asked.stdout + asked.stderr)
    return found[0] if found else "?"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", type=Path, nargs="*", default=[], help="further folders with programs")
    parser.add_argument("--only", nargs="*", choices=KNOWN_AGENTS, help="these agents")
    parser.add_argument("--write", action="store_true", help="write the table into docs/clients.md")
    options = parser.parse_args()
    if options.only and options.write:
        parser.error("the table is of all agents: leave out --only or --write")
    os.environ["PATH"] = os.pathsep.join([*(str(folder.resolve()) for folder in options.path), os.environ["PATH"]])
    rows: list[str] = []
    missing: list[str] = []
    for agent in KNOWN_AGENTS.values():
        program = shutil.which(agent.program)
        if program is None or (options.only and agent.name not in options.only):
            missing.append(agent.name)
            continue
        try:
            rows.append(asyncio.run(run(agent, program)).row())
            print(rows[-1], flush=True)
        except TimeoutError:
            missing.append(f"{agent.name} (it took longer than {_MOST_SECONDS:g} s)")
    print(f"Not run: {', '.join(missing) or 'none'}.", flush=True)
    if options.write:
        table = "\n".join([HEAD, "|---" * (HEAD.count("|") - 1) + "|", *rows]) + "\n"
        table += f"\nNot run, as they were not installed: {', '.join(missing)}.\n" if missing else ""
        pattern = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.DOTALL)
        PAGE.write_text(pattern.sub(lambda _: BEGIN + table + END, PAGE.read_text()))


if __name__ == "__main__":
    main()
