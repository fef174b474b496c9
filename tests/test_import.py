"""`import agentlightning` is cheap and needs none of the heavy packages, installed or not."""

from __future__ import annotations

import json
import subprocess
import sys

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
    # No clock here, machines differ: what costs time is the number of modules. Names are loaded when they are used.
    assert len(modules) < 100, f"{len(modules)} modules in {seconds:.2f} s"


EVERYTHING = """
import importlib, json, pkgutil, sys
for name in json.loads(sys.argv[1]):
    sys.modules[name] = None
import agentlightning
failures = []
for module in pkgutil.walk_packages(agentlightning.__path__, "agentlightning."):
    if module.name.split(".")[1] in json.loads(sys.argv[2]) or module.name.endswith(".__main__"):
        continue
    try:
        importlib.import_module(module.name)
    except ImportError as error:
        if error.name not in ("psycopg", "weave"):  # of the extras `postgres` and `weave`
            failures.append(f"{module.name}: {error}")
print(json.dumps(failures))
"""


def test_everything_but_training_and_sampling_imports_without_torch() -> None:
    blocked = ("torch", "transformers", "peft", "safetensors", "openai", "matplotlib", "numpy", "uvloop")
    computing = ("engine", "learner", "backend", "examples")
    done = subprocess.run(
        [sys.executable, "-c", EVERYTHING, json.dumps(blocked), json.dumps(computing)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == []


LARGE = """
import json, sys
import agentlightning.gateway.large.work
print(json.dumps(sorted({name.split(".")[0] for name in sys.modules})))
"""


def test_the_process_for_large_requests_starts_without_the_store_and_http() -> None:
    done = subprocess.run([sys.executable, "-c", LARGE], capture_output=True, text=True, timeout=60, check=True)
    assert not set(json.loads(done.stdout)) & {"sqlalchemy", "aiohttp", "uvicorn", "fastapi", "torch", "transformers"}
