"""Makes an environment with verl and Ray on CPUs and runs the tests that need it.

    python scripts/verl_cpu.py [--folder .verl] [--no-tests] [pytest arguments …]

`make test-verl` calls this; TORCH_INDEX_URL and PIP_ARGS mean what they mean in the Makefile. verl needs an older
transformers than this package is tested with, so this package is installed beside it, in 2 GB. With --no-tests it says
where the interpreter is.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
PINNED = ROOT / "tests" / "learner" / "verl" / "requirements.txt"
TOOLS = ["hypothesis", "psutil", "pytest", "pytest-asyncio", "pytest-timeout"]
FOLDERS = ["tests/learner/verl", "tests/backend/ray"]


def constraints() -> str:
    """Those of the repository, but for what verl's environment pins otherwise."""
    pinned = [line for line in PINNED.read_text().splitlines() if "==" in line]
    others = {line.partition("==")[0] for line in pinned}
    usual = (ROOT / "constraints.txt").read_text().splitlines()
    return "\n".join([line for line in usual if line.partition("==")[0] not in others] + pinned)


def build(folder: Path) -> Path:
    """The interpreter of the environment, which is made if what it is made of has changed."""
    pinned, stamp, python = folder / "constraints.txt", folder / "made.txt", folder / "bin" / "python"
    wanted = constraints() + "\n" + (ROOT / "pyproject.toml").read_text()
    if stamp.is_file() and stamp.read_text() == wanted:
        return python
    print(f"==> making {folder} with verl (a few minutes)", flush=True)
    began = time.monotonic()
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    pinned.write_text(constraints())
    index = os.environ.get("TORCH_INDEX_URL")
    extra = [*(["--extra-index-url", index] if index else []), *shlex.split(os.environ.get("PIP_ARGS", ""))]
    pip = [str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-input", *extra]
    for packages in (["torch"], ["-e", f"{ROOT}[verl]", *TOOLS]):
        subprocess.run([*pip, "-c", str(pinned), *packages], check=True)
    stamp.write_text(wanted)
    print(f"    done in {time.monotonic() - began:.0f} s", flush=True)
    return python


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, default=ROOT / ".verl")
    parser.add_argument("--no-tests", action="store_true")
    options, arguments = parser.parse_known_args()
    python = build(options.folder.resolve())
    if options.no_tests:
        print(python)
        return 0
    command = [str(python), "-m", "pytest", "-q", "-m", "verl", "-p", "no:cacheprovider", *FOLDERS, *arguments]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
