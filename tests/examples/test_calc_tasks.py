"""The calculator's tasks are exact and split cleanly; its demonstrations do what their behaviour says."""

from __future__ import annotations

import random
import re
from fractions import Fraction

import pytest

from examples.calc.calc_agent import score
from examples.calc.demonstrations import BEHAVIOURS, steps_of
from examples.calc.tasks import LARGEST, STORIES, make_problem, make_tasks, write


def exactly(expression: str) -> Fraction:
    """Python's own precedence, in fractions."""
    return eval(re.sub(r"(\d+)", r"Fraction(\1)", expression), {"Fraction": Fraction})


def test_training_and_validation_share_no_question() -> None:
    train, val = make_tasks(1500, 300, seed=3)
    assert (len(train), len(val)) == (1500, 300)
    assert len({task["question"] for task in train + val}) == 1800


def test_the_same_seed_gives_the_same_tasks() -> None:
    assert make_tasks(20, 5, seed=1) == make_tasks(20, 5, seed=1)
    assert make_tasks(20, 5, seed=1) != make_tasks(20, 5, seed=2)


def test_answers_are_what_python_says() -> None:
    rng = random.Random(0)
    for _ in range(1000):
        problem = make_problem(rng)
        assert exactly(write(problem.tree)) == problem.answer
        assert 0 <= problem.answer <= LARGEST
        written = re.search(r"(?:What is|Compute|How much is) ([-\d+*/() ]+)[?.]$", problem.question)
        if written:
            assert exactly(written[1]) == problem.answer


def test_every_number_of_a_problem_is_in_its_question() -> None:
    rng = random.Random(1)
    for _ in range(500):
        problem = make_problem(rng)
        assert sorted(re.findall(r"\d+", write(problem.tree))) == sorted(re.findall(r"\d+", problem.question))


def test_stories_draw_as_many_numbers_as_they_use() -> None:
    for operations, stories in STORIES.items():
        for story in stories:
            numbers = story.draw(random.Random(0))
            assert len(numbers) == operations + 1
            assert len(steps_of(story.tree(*numbers))) == operations


@pytest.mark.parametrize("name", BEHAVIOURS)
def test_only_the_careful_behaviour_is_reliable(name: str) -> None:
    rng = random.Random(2)
    rewards = []
    for _ in range(300):
        problem = make_problem(rng)
        demonstration = BEHAVIOURS[name](problem, rng)
        assert len(demonstration.turns) == len(demonstration.results) + 1
        rewards.append(score(demonstration.turns[-1], problem.answer))
    success = sum(rewards) / len(rewards)
    assert success == 1.0 if name == "careful" else success < 0.6  # hasty is right where one operation is enough
