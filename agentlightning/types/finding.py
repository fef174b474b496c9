"""Findings: what was found to be wrong with a run or an agent, in words, with the first thing to try. Plain records.

Whoever shows them decides how.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any


class Severity(StrEnum):
    """How serious a finding is."""

    PROBLEM = "problem"
    """Training is meaningless or learns the wrong thing until it is mended."""
    WARNING = "warning"
    """It costs speed or quality."""
    NOTE = "note"
    """Good to know; nothing to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was found. `evidence` holds numbers and ids, JSON values all of them."""

    code: str
    """Names the kind of finding for programs; docs/diagnosis.md explains each."""
    severity: Severity
    words: str
    """What was found, for people."""
    fix: str
    """The first thing to try."""
    evidence: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        """What was found and what to do, as text."""
        return f"{self.words} {self.fix}".rstrip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What was found out about a run or an agent."""

    verdict: str
    """What it comes to, in a sentence or two, with the first thing to try."""
    findings: Sequence[Finding] = ()
    """The worst first."""
    measured: Mapping[str, Any] = field(default_factory=dict)
    """Numbers that were looked at, by name, whether anything is wrong with them or not."""
    run_id: str | None = None

    @property
    def problems(self) -> Sequence[Finding]:
        return [f for f in self.findings if f.severity is Severity.PROBLEM]

    @property
    def healthy(self) -> bool:
        """Whether there is neither a problem nor a warning."""
        return all(f.severity is Severity.NOTE for f in self.findings)

    def to_json(self) -> dict[str, Any]:
        """Returns the diagnosis as JSON values."""
        return asdict(self)


def problem(code: str, words: str, fix: str, **evidence: Any) -> Finding:
    """A finding that makes training meaningless."""
    return Finding(code=code, severity=Severity.PROBLEM, words=words, fix=fix, evidence=evidence)


def warning(code: str, words: str, fix: str, **evidence: Any) -> Finding:
    """A finding that costs speed or quality."""
    return Finding(code=code, severity=Severity.WARNING, words=words, fix=fix, evidence=evidence)


def note(code: str, words: str, fix: str = "", **evidence: Any) -> Finding:
    """A finding to know of."""
    return Finding(code=code, severity=Severity.NOTE, words=words, fix=fix, evidence=evidence)


_RANK = {severity: rank for rank, severity in enumerate(Severity)}


def worst_first(findings: Sequence[Finding]) -> list[Finding]:
    """Sorted by severity; those of one severity stay in their order."""
    return sorted(findings, key=lambda f: _RANK[f.severity])


def counted(count: int, one: str, many: str | None = None) -> str:
    """`1 rollout`, `2 rollouts`: a count with its noun, or with words that bend with it, of which `many` is the plural
    if that is not the first with an s."""
    return f"{count:,} {one if count == 1 else many or f'{one}s'}"


def share(part: int, whole: int) -> str:
    """`3 of 12 (25 %)`."""
    return f"{part} of {whole} ({part / whole:.0%})" if whole else "none"
