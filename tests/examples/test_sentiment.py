"""The sentiment example: its grader, its tasks, its critic, and runs of it."""

from __future__ import annotations

import random
import string
import tarfile
from pathlib import Path

import pytest

import agentlightning as agl
from agentlightning.metrics import SilentConsole, read_metrics
from agentlightning.store import SqliteLightningStore
from agentlightning.types.reward import find_final_reward
from examples.sentiment import recipe
from examples.sentiment.mutations import BLOCKS, LONGEST, Mutations, mutated
from examples.sentiment.packages import Unavailable
from examples.sentiment.reviews import PACKAGE, make_tasks
from examples.sentiment.sentiment_agent import FIRST_PROMPT, grade
from examples.sentiment.smollm2 import smollm2
from tests.typed import typed

RATED = "movieReviewSnippets_GroundTruth.txt"


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("negative", 1.0),
        ("Negative.", 1.0),
        ("The review is negative.", 0.5),
        ("It is negative, not positive.", 0.0),
        ("positive", 0.0),
        ("nonnegative", 0.0),
        ("", 0.0),
    ],
)
def test_the_right_word_alone_earns_most(answer: str, reward: float) -> None:
    assert grade(answer, "negative") == reward


@pytest.mark.slow
def test_tasks_are_balanced_and_the_parts_share_none() -> None:
    try:
        parts = make_tasks(40, 60, 80, seed=3)
    except Unavailable as reason:
        pytest.skip(str(reason))
    texts = [task["text"] for part in parts for task in part]
    assert [len(p) for p in parts] == [40, 60, 80]
    assert len(set(texts)) == 180
    assert all(sum(t["label"] == "positive" for t in part) == len(part) / 2 for part in parts)
    assert parts == make_tasks(40, 60, 80, seed=3)


def test_the_file_of_settings_says_what_the_demo_trains_with() -> None:
    yaml = pytest.importorskip("yaml")
    assert yaml.safe_load(Path(recipe.__file__).with_name("config.yaml").read_text()) == recipe.SETTINGS


@pytest.fixture
def cache(tmp_path: Path) -> dict[str, str]:
    """An environment whose cache has reviews in it, in the form in which they are published."""
    rated = [f"{n}\t{2 if n % 2 else -2}\tone more film {n}" for n in range(800)]
    folder = tmp_path / "cache" / PACKAGE.replace("==", "-")
    folder.mkdir(parents=True)
    file = tmp_path / RATED
    file.write_text("\n".join(rated))
    with tarfile.open(folder / "hutto_ICWSM_2014.tar.gz", "w:gz") as packed:
        packed.add(file, arcname=f"hutto_ICWSM_2014/{RATED}")
    return {"AGL_CACHE": str(tmp_path / "cache")}


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_two_steps_of_the_demo_on_a_small_model(tmp_path: Path, cache: dict[str, str]) -> None:
    """The command goes from the reviews to the next thing to type, and every rollout is graded. The calculator's model
    says neither word, so nothing is learned."""
    command = ("-m", "agentlightning", "demo", "sentiment", "--model", "calc", "--steps", "2", "--run-dir", "run")
    done = typed(tmp_path, *command, environment=cache)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [m["step"] for m in steps] == [0, 1, 2]
    assert all(m["failed"] == 0 for m in steps[1:])
    store = SqliteLightningStore(tmp_path / "run" / "store.db")
    try:
        rollouts = await store.query_rollouts(limit=-1)
        rewards = [find_final_reward((await store.query_spans(r.rollout_id, "latest")).items) for r in rollouts]
    finally:
        await store.close()
    assert len(rewards) == 2 * 64 + 2 * 8 * 8
    assert set(rewards) == {0.0}
    assert "agl eval" in done.stdout or "agentlightning eval" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_real_model_has_something_to_learn_from(tmp_path: Path) -> None:
    """It is right now and then, siblings differ, and every reward that trains is that of tokens that were sampled."""
    try:
        smollm2()
        make_tasks(2, 2, 2)
    except Unavailable as reason:
        pytest.skip(str(reason))
    command = ("-m", "agentlightning", "demo", "sentiment", "--steps", "2", "--run-dir", "run")
    done = typed(tmp_path, *command, timeout=1100)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert 0.2 < steps[0]["val_reward"] < 0.7
    assert all(m["logprob_gap_max"] < 1e-3 for m in steps[1:])
    assert all(m["grad_norm"] > 0 for m in steps[1:]), "siblings earned the same"


def test_mutations_keep_the_placeholder_and_stay_short() -> None:
    template, rng = FIRST_PROMPT, random.Random(0)
    seen: set[str] = set()
    for _ in range(400):
        template = mutated(template, rng)
        assert [field for _, field, _, _ in string.Formatter().parse(template) if field] == ["review"]
        blocks = template.split("\n\n")
        assert len(blocks) <= LONGEST
        assert len(set(blocks)) == len(blocks)
        seen |= set(blocks)
    assert seen >= set(BLOCKS)


@pytest.mark.slow
async def test_apo_finds_a_better_prompt_among_mutations(tmp_path: Path) -> None:
    """With an agent that earns more the more examples its prompt shows."""

    @agl.rollout
    async def agent(task: int, prompt_template: agl.PromptTemplate) -> float:
        return min(1.0, 0.25 * prompt_template.template.count("Sentiment: "))

    tuner = agl.APO(
        Mutations(seed=1), beam_width=2, branch_factor=3, beam_rounds=4, val_batch_size=2, gradient_batch_size=1
    )
    first = agl.PromptTemplate(template=FIRST_PROMPT)
    trainer = agl.Trainer(
        algorithm=tuner, initial_resources={"prompt_template": first}, run_dir=tmp_path, console=SilentConsole()
    )
    await trainer.fit_async(agent, list(range(4)), list(range(100, 124)))
    best = tuner.get_best_prompt().template
    assert best.count("Sentiment: ") >= 2, best
    assert "{review}" in best
