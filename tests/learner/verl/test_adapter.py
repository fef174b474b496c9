"""An adapter in verl's words, and those that it has none for."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentlightning.errors import ConfigError
from agentlightning.learner.policy import LoraSpec, Policy, load_policy, peft_calls_deprecated_names
from agentlightning.learner.verl.group import adapter_of, base_of


def test_an_adapter_is_told_by_what_it_is(tiny_model_dir: Path, tmp_path: Path) -> None:
    policy = load_policy(tiny_model_dir, device="cpu", lora=LoraSpec(rank=4, alpha=8, target_modules=["q_proj"]))
    expected = {"lora_rank": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    assert (adapter_of(policy), base_of(policy)) == (expected, str(tiny_model_dir))
    policy.export(tmp_path / "saved")
    again = load_policy(tmp_path / "saved", device="cpu")
    assert (adapter_of(again), base_of(again)) == (expected, str(tiny_model_dir))


def test_without_an_adapter_nothing_is_told(policy: Policy) -> None:
    assert adapter_of(policy) == {}


def test_an_adapter_of_another_kind_is_refused(tiny_model_dir: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["q_proj"], use_rslora=True, lora_dropout=0.1, task_type="CAUSAL_LM")
    model = load_policy(tiny_model_dir, device="cpu").model
    with peft_calls_deprecated_names():
        made = get_peft_model(model, config)
    made.save_pretrained(str(tmp_path))
    load_policy(tiny_model_dir, device="cpu").tokenizer.save_pretrained(str(tmp_path))
    with pytest.raises(ConfigError, match=r"is one with use_rslora=True\. .*learner='own'"):
        adapter_of(load_policy(tmp_path, device="cpu"))
