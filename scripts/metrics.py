"""The list of metrics in docs/metrics.md, from the tables of `agentlightning.algorithm.catalogue`.

python scripts/metrics.py            prints it
python scripts/metrics.py --write    puts it into the page
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from agentlightning.algorithm.catalogue import CATALOGUE
from agentlightning.metrics.catalogue import GROUPS

PAGE = Path(__file__).parent.parent / "docs" / "metrics.md"
LIST = re.compile(r"^## Reward and validation\n.*?(?=^## Notes$)", re.MULTILINE | re.DOTALL)


def listed() -> str:
    """A table per group, as the page holds them."""
    parts: list[str] = []
    for group in GROUPS:
        rows = [m for m in CATALOGUE.metrics if m.group == group]
        parts.append(f"## {group}\n\n| metric | title | unit | meaning |\n|---|---|---|---|\n")
        parts += [f"| `{m.name}` | {m.title} | {m.unit} | {_escaped(m.sentence)} |\n" for m in rows]
        parts.append("\n")
    return "".join(parts)


def _escaped(sentence: str) -> str:
    return sentence.replace("|", "\\|")


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        text = PAGE.read_text()
        PAGE.write_text(LIST.sub(lambda _: listed(), text))
    else:
        print(listed())
