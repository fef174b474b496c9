"""Runs: one `fit` each, with what it was set to, where it stands, and what it said and measured on its way."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Literal

from pydantic import Field

from agentlightning.types.rollout import Record


class RunStatus(StrEnum):
    """Where a run stands. One whose process was killed stays `running` until it is resumed."""

    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"


class Run(Record):
    """One `fit`. Times are seconds since the epoch.

    `settings` are those of its algorithm; `state` is what changes on the way (what it does right now, its last step,
    its folder); `error` says why a run failed or stopped; a run that its user stopped has none.
    """

    run_id: str
    algorithm: str = ""
    agent: str = ""
    status: RunStatus = RunStatus.RUNNING
    settings: dict[str, Any] = Field(default_factory=dict)
    state: dict[str, Any] = Field(default_factory=dict)
    error: str | None = None
    start_time: float = 0.0
    end_time: float | None = None


RunEventKind = Literal["step", "note", "warning", "verdict", "event"]


class RunEvent(Record):
    """One thing that a run measured or said.

    A `step` holds the metrics of step `step`; a `note`, a `warning` and a `verdict` hold a `text`; an `event` is
    anything else that is worth a row (a checkpoint, a restart). Storing one `event_id` of a run twice stores it once.
    """

    run_id: str
    event_id: str
    kind: RunEventKind
    time: float
    step: int | None = None
    data: dict[str, Any] = Field(default_factory=dict)
