"""Settings that cannot work, or would do nothing, are refused when the algorithm is made."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest
from annotated_types import Ge, Gt, Le

import agentlightning as agl
from agentlightning.algorithm.records import Setting, settings_of
from agentlightning.algorithm.validation import choices
from agentlightning.errors import ConfigError
from agentlightning.types import Outcome

FAMILY: list[Any] = [
    *(agl.GRPO, agl.REINFORCE, agl.RLOO, agl.ReinforcePP, agl.ReinforcePPBaseline, agl.DrGRPO, agl.DAPO),
    *(agl.GSPO, agl.CISPO, agl.PPO, agl.SFT, agl.DPO),
]


@pytest.mark.parametrize("algorithm", FAMILY)
def test_each_algorithm_as_it_is_can_work(algorithm: Any) -> None:
    algorithm(model="calc")
    algorithm(model="calc", max_staleness=1)


SETTINGS = settings_of(agl.DPO)
UNBOUNDED = {"entropy_coef"}
"""Any number makes sense: a negative bonus is a penalty."""
NUMBERS = [n for n, one in SETTINGS.items() if one.type in (int, float, int | None, float | None)]


def outside(setting: Setting) -> Iterator[float]:
    """Numbers just outside the bounds."""
    for bound in setting.bounds:
        match bound:
            case Ge():
                yield float(cast(Any, bound.ge)) - 1
            case Gt():
                yield float(cast(Any, bound.gt))
                yield float(cast(Any, bound.gt)) - 1
            case Le():
                yield float(cast(Any, bound.le)) + 0.1


@pytest.mark.parametrize("name", [name for name in NUMBERS if name not in UNBOUNDED])
def test_numbers_out_of_range_are_refused(name: str) -> None:
    assert SETTINGS[name].bounds, f"{name} has no bounds beside it"
    for value in [*outside(SETTINGS[name]), float("nan"), float("inf"), "many"]:
        with pytest.raises(ConfigError, match=f"^{name} is .* it must be a (whole )?number"):
            agl.DPO(model="calc", **{name: value})


@pytest.mark.parametrize("algorithm", FAMILY)
def test_a_class_with_another_default_has_the_same_bounds_and_needs(algorithm: Any) -> None:
    plain = settings_of(agl.GRPO)
    found = {n: (one.bounds, one.needs) for n, one in settings_of(algorithm).items() if n in plain}
    assert found == {n: (one.bounds, one.needs) for n, one in plain.items()}


TEXTS = [n for n, one in SETTINGS.items() if one.type in (str, str | None) and n not in ("model", "device", "frozen")]
SWITCHES = [n for n, one in SETTINGS.items() if one.type in (bool, bool | None)]


@pytest.mark.parametrize(("name", "value"), [*((n, 5) for n in TEXTS), *((n, "false") for n in SWITCHES)])
def test_what_is_no_text_or_no_switch_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{name} is {value!r}; it must be (a text|True or False)"):
        agl.DPO(model="calc", **{name: value})


@pytest.mark.parametrize("name", ["advantage", "credit", "loss", *sorted(choices(agl.GRPO))])
def test_words_nobody_knows_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name} is 'magic'; it can be"):
        agl.GRPO(model="calc", **{name: "magic"})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("algorithm", "settings", "cause"),
    [
        (agl.GRPO, {"group_size": 1}, "at least 2.*PPO"),
        (agl.GRPO, {"tasks_per_step": 2, "minibatches": 3}, "minibatches .* at most tasks_per_step"),
        (agl.GRPO, {"gamma": 0.9}, "gamma=0.9 has no effect.*return_to_go"),
        (agl.GRPO, {"credit": "per_turn", "lam": 0.5}, "lam=0.5 has no effect.*gae"),
        (agl.PPO, {"advantage": "rloo"}, "advantage='rloo' has no effect"),
        (agl.GRPO, {"credit": "return_to_go", "rollout_return": "sum"}, "rollout_return='sum' has no effect"),
        (agl.REINFORCE, {"clip_high": 0.3}, "clip_high=0.3 has no effect.*clips"),
        (agl.GRPO, {"kl_in": "reward"}, "kl_in='reward' has no effect.*kl_coef"),
        (agl.GRPO, {"kl_in": "reward", "kl_coef": 0.1, "kl_estimator": "k2"}, "kl_estimator='k2' has no effect"),
        (agl.GRPO, {"overlong_margin": 5}, "overlong_margin=5 has no effect.*overlong_tokens"),
        (agl.GRPO, {"correction_cap": 3.0}, "correction_cap=3.0 has no effect.*max_staleness"),
        (agl.GRPO, {"overlong_tokens": 90, "overlong_margin": 9, "max_tokens": 80}, "No rollout can be overlong"),
        (agl.GRPO, {"policies": {"a": "runs/x", "b": None}, "kl_coef": 0.1}, "one by one"),
        (agl.GRPO, {"deterministic": True, "max_staleness": 1}, "max_staleness must be 0"),
        (agl.GRPO, {"dynamic_sampling": 1, "quorum": 0.5}, "quorum must be 1"),
        (agl.PPO, {"dynamic_sampling": 1}, "compares no siblings"),
        (agl.DAPO, {"advantage": "reinforce++"}, "compares no siblings"),
        (agl.GRPO, {"loss": "dpo"}, "use agl.DPO"),
        (agl.DPO, {"loss": "ppo_clip"}, "use agl.DPO"),
        (agl.DPO, {"advantage": "grpo"}, "use agl.DPO"),
        (agl.DPO, {"credit": "gae"}, "DPO chooses whole rollouts"),
        (agl.SFT, {"credit": "return_to_go"}, "SFT chooses whole rollouts"),
        (agl.SFT, {"correction": "token"}, "Leave correction out"),
        (agl.SFT, {"source": "chats", "max_staleness": 1}, "Chats are not sampled"),
        (agl.SFT, {"source": "chats", "quorum": 0.5}, "Chats are not sampled"),
        (agl.RLOO, {"update_epochs": 2}, "loss='ppo_clip'"),
        (agl.GRPO, {"outcome_use": {"time_out": "mask"}}, "outcomes are ok, truncated"),
        (agl.GRPO, {"outcome_use": {"timeout": "drop"}}, "'train' or 'zero' or 'mask'"),
        (agl.GRPO, {"train_agents": "("}, "train_agents is no regular expression"),
        (agl.GRPO, {"advantage": "pass@4", "group_size": 2}, "looks at 4 siblings at a time, and group_size is 2"),
        (agl.GRPO, {"advantage": "maxrl", "overlong_tokens": 90}, "rewards of at least 0.*overlong_tokens"),
        (agl.GRPO, {"advantage": "maxrl", "kl_coef": 0.1, "kl_in": "reward"}, "rewards of at least 0.*kl_in"),
        (agl.PPO, {"loss": "gmpo"}, "'token_gae' would be lost"),
        (agl.GRPO, {"loss": "gmpo", "credit": "return_to_go"}, "'return_to_go' would be lost"),
        (agl.Distill, {"teacher": "calc", "loss": "gmpo"}, "'teacher' would be lost"),
        (agl.Distill, {"teacher": "calc", "replay": 1}, "replay=1 has no effect.*a teacher gives none"),
        (agl.REINFORCE, {"credit": "hierarchical", "baseline": "task"}, "baseline='task' has no effect"),
    ],
)
def test_what_is_at_odds_is_refused(algorithm: Any, settings: dict[str, Any], cause: str) -> None:
    with pytest.raises(ConfigError, match=cause):
        algorithm(model="calc", **settings)


@pytest.mark.parametrize(("model", "shown"), [("", "''"), (None, "None"), ([0] * 999, "an object of the class list")])
def test_what_is_no_model_is_named_in_few_words(model: Any, shown: str) -> None:
    with pytest.raises(ConfigError, match=f"^model is {shown}; give a directory"):
        agl.GRPO(model=model)


def test_a_loaded_model_is_saved_first() -> None:
    loaded = pytest.importorskip("torch").nn.Linear(2, 2)
    with pytest.raises(
        ConfigError, match=r"class Linear; save it with its tokenizer.*model\.save_pretrained\('folder'\)"
    ):
        agl.GRPO(model=loaded)


def test_a_name_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"no setting 'learning_rat'. Did you mean learning_rate\?"):
        agl.GRPO(model="calc", learning_rat=1.0)  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize(
    ("loss", "low", "high"),
    [("ppo_clip", 0.2, 0.28), ("gspo", 3e-4, 4e-4), ("cispo", 1.0, 2.0), ("gmpo", 0.4, 0.4), ("dppo_kl", 0.05, 0.05)],
)
def test_a_loss_clips_as_its_paper_does_unless_told_otherwise(loss: str, low: float, high: float) -> None:
    """With GRPO's range GSPO, whose ratios move by thousandths, would never clip."""
    config = agl.GRPO(model="calc", loss=loss, minibatches=2).loss_config()
    assert (config.clip_low, config.clip_high) == (low, high)
    config = agl.GRPO(model="calc", loss=loss, minibatches=2, clip_low=0.1, clip_high=0.0).loss_config()
    assert (config.clip_low, config.clip_high) == (0.1, 0.0)


def test_an_outcome_may_be_given_by_its_name() -> None:
    assert agl.GRPO(model="calc", outcome_use={"timeout": "zero"}).outcome_use[Outcome.TIMEOUT] == "zero"  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("algorithm", [agl.SFT, agl.DPO])
def test_what_is_learned_as_it_is_gets_no_importance_weights(algorithm: Any) -> None:
    assert algorithm(model="calc", max_staleness=2).correction_kind is None
    assert agl.GRPO(model="calc", max_staleness=2).correction_kind == "token"


def test_reinforce_pp_has_its_kl_in_the_reward() -> None:
    """As its paper and its docstring say; the policy's loss is then free of it."""
    assert agl.GRPO(model="calc", kl_coef=0.1).loss_config().kl_coef == 0.1
    assert agl.ReinforcePP(model="calc", kl_coef=0.1).loss_config().kl_coef == 0.0
