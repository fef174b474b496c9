"""Terminals as people have them: 80 columns wide, and with an encoding that lacks our signs, as on Windows."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
from rich.text import Text

from agentlightning.console import Console as OurConsole, encodable, fitting_table
from tests.first_day.day import agl, script, typed

ENCODINGS = ("ascii", "cp1252", "latin-1", "cp437", "utf-8")
COMMANDS = (
    ("train", "--help"),
    ("models", "--gpus", "H100"),
    ("compare", "runs/a", "runs/b"),
    ("show", "runs/none"),
)


def make_run(folder: Path, name: str, rewards: list[float]) -> None:
    run = folder / "runs" / name
    run.mkdir(parents=True)
    about = {"run_id": f"run-{name}", "algorithm": "GRPO", "agent": "a_long_name_of_an_agent", "settings": {"steps": 9}}
    (run / "run.json").write_text(json.dumps({**about, "status": "failed", "error": "it broke → here"}))
    rows = [
        {"step": n + 1, "reward": r, "val_reward": r, "val_low": 0.1, "val_high": 0.9} for n, r in enumerate(rewards)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.slow  # an interpreter is started for each: the encoding is chosen when it starts
@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_no_command_fails_for_a_sign_that_the_terminal_lacks(
    tmp_path: Path, command: tuple[str, ...], encoding: str
) -> None:
    for name in ("a", "b"):
        make_run(tmp_path, name, [0.1, 0.2])
    done = run_encoded(tmp_path, encoding, "-m", "agentlightning", *command)
    assert "Traceback" not in done
    assert "UnicodeEncodeError" not in done


def run_encoded(folder: Path, encoding: str, *arguments: str) -> str:
    """What it printed. A process of its own: the encoding is chosen when an interpreter starts."""
    import os
    import subprocess

    environment = {**os.environ, "PYTHONIOENCODING": encoding, "HF_HUB_OFFLINE": "1", "COLUMNS": "80"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    done = subprocess.run([sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, check=False)
    return (done.stdout + done.stderr).decode(encoding)


@pytest.mark.slow
def test_a_script_that_trains_prints_in_ascii(tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}
    (tmp_path / "chats.jsonl").write_text((json.dumps(chat) + "\n") * 2)
    (tmp_path / "train.py").write_text(
        "import agentlightning as agl\n"
        "if __name__ == '__main__':\n"
        "    sft = agl.SFT(model='calc', source='chats', steps=1, max_context=64)\n"
        "    agl.Trainer(algorithm=sft, run_dir='run').fit(None, 'chats.jsonl')\n"
    )
    printed = run_encoded(tmp_path, "ascii", "train.py")
    assert "Traceback" not in printed, printed
    assert "Loss of the first step" in printed


def test_a_sign_is_replaced_by_one_that_is_as_wide() -> None:
    said = "a → b … c × d ✗ é 日"
    for encoding in (*ENCODINGS, "no-such-encoding"):
        shown = encodable(said, encoding)
        assert len(shown) == len(said)
        if encoding != "no-such-encoding":
            shown.encode(encoding)
    assert encodable(said, "utf-8") == said


@pytest.mark.parametrize("width", [40, 60, 80, 100, 200])
def test_names_of_runs_are_whole_however_narrow_the_terminal(tmp_path: Path, width: int) -> None:
    name = "a-run-with-quite-a-long-name-2026"
    make_run(tmp_path, name, [0.25, 0.5])
    printed = agl(tmp_path, "runs", COLUMNS=str(width)).stdout
    assert f"runs/{name}" in printed
    assert max(map(len, printed.splitlines())) <= max(width, len(f"runs/{name}") + 2)


def test_runs_say_how_they_stand(tmp_path: Path) -> None:
    make_run(tmp_path, "a", [0.25])
    assert "failed" in agl(tmp_path, "runs", COLUMNS="80").stdout
    (found,) = json.loads(agl(tmp_path, "runs", "--json").stdout)
    assert (found["status"], found["why"]) == ("failed", "it broke → here")


@pytest.mark.parametrize("width", [20, 40, 80])
def test_a_table_drops_columns_from_the_right_and_breaks_no_cell(width: int) -> None:
    rows = [{"variant": Text("advantage=reinforce++"), "cosine": Text("0.913"), "eff. sample": Text("98.3%" * 8)}]
    table = fitting_table(rows, OurConsole(width=width))
    titles = [column.header for column in table.columns]
    assert titles == list(rows[0])[: len(titles)]
    assert titles


def test_what_looks_like_the_name_of_a_picture_stays_as_it_was_written() -> None:
    shown, wrote = io.StringIO(), "127.0.0.1:-1: and C:fire:x"
    console = OurConsole(file=shown, width=80)
    table = fitting_table([{"task": wrote}], console)
    console.print(wrote, table, Text(wrote))
    assert shown.getvalue().count(wrote) == 3


@pytest.mark.slow
def test_a_script_whose_run_fails_names_the_folder_and_what_to_type(tmp_path: Path) -> None:
    done = script(
        tmp_path,
        "@agl.rollout\n"
        "def agent(task, llm):\n"
        "    raise ValueError('no such order')\n"
        "if __name__ == '__main__':\n"
        "    agl.Trainer(algorithm=agl.GRPO(model='calc', steps=1), run_dir='run').fit(agent, [1, 2])\n",
    )
    assert done.returncode == 1
    assert "no such order" in done.stderr
    assert "why run" in done.stderr
    assert "show run" in done.stderr
    looked = typed(tmp_path, "-m", "agentlightning", "show", "run", "--failed")
    assert "no such order" in looked.stdout
