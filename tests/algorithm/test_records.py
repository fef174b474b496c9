"""Settings in records and by their flat names: two spellings, one meaning, for each setting that has both."""

from __future__ import annotations

import ast
import copy
import json
import pickle
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import pytest

import agentlightning as agl
from agentlightning.algorithm import records
from agentlightning.algorithm.credit.units import OUTCOME_USE, Use
from agentlightning.algorithm.records import FLAT, flat_of, flattened, names_of, records_of, replaced, settings_of
from agentlightning.cli.configuration import make_algorithm, settings_for_file
from agentlightning.errors import ConfigError

GRPO: Any = agl.GRPO
NEEDED: dict[str, tuple[Any, dict[str, Any]]] = {
    **dict.fromkeys(("kl_in", "kl_target", "reference_every"), (agl.GRPO, {"kl_coef": 0.1})),
    "kl_estimator": (agl.GRPO, {"kl_coef": 0.1}),
    "reference_share": (agl.GRPO, {"kl_coef": 0.1, "reference_every": 1}),
    **dict.fromkeys(("replay_size", "replay_priority"), (agl.GRPO, {"replay": 1})),
    "correction_cap": (agl.GRPO, {"max_staleness": 1}),
    "correction_veto": (agl.GRPO, {"max_staleness": 1}),
    "correction_floor": (agl.GRPO, {"correction": "mask", "max_staleness": 1}),
    "overlong_margin": (agl.GRPO, {"overlong_tokens": 90}),
    "baseline": (agl.REINFORCE, {}),
    "baseline_decay": (agl.REINFORCE, {"baseline": "task"}),
    "teacher": (agl.Distill, {}),
    "teacher_url": (agl.Distill, {"teacher": "m"}),
    "hint": (agl.SelfDistill, {}),
    **dict.fromkeys(("lam", "critic_warmup"), (agl.PPO, {})),
    **dict.fromkeys(("branches", "branch_share", "branch_turns", "branch_train"), (agl.GRPO, {"credit": "branches"})),
    **dict.fromkeys(("explore_below", "explore_forks", "explore_back"), (agl.GRPO, {"explore": "fork_successes"})),
    "filter_replay": (agl.GRPO, {"top_p": 0.5}),
    "reward_scale": (agl.RLOO, {}),
    "tensor_parallel": (agl.GRPO, {"ranks": 3, "gradient_noise_every": 0}),
    "backend_options": (agl.GRPO, {"backend": "vllm"}),
    "ranks": (agl.GRPO, {"gradient_noise_every": 0}),
}
"""The algorithm and the settings that a setting plays a part with."""
VALUES: dict[str, Any] = {
    **{"kl_in": "reward", "kl_estimator": "k2", "correction": "token", "baseline": "task", "teacher": "calc"},
    **{"teacher_url": "http://localhost:1/v1", "hint": "answer", "preflight": "warn", "on_stall": "stop"},
    **{
        "reference_share": 0.5,
        "branch_share": 0.25,
        "branch_train": False,
        "explore": "fork_successes",
        "explore_below": 0.5,
        "correction_floor": 0.25,
        "lam": 0.5,
        "baseline_decay": 0.5,
        "adam_beta1": 0.5,
    },
    **{"adam_beta2": 0.5, "correction_veto": 0.01, "top_p": 0.5, "min_p": 0.5, "device": "cuda:1", "dtype": "bfloat16"},
    **{"train_agents": "writer", "train_prompts": "You", "renderer": "qwen3", "in_flight": "continue"},
    **dict.fromkeys(("filter_replay", "cut_long_prompts", "strict_requests", "gradient_checkpointing"), True),
    **{"offload": True, "backend_options": {"replicas": 2}, "reward_weights": {"right": 1.0}, "reward_scale": "source"},
    **{"watched_parts": ("short",), "outcome_use": {**OUTCOME_USE, agl.Outcome.TIMEOUT: "zero"}, "val_before": True},
    "checkpoint_copy": "file:///copies",
}
"""Another value than the default; of all others it is 3."""


def spelled(name: str) -> tuple[Any, Any, str, str, Any]:
    """The algorithm, what else it is given, the record, its field, and a value."""
    kind, others = NEEDED.get(name, (agl.GRPO, {}))
    record, own = FLAT[name]
    return kind, {"model": "calc", **others}, record, own, VALUES.get(name, 3)


@pytest.mark.parametrize("name", FLAT)
def test_each_spelling_of_a_setting_is_the_same_setting(name: str) -> None:
    kind, others, record, own, value = spelled(name)
    flat = kind(**others, **{name: value})
    assert value != getattr(records_of(kind)[record], own), "the value is another than the default"
    assert getattr(getattr(flat, record), own) == flattened(flat)[name] == value
    if name != record:
        assert getattr(flat, name) == value
    inside = {FLAT[n][1]: v for n, v in others.items() if n in FLAT and FLAT[n][0] == record}
    outside = {n: v for n, v in others.items() if n not in FLAT or FLAT[n][0] != record}
    whole = type(records_of(kind)[record])
    for nested in (whole(**inside, **{own: value}), {**inside, own: value}):
        assert kind(**outside, **{record: nested}) == flat
    settings = [f"{record}.{own}={json.dumps(value)}", *(f"{n}={json.dumps(v)}" for n, v in others.items())]
    assert make_algorithm(kind.__name__, "calc", None, settings) == flat


@pytest.mark.parametrize("name", FLAT)
def test_a_setting_that_is_given_twice_is_refused(name: str) -> None:
    kind, others, record, own, value = spelled(name)
    whole = type(records_of(kind)[record])
    if name != record:
        with pytest.raises(ConfigError, match=rf"{name} and {record}\.{own} are the same setting"):
            kind(**others | {record: whole(**{own: value}), name: value})


@pytest.mark.parametrize("name", [n for n in FLAT if settings_of(agl.GRPO)[n].bounds])
def test_what_is_wrong_is_named_as_it_was_written(name: str) -> None:
    record, own = FLAT[name]
    whole: Any = type(records_of(agl.GRPO)[record])
    with pytest.raises(ConfigError, match=rf"^{name} is -1"):
        GRPO(model="calc", **{name: -1})
    with pytest.raises(ConfigError, match=rf"^{record}\.{own} is -1"):
        GRPO(model="calc", **{record: whole(**{own: -1})})


@pytest.mark.parametrize("name", [n for n, one in settings_of(agl.GRPO).items() if n in FLAT and one.needs])
def test_what_plays_no_part_is_named_as_it_was_written(name: str) -> None:
    _, _, record, own, value = spelled(name)
    whole: Any = type(records_of(agl.GRPO)[record])
    kind: Any = agl.DPO if name == "replay" else agl.GRPO
    for given, said in (({name: value}, name), ({record: whole(**{own: value})}, f"{record}.{own}")):
        with pytest.raises(ConfigError, match=rf"^{said}={value!r} has no effect here"):
            kind(model="calc", **given)


def test_advice_names_a_setting_as_it_was_written() -> None:
    with pytest.raises(ConfigError, match=r"before overlong\.tokens=90 .* Lower overlong\.tokens\."):
        agl.GRPO(model="calc", overlong=agl.Overlong(tokens=90), max_tokens=80)
    with pytest.raises(ConfigError, match=r"it needs kl\.coef\."):
        agl.GRPO(model="calc", kl=agl.Reference(where="reward"))


def test_a_class_gives_other_defaults_by_either_name() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Mine(agl.GRPO):
        replay_size: int = 8
        replay: Any = 2
        kl_coef: float = 0.1

    @dataclass(frozen=True, kw_only=True)
    class Yours(Mine):
        kl_in: Literal["loss", "reward"] = "reward"

    assert Mine(model="calc").replay == agl.Replay(groups=2, size=8)
    assert Mine(model="calc", replay_size=9).replay == agl.Replay(groups=2, size=9)
    assert Yours(model="calc").kl == agl.Reference(coef=0.1, where="reward")
    assert agl.GRPO(model="calc").kl == agl.Reference()
    assert settings_of(Mine)["kl_coef"].bounds == settings_of(agl.GRPO)["kl_coef"].bounds


def test_every_field_of_a_record_has_a_flat_name() -> None:
    for name, record in records_of(agl.GRPO).items():
        assert {*flat_of(record, name)} == {f.name for f in fields(record)}
    assert {*FLAT} <= {*names_of(agl.GRPO)}


def test_what_a_record_leaves_out_is_as_the_algorithm_has_it() -> None:
    assert agl.ReinforcePP(model="calc", kl=agl.Reference(coef=0.1)).kl.where == "reward"
    assert agl.ReinforcePP(model="calc", kl={"coef": 0.1, "where": "loss"}).kl.where == "loss"
    assert agl.PPO(model="calc", critic=agl.Critic(warmup=1)).critic.lam == 0.95
    assert agl.SelfDistill(model="calc", teacher=agl.Teacher()).teacher == agl.Teacher(model="calc", hint="hint")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"kl": {"coeff": 0.1}}, "Reference has no setting 'coeff'. Did you mean coef"),
        ({"replay": agl.Overlong(tokens=3)}, "replay is an agl.Overlong; it takes an agl.Replay"),
        ({"replay": "many"}, "replay is 'many'; it must be a whole number"),
        ({"preflight": "loud"}, "preflight is 'loud'; it can be 'refuse' or 'warn'"),
        ({"kl_coeff": 0.1}, "Did you mean kl_coef"),
    ],
)
def test_records_that_are_none(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        agl.GRPO(model="calc", **given)


def test_a_slip_in_a_record_names_what_was_meant() -> None:
    with pytest.raises(ConfigError, match=r"Replay has no setting 'grups'\. Did you mean groups"):
        agl.Replay(grups=4)  # pyright: ignore[reportCallIssue]


def test_settings_are_changed_by_any_of_their_names() -> None:
    made = agl.GRPO(model="calc", replay=agl.Replay(groups=2, size=8), kl_coef=0.1)
    assert replace(made, replay_size=9).replay == agl.Replay(groups=2, size=9)
    assert replace(made, kl_coef=0.2).kl.coef == 0.2
    assert replaced(made, {"replay": 4, "steps": 3}).replay == agl.Replay(groups=4, size=8)
    for same in (pickle.loads(pickle.dumps(made)), copy.deepcopy(made), replace(made)):
        assert same == made
        assert replace(same, replay_size=9).replay.size == 9


def test_the_command_line_wins_over_a_file_however_either_is_spelled(tmp_path: Path) -> None:
    for number, (held, typed) in enumerate(
        [
            ('{"kl": {"coef": 0.1}, "replay": {"size": 5}}', ["kl_coef=0.2", "replay=4"]),
            ('{"kl_coef": 0.1, "replay_size": 5}', ["kl.coef=0.2", "replay.groups=4"]),
            ('{"kl": 0.1, "replay": 3, "replay_size": 5}', ["kl.coef=0.2", "replay=4"]),
        ]
    ):
        file = tmp_path / f"{number}.json"
        file.write_text(held)
        made = make_algorithm(None, None, file, typed)
        assert made.kl.coef == 0.2
        assert made.replay == agl.Replay(groups=4, size=5)


def test_printed_settings_are_read_back(tmp_path: Path) -> None:
    made = agl.GRPO(model="calc", replay=agl.Replay(groups=2), kl=agl.Reference(coef=0.1, where="reward"))
    file = tmp_path / "settings.json"
    file.write_text(json.dumps(settings_for_file(made)))
    assert settings_for_file(make_algorithm(None, None, file, [])) == settings_for_file(made)


def test_type_checkers_know_the_flat_names() -> None:
    tree = ast.parse(Path(records.__file__).read_text())
    (seen,) = (n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == "FlatNames" and len(n.body) > 1)
    rows = [one for one in seen.body if isinstance(one, ast.AnnAssign)]
    made = object()  # by a factory: mappings
    names = {**vars(records), "field": lambda **_: made, "Outcome": agl.Outcome, "Use": Use}
    typed = {
        ast.unparse(r.target): (eval(ast.unparse(r.annotation), names), eval(ast.unparse(r.value), names))
        for r in rows
        if r.value
    }
    known = settings_of(agl.GRPO)
    expected = {
        n: (known[n].type, made if isinstance(known[n].default, dict) else known[n].default)
        for n, (record, _) in FLAT.items()
        if n != record
    }
    assert typed == expected
