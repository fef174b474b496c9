"""The store's counts as Prometheus metrics."""

from __future__ import annotations

from agentlightning.store.base import Statistics


def render(values: Statistics) -> str:
    """The text format of Prometheus, version 0.0.4."""
    lines: list[str] = []

    def metric(name: str, kind: str, about: str, samples: dict[str, float]) -> None:
        lines.append(f"# HELP agl_{name} {about}")
        lines.append(f"# TYPE agl_{name} {kind}")
        lines.extend(f"agl_{name}{labels} {value}" for labels, value in samples.items())

    def by_status(counts: dict[str, int]) -> dict[str, float]:
        return {f'{{status="{status}"}}': count for status, count in counts.items()}

    metric("rollouts", "gauge", "Rollouts by status.", by_status(values["rollouts"]))
    metric("attempts", "gauge", "Attempts by status.", by_status(values["attempts"]))
    metric("spans", "gauge", "Stored spans.", {"": values["total_spans"]})
    metric("calls", "gauge", "Stored model calls.", {"": values["total_calls"]})
    metric("resources", "gauge", "Stored resources.", {"": values["total_resources"]})
    metric("workers", "gauge", "Workers ever heard of.", {"": values["total_workers"]})
    metric("uptime_seconds", "counter", "Seconds since the store was opened.", {"": values["uptime_seconds"]})
    return "\n".join(lines) + "\n"
