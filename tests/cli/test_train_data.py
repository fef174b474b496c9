"""`agl train --data`: fine-tuning on conversations in a file, without an agent, and what is said of it afterwards."""

from __future__ import annotations

import json
from pathlib import Path

from agentlightning.metrics import read_metrics
from tests.typed import agl


def test_conversations_in_a_file_are_learned_without_an_agent(tmp_path: Path) -> None:
    chats = [
        {
            "messages": [
                {"role": "user", "content": f"Where does mail {n} go?"},
                {"role": "assistant", "content": ("sales", "support")[n % 2]},
            ]
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
