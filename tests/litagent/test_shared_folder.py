"""Whether attempts of a program share the folder they work in, as its command says."""

from __future__ import annotations

import pytest

import agentlightning as agl
from agentlightning.litagent.shared_folder import shared_in_container, shared_outside

FRESH = [
    ["python", "agent.py"],
    ["sh", "-c", "cd project && agent"],
    ["sh", "-c", 'cd "$(mktemp -d)" && agent'],
    ["env", "A=/srv", "agent"],
    ["docker", "run", "--rm", "image"],
    ["docker", "run", "-v", "./data:/data", "-w", "/data", "image"],
]
SHARED = [
    (["sh", "-c", "cd /srv/project && agent"], "/srv/project"),
    (["bash", "-lc", 'set -e; cd "$HOME/project"; agent'], "$HOME/project"),
    (["env", "-C", "/srv/project", "A=1", "agent"], "/srv/project"),
    (["env", "--chdir=/srv/project", "agent"], "/srv/project"),
    (["ssh", "host", "agent"], "ssh"),
    (["docker", "exec", "box", "agent"], "docker"),
    (["docker", "run", "-v", "/srv/project:/w", "-w", "/w", "image"], "/srv/project"),
]
FRESH_CONTAINERS = [
    ["docker", "run", "--rm", "image"],
    ["docker", "run", "-v", "{workspace}:{workspace}", "-w", "{workspace}", "image"],
    ["docker", "run", "-v", "{workspace}:/w", "-v", "/srv/data:/data", "-w", "/w/sub", "image"],
    ["docker", "run", "-v", "/srv/project:/w:ro", "-w", "/w", "image"],
    ["docker", "run", "--mount", "type=tmpfs,dst=/w", "-w", "/w", "image"],
    ["podman", "exec", "-w", "{workspace}", "box"],
    ["apptainer", "exec", "--bind", "{workspace}", "image.sif"],
]
SHARED_CONTAINERS = [
    (["docker", "exec", "box"], "{workspace}"),
    (["docker", "run", "-v", "/srv/project:/w", "-w", "/w", "image"], "/srv/project"),
    (["docker", "run", "--volume=/srv/project:/w", "--workdir=/w/sub", "image"], "/srv/project"),
    (["docker", "run", "--mount", "type=bind,src=/srv/project,dst=/w", "image"], "/srv/project"),
    (["docker", "run", "-v", "{workspace}:/out", "-v", "volume:/w", "-w", "/w", "image"], "volume"),
]


@pytest.mark.parametrize("command", FRESH, ids=" ".join)
def test_a_working_directory_of_its_own(command: list[str]) -> None:
    assert shared_outside(command) is None


@pytest.mark.parametrize(("command", "named"), SHARED, ids=lambda one: " ".join(one) if isinstance(one, list) else "")
def test_a_folder_that_all_attempts_share_is_named(command: list[str], named: str) -> None:
    assert named in (shared_outside(command) or "")


@pytest.mark.parametrize("command", FRESH_CONTAINERS, ids=" ".join)
def test_a_container_with_a_folder_of_its_own(command: list[str]) -> None:
    assert shared_in_container(command) is None


@pytest.mark.parametrize(
    ("command", "named"), SHARED_CONTAINERS, ids=lambda one: " ".join(one) if isinstance(one, list) else ""
)
def test_a_container_that_attempts_share_says_why(command: list[str], named: str) -> None:
    assert named in (shared_in_container(command) or "")


def test_programs_know_it_of_themselves() -> None:
    assert agl.Program(["sh", "-c", "cd /srv && agent"]).shared_state is not None
    assert agl.Program(["agent"], isolation=agl.Container(["docker", "exec", "box"])).shared_state is not None
    assert agl.Program(["agent"]).shared_state is None


def test_training_that_forks_warns_of_it(caplog: pytest.LogCaptureFixture) -> None:
    from agentlightning.trainer.checks import check_given

    agent = agl.Program(["sh", "-c", "cd /srv && agent"])
    check_given(agl.GRPO(model="calc", credit="branches", advantage="rloo"), agent, [{"a": 1}], None)
    assert "another state" in caplog.text
    caplog.clear()
    check_given(agl.GRPO(model="calc"), agent, [{"a": 1}], None)
    assert not caplog.text
