"""The tables of settings in docs/configuration.md, from the records that hold them: defaults, and what is said of each.

python scripts/settings.py            prints them
python scripts/settings.py --write    puts them into the page

Which table a setting stands in, and in which order, is the page's.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import MISSING
from itertools import pairwise
from pathlib import Path
from typing import Any

import agentlightning as agl
from agentlightning.algorithm.credit.advantage import ADVANTAGES
from agentlightning.algorithm.credit.modes import CREDIT_MODES
from agentlightning.algorithm.parts.curriculum import CURRICULA
from agentlightning.algorithm.parts.league import DRAWS
from agentlightning.algorithm.records import FLAT, records_of, settings_of
from agentlightning.algorithm.validation import choices
from agentlightning.learner.catalog import LOSSES

PAGE = Path(__file__).parent.parent / "docs" / "configuration.md"
ROW = re.compile(r"^\| `(\w+)`[^|]*\|.*\|$")
NAMED: Mapping[str, Mapping[str, Any]] = {
    "loss": LOSSES,
    "advantage": ADVANTAGES,
    "credit": CREDIT_MODES,
    "curriculum": CURRICULA,
    "league": DRAWS,
}
"""The tables of what settings can name."""
SEE: Mapping[str, str] = {
    "advantage": "[your own](algorithms.md#your-own)",
    "backend": "[vLLM](vllm.md), [Ray](ray.md), [backends of your own](extending.md)",
    "backend_options": "those of [vllm](vllm.md#options) and of [ray](ray.md#options)",
    "checkpoint_copy": "[stopping and resuming](troubleshooting.md#stopping-and-resuming)",
    "clip_high": "[the family](algorithms.md#the-family)",
    "constraint": "[rewards of several parts](algorithms.md#rewards-of-several-parts)",
    "credit": "[which calls a reward goes to](algorithms.md#which-calls-a-reward-goes-to)",
    "curriculum": "[curricula](algorithms.md#curricula)",
    "filter_replay": "[truncated sampling](algorithms.md#truncated-sampling)",
    "group_judge": "[a judge over the group](algorithms.md#a-judge-over-the-group)",
    "hint": "[self-distillation](algorithms.md#self-distillation)",
    "league": "[self-play](algorithms.md#self-play-against-a-league)",
    "learning_rate": "[the default learning rate](algorithms.md#the-default-learning-rate)",
    "loss": "[the family](algorithms.md#the-family), [your own](algorithms.md#your-own)",
    "offload": "[memory](memory.md#offload)",
    "outcome_use": "[what a failure is worth](algorithms.md#what-a-failure-is-worth)",
    "parts": "[a feature of training](extending.md#a-feature-of-training)",
    "policies": "[several policies](algorithms.md#several-policies)",
    "ranks": "[over several ranks](memory.md#over-several-ranks)",
    "reference_every": "[a reference that follows](algorithms.md#a-reference-that-follows-the-policy)",
    "replay": "[replay](algorithms.md#learning-from-earlier-steps-again)",
    "reward_weights": "[rewards of several parts](algorithms.md#rewards-of-several-parts)",
    "rollout_config": "[below](#rolloutconfig)",
    "routing_replay": "[routing replay](algorithms.md#routing-replay)",
    "strict_requests": "[what of a request is honoured](gateway.md#what-of-a-request-is-honoured)",
    "teacher": "[distillation](algorithms.md#distillation)",
    "tensor_parallel": "[layers over several ranks](memory.md#layers-over-several-ranks)",
    "train_agents": "[how agents get a name](clients.md#several-agents-in-one-rollout)",
    "watched_parts": "[rewards of several parts](algorithms.md#rewards-of-several-parts)",
}
"""Where more is said of a setting."""


def docstrings(kind: type[Any]) -> dict[str, str]:
    """What stands under each setting of a class, and of those it inherits from."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):
        try:
            (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        except (OSError, TypeError):
            continue
        body = tree.body if isinstance(tree, ast.ClassDef) else []
        for setting, said in pairwise(body):
            match setting, said:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    found[name] = " ".join(text.split())
    return found


def said_of(kind: type[Any]) -> dict[str, str]:
    """What is said of each setting of an algorithm, those of records by their flat names."""
    inside = {name: docstrings(type(record)) for name, record in records_of(kind).items()}
    return docstrings(kind) | {flat: inside[record][own] for flat, (record, own) in FLAT.items()}


def rows(kind: type[Any]) -> dict[str, str]:
    """A row of a table for each setting."""
    said, words = said_of(kind), choices(kind) | {name: tuple(table) for name, table in NAMED.items()}
    found: dict[str, str] = {}
    for name, setting in settings_of(kind).items():
        text, known = said[name], words.get(name, ())
        if not all(re.search(rf"\b{re.escape(word)}", text) for word in known):
            text += f" It can be {', '.join(f'`{word}`' for word in known)}."
        text += f" See {SEE[name]}." if name in SEE else ""
        record = f" or `{'.'.join(FLAT[name])}`" if name in FLAT else ""
        default = "" if setting.default is MISSING or setting.default == MISSING else f"`{setting.default!r}`"
        found[name] = f"| `{name}`{record} | {default} | {text.replace('|', chr(92) + '|')} |"
    return found


def written(page: str) -> str:
    """The page, with its rows of settings of training made anew. Raises ValueError where it lacks one."""
    head, _, rest = page.partition("\n## GRPO\n")
    section, end, tail = rest.partition("\n## ")
    made = rows(agl.GRPO)
    lines = [made.pop(m[1], line) if (m := ROW.match(line)) else line for line in section.split("\n")]
    if made:
        raise ValueError(
            f"docs/configuration.md has no row of {', '.join(made)}: put one into the table it belongs to."
        )
    return f"{head}\n## GRPO\n" + "\n".join(lines) + end + tail


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(written(PAGE.read_text()))
    else:
        print("\n".join(rows(agl.GRPO).values()))
