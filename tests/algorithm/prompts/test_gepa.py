"""GEPA on the same agents, traces and rewards; with the library itself."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from tests.algorithm.prompts.fakes import SEED, WORDS, FakeClient, tune, words_agent


def reflecting(prompt: str) -> str:
    """Adds the first of WORDS that the text lacks."""
    text = prompt.split("```")[1].strip()
    return f"```\n{text} {next((w for w in WORDS if w not in text), '')}\n```"


def gepa(client: FakeClient, **settings: Any) -> agl.GEPA:
    return agl.GEPA(client, **{"iterations": 6, "val_batch_size": 8, **settings})


def test_it_finds_the_better_prompt(tmp_path: Path) -> None:
    client = FakeClient(reflecting)
    tuner = gepa(client)
    tune(tuner, words_agent([]), tmp_path / "run")
    assert tuner.get_best_prompt().template == f"{SEED} alpha beta gamma"
    assert any(re.search(r"## reward\n0\.0", prompt) for prompt in client.asked)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["val_reward"] == pytest.approx(0.0)
    assert rows[-1]["val_reward"] == pytest.approx(1.0)


@pytest.mark.slow
def test_a_run_taken_again_pays_only_for_what_is_new(tmp_path: Path) -> None:
    client, ran = FakeClient(reflecting), list[str]()
    tune(gepa(client, budget_rollouts=20), words_agent(ran), tmp_path / "run")
    assert 0 < len(ran) <= 20
    tuner = gepa(client)
    tune(tuner, words_agent(ran), tmp_path / "run", resume=True)
    at_once, uninterrupted = FakeClient(reflecting), list[str]()
    tune(gepa(at_once), words_agent(uninterrupted), tmp_path / "another")
    assert set(Counter(ran)) == set(uninterrupted)
    assert max(Counter(ran).values()) == 1
    assert Counter(client.asked) == Counter(at_once.asked)
    assert tuner.get_best_prompt().template == f"{SEED} alpha beta gamma"


def test_no_misbehaviour_of_the_critic_ends_a_run_or_gets_run(tmp_path: Path) -> None:
    answers: list[Any] = ["```\nSolve it alpha\n```", {"content": None, "refusal": "no"}, "", "```\n{broken\n```"]
    calls = iter(answers * 10)
    ran: list[str] = []
    tuner = gepa(FakeClient(lambda _: next(calls)))
    tune(tuner, words_agent(ran), tmp_path / "run")
    assert tuner.get_best_prompt().template == SEED
    assert all(re.fullmatch(r"Solve [tv]\d+", prompt) for prompt in ran)
    assert len(tuner.candidates) == 1


def test_a_critic_that_never_answers_ends_the_run_in_words(tmp_path: Path) -> None:
    tuner = agl.GEPA(critic_url="http://127.0.0.1:9/v1", critic_timeout=1, iterations=8, reflection_model="c")
    with pytest.raises(agl.ConfigError, match="The critic answered none of its first"):
        tune(tuner, words_agent([]), tmp_path / "run")


@pytest.mark.parametrize("failure", [{"content": None, "refusal": "I would rather not."}, ""])
@pytest.mark.slow
def test_a_critic_that_refuses_is_asked_again_and_not_for_ever(failure: Any, tmp_path: Path) -> None:
    calls = iter([failure, failure, *[f"```\n{SEED} alpha\n```"] * 20])
    tuner = gepa(FakeClient(lambda _: next(calls)))
    tune(tuner, words_agent([]), tmp_path / "run")
    assert len(tuner.candidates) > 1
    with pytest.raises(agl.ConfigError, match="The critic answered none of its first 3 questions"):
        tune(gepa(FakeClient(lambda _: failure)), words_agent([]), tmp_path / "never")


def test_a_prompt_of_ones_own_must_show_the_text_and_the_runs(tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_text("<curr_param> only")
    with pytest.raises(agl.ConfigError, match="<side_info>"):
        gepa(FakeClient(reflecting), reflection_prompt_file=tmp_path / "own.txt")
