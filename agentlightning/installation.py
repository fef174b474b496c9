"""How this package was installed, and so which command adds one of its extras: that of a clone is another than that of
a wheel, and the name alone may be somebody else's on the index at hand.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

NAME, COMMAND = "agentlightning", "agl"


def install_command(extra: str) -> str:
    """What to type to get the extra, into the environment that this process runs in."""
    root = Path(__file__).resolve().parent.parent
    try:
        return f"{pip_command()} install {requirements(distribution(NAME), extra)}"
    except PackageNotFoundError:  # a clone that is on the path
        return f"{pip_command()} install -e '{root}[{extra}]'"


def command_name() -> str:
    """How `agl` is called here, so that what is advised can be pasted: as it was called, or as a shell finds it."""
    called, found = Path(sys.argv[0]), shutil.which(COMMAND)
    if called.name == "__main__.py":
        return f"{Path(sys.executable).name} -m {NAME}"
    if called.name == COMMAND:
        return COMMAND if found is not None and Path(found).resolve() == called.resolve() else str(called)
    same = found is not None and Path(found).parent == Path(sys.executable).parent
    return COMMAND if same else f"{sys.executable} -m {NAME}"


def requirements(installed: Distribution, extra: str) -> str:
    """What pip has to be given, in the shell's words."""
    origin = json.loads(installed.read_text("direct_url.json") or "{}")
    url = origin.get("url", "")
    if "dir_info" in origin:
        place = f"{unquote(urlsplit(url).path)}[{extra}]"
        return f"-e '{place}'" if origin["dir_info"].get("editable") else f"'{place}'"
    if "vcs_info" in origin:
        source = origin["vcs_info"]
        return f"'{NAME}[{extra}] @ {source['vcs']}+{url}@{source['commit_id']}'"
    if url:
        return f"'{NAME}[{extra}] @ {url}'"
    return " ".join(f"'{package}'" for package in _packages(installed, extra))


def _packages(installed: Distribution, extra: str) -> list[str]:
    """What the extra stands for: from an index, its name might fetch another project."""
    found = [r.split(";") for r in installed.requires or () if re.search(rf"extra == ['\"]{extra}['\"]", r)]
    return [requirement.strip() for requirement, *_ in found] or [f"{NAME}[{extra}]"]


def pip_command() -> str:
    """pip of this environment, whichever is first on the path."""
    if find_spec("pip") is None and shutil.which("uv"):
        return f"uv pip --python {sys.executable}"
    here = shutil.which("python")
    same = here is not None and Path(here).parent == Path(sys.executable).parent
    return "pip" if same else f"{sys.executable} -m pip"
