"""`agl plan`, as it is typed."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner, Result

from agentlightning.cli.app import app
from agentlightning.errors import ConfigError


def plan(*arguments: str) -> Result:
    result = CliRunner(env={"COLUMNS": "160"}).invoke(app, ["plan", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_a_plan_that_fits_ends_with_what_to_write() -> None:
    result = plan("--model", "4B", "--gpus", "3xH100", "--lora-rank", "16", "--tokens-per-batch", "4096")
    assert result.exit_code == 0, result.stdout
    for words in ("4.0 billion parameters", "LoRA of rank 16 in bfloat16", "A step takes about", "backend='vllm'"):
        assert words in result.stdout
    assert "'devices': ['1', '2'], 'gpu_memory_utilization': 0.9, 'replicas': 2" in result.stdout


def test_one_that_does_not_says_what_to_change() -> None:
    result = plan("--model", "8B", "--gpus", "H100")
    assert result.exit_code == 1
    assert "That does not fit" in result.stdout
    assert "offload=True, gradient_checkpointing=True, tokens_per_batch=4096: " in result.stdout
    assert "lora_rank=16, gradient_checkpointing=True, tokens_per_batch=4096: " in result.stdout


def test_an_optimiser_on_the_host_is_for_a_gpu() -> None:
    result = plan("--model", "4B", "--gpus", "H100", "--offload", "--context", "1024", "--tokens-per-batch", "2048")
    assert result.exit_code == 0, result.stdout
    assert "offload=True" in result.stdout
    with pytest.raises(ConfigError, match="--offload takes the optimiser from a GPU's memory"):
        plan("--model", "calc", "--gpus", "cpu", "--offload")


def test_the_settings_that_it_names_are_settings() -> None:
    from agentlightning import GRPO

    found = json.loads(plan("--model", "calc", "--gpus", "2xL4", "--lora-rank", "4", "--json").stdout)
    assert found["layout"]["fits"]
    assert found["job"]["context"] == 1024, "the longest that the model can do"
    assert sum(found["layout"]["memory"]["learner"].values()) < found["layout"]["limits"]["learner"]
    GRPO(model="calc", **found["settings"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--model", "calc", "--gpus", "abacus"), "Known are"),
        (("--model", "calc", "--gpus", "cpu", "--context", "5000"), "contexts of 1024 tokens"),
        (("--model", "calc", "--gpus", "cpu", "--context", "100", "--response", "100"), "less than its context"),
        (("--model", "calc", "--gpus", "cpu", "--dtype", "int8"), "--dtype"),
    ],
)
def test_what_means_nothing_is_refused(arguments: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        plan(*arguments)
