"""The sentiment example: its grader and its tasks."""

from __future__ import annotations

import pytest

from examples.sentiment.packages import Unavailable
from examples.sentiment.reviews import make_tasks
from examples.sentiment.sentiment_agent import grade


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
