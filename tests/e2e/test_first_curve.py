"""docs/first-curve.md as a reader types it: conversations first, then rewards, and a curve that rises. Three seeds."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from agentlightning.metrics import read_metrics
from tests.source.commands import commands
from tests.typed import agl, typed

PAGE = Path(__file__).parents[2] / "docs" / "first-curve.md"
AGENT, MAILS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
STEPS = 30


def write_files(folder: Path) -> None:
    (folder / "mail_agent.py").write_text(AGENT)
    (folder / "make_mails.py").write_text(MAILS)
    done = typed(folder, "make_mails.py")
    assert done.returncode == 0, done.stderr


def command(beginning: str, *more: str) -> list[str]:
    """The command of the page that begins so, without `agl`."""
    (found,) = [line for line in commands(PAGE) if line.startswith(beginning)]
    return [*shlex.split(found)[1:], *more]


def test_the_held_out_emails_are_not_trained(tmp_path: Path) -> None:
    write_files(tmp_path)
    train, val = ((tmp_path / name).read_text().splitlines() for name in ("train.jsonl", "val.jsonl"))
    assert not set(train) & set(val)
    assert len((tmp_path / "chats.jsonl").read_text().splitlines()) == 40


@pytest.mark.slow
def test_the_doctor_leads_to_the_conversations(tmp_path: Path) -> None:
    write_files(tmp_path)
    done = agl(tmp_path, *command("agl doctor --agent"))
    said = " ".join(done.stdout.split())
    assert done.returncode == 1
    assert "arithmetic" in said
    assert "agl train --data chats.jsonl --model calc --name sft" in said


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", ["0", "1", "2"])
def test_first_conversations_then_rewards_and_it_rises(tmp_path: Path, seed: str) -> None:
    write_files(tmp_path)
    learned = typed(tmp_path, "-m", "agentlightning", *command("agl train --data", "--seed", seed), timeout=600)
    assert learned.returncode == 0, learned.stderr
    trained = typed(tmp_path, "-m", "agentlightning", *command("agl train --model", "--seed", seed), timeout=1200)
    assert trained.returncode == 0, trained.stderr
    rows = read_metrics(tmp_path / "runs" / "grpo" / "metrics.jsonl")
    assert rows[-1]["step"] == STEPS
    validated = [row["val_reward"] for row in rows if row.get("val_reward") is not None]
    assert 0.2 < validated[0] < 0.6, "conversations alone solve some, and leave something to learn"
    assert validated[-1] > validated[0] + 0.15
    assert "Gain on the same tasks" in agl(tmp_path, *command("agl eval runs/grpo")).stdout
