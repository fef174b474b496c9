"""What a run says of itself while it goes on is what the doctor finds in it afterwards, word for word."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from agentlightning.algorithm.credit.units import CreditRule
from agentlightning.algorithm.episode import Episode
from agentlightning.algorithm.parts.preflight import LOOK_AGAIN, Preflight
from agentlightning.algorithm.verdicts import WATCHED_STEPS
from agentlightning.doctor.evidence import Evidence
from agentlightning.doctor.in_rollouts import rollout_findings
from agentlightning.doctor.in_steps import step_findings
from agentlightning.errors import AgentError
from agentlightning.metrics import Reporter, SilentConsole
from agentlightning.types import Outcome
from tests.algorithm.test_credit import episode

RNG = np.random.default_rng(7)
ROLLOUTS = [episode("g", [(0.0, 1)]), episode("g", [(1.0, 1)], name="s")]
SERIES: dict[str, Sequence[float]] = {
    "flat": [0.3] * 60,
    "noise of many": (RNG.binomial(128, 0.4, 60) / 128).tolist(),
    "noise of few": (RNG.binomial(4, 0.4, 60) / 4).tolist(),
    "high": (RNG.binomial(128, 0.96, 60) / 128).tolist(),
    "rises": np.linspace(0.2, 0.8, 60).tolist(),
    "falls": [*np.linspace(0.2, 0.9, 30), *np.linspace(0.9, 0.1, 15)],
}
CAUSES: list[Mapping[str, Any]] = [{"learning_rate": 0.0}, {"updates": 0}, {"clip_fraction": 0.4}, {"entropy": 0.001}]


class Listener(SilentConsole):
    """Keeps what was said."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def warn(self, text: str) -> None:
        self.said.append(text)


def preflight() -> tuple[Preflight, Listener]:
    listener = Listener()
    return Preflight(Reporter(listener), CreditRule()), listener


@pytest.mark.parametrize(("name", "metrics"), [*((name, {}) for name in SERIES), *(("flat", one) for one in CAUSES)])
def test_a_run_and_the_doctor_say_the_same_of_its_reward(name: str, metrics: Mapping[str, Any]) -> None:
    """At every step at which the run looks: what it says first is what the doctor finds at that step."""
    watching, listener = preflight()
    watching.check(ROLLOUTS)
    steps: list[Mapping[str, Any]] = []
    told: dict[str, str] = {}
    for reward in SERIES[name]:
        steps.append({"reward": reward, **metrics})
        watching.watch(steps[-1])
        looks = len(steps) % LOOK_AGAIN == 0
        for found in step_findings(Evidence(steps=steps, episodes=ROLLOUTS)):
            if found.code == "reward_fell" or (found.code == "not_rising" and looks):
                told.setdefault(found.code, str(found))
    assert listener.said == list(told.values())
    assert bool(told) == (name in ("flat", "noise of many", "falls"))
    assert len(steps) > WATCHED_STEPS


REFUSED: dict[str, Callable[[Episode], Episode]] = {
    "silent": lambda e: e,
    "its calls were refused": lambda e: replace(e, refused=["the field 'x' is not known"]),
    "it failed at that": lambda e: replace(
        e, refused=["no"], attempt=e.attempt and e.attempt.model_copy(update={"outcome": Outcome.AGENT_ERROR})
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_run_and_the_doctor_say_the_same_of_an_agent_that_reaches_no_model(name: str) -> None:
    episodes = [REFUSED[name](replace(e, calls=[])) for e in ROLLOUTS]
    watching, _ = preflight()
    with pytest.raises(AgentError) as refusal:
        watching.check(episodes)
    codes = {"never_called", "calls_refused"}
    (found,) = [f for f in rollout_findings(Evidence(episodes=episodes)) if f.code in codes]
    assert str(refusal.value) == str(found)
