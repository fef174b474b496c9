"""Slips on the command line: each answer names what was meant, and nothing is loaded for it."""

from __future__ import annotations

import colorsys
import json
import re
import shlex
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import agentlightning as agl
from agentlightning.cli.app import app
from agentlightning.errors import in_words

AGENT = "def agent(task, llm):\n    return 1.0\n\n\nVALUE = 5\n"
FILES = {
    "agent.py": AGENT,
    "tasks.jsonl": "1\n",
    "alone/agent.py": "from .names import NAME\n\n" + AGENT,
    "missing.py": "import langchain_that_is_not_here\n\n" + AGENT,
    "ends.py": "import sys\n\nsys.exit(2)\n\n" + AGENT,
    "shadow/colorsys.py": "from colorsys import rgb_to_hsv\n\n" + AGENT,
    "marked.py": "import agentlightning as agl\n\n\n@agl.rollout\n" + AGENT,
    "trains.py": "import agentlightning as agl\n\n" + AGENT + "\nagl.Trainer().fit(lambda task: 1.0, [1])\n",
    "slip.yaml": "learning_rte: 1\n",
    "tab.yaml": "steps: 5\n\tgroup_size: 4\n",
    "words.yaml": "steps: five\n",
    "empty.yaml": "",
    "agent.yaml": "agent: agent.py:agent\n",
    "tasks.toml": 'tasks = "tasks.jsonl"\n',
    "heading.yaml": "grpo:\n  steps: 3\n",
    "plain.sh": "echo 1.0\n",
    "misnamed/task.toml": 'version = "1.0"\n',
    "misnamed/instructions.md": "Do it.\n",
    "plain.js": "console.log(1.0)\n",
    "agent.json": "{}\n",
    "shared.jsonl": '{"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}]}\n',
    "pairs.jsonl": '{"instruction": "x", "output": "y"}\n',
    "bots.jsonl": '{"messages": [{"role": "user", "content": "x"}, {"role": "bot", "content": "y"}]}\n',
    "comma.json": '{"steps": 5,}',
    "nested.yaml": "algorithm: GRPO\n  steps: 3\n",
    "twice.csv": "question,answer,answer\nx,1,2\n",
    "joined.jsonl": '{"q": 1} {"q": 2}\n',
    "from.jsonl": '{"messages": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}]}\n',
    "chosen.jsonl": '{"prompt": "x", "chosen": "y", "rejected": "z"}\n',
    "text.jsonl": '{"text": "x"}\n',
    "chats.jsonl": '{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}\n',
    "runs/first/run.json": "{}\n",
}
TRAIN = "train --agent agent.py:agent --tasks tasks.jsonl"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # at the end the path is as it was
    monkeypatch.setitem(sys.modules, "colorsys", colorsys)
    for name, text in FILES.items():
        Path(name).parent.mkdir(exist_ok=True, parents=True)
        Path(name).write_text(text)
    (tmp_path / "runs" / "first" / "store.db").touch()
    (saved := tmp_path / "runs" / "saved" / "checkpoints" / "step-000001").mkdir(parents=True)
    (saved / "checkpoint.json").write_text("{}")
    return tmp_path


def answer(command: str) -> str:
    """What is said, of a command that cannot work."""
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, shlex.split(command))
    assert done.exit_code in (1, 2), done.output
    if isinstance(done.exception, agl.AgentLightningError):
        return in_words(done.exception)
    assert isinstance(done.exception, SystemExit), done.exception
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", done.output).split())


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("dashboard http://127.0.0.1:9", "nothing listens at 127.0.0.1:9"),
        ("models calc", "agl plan --model calc"),
        ("doctor runs/saved", "What a run suffers from: agl why runs/saved"),
        ("agents codex", "agl doctor --agent codex --tasks FILE"),
        ("serve calc --api-key @nokey.txt", "@nokey.txt cannot be read: No such file or directory. Name a file"),
        ("env check harbor:misnamed", "No such file or directory. Did you mean "),
        ("version", "agl --version prints it"),
        ("ls", "agl runs lists the runs"),
        ("show runs/saved --head 3", "--limit"),
        ("train --agent agent.py:agent --tasks tasks.jsonl --model_name_or_path calc", "--model"),
        ("plan --model 4B --gpus A100-80GB", "--gpus is 'A100-80GB'; it takes a number and a name"),
        ("plan --model 4B --gpus 2xA100-80GB-SXM", "Did you mean A100-80?"),
        ("run --agent Codex --tasks tasks.jsonl --model calc", "The agent that has a name here is codex."),
        ("store --path postgresql://me@db/x stats", "is given by --dsn postgresql://"),
        ("store --path http://localhost:4747", "shown by  agl dashboard http://localhost:4747"),
        ("why https://wandb.ai/me/project/runs/abc", "https://wandb.ai/me/project/runs/abc is an address"),
        ("train --data tasks.jsonl --tasks tasks.jsonl", "give one of them"),
        ("train --data tasks.jsonl --algorithm ppo", "which SFT learns, or preferences"),
        ("train --data tasks.jsonl --val-tasks tasks.jsonl", "Say which agent to train"),
        ("train --data tasks.jsonl --model nowhere", "It must be a chat"),
        ("train --data chats.txt", "chats.txt"),
        ("sft --data tasks.jsonl", "agl train --data CHATS.jsonl"),
        ("train --agent agent:agent --tasks tasks.jsonl", "An agent is named by its file: agent.py:agent"),
        ("train --agent agent.ipynb:run --tasks tasks.jsonl", "jupyter nbconvert --to script"),
        ("train --agent agent.py:agent --tasks https://x.example/t.jsonl", "download the file first"),
        ('train --agent agent.py:agent --tasks tasks.jsonl --set {"steps":5}', "give NAME=VALUE"),
        ("train --agent pkg.agent:run --tasks tasks.jsonl", "named by its file: pkg/agent.py:run"),
        ("train --agent agent.py: --tasks tasks.jsonl", "the name of a function in it"),
        ("train --agent 'agent.py:agent()' --tasks tasks.jsonl", "without brackets: agent.py:agent"),
        ("train --agent agent.py:VALUE --tasks tasks.jsonl", "agent.py:VALUE is 5, and an agent is a function"),
        ("train --agent alone --tasks tasks.jsonl", "It is a folder: give file.py:name"),
        ("train --agent alone/agent.py:agent --tasks tasks.jsonl", "put an empty __init__.py into"),
        ("train --agent missing.py:agent --tasks tasks.jsonl", "Install it into this environment:"),
        ("train --agent ends.py:agent --tasks tasks.jsonl", 'put that under  if __name__ == "__main__":'),
        ("train --agent shadow/colorsys.py:agent --tasks tasks.jsonl", "give the file another name"),
        ("train --agent trains.py:agent --tasks tasks.jsonl", "trains.py trains when it is imported"),
        ("train --agent agent.py:agent --tasks runs", "'runs' is a folder"),
        ("train --agent agent.py:agent tasks.jsonl", "Tasks are given by an option: --tasks tasks.jsonl"),
        ("doctor --tasks tasks.jsonl agent.py", "The agent is given by an option: --agent agent.py"),
        ("run agent.py --tasks tasks.jsonl --agent x.py:y", "The agent is given by an option: --agent agent.py"),
        (f"{TRAIN} --set steps 5", "--set NAME=VALUE"),
        (f"{TRAIN} --set steps", "give NAME=VALUE, without blanks: --set steps=…"),
        (f"{TRAIN} --gpus 2", "--set device=…"),
        (f"{TRAIN} --output x", "(Possible options: --run-dir)"),
        (f"{TRAIN} --algorithm gpro", "Did you mean GSPO or GRPO?"),
        (f"{TRAIN} --algorithm apo", "agl optimize --algorithm apo"),
        (f"{TRAIN} --config slip.yaml", "Did you mean learning_rate?\nSettings were read from slip.yaml."),
        (f"{TRAIN} --config words.yaml", "a whole number (or None).\nSettings were read from"),
        (f"{TRAIN} --config tab.yaml", "YAML takes no tabs"),
        (f"{TRAIN} --config empty.yaml", "empty.yaml is empty"),
        (f"{TRAIN} --config heading.yaml", "settings below 'grpo'; they stand at the top"),
        (f"{TRAIN} --config comma.json", "comma.json cannot be read"),
        (f"{TRAIN} --config none.yaml", "There is no file 'none.yaml' with settings"),
        ("train --config agent.yaml --tasks tasks.jsonl", "given on the command line: --agent"),
        ("train --config tasks.toml --agent agent.py:agent", "given on the command line: --tasks"),
        ("resume runs/first", "--resume RUN"),
        ("help", "agl -h lists the commands"),
        ("trian", "Did you mean 'train'?"),
        ("runner --store", "(Possible options: --server)"),
        ("runner --store x.db --agent agent.py:agent", "(Possible options: --server)"),
        ("runner --agent agent.py:agent", "Missing option '--server'. URL of the store's server, such as http://"),
        ("runner --server 10.0.0.1:4747 --agent agent.py:agent", "it begins with http://"),
        ("runner --server store.db --agent agent.py:agent", "it begins with http://"),
        ("run --agent agent.py:agent --tasks tasks.jsonl --endpoint localhost:8000", "it begins with http://"),
        ("--model calc train", "stand behind it: agl train --model"),
        ("--store x.db store", "stand behind it: agl"),
        ("--agent agent.py:agent --tasks tasks.jsonl", "stand behind it: agl train --agent"),
        ("--port 80 serve runs/first", "stand behind it: agl serve --port"),
        ("--frobnicate", "stand behind it: agl COMMAND --option"),
        ("--verbose train", "AGL_DEBUG=1"),
        ("--vers", "(Possible options: --version)"),
        (f"{TRAIN.replace('agent.py:agent', repr('python nope.py'))}", "there is no such file here"),
        ("train -agent agent.py:agent", "(Possible options: --agent)"),
        ("train -tasks=tasks.jsonl", "(Possible options: --tasks)"),
        ("train --agent ./plain.sh --tasks tasks.jsonl", "chmod +x ./plain.sh"),
        ("train --agent 'python marked.py' --tasks tasks.jsonl", "Give the agent itself: marked.py:agent"),
        ("optimize --algorithm grpo", "Weights are trained by agl train --algorithm grpo"),
        ("train --agent ./plain.js --tasks tasks.jsonl", "such as 'node ./plain.js'"),
        ("train --agent agent.json --tasks tasks.jsonl", "'agent.json' is a file of data, and an agent is code"),
        (f"{TRAIN} --resume runs/none", "The folder 'runs/none' is not there. Runs with checkpoints: runs/saved."),
        (f"{TRAIN} --resume latest", "The folder 'latest' is not there. Runs with checkpoints: runs/saved."),
        (f"{TRAIN} --resume alone", "It is no run's folder"),
        (f"{TRAIN} --set steps:5", "--set steps=5"),
        ("serve tasks.jsonl", "'tasks.jsonl' is a file, and a model is a folder"),
        ("watch tasks.jsonl", "Give a run's folder"),
        ("train --data shared.jsonl --model calc", "This is ShareGPT's form"),
        ("train --data pairs.jsonl --model calc", "row['instruction']"),
        ("train --data bots.jsonl --model calc", "and this one has bot"),
        ("eval --run runs/first", "It is given without an option: agl eval CHECKPOINT"),
        ("serve --model runs/first", "It is given without an option: agl serve MODEL"),
        ("why --run-dir runs/first", "It is given without an option: agl why RUN"),
        ("export runs/first --output model", "(Possible options: --to)"),
        ("report runs/first --output x.html", "(Possible options: --to)"),
        ("train -a agent.py:agent", "--agent"),
        ("show runs/first -s 3", "--step"),
        ("chat runs/first", "agl serve RUN serves the model"),
        ("\u2014agent agent.py:agent", "Type --agent"),
        (f"{TRAIN} \u2013\u2013steps 5", "Type --steps"),
        ("train --agent \u201cagent.py:agent\u201d --tasks tasks.jsonl", 'Type "agent.py:agent"'),
        ("train /agent agent.py:agent /tasks tasks.jsonl", "Options begin with two hyphens: --agent … --tasks"),
        ("eval calc agent.py:agent tasks.jsonl", "--agent agent.py:agent --tasks tasks.jsonl"),
        (f"{TRAIN} --set actor_rollout_ref.rollout.n=8", "did you mean group_size=…?"),
        (f"{TRAIN} --set frobnicate=8", "agl train --print-config prints all"),
        (f"{TRAIN} --model llama3.2:1b", "a name of Ollama's"),
        ("show runs", "The latest run in it is runs/first."),
        (f"{TRAIN} --config nested.yaml", "not allowed here\n  line 2, column 8"),
        (f"{TRAIN} --config nested.yaml", "Settings stand below each other, each at the left"),
        (f"{TRAIN} --config comma.json", "A comma stands before a bracket that closes"),
        (f"{TRAIN} --config runs/first", "Its settings are in runs/first/run.json: --config runs/first/run.json"),
        (f"{TRAIN} --config slpi.yaml", "Did you mean slip.yaml?"),
        ("train --agent agnt.py:agent --tasks tasks.jsonl", "Did you mean agent.py?"),
        ("train --agent agent.py:agent --tasks tasks", "Did you mean tasks.jsonl?"),
        ("train --agent agent.py:agent --tasks twice.csv", "more than one column 'answer'"),
        ("train --agent agent.py:agent --tasks joined.jsonl", "More than one value stands on it"),
        ("train --tasks chats.jsonl --algorithm sft", "Conversations to learn are given as --data FILE"),
        ("train --data from.jsonl --model calc", "from.jsonl: Of the conversations, number 1"),
        ("train --data from.jsonl --model calc", "This is ShareGPT's form"),
        ("train --data chosen.jsonl --model calc", "which agl.DPO(source='pairs') learns"),
        ("train --data chosen.jsonl --algorithm dpo", "what was chosen as preferred_output"),
        ("train --data text.jsonl --model calc", "Write its text as messages"),
        ("train --resume runs/none", "The folder 'runs/none' is not there. Runs with checkpoints: runs/saved."),
        ("train --resume runs/saved", "--resume runs/saved --config runs/saved/run.json --trust"),
        ("show runs/frist", "Did you mean runs/first?"),
        ("import chat.jsonl --to new.jsonl", "Did you mean chats.jsonl?"),
        ("serve runs/first --port 99999", "it is '99999'; it must be at most 65535. Port to listen on"),
        ("store --port -1", "it must be at least 0"),
        ("demo clac", "There is no example 'clac'"),
        (
            f"{TRAIN} --timeout 5m",
            "it is '5m'; it must be a number. Write the number alone, without a letter or a unit behind it. Seconds",
        ),
        (f"{TRAIN} --timeout 0,5", "A number has a point here: 0.5. Seconds"),
        (f"{TRAIN} --steps x", "it is 'x'; it must be a whole number. Training steps"),
        (f"{TRAIN} --n-runners 0", "it is '0'; it must be at least 1. Number of runners"),
        (f"{TRAIN} --isolation docker", "'--isolation': 'docker' is not one of"),
        (f"{TRAIN} --tasks tasks.jsonl", "--tasks is given twice: leave one out."),
        ("compare a b --metric x --metric y", "--metric is given twice"),
        ("train --dataset tasks.jsonl", "(Possible options: --tasks)"),
        ("train --eval-data tasks.jsonl", "(Possible options: --val-tasks)"),
        ("models calc", "agl models takes options alone."),
        ("env check gym:x y", "agl env check takes ENV; what holds blanks stands in quotes."),
        ("store runs/store.db", "agl store --path runs/store.db"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_the_answer_names_what_was_meant(command: str, words: str) -> None:
    assert words in answer(command)


@pytest.mark.usefixtures("folder")
def test_a_store_is_named_by_the_server_that_has_it() -> None:
    assert "Possible options: --server" in answer(f"{TRAIN} --store x.db")


@pytest.mark.usefixtures("folder")
def test_an_exponent_is_a_number_in_yaml() -> None:
    Path("rate.yaml").write_text("learning_rate: 1e-4\nkl_coef: 1e-3\nmodel: calc\n")
    done = CliRunner().invoke(app, ["train", "--config", "rate.yaml", "--print-config"])
    assert done.exit_code == 0, done.exception
    assert '"learning_rate": 0.0001' in done.output
    assert '"kl_coef": 0.001' in done.output


@pytest.mark.usefixtures("folder")
def test_a_dict_as_python_writes_it_is_a_setting() -> None:
    given = ["--set", "reward_weights={'a': 1, 'b': 0.5}", "--set", "watched_parts=('c',)"]
    done = CliRunner().invoke(app, ["train", "--model", "calc", *given, "--print-config"])
    assert done.exit_code == 0, done.exception
    assert json.loads(done.output)["reward_weights"] == {"a": 1, "b": 0.5}
    assert json.loads(done.output)["watched_parts"] == ["c"]
