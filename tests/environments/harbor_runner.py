# pyright: basic, reportMissingImports=false
"""Harbor's own runner on a task, in an environment of ours that is a container of podman.

`python harbor_runner.py TASK AGENT FOLDER OPTION…` prints the rewards as JSON. It runs where Harbor is installed, and
imports nothing of this package. With `--its-own-podman` as the only option it takes Harbor's own environment.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from uuid import uuid4

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities
from harbor.models.trial.config import TrialConfig
from harbor.trial.trial import Trial

OPTIONS: list[str] = []


def podman(*arguments: str, timeout: float | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["podman", *arguments], capture_output=True, text=True, check=False, timeout=timeout)


class Podman(BaseEnvironment):
    """The least that Harbor needs of an environment."""

    @staticmethod
    def type() -> str:
        return "podman-of-the-tests"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(disable_internet=True)

    def _validate_definition(self) -> None:
        pass

    async def start(self, force_build: bool) -> None:
        self.name = f"harbor-test-{uuid4().hex[:8]}"
        tag = f"harbor-test-{uuid4().hex[:8]}"
        built = podman("build", "-q", "-t", tag, str(self.environment_dir))
        assert built.returncode == 0, built.stderr
        run = podman("run", "-d", "--name", self.name, "--network", "none", *OPTIONS, tag, "sleep", "600")
        assert run.returncode == 0, run.stderr
        folders = ["/logs/agent", "/logs/verifier", "/logs/artifacts", "/tests", "/solution"]
        podman("exec", self.name, "mkdir", "-p", *folders)

    async def stop(self, delete: bool) -> None:
        podman("rm", "--force", "--time", "0", self.name)

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        whole = self._merge_env(env) or {}
        options = [a for name, value in whole.items() for a in ("--env", f"{name}={value}")]
        options += ["--workdir", cwd] if cwd else []
        options += ["--user", str(user)] if user is not None else []
        done = await asyncio.to_thread(podman, "exec", *options, self.name, "sh", "-c", command, timeout=timeout_sec)
        return ExecResult(stdout=done.stdout, stderr=done.stderr, return_code=done.returncode)

    async def upload_file(self, source_path: Any, target_path: str) -> None:
        podman("exec", self.name, "mkdir", "-p", str(Path(target_path).parent))
        podman("cp", str(source_path), f"{self.name}:{target_path}")

    async def upload_dir(self, source_dir: Any, target_dir: str) -> None:
        podman("exec", self.name, "mkdir", "-p", target_dir)
        podman("cp", f"{source_dir}/.", f"{self.name}:{target_dir}")

    async def download_file(self, source_path: str, target_path: Any) -> None:
        podman("cp", f"{self.name}:{source_path}", str(target_path))

    async def download_dir(self, source_dir: str, target_dir: Any) -> None:
        os.makedirs(target_dir, exist_ok=True)
        podman("cp", f"{self.name}:{source_dir}/.", str(target_dir))


async def main(task: str, agent: str, folder: str) -> None:
    ours = {"import_path": f"{Path(__file__).stem}:Podman"}
    environment = {"type": "podman"} if OPTIONS == ["--its-own-podman"] else ours
    config = TrialConfig.model_validate(
        {
            "task": {"path": task},
            "trials_dir": folder,
            "agent": {"name": agent},
            "environment": environment,
        }
    )
    trial = await Trial.create(config)
    result = await trial.run()
    rewards = result.verifier_result.rewards if result.verifier_result else None
    failed = result.exception_info.exception_type if result.exception_info else None
    print(json.dumps({"rewards": rewards, "failed": failed}))  # noqa: T201


if __name__ == "__main__":
    OPTIONS += sys.argv[4:]
    sys.modules[Path(__file__).stem] = sys.modules["__main__"]
    asyncio.run(main(*sys.argv[1:4]))
