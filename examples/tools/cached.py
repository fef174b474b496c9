"""The model of an application, made when it is first asked for and then kept in the cache.

    python -m examples.tools.cached sql

prints where it is.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from zlib import crc32

from agentlightning.errors import ModelError
from agentlightning.trainer.example import example_dir, load_example

_MAKE = (
    "import sys; from agentlightning.trainer.example import load_example; load_example('tools', 'make_model').main()"
)


def cached_model(application: str) -> str:
    """The directory of the model. It is made anew where the scripts that make it have changed.

    In a process of its own: torch stays out of this one. Raises ModelError if that fails.
    """
    folder: Path = load_example("sentiment", "packages").cache_dir() / f"{application}-{_version(application)}"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        print(
            f"Making the model of {application}, once, in some minutes (5 to 20): {folder}", file=sys.stderr, flush=True
        )
        with tempfile.TemporaryDirectory(dir=folder.parent) as name:
            made = Path(name) / "model"
            command = [sys.executable, "-c", _MAKE, application, "--out", str(made)]
            done = subprocess.run(command, stdout=sys.stderr, check=False)
            if done.returncode:
                raise ModelError(f"The model of the example '{application}' could not be made; what is above says why.")
            if not folder.is_dir():  # another process may have been faster
                shutil.move(made, folder)
    return str(folder)


def _version(application: str) -> str:
    """A check sum of all scripts that a model comes from."""
    base, tools = example_dir("calc", "make_model"), example_dir("tools", "make_model")
    own = sorted(example_dir(application, "demonstrations").glob("*.py"))
    files = [base / "make_model.py", base / "tokenizer.py", base / "chat_template.jinja", tools / "make_model.py"]
    total = 0
    for file in [*files, *(f for f in own if not f.name.endswith(("recipe.py", "agent.py", "train.py")))]:
        total = crc32(file.read_bytes(), total)
    return f"{total:08x}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("application", metavar="APPLICATION", help="a folder of examples, such as sql")
    print(cached_model(parser.parse_args().application))
