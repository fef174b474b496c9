"""The examples for KubeRay, Slurm and `ray job submit`: they parse, and their flags and settings exist."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import typer
import yaml

import agentlightning as agl
from agentlightning.algorithm.records import names_of
from agentlightning.backend.ray.options import RayOptions
from agentlightning.cli.app import app

ROOT = Path(__file__).parents[3]
SLURM = ROOT / "deploy" / "ray" / "slurm.sh"
KUBERAY = yaml.safe_load((ROOT / "deploy" / "ray" / "kuberay.yaml").read_text())
PAGE = (ROOT / "docs" / "ray.md").read_text()


def joined(text: str) -> list[str]:
    return text.replace("\\\n", " ").splitlines()


def submitted() -> str:
    (line,) = [line for line in joined(PAGE) if line.startswith("$ ray job submit")]
    return line.removeprefix("$ ")


def trainings() -> Iterator[list[str]]:
    """What stands behind `agl train` in each."""
    for text in (KUBERAY["spec"]["entrypoint"], *joined(SLURM.read_text()), submitted()):
        if "agl train" in text:
            yield shlex.split(text.split("agl train", 1)[1])


def after(words: list[str], flag: str) -> Iterator[str]:
    return (words[n + 1].split("=")[0] for n, word in enumerate(words) if word == flag)


def test_the_trainings_are_told_what_there_is() -> None:
    known = {flag for p in typer.main.get_command(app).commands["train"].params for flag in p.opts}  # pyright: ignore
    options, settings = {*RayOptions.__struct_fields__}, {*names_of(agl.GRPO)}
    found = list(trainings())
    assert len(found) == 3
    for words in found:
        assert {word for word in words if word.startswith("--")} <= known
        assert {*after(words, "--backend-option")} <= options
        assert {*after(words, "--set")} <= settings
        assert "ranks" in after(words, "--set")


def test_the_script_for_slurm_is_bash() -> None:
    checked = subprocess.run(["bash", "-n", str(SLURM)], capture_output=True, text=True, timeout=30, check=False)
    assert checked.returncode == 0, checked.stderr


def test_the_job_for_kuberay_has_what_a_ray_job_needs() -> None:
    """The names of the fields are those of ray.io/v1; the operator itself is not asked."""
    assert (KUBERAY["apiVersion"], KUBERAY["kind"]) == ("ray.io/v1", "RayJob")
    cluster = KUBERAY["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    images = {c["image"] for group in groups for c in group["template"]["spec"]["containers"]}
    assert len(images) == 1, "Ray wants the same version everywhere"
    for group in cluster["workerGroupSpecs"]:
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
        (container,) = group["template"]["spec"]["containers"]
        assert container["resources"]["requests"] == container["resources"]["limits"]


@pytest.mark.ray
@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is tested by `make test-ray`, which installs it")
def test_ray_knows_its_flags() -> None:
    from ray.scripts.scripts import cli  # pyright: ignore[reportMissingImports]

    start = {flag for p in cli.commands["start"].params for flag in p.opts}
    job = cli.commands["job"]
    submit = {flag for p in job.commands["submit"].params for flag in p.opts}  # pyright: ignore[reportAttributeAccessIssue]
    calls = [line for line in joined(SLURM.read_text()) if " ray start " in line]
    assert len(calls) == 2
    for line in calls:
        assert {*re.findall(r"--[\w-]+", line.split(" ray start ", 1)[1])} <= start
    assert {*re.findall(r"--[\w-]+", submitted().split(" -- ", 1)[0])} <= submit
