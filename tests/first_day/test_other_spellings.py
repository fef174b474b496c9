"""Values as other programs write them: never and all as numbers, addresses without http://, texts in place of files,
models without their owner; and what a step would find out late."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import agentlightning as agl
from agentlightning.cli.app import app
from agentlightning.errors import ConfigError, ModelError, in_words
from agentlightning.models import resolve_model

WORK = "--agent agent.py:agent --tasks tasks.jsonl"
CRITIC = f"optimize {WORK} --model calc --critic-url http://127.0.0.1:9/v1 --critic-model c"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").write_text("def agent(task, llm):\n    return 1.0\n")
    (tmp_path / "tasks.jsonl").write_text("1\n2\n")
    return tmp_path


def answer(command: str) -> str:
    done = CliRunner().invoke(app, shlex.split(command))
    assert done.exit_code != 0, done.output
    said = in_words(done.exception) if isinstance(done.exception, agl.AgentLightningError) else done.output
    return " ".join(said.replace("│", " ").split())


NEVER = [-1, None, False, "never", "none", "None", "off"]
WRITTEN = [
    *(("save_every", value, "For never, give a number above that of the steps.") for value in [0, *NEVER]),
    *(("val_every", value, "0 turns it off.") for value in NEVER),
    *(("max_grad_norm", value, "0 turns it off.") for value in NEVER),
    *(("keep_checkpoints", value, "For all, give a large number") for value in [-1, None, "all", float("inf")]),
    *(("max_kl", value, "(or None)") for value in [0, -1, "off"]),
    *(("lora_rank", value, "(or None)") for value in [0, -1, "none", True]),
    ("val_every", "ten", "it must be a whole number."),
    ("epochs", -1, "it must be a number at least 1."),
]


@pytest.mark.parametrize(("name", "value", "words"), WRITTEN)
def test_never_and_all_as_numbers(name: str, value: Any, words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        agl.GRPO(model="calc", **{name: value})
    assert words in str(raised.value)


@pytest.mark.parametrize("address", ["localhost:8000", "127.0.0.1:8000/v1", "api.openai.com", "api.openai.com/v1", "x"])
@pytest.mark.parametrize("command", [f"train {WORK}", "gateway"])
def test_an_upstream_without_http(folder: Path, command: str, address: str) -> None:
    said = answer(f"{command} --upstream judge={address}")
    assert f"The address of --upstream judge is '{address}'; it begins with http:// or https://" in said


@pytest.mark.parametrize("address", ["localhost:4747", "http://localhost:4747", "10.0.0.1:4747/", "store.example:80/x"])
@pytest.mark.parametrize("command", ["show", "why", "watch --once", "report", "whatif"])
def test_an_address_in_place_of_a_run(folder: Path, command: str, address: str) -> None:
    url = f"http://{address.removeprefix('http://').rstrip('/')}"
    assert f"is an address, and this reads a run's folder. A served store is shown by agl dashboard {url}" in answer(
        f"{command} {address}"
    )


@pytest.mark.parametrize("place", ["nothere", "no:where", "a/b"])
def test_what_is_no_address(folder: Path, place: str) -> None:
    assert "address" not in answer(f"show {place}")
    assert "begins with http://" not in answer(f"dashboard --no-open {place}")


def test_the_dashboard_of_an_address_without_http(folder: Path) -> None:
    assert "A server's address begins with http://, as http://localhost:4747 does." in answer(
        "dashboard localhost:4747"
    )


@pytest.mark.parametrize("option", ["--prompt", "--system-prompt", "--tool-description"])
@pytest.mark.parametrize("text", ["Answer: {question}", "You are nice", "{question}"])
def test_a_text_in_place_of_its_file(folder: Path, option: str, text: str) -> None:
    given = f"calc={text}" if option == "--tool-description" else text
    said = answer(f"{CRITIC} {option} {shlex.quote(given)}")
    assert f"There is no file '{text}' with a prompt. Write the text into a file, and give the file." in said


@pytest.mark.parametrize("command", ["export runs/a my-model", "report runs/a report.html"])
def test_a_place_to_write_to_without_its_option(folder: Path, command: str) -> None:
    assert f"Where it goes is given by an option: --to {command.split()[-1]}" in answer(command)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("qwen2.5-0.5b-instruct", "Qwen/qwen2.5-0.5b-instruct"),
        ("Llama-3.2-1B", "meta-llama/Llama-3.2-1B"),
        ("SmolLM2-135M", "HuggingFaceTB/SmolLM2-135M"),
        ("gemma-3-1b-it", "google/gemma-3-1b-it"),
    ],
)
def test_a_model_without_its_owner(name: str, meant: str) -> None:
    with pytest.raises(ModelError, match=f"A Hugging Face id has its owner in front: '{meant}'"):
        resolve_model(name)


@pytest.mark.parametrize("name", ["qwen3:8b", "my-model", "./Qwen3-0.6B", "models/x/Qwen3"])
def test_a_model_that_has_no_owner(name: str) -> None:
    with pytest.raises(ModelError) as raised:
        resolve_model(name)
    assert "owner" not in str(raised.value)


@pytest.mark.parametrize("teacher", ["gpt-4o", "./nothere", "claude-3-5-sonnet", "qwen3:8b"])
def test_a_teacher_that_cannot_be_loaded_is_refused_before_anything_is(folder: Path, teacher: str) -> None:
    said = answer(f"train {WORK} --algorithm Distill --set teacher={teacher}")
    assert said.startswith("Error: The teacher cannot be loaded.") or said.startswith("The teacher cannot be loaded.")
    assert teacher in said
    assert "teacher_url=" in said
    assert not (folder / "runs").exists()
    agl.Distill(model="calc", teacher=teacher, teacher_url="http://localhost:8000/v1").check_data([1])


def test_a_teacher_that_is_missing(folder: Path) -> None:
    assert "--set teacher=" in answer(f"train {WORK} --algorithm Distill")


@pytest.mark.parametrize("place", ["runs/nothere", "agent", "nothere.db"])
def test_a_run_to_learn_from_that_is_not_there_is_refused_before_anything_is_loaded(folder: Path, place: str) -> None:
    said = answer(f"train {WORK} --algorithm SFT --set from_run={place}")
    assert f"There is no store '{place}'" in said
    assert not (folder / "runs").exists()


def test_minibatches_of_an_algorithm_are_named_with_what_to_give(folder: Path) -> None:
    said = answer(f"train {WORK} --algorithm Distill --set teacher=calc --set tasks_per_step=2 --set steps=1")
    assert "minibatches (4) must be at most tasks_per_step (2)" in said
    assert "Give minibatches=2" in said


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("sglang", "it takes vLLM: 'vllm'"),
        ("TensorRT", "it takes vLLM: 'vllm'"),
        ("hf", "'embedded' computes with torch and transformers"),
        ("CUDA", "'embedded' computes with torch and transformers"),
        ("deepspeed", "are 'ray', with ranks="),
        ("llama.cpp", "serves models and trains none"),
    ],
)
def test_engines_that_people_know(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        agl.Trainer(algorithm=agl.GRPO(model="calc", backend=name))


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("name", "words"), [("rlhf", "Did you mean GRPO or PPO?"), ("KTO", "Did you mean DPO?"), ("dspy", "agl optimize")]
)
def test_algorithms_that_people_know(name: str, words: str) -> None:
    assert words in answer(f"train {WORK} --model calc --algorithm {name}")


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("command", ["train", "run", "optimize"])
def test_a_timeout_of_nothing(command: str) -> None:
    assert "'--timeout': it is '0'; it must be at least" in answer(f"{command} {WORK} --timeout 0")


@pytest.mark.parametrize("file", ["c.yaml", "c.json"])
def test_a_setting_that_stands_twice(folder: Path, file: str) -> None:
    lines = {"c.yaml": "model: calc\nsteps: 1\nsteps: 2\n", "c.json": '{"model": "calc", "steps": 1, "steps": 2}'}
    (folder / file).write_text(lines[file])
    assert "'steps' stands in it twice" in answer(f"train {WORK} --config {file}")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model: ${MODEL}\n", "c.yaml has model: ${MODEL}, and no variables of the environment are filled in"),
        ("model: calc\nlearning_rate: $LR\n", '--set learning_rate="$LR"'),
        ("- steps: 1\n", "Leave the dashes at the left out"),
        ("model:calc\n", "Behind each colon stands a blank"),
        ("data:\n  train_batch_size: 4\nactor_rollout_ref:\n  model:\n    path: calc\n", "agl.VERL(config)"),
        ("7\n", "holds a int, not settings by name. Write each on a line of its own"),
    ],
)
def test_files_of_settings_as_other_programs_read_them(folder: Path, text: str, words: str) -> None:
    (folder / "c.yaml").write_text(text)
    assert words in answer(f"train {WORK} --config c.yaml")


@pytest.mark.parametrize(
    ("sinks", "words"),
    [
        ("tb", "Did you mean tensorboard?"),
        (["wandd"], "Did you mean wandb?"),
        ("wandb,tensorboard", "Give each by itself: --log wandb --log tensorboard"),
        ("csv", "Metrics are written to metrics.jsonl in the run's folder in any case"),
        ("neptune", "write a subclass of agl.metrics.Sink"),
        (print, "sink is <built-in function print>, which is no Sink"),
    ],
)
def test_trackers_that_there_are_not(sinks: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        agl.Trainer(sinks=sinks)


def test_no_trackers_are_none() -> None:
    assert agl.Trainer(sinks=None, dialects=None).sinks == []  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("name", ["WandbSink", "JsonlSink", "read_metrics"])
def test_a_name_of_a_part_of_the_package(name: str) -> None:
    with pytest.raises(AttributeError, match=rf"from agentlightning\.[a-z.]+ import {name}"):
        getattr(agl, name)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("sign", ["n", "火"])
def test_a_name_that_no_folder_can_have(sign: str) -> None:
    found = answer(f"train {WORK} --model calc --name {sign * 300}")
    assert f"--name has {300 * len(sign.encode())} bytes, and at most 200 fit" in found
