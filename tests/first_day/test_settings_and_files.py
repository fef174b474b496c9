"""Settings of training that a trainer is given, files of tasks that are another kind than their names say, and
variables of the environment that nothing reads."""

from __future__ import annotations

import functools
import gzip
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.errors import ConfigError
from agentlightning.trainer.tasks import load_tasks
from tests.first_day.day import script

GIVEN = [
    *((name, f"{name} is a setting", name) for name in ("epochs", "seed", "learning_rate", "steps", "group_size")),
    *((name, f"{name} is called epochs here", "epochs") for name in ("max_epochs", "num_train_epochs")),
    ("lr", "lr is called learning_rate here", "learning_rate"),
    ("batch_size", "batch_size is called tasks_per_step here", "tasks_per_step"),
    ("num_generations", "num_generations is called group_size here", "group_size"),
    ("gradient_clip_val", "gradient_clip_val is called max_grad_norm here", "max_grad_norm"),
    ("check_val_every_n_epoch", "check_val_every_n_epoch is called val_every here", "val_every"),
    ("precision", "precision is called dtype here", "dtype"),
]
OTHERS = [
    *((name, "device='cuda:1' takes another, device='cpu' none") for name in ("devices", "accelerator", "num_nodes")),
    ("gradient_accumulation_steps", "tokens_per_batch bounds the memory"),
    ("use_vllm", "Say backend='vllm'."),
    ("peft_config", "Say lora_rank=16."),
]


def refused(where: str, name: str) -> str:
    given: dict[str, Any] = {name: 3}
    fit: Any = agl.Trainer(algorithm=agl.GRPO(model="calc")).fit
    called: Any = agl.Trainer if where == "Trainer" else functools.partial(fit, lambda task, llm: 1.0, [1])
    with pytest.raises(ConfigError) as raised:
        called(**given)
    return str(raised.value)


@pytest.mark.parametrize("where", ["Trainer", "fit"])
@pytest.mark.parametrize(("name", "words", "ours"), GIVEN)
def test_a_setting_of_the_algorithm(where: str, name: str, words: str, ours: str) -> None:
    said = refused(where, name)
    assert words in said
    assert f"of the algorithm: Trainer(algorithm=GRPO(model=…, {ours}=…))." in said


@pytest.mark.parametrize("where", ["Trainer", "fit"])
@pytest.mark.parametrize(("name", "words"), OTHERS)
def test_a_setting_of_another_library(where: str, name: str, words: str) -> None:
    assert words in refused(where, name)


FILES = [
    ("a.csv", b"", "holds no tasks."),
    ("a.csv", b"\xef\xbb\xbf", "holds no tasks."),
    ("a.json", b"", "holds no tasks."),
    ("a.csv", b"PK\x03\x04\x14\x00", "is a zip archive or an Excel sheet"),
    ("a.jsonl", gzip.compress(b"1\n"), "is compressed by gzip"),
    ("a.json", b"PAR1....", "let its name end in .parquet"),
    ("a.jsonl", b"\n<!DOCTYPE html><html>", "is a web page, not the data"),
    ("a.jsonl", b'{"q": 1,}\n', "line 1 is not JSON"),
    ("a.jsonl", b'{"q": [1, 2,]}\n', "JSON has no comma before a closing bracket"),
    ("a.json", b'{"question": ["a", "b"], "answer": ["c", "d"]}', "holds a dict of lists"),
]


@pytest.mark.parametrize(("name", "content", "words"), FILES)
def test_a_file_of_another_kind(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError) as raised:
        load_tasks(tmp_path / name)
    assert words in str(raised.value)


def test_white_space_in_front_is_no_lack(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(" " * 2000 + "[1, 2]")
    assert load_tasks(tmp_path / "a.json") == [1, 2]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("AGL_DEBG", "Did you mean AGL_DEBUG?"),
        ("AGENTLIGHTNING_DEBUG", "Did you mean AGL_DEBUG?"),
        ("AGENT_LIGHTNING_STORE_KEYS", "Did you mean AGL_STORE_KEY?"),
        ("AGENTLIGHTNING_MODEL", "give --model, or the same in the script."),
        ("AGENTLIGHTNING_OF_MY_OWN", ""),
        ("AGL_CACHE", ""),
    ],
)
def test_a_variable_that_nothing_reads_is_named_once_by_a_script(tmp_path: Path, name: str, words: str) -> None:
    text = "for _ in (1, 2):\n    agl.Trainer(algorithm=agl.Baseline()).fit(agl.rollout(lambda task: 1.0), [1])\n"
    done = script(tmp_path, text, **{name: str(tmp_path)})
    assert done.returncode == 0, done.stderr
    said = " ".join((done.stdout + done.stderr).split())
    assert said.count(f"{name} is set, and nothing reads it") == (1 if words else 0), said
    assert words in said
