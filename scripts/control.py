"""Runs the scripts of `tests/compat/scripts` and `tests/clients/scripts` on agentlightning 0.3.0 and on this package.

    python scripts/control.py [--folder .control] [--json FILE] [SCRIPT …]

They are written as scripts for 0.3 are, so the original is the control: what runs there has to run here. It is
installed from PyPI into an environment of its own, with what its imports need and none of what needs a GPU. This
package runs in an environment of `scripts/clients.py`, if `--ours PYTHON` names its interpreter.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.compat.provider import serving  # noqa: E402

ORIGINAL = ["--no-deps", "agentlightning==0.3.0"]
NEEDED = [
    "agentops==0.4.21",
    "aiohttp",
    "aiologic==0.16.0",
    "autogen-agentchat==0.7.5",
    "autogen-ext[openai]==0.7.5",
    "fastapi",
    "flask",
    "gpustat",
    "graphviz",
    "gunicorn",
    "langchain==1.1.2",
    "langchain-openai==1.1.0",
    "langgraph==1.0.4",
    "litellm[proxy]==1.80.0",
    "openai==2.8.0",
    "openai-agents==0.5.1",
    "opentelemetry-api==1.38.0",
    "opentelemetry-exporter-otlp==1.38.0",
    "opentelemetry-sdk==1.38.0",
    "poml==0.0.8",
    "portpicker",
    "psutil",
    "pyarrow",
    "pydantic==2.12.4",
    "rich",
    "setproctitle",
    "setuptools<81",
    "uvicorn",
    "uvicorn-worker",
]
"""What it imports, in versions of its time."""
SECONDS = 300


def build(folder: Path) -> Path:
    """The python of the environment with the original, which is made if its list of packages has changed."""
    stamp, python = folder / "packages.txt", folder / "bin" / "python"
    wanted = "\n".join([*ORIGINAL, *NEEDED])
    if not (stamp.is_file() and stamp.read_text() == wanted):
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-input"]
        subprocess.run([*pip, *NEEDED], check=True)
        subprocess.run([*pip, *ORIGINAL], check=True)
        stamp.write_text(wanted)
    return python


def result_of(python: Path, script: Path) -> str:
    """`runs`, or the last line of what it said before it ended."""
    with tempfile.TemporaryDirectory() as folder, serving() as provider:
        command = [str(python), str(script)]
        given = {**os.environ, **provider, "NO_COLOR": "1", "COLUMNS": "200"}
        try:
            done = subprocess.run(
                command, cwd=folder, env=given, capture_output=True, text=True, timeout=SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            return f"goes on after {SECONDS} s"
    if done.returncode == 0:
        return "runs"
    errors = [line for line in done.stderr.splitlines() if line[:1].isalpha() and "Error" in line.partition(":")[0]]
    return (errors or done.stderr.strip().splitlines() or ["ends without a word"])[-1].strip()[:160]


def table(results: dict[str, dict[str, str]]) -> str:
    rows = [f"| `{name}` | {found['original']} | {found['ours']} |" for name, found in results.items()]
    return "\n".join(["| script | agentlightning 0.3.0 | here |", "|---|---|---|", *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scripts", nargs="*", help="names of scripts; all of them by default")
    parser.add_argument("--folder", type=Path, default=ROOT / ".control", help="where the environment is kept")
    parser.add_argument("--ours", type=Path, default=Path(sys.executable), help="the python that runs this package")
    parser.add_argument("--json", type=Path, help="write what came of each script here, too")
    options = parser.parse_args()
    found = sorted(ROOT.glob("tests/c*/scripts/*.py"), key=lambda path: path.stem)
    chosen = [path for path in found if not options.scripts or path.stem in options.scripts]
    pythons = {"original": build(options.folder.resolve()), "ours": options.ours.absolute()}
    results = {path.stem: {who: result_of(python, path) for who, python in pythons.items()} for path in chosen}
    print(table(results))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    if worse := [name for name, is_ in results.items() if is_["original"] == "runs" != is_["ours"]]:
        sys.exit(f"run on the original and not here: {', '.join(worse)}")


if __name__ == "__main__":
    main()
