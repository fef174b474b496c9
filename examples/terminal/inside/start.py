"""Runs inside the sandbox: lays out the repository and Codex's configuration, starts Codex, and keeps what it leaves.

The standard library alone, as it is started with `python -I -S`: start.py CODEX [MAIN]. The task is on stdin. With MAIN
the main agent's model is that one, and the rollout's own is that of a sub-agent without tools, `repairer`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
REPOSITORY, HOME = Path("/tmp/repository"), Path("/tmp/codex")
"""The same in every rollout: /tmp is the sandbox's own."""


def main(codex: str, main_model: str | None = None) -> int:
    task = json.load(sys.stdin)
    for name, text in task["files"].items():
        file = REPOSITORY / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    HOME.mkdir()
    for name in ("config.toml", "instructions.md"):
        shutil.copy(HERE / name, HOME)
    provider = f'model_providers.agl.base_url="{os.environ["OPENAI_BASE_URL"]}"'
    options = ["--skip-git-repo-check", "--ephemeral", "-c", provider, "-m", main_model or os.environ["OPENAI_MODEL"]]
    command = [codex, "exec", *options, *(sub_agent() if main_model else ()), task["issue"]]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment(), stdin=subprocess.DEVNULL, check=False)
    mended = REPOSITORY / task["module"]
    if mended.is_file() and not mended.is_symlink():
        shutil.copy(mended, task["module"])
    return done.returncode


def sub_agent() -> list[str]:
    """What declares the sub-agent, which starts none of its own."""
    role = HOME / "repairer.toml"
    model = json.dumps(os.environ["OPENAI_MODEL"])
    role.write_text(f"model = {model}\n[features]\nshell_tool = false\nunified_exec = false\n")
    agents = {"enabled": True, "max_depth": 1}
    declared = {"description": "Says how a function is mended.", "config_file": str(role)}
    values = {
        **{f"agents.{k}": v for k, v in agents.items()},
        **{f"agents.repairer.{k}": v for k, v in declared.items()},
    }
    return [part for key, value in values.items() for part in ("-c", f"{key}={json.dumps(value)}")]


def environment() -> dict[str, str]:
    """What Codex and the commands of its model see. Python keeps no byte code: by its time and size it would not tell
    that a file was changed twice in a second.
    """
    python = os.path.dirname(sys.executable)  # for systems that have no python3 elsewhere
    own = {"CODEX_HOME": str(HOME), "PATH": f"/usr/local/bin:/usr/bin:/bin:{python}", "PYTHONDONTWRITEBYTECODE": "1"}
    return {**{name: os.environ[name] for name in ("HOME", "TMPDIR", "OPENAI_API_KEY")}, **own, "LANG": "C.UTF-8"}


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
