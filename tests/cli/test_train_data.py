"""`agl train --data`: fine-tuning on conversations in a file, without an agent, and what is said of it afterwards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentlightning.metrics import read_metrics
from tests.typed import agl


@pytest.mark.slow
def test_conversations_in_a_file_are_learned_without_an_agent(tmp_path: Path) -> None:
    chats = [
        {
            "messages": [
                {"role": "user", "content": f"Where does mail {n} go?"},
                {"role": "assistant", "content": ("sales", "support")[n % 2]},
            ],
            **({"scores": {"right": 1}, "score_comments": {"right": "Yes."}} if n == 1 else {}),
        }
        for n in range(6)
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    settings = ["--set", "tasks_per_step=4", "--set", "epochs=2", "--set", "max_context=128"]
    done = agl(tmp_path, "train", "--data", "chats.jsonl", "--model", "calc", "--run-dir", "run", *settings)
    assert done.returncode == 0, done.stderr
    assert "4 steps of 4 conversations" in done.stdout
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["examples"] for row in rows if row["step"]] == [4, 2, 4, 2]
    assert rows[-1]["loss"] < rows[0]["loss"]
    judged = agl(tmp_path, "why", "run")
    assert "It learns the examples" in " ".join(judged.stdout.split())


def chat(words: int, answer: str = "ok") -> dict[str, object]:
    return {
        "messages": [{"role": "user", "content": "word " * words}, {"role": "assistant", "content": answer}],
    }


def write(file: Path, rows: list[object]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.slow
def test_conversations_beyond_the_context_are_said_before_training(tmp_path: Path) -> None:
    write(tmp_path / "chats.jsonl", [chat(5), chat(300), chat(5), chat(400)])
    settings = ["--set", "tasks_per_step=4", "--set", "max_context=128"]
    done = agl(tmp_path, "train", "--data", "chats.jsonl", "--run-dir", "run", *settings)
    assert done.returncode == 0, done.stderr
    said, row = (done.stdout.index(words) for words in ("2 of 4 conversations are longer", "step    loss"))
    assert said < row
    assert "raise max_context" in done.stdout


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"question": "2+2", "answer": "4"}, "must be a chat"),
        ({"messages": "hello"}, "must be a chat"),
        ({"messages": ["hello"]}, "must be a chat"),
        ("hello", "must be a chat"),
        ({"messages": [{"role": "user", "content": "hi"}]}, "without an assistant message"),
    ],
    ids=["a task", "a text", "texts", "text alone", "no answer"],
)
def test_what_is_no_conversation_is_said_with_its_number_before_anything_is_loaded(
    tmp_path: Path, row: object, words: str
) -> None:
    write(tmp_path / "chats.jsonl", [chat(5), row])
    done = agl(tmp_path, "train", "--data", "chats.jsonl", "--model", "no/model/here", "--run-dir", "run")
    assert done.returncode == 1
    assert "number 2" in done.stderr
    assert words in done.stderr
    assert not (tmp_path / "run").exists()
