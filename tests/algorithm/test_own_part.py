"""A part from outside the package, the documentation's, in a run that is resumed; and what the loop knows of parts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, cast

import pytest

import agentlightning as agl
from agentlightning.algorithm.checkpoint import CHECKPOINT_FILE, info_from, list_checkpoints, read_checkpoint
from agentlightning.algorithm.features import PARTS
from agentlightning.algorithm.update import Updater
from agentlightning.errors import ConfigError
from agentlightning.metrics import Reporter, read_metrics
from agentlightning.metrics.catalogue import TOKENS, Metric
from agentlightning.reading import read_object
from agentlightning.trainer.live import RUN_FILE, describe

from .fakes import CountingLearner
from .test_credit import episode
from .test_loop import Recorded, run

ROOT = Path(agl.__file__).parent
PAGE = ROOT.parent / "docs" / "extending.md"
FEATURES = (
    *("replay", "league", "opponents?", "curriculum", "teacher", "hints?", "critic", "reference", "correction"),
    *(
        "overlong",
        "baselines?",
        "routing",
        "noise",
        "check_packing",
        "sync_check",
        "preflight",
        "scales",
        "kl_(coef|in|target|estimator)",
    ),
    *("reward_scale", "checkpoint_copy", "staleness"),
)


@pytest.fixture(scope="module")
def brevity() -> Any:
    text = PAGE.read_text().split("## A feature of training")[1]
    block = re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)[0]
    names: dict[str, Any] = {"__name__": "mine"}
    exec(compile(block, str(PAGE), "exec", dont_inherit=True), names)
    return names["Brevity"]


async def test_a_part_of_ones_own_learns_and_is_resumed(brevity: Any, tmp_path: Path) -> None:
    given: dict[str, Any] = {"parts": [brevity(weight=0.5, keep=0.5)], "save_every": 1}
    await run(tmp_path, Recorded(steps=1, **given), range(9))
    (row,) = read_metrics(tmp_path / "m.jsonl")
    (_, last) = list_checkpoints(tmp_path)
    kept = read_checkpoint(last).learning["policy"]["brevity"]
    assert kept == row["mean_tokens"] > 0
    resumed = brevity(weight=0.5, keep=1.0)
    await run(tmp_path, Recorded(steps=2, parts=[resumed], save_every=1), range(9), resume=last)
    assert read_metrics(tmp_path / "m.jsonl")[-1]["mean_tokens"] == kept, "keep=1 leaves what was loaded"


def test_a_run_keeps_what_it_says_of_its_metrics(brevity: Any, tmp_path: Path) -> None:
    metric = Metric("mean_tokens", "Tokens of a rollout", TOKENS, "tokens", "How long rollouts are.")
    described = type("Described", (brevity,), {"metrics": (metric,)})
    agent = agl.rollout(lambda task, llm: 0.0)
    run = describe(tmp_path, agl.GRPO(model="calc", parts=[described()]), agent)
    assert run.state["own_metrics"] == read_object(tmp_path / RUN_FILE)["own_metrics"] == [metric._asdict()]
    assert "own_metrics" not in describe(tmp_path, agl.GRPO(model="calc", parts=[brevity()]), agent).state


async def test_what_it_pays_is_learned(brevity: Any) -> None:
    learner: Any = CountingLearner()
    settings = agl.REINFORCE(model="calc", group_size=2, check_packing_every=0, parts=[brevity(weight=0.5)])
    episodes = [episode("g", [(0.0, 0)], tokens=(n,), name=f"{n}") for n in (1, 3)]
    await Updater(settings, learner, Reporter()).learn(episodes, 0.1)
    assert sorted({*learner.batches[0].advantages_E.tolist()}) == [-0.25, 0.25]


async def test_a_state_that_no_checkpoint_can_keep_names_its_part(brevity: Any, tmp_path: Path) -> None:
    part = brevity(keep=1.0)
    settings = Recorded(steps=1, parts=[part])
    updater = Updater(settings, cast(Any, CountingLearner()), Reporter())
    await updater.parts.load({"brevity": object()})
    with pytest.raises(ConfigError, match="The state of the part 'brevity' cannot be kept"):
        updater.parts.state()


@pytest.mark.parametrize(
    "wrong", [{"learning": []}, {"learning": {"policy": 3}}, {"parts": 5}, {"league": 1, "parts": []}]
)
def test_a_checkpoint_of_another_form_is_no_whole_one(wrong: dict[str, Any], tmp_path: Path) -> None:
    about = {"step": 1, "base_model": "calc", "seed": 0, **wrong}
    (tmp_path / CHECKPOINT_FILE).write_text(json.dumps(about))
    with pytest.raises(ConfigError, match="is not a whole checkpoint"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("named", [kind.name for kind in PARTS])
def test_a_second_part_of_one_name_is_refused(named: str) -> None:
    kind = type("Mine", (agl.Part,), {"name": named})
    with pytest.raises(ConfigError, match=f"a second one called '{named}'"):
        agl.GRPO(model="calc", parts=[kind()])


@pytest.mark.parametrize("wrong", ["Brevity(weight=0.2)", dict, agl.Part])
def test_what_is_no_part_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"inherit from agl\.Part"):
        agl.GRPO(model="calc", parts=[wrong])


def test_parts_have_names_of_their_own() -> None:
    names = [kind.name for kind in PARTS]
    assert len({*names}) == len(names)


@pytest.mark.parametrize(
    "file", ["run.py", "update.py", "validation.py", "grpo.py", "sampling/schedule.py", "sampling/source.py"]
)
def test_the_loop_names_no_feature(file: str) -> None:
    text = (ROOT / "algorithm" / file).read_text().lower()
    assert [name for name in FEATURES if re.search(rf"\b{name}\b", text)] == []
    assert len(text.splitlines()) <= (330 if file == "sampling/source.py" else 220)


WHO_NAMES_PARTS = {"features.py", "family.py", "whatif.py"}
"""The list of features, algorithms with other defaults, and what if."""


@pytest.mark.parametrize("file", sorted(f.name for f in (ROOT / "algorithm").glob("*.py")))
def test_only_the_list_of_features_imports_a_part(file: str) -> None:
    imports = "agentlightning.algorithm.parts." in (ROOT / "algorithm" / file).read_text()
    assert imports == (file in WHO_NAMES_PARTS)


def test_a_checkpoint_from_before_parts_is_read() -> None:
    """As version 0.3.0 of this package wrote it."""
    before = {
        **{"step": 4, "base_model": "calc", "seed": 0, "position": 8, "known_tasks": {"1": [2.0, 0.5]}},
        **{"league": [{"alias": "start"}], "replay": [{"rollouts": ["r"], "priority": 1.0}]},
        "learning": {"policy": {"kl_coef": 0.3, "baselines": {"t": 0.5}, "steps": 7, "scales": {"a": [1.0, 2.0]}}},
    }
    info = info_from(before)
    assert info.parts == {"curriculum": before["known_tasks"], "league": before["league"], "replay": before["replay"]}
    assert info.learning["policy"] == {
        "reference": {"coef": 0.3, "steps": 7},
        "baseline": {"t": 0.5},
        "scales": {"a": [1.0, 2.0]},
    }
    assert {*info.parts, *info.learning["policy"]} <= {kind.name for kind in PARTS}
