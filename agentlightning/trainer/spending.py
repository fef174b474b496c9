"""What a run asks of other providers: measured with every step, said at its end, counted on where it is resumed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentlightning.gateway import Provider
from agentlightning.metrics import Reporter, read_metrics
from agentlightning.types.call import Spent

_PREFIX = "provider/"


def as_metrics(spent: Mapping[str, Spent], providers: Mapping[str, Provider]) -> dict[str, Any]:
    """Of each provider, since the run began: calls, tokens, and the cost where it has a price."""
    found: dict[str, Any] = {}
    for alias, provider in providers.items():
        if alias in spent:
            own = spent[alias]
            found |= {f"{_PREFIX}{alias}/calls": own.calls, f"{_PREFIX}{alias}/tokens": own.tokens}
            found |= {} if provider.price is None else {f"{_PREFIX}{alias}/cost": own.cost}
    return found


def spent_before(metrics_file: Path) -> dict[str, Spent]:
    """What the run had asked for when its last step was reported; nothing for a new run."""
    rows = read_metrics(metrics_file) if metrics_file.exists() else []
    found: dict[str, dict[str, Any]] = {}
    for name, value in rows[-1].items() if rows else ():
        if name.startswith(_PREFIX):
            alias, _, what = name.removeprefix(_PREFIX).rpartition("/")
            found.setdefault(alias, {})[what] = value
    return {alias: Spent(**numbers) for alias, numbers in found.items()}


def say_spent(reporter: Reporter, spent: Mapping[str, Spent]) -> None:
    """A line per provider that was asked."""
    for alias, own in spent.items():
        if own.calls:
            reporter.note(f"Calls to {alias}: {own.words()}.")
