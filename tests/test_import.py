"""`import agentlightning` is cheap and needs none of the heavy packages, installed or not."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "openai", "peft", "renderers", "safetensors", "matplotlib", "sqlalchemy", "fastapi")

PROBE = """
import json, sys, time
for name in json.loads(sys.argv[1]):
    sys.modules[name] = None  # importing it raises ImportError, as if it were not installed
before = set(sys.modules)
began = time.perf_counter()
import agentlightning
seconds = time.perf_counter() - began
print(json.dumps({"seconds": seconds, "modules": sorted(set(sys.modules) - before)}))
"""


def probe(blocked: tuple[str, ...]) -> tuple[float, list[str]]:
    """Seconds and newly imported modules of `import agentlightning` in a fresh process that lacks `blocked`."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps(blocked)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    return answer["seconds"], answer["modules"]


def test_import_works_without_the_heavy_packages() -> None:
    seconds, modules = probe(HEAVY)
    print(f"import agentlightning: {seconds:.3f} s, {len(modules)} modules")  # noqa: T201
    assert "agentlightning" in modules


def test_import_does_not_load_what_it_does_not_need() -> None:
    seconds, modules = probe(())
    loaded = {name.split(".")[0] for name in modules}
    assert not loaded & set(HEAVY)
    # No clock here (machines differ): what costs time is the number of modules. pydantic alone brings about 250.
    assert len(modules) < 600, f"{len(modules)} modules in {seconds:.2f} s"


@pytest.mark.parametrize("module", ["agentlightning.types", "agentlightning.errors", "agentlightning.emitter"])
def test_what_agents_import_works_without_torch(module: str) -> None:
    code = f"import sys; sys.modules.update(torch=None, transformers=None, openai=None); import {module}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
