"""The SQL example without LangGraph: what its sandbox refuses, what its grader compares, what its data is made of."""

from __future__ import annotations

import random
import sqlite3
from collections import Counter
from pathlib import Path

import pytest

from agentlightning.cli.configuration import make_algorithm
from examples.sql import recipe
from examples.sql.data import SIZES, make_data
from examples.sql.grading import describe, extract_query, score
from examples.sql.questions import KINDS, make_question
from examples.sql.sandbox import Result, run_query, same
from examples.sql.schemas import NAMES, SCHEMAS, make_database

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("sql") / "shop.sqlite"
    make_database(SCHEMAS[0], file)
    return file


def test_a_query_is_run(shop: Path) -> None:
    assert run_query(shop, "SELECT COUNT(*) FROM customers").rows == [(len(NAMES),)]
    assert describe(shop) == "customers(id, name, city, age)\norders(id, customer_id, item, price, year)"


@pytest.mark.parametrize(
    "sql",
    [
        "DROP TABLE customers",
        "DELETE FROM customers",
        "UPDATE customers SET age = 1",
        "INSERT INTO customers VALUES (99, 'x', 'y', 1)",
        "CREATE TABLE mine (a)",
        "ATTACH '{folder}/other.sqlite' AS other",
        "VACUUM INTO '{folder}/other.sqlite'",
        "PRAGMA query_only = 0",
        "SELECT load_extension('evil.so')",
        "SELECT name FROM customers; DROP TABLE customers",
        "BEGIN",
    ],
)
def test_anything_but_a_select_is_refused(sql: str, shop: Path) -> None:
    before = shop.read_bytes()
    result = run_query(shop, sql.format(folder=shop.parent))
    assert result.error is not None
    assert result.rows == []
    assert shop.read_bytes() == before
    assert [file.name for file in shop.parent.iterdir()] == ["shop.sqlite"]


@pytest.mark.parametrize(
    ("sql", "seconds", "error"),
    [
        ("WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT COUNT(*) FROM n", 0.1, "than 0.1 s"),
        ("SELECT a.id FROM orders a, orders b, orders c", 60, "more than 1000 rows"),
        ("SELECT zeroblob(1000000000)", 60, "too big"),
        ("SELECT city_name FROM customers", 60, "no such column: city_name"),
        ("", 60, "no rows"),
        ("SELECT \0", 60, "null character"),
    ],
)
def test_what_takes_too_much_or_is_wrong_is_said(sql: str, seconds: float, error: str, shop: Path) -> None:
    assert error in run_query(shop, sql, seconds=seconds).show()


def test_results_are_compared_as_rows() -> None:
    one, other = Result([(1, "a"), (2, "b")]), Result([(2, "b"), (1, "a")])
    assert same(one, other, ordered=False)
    assert not same(one, other, ordered=True)
    assert not same(Result([(1,), (1,)]), Result([(1,)]), ordered=False), "how often a row occurs counts"
    assert same(Result([(0.1 + 0.2,)]), Result([(0.3,)]), ordered=True)
    failed = Result([], "syntax error")
    assert not same(failed, failed, ordered=False), "two errors are no answer"


def test_the_reward_needs_the_right_rows(shop: Path) -> None:
    wanted = "SELECT name FROM customers ORDER BY age DESC LIMIT 1"
    assert score(shop, "select name from customers where age = (select max(age) from customers) limit 1", wanted) == 1.0
    assert score(shop, "SELECT name FROM customers ORDER BY age LIMIT 1", wanted) == 0.0
    assert score(shop, "I do not know.", wanted) == 0.0
    with pytest.raises(ValueError, match="task's own query fails"):
        score(shop, wanted, "SELECT nothing FROM nowhere")


@pytest.mark.parametrize(
    "text",
    ["```sql\nSELECT 1\n```", "SELECT 1;", "Let me see.\n```\nSELECT 2\n```\nNo:\n```sql\nSELECT 1;\n```\nDone."],
)
def test_the_query_is_found_in_what_was_said(text: str) -> None:
    assert extract_query(text) == "SELECT 1"


def test_no_question_is_in_two_parts_and_each_can_be_answered(tmp_path: Path) -> None:
    parts = make_data(tmp_path)
    assert {part: len(tasks) for part, tasks in parts.items()} == SIZES
    asked = Counter((task["database"], task["question"]) for tasks in parts.values() for task in tasks)
    assert set(asked.values()) == {1}
    for task in parts["val"]:
        assert score(Path(task["database"]), task["query"], task["query"]) == 1.0
    assert make_data(tmp_path) == parts, "the same each time"
    assert sqlite3.connect(parts["val"][0]["database"]).execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_every_kind_of_question_is_asked() -> None:
    rng = random.Random(0)
    asked = Counter(make_question(rng).text.split()[0] for _ in range(200))
    assert set(asked) == {"How", "Which", "What"}
    assert len(KINDS) == 6


def test_the_files_of_settings_are_settings() -> None:
    yaml = pytest.importorskip("yaml")
    assert yaml.safe_load((ROOT / "examples" / "sql" / "config.yaml").read_text()) == recipe.SETTINGS
    algorithm = make_algorithm(None, None, ROOT / "examples" / "sql" / "config.gpu.yaml", [])
    assert (algorithm.model, algorithm.train_agents) == ("Qwen/Qwen3-1.7B", "^(write|rewrite)$")
