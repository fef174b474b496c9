"""What `pip install .` without extras puts on the disk, and what importing it costs.

    python benchmarks/install.py [--quick] [--json]

The package is installed into a fresh environment, from wherever pip finds its dependencies. `--quick` measures the
environment that runs the script instead: of all that is installed there, only what the package without extras needs.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import venv
from importlib.metadata import Distribution, distribution
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
PACKAGE = "agentlightning"
IMPORTS = 15
PROBE = "import time; t = time.perf_counter(); import agentlightning; print(1e3 * (time.perf_counter() - t))"


def needed(name: str, found: dict[str, Distribution]) -> dict[str, Distribution]:
    """A package and all that it needs without extras, as far as it is installed: markers are true where it is."""
    found[name] = distribution(name)
    for requirement in found[name].requires or ():
        wanted = re.match(r"[\w.-]+", requirement)
        assert wanted is not None, requirement
        key = re.sub(r"[-_.]+", "-", wanted[0]).lower()
        if "extra ==" not in requirement and key not in found and _applies(requirement, key):
            needed(key, found)
    return found


def _applies(requirement: str, name: str) -> bool:
    marker = requirement.partition(";")[2]
    if "platform_" in marker or "python_" in marker or "sys_" in marker:
        try:
            distribution(name)
        except ModuleNotFoundError:
            return False
    return True


def megabytes(package: Distribution) -> float:
    """Of all files on the disk, compiled ones too; of an editable clone, those that would be installed."""
    files = [Path(str(package.locate_file(file))) for file in package.files or ()]
    if package.name == PACKAGE and not any(file.name == "errors.py" for file in files):
        files = [p for name in (PACKAGE, "agent_lightning") for p in (ROOT / name).rglob("*") if p.is_file()]
    return sum(path.stat().st_blocks * 512 for path in files if path.exists()) / 2**20


def import_ms() -> float:
    """The quickest of several fresh processes, less the start of the interpreter."""
    command = [sys.executable, "-c", PROBE]
    return min(float(subprocess.check_output(command)) for _ in range(IMPORTS))


def here() -> dict[str, float]:
    """The figures of the environment that runs this: sizes by package, and the keys of the benchmark."""
    sizes = {name: megabytes(package) for name, package in needed(PACKAGE, {}).items()}
    return {"core_mb": sum(sizes.values()), "core_packages": len(sizes), "import_ms": import_ms(), **sizes}


def fresh() -> dict[str, float]:
    """The figures of a new environment into which the package was installed."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = str(Path(folder, "bin", "python"))
        installed = subprocess.run(
            [python, "-m", "pip", "install", str(ROOT)], capture_output=True, text=True, check=False
        )
        if installed.returncode:
            raise SystemExit(f"pip could not install {ROOT}:\n{installed.stderr}")
        done = subprocess.run([python, __file__, "--quick", "--json"], capture_output=True, text=True, check=True)
        return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="measure this environment, install nothing")
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object at the end")
    options = parser.parse_args()
    figures = here() if options.quick else fresh()
    show(figures)
    if options.json:
        print(json.dumps({name: round(figure, 2) for name, figure in figures.items()}))


def show(figures: dict[str, float]) -> None:
    sizes = dict(figures)
    total, packages, milliseconds = (sizes.pop(name) for name in ("core_mb", "core_packages", "import_ms"))
    table = Table("package", "MB", title="Without extras")
    for name, size in sorted(sizes.items(), key=lambda item: -item[1])[:12]:
        table.add_row(name, f"{size:.1f}")
    table.add_row("… all", f"{total:.1f}", style="bold")
    Console().print(table)
    print(f"{packages:.0f} packages; import agentlightning takes {milliseconds:.0f} ms")


if __name__ == "__main__":
    main()
