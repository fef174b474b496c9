"""What is reported of a step and of a validation: each number against a definition of its own, each name documented."""

from __future__ import annotations

import itertools
import re
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

import agentlightning as agl
from agentlightning.algorithm.catalogue import CATALOGUE
from agentlightning.algorithm.credit.ratios import correction_measures, mean_kl, ratio_range
from agentlightning.algorithm.credit.units import CreditRule
from agentlightning.algorithm.episode import Earned, Sampled, make_episode
from agentlightning.algorithm.features import PARTS
from agentlightning.algorithm.measures import Progress, of_rollouts, of_validation
from agentlightning.algorithm.settings import TrainingSettings
from agentlightning.cli.commands.train import EvalOptions
from agentlightning.cli.evaluate import estimates_of, rollouts_of
from agentlightning.errors import ConfigError
from agentlightning.metrics import read_metrics
from agentlightning.metrics.catalogue import COUNTED, GROUPS, MEASURED, Metric
from agentlightning.metrics.intervals import expected_best
from agentlightning.types import Outcome, Span
from agentlightning.types.names import REWARD
from agentlightning.types.reward import of_trained, reward_attributes
from scripts.metrics import listed

from .test_credit import episode
from .test_loop import Recorded, run

ROOT = Path(__file__).parents[2]


def reward_span(value: float | dict[str, float], number: int = 0) -> Span:
    attributes = reward_attributes(value, "correct" if isinstance(value, dict) else None)
    return Span(
        rollout_id="r",
        attempt_id="a",
        sequence_id=number,
        trace_id="t",
        span_id=f"{number}",
        name=REWARD,
        attributes=attributes,
    )


@given(st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=1, max_size=7), st.data())
def test_the_best_of_k_is_the_mean_over_all_choices_of_k(rewards: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(rewards)))
    every = [max(chosen) for chosen in itertools.combinations(rewards, k)]
    assert expected_best(rewards, k) == pytest.approx(np.mean(every))


def test_pass_at_k_is_the_product_form_of_its_paper() -> None:
    """1 − Π (1 − k / i) for i from n − c + 1 to n, as the paper's own program computes it."""
    n, c, k = 20, 3, 5
    expected = 1.0 - np.prod(1.0 - k / np.arange(n - c + 1, n + 1))
    assert expected_best([1.0] * c + [0.0] * (n - c), k) == pytest.approx(expected)
    with pytest.raises(ValueError, match="there are 2"):
        expected_best([1.0, 0.0], 3)


def test_an_evaluation_takes_as_many_runs_as_its_estimates_need() -> None:
    assert rollouts_of(EvalOptions(checkpoint=Path())) == 1
    assert rollouts_of(EvalOptions(checkpoint=Path(), pass_at=4, best_of=8)) == 8
    assert rollouts_of(EvalOptions(checkpoint=Path(), pass_at=4, repeats=16)) == 16
    with pytest.raises(ConfigError, match="--repeats 4"):
        rollouts_of(EvalOptions(checkpoint=Path(), pass_at=4, repeats=2))
    shown = estimates_of(EvalOptions(checkpoint=Path(), pass_at=2, best_of=3, passing=0.5))
    assert {name: f([0.0, 0.5, 0.25]) for name, f in shown.items()} == pytest.approx(
        {"mean reward": 0.25, "pass@2": 2 / 3, "best of 3": 0.5}
    )


def test_a_validation_with_repeats_tells_the_best_of_k_and_intervals() -> None:
    earned = [[0.0, 1.0, 0.0, 1.0], [0.0] * 4, [1.0] * 4]
    episodes = [episode("g", [(r, 1)]) for rewards in earned for r in rewards]
    found = of_validation(episodes, 4)
    assert found["val_reward"] == pytest.approx(0.5)
    assert found["val_best@2"] == pytest.approx((5 / 6 + 0 + 1) / 3)
    assert found["val_best@4"] == pytest.approx(2 / 3)
    assert found["val_low"] < 0.5 < found["val_high"]
    assert set(of_validation(episodes, 1)) == {"val_reward", "val_low", "val_high"}


def test_a_step_tells_how_its_rollouts_were() -> None:
    flat = [episode("flat", [(1.0, 1)]) for _ in range(2)]
    differing = [episode("g", [(0.0, 1)]), episode("g", [(1.0, 1)], tokens=(7,), outcome=Outcome.TRUNCATED)]
    call = differing[1].calls[0]
    differing[1] = replace(differing[1], calls=[replace(call, info=replace(call.info, finish_reason="length"))])
    found = of_rollouts(Sampled([*flat, *differing], [4, 5], 2, 0.0, 0.0), CreditRule())
    assert found["flat_groups"] == 0.5
    assert found["truncated"] == 0.25
    assert (found["reward"], found["reward_min"], found["reward_max"]) == (0.75, 0.0, 1.0)
    assert found["reward_std"] == pytest.approx(np.std([1, 1, 0, 1]))
    lengths = [2, 3] * 3 + [7]
    assert (found["response_tokens_mean"], found["response_tokens_max"]) == (pytest.approx(np.mean(lengths)), 7)
    assert found["cut_off"] == pytest.approx(1 / 7)


def test_parts_of_a_reward_are_logged_apart_and_their_weighted_sum_trains() -> None:
    one = episode("g", [])
    spans = [reward_span({"correct": 0.0, "format": 1.0}), reward_span({"correct": 1.0, "format": 0.5}, 1)]

    def made(weights: dict[str, float]) -> float | None:
        return make_episode(one.rollout, one.attempt, one.calls, spans, weights).reward

    assert made({}) == 1.0
    assert made({"correct": 1.0, "format": 0.2}) == pytest.approx(1.1)
    assert made({"format": -1.0}) == -0.5
    assert made({"elsewhere": 1.0}) == 1.0, "it has no part with a weight"
    e = make_episode(one.rollout, one.attempt, one.calls, spans)
    plain = make_episode(one.rollout, one.attempt, one.calls, [reward_span(0.5)], {"format": 1.0})
    found = of_rollouts(Sampled([e, plain], [0], 1, 0.0, 0.0), CreditRule())
    assert {k: v for k, v in found.items() if k.startswith("reward/")} == {"reward/correct": 1.0, "reward/format": 0.5}
    assert plain.reward == 0.5
    with pytest.raises(ConfigError, match="reward_weights has 'correct': nan"):
        agl.GRPO(model="calc", reward_weights={"correct": float("nan")})


def test_parts_of_agents_rewards_are_the_mean_over_those_in_training() -> None:
    one = episode("g", [], tokens=(2, 2, 2), agents=("a", "b", "frozen"))
    calls = [replace(call, info=replace(call.info, trained=call.info.agent != "frozen")) for call in one.calls]
    parts = [
        ("a", {"vote": 1.0}),
        ("a", {"won": 1.0}),
        ("b", {"vote": -1.0}),
        ("b", {"vote": 0.0}),
        ("b", {"won": 0.0}),
    ]
    parts += [("frozen", {"won": 1.0, "vote": 9.0}), ("never asked", {"won": 1.0, "vote": 9.0})]
    rewards = [Earned(0.0, 0, agent, False, given) for agent, given in parts]
    found = of_rollouts(Sampled([replace(one, calls=calls, rewards=rewards)], [0], 1, 0.0, 0.0), CreditRule())
    assert {k: v for k, v in found.items() if k.startswith("reward/")} == {"reward/vote": 0.5, "reward/won": 0.5}
    callers = replace(one, calls=calls).callers
    assert [r.agent for r in of_trained(rewards[5:], callers)] == ["never asked"], "its calls may have had no name"


def test_ratios_and_the_divergence_of_the_engine() -> None:
    now_E, old_E = np.log(np.array([0.5, 0.2, 0.3])), np.log(np.array([0.25, 0.4, 0.3]))
    assert ratio_range(now_E, old_E) == pytest.approx((0.5, 2.0))
    ratios_E = np.array([2.0, 0.5, 1.0])
    assert mean_kl(now_E, old_E) == pytest.approx(np.mean(ratios_E - 1 - np.log(ratios_E)))


# ---- the table of metrics ------------------------------------------------------------------------------------------


async def test_every_metric_that_is_reported_is_in_the_table(tmp_path: Path) -> None:
    algorithm = Recorded(steps=2, val_rewards=[0.5] * 2, overlong_tokens=4, schedule="cosine")
    await run(tmp_path, algorithm, range(9), range(2))
    reported = {name for row in read_metrics(tmp_path / "m.jsonl") for name in row}
    assert len(reported) > 25
    assert {name for name in reported if CATALOGUE.find(name) is None} == set()


def test_the_documentation_lists_the_table() -> None:
    assert listed() in (ROOT / "docs" / "metrics.md").read_text(), "run `python scripts/metrics.py --write`"


def test_no_title_occurs_twice_and_each_metric_has_its_sentence() -> None:
    both = dict.fromkeys((*CATALOGUE.metrics, *MEASURED, *COUNTED))
    titles = Counter(metric.title.casefold() for metric in both)
    assert [title for title, count in titles.items() if count > 1] == []
    assert list(dict.fromkeys(m.group for m in CATALOGUE.metrics)) == list(GROUPS), "the page shows them in this order"
    assert [m.name for m in both if not re.fullmatch(r"\S.*\.", m.sentence) or m.group not in GROUPS] == []
    assert Counter(m.name for m in CATALOGUE.metrics).most_common(1)[0][1] == 1


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("reward/correct", "Reward part: correct"),
        ("val_best@4_low", "Best of 4 validation rollouts, low end"),
        ("provider/judge/calls", "Calls of judge"),
        ("solver/loss", "Loss of solver"),
        ("source/a/b/reward", "Reward on a/b"),
    ],
)
def test_a_metric_with_a_name_inside_is_called_by_it(name: str, title: str) -> None:
    metric = CATALOGUE.find(name)
    assert metric is not None
    assert (metric.name, metric.title) == (name, title)
    assert CATALOGUE.find("my_own") is None
    rows = [{"my_own": 1, name: 0.5, "step": 1, "note": "text", "odd": True}]
    assert list(CATALOGUE.described(rows)) == [name, "step", "my_own"]


@pytest.mark.parametrize(
    ("weights", "size"), [([2, 2, 2, 2], 1.0), ([0, 4, 0, 0], 0.25), ([1, 1, 0, 0], 0.5), ([0], 0.0)]
)
def test_the_effective_sample_size_is_that_of_as_many_equal_weights(weights: list[float], size: float) -> None:
    measures = correction_measures(np.array(weights, np.float32))
    assert measures["effective_sample_size"] == size
    assert measures["correction_mean"] == np.mean(weights)
    assert measures["corrected_to_zero"] == np.mean(np.array(weights) == 0)


def test_every_metric_of_the_table_is_in_the_code() -> None:
    files = (path for path in (ROOT / "agentlightning").rglob("*.py") if path.name != "catalogue.py")
    source = "".join(path.read_text() for path in files)
    names = {metric.name for metric in CATALOGUE.metrics if "…" not in metric.name}
    of_parts = {metric.name for kind in PARTS for metric in kind.metrics}  # whose row is in the code, too
    used = {name: source.count(f'"{name}"') - (name in of_parts) for name in names}
    assert {name for name, times in used.items() if times < 1} - {"val_low", "val_high"} == set()


def test_a_strangers_own_metrics_cannot_hold_up_a_page() -> None:
    one = Metric("a…", "Title of …", GROUPS[0], "", "A sentence.")._asdict()
    known = CATALOGUE.with_own([one, {**one, "name": "…" * 40}, *({**one, "name": f"m{n}"} for n in range(1000))])
    assert len(known.metrics) - len(CATALOGUE.metrics) < 200
    assert known.find("x" * 60) is None, "a pattern of many gaps would match it"
    assert (found := known.find("a1")) is not None
    assert found.title == "Title of 1"


@pytest.mark.parametrize("jump", [-86_400.0, 86_400.0])
def test_what_a_step_took_is_no_matter_of_the_clock(jump: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock may be set, and a machine may sleep, in the middle of a step."""
    progress = Progress(TrainingSettings(model="calc", steps=3), tasks=1, done=0, position=0)
    progress.begin()
    progress.begin_learning()
    set_clock = time.time() + jump
    monkeypatch.setattr(time, "time", lambda: set_clock)
    progress.end_learning()
    found = progress.of_step(1, Sampled((), (), 0, set_clock, 2.0), {})
    assert found["sampling_seconds"] == 2.0
    assert 0 <= found["learning_seconds"] < 60
    assert 0 <= found["seconds_left"] < 60
