"""What algorithms as people write them are set to: those of the documentation, the examples and the tests.

    python -m tests.golden.spellings     # adds what is written today to tests/golden/settings.json

A spelling that is there is kept as it was recorded, so that a change of how settings are held can be compared with it.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import agentlightning as agl
from agentlightning.algorithm.records import flattened
from agentlightning.algorithm.settings import TrainingSettings
from agentlightning.errors import ConfigError
from agentlightning.trainer.live import _plain  # pyright: ignore[reportPrivateUsage]

ROOT = Path(__file__).parents[2]
RECORDS = Path(__file__).with_name("settings.json")
NAMES = {name: getattr(agl, name) for name in dir(agl) if isinstance(getattr(agl, name, None), type)}
ALGORITHMS = {name for name, what in NAMES.items() if issubclass(what, TrainingSettings) or name == "VERL"}


def sources() -> Iterator[str]:
    """The Python that people read: blocks of the documentation, examples, scripts of 0.3, tests of algorithms."""
    for page in sorted([*ROOT.glob("docs/*.md"), *ROOT.glob("examples/*/README.md"), ROOT / "README.md"]):
        yield from re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    for folder in ("examples", "tests/compat", "tests/algorithm", "benchmarks"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            yield file.read_text()


def spellings() -> list[str]:
    """Each algorithm that is made of nothing but values, as Python writes it."""
    found: set[str] = set()
    for source in sources():
        try:
            tree = ast.parse(source)
        except SyntaxError:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and is_algorithm(node.func):
                found.add(ast.unparse(node))
                continue
            match node:
                case ast.Tuple(elts=[made, ast.Dict() as given, *_]) if is_algorithm(made):
                    # As tests of settings have them: (agl.GRPO, {"steps": 0}, …).
                    found.add(f"{ast.unparse(made)}(**{{'model': 'calc', **{ast.unparse(given)}}})")
    return sorted(found)


def is_algorithm(node: ast.expr) -> bool:
    return ast.unparse(node).removeprefix("agl.") in ALGORITHMS


def settings_of(spelling: str) -> dict[str, Any] | str | None:
    """What it is set to, as `run.json` has it, or the name of the error; None where it is not made of values."""
    try:
        made = eval(spelling, {"agl": agl, **NAMES})
    except ConfigError as refused:
        return type(refused).__name__
    except (NameError, AttributeError, TypeError):
        return None
    held = flattened(made)
    text = json.dumps(held, default=_plain)
    return None if " at 0x" in text else json.loads(text)


def main() -> None:
    kept = json.loads(RECORDS.read_text()) if RECORDS.exists() else {}
    new = {one: settings for one in spellings() if (settings := settings_of(one)) is not None}
    RECORDS.write_text(json.dumps(dict(sorted({**new, **kept}.items())), indent=None, separators=(",", ":")))
    sys.stdout.write(f"{len(kept)} spellings were recorded, {len({**new, **kept}) - len(kept)} are new.\n")


if __name__ == "__main__":
    main()
