"""Every key of VERL's configuration that is taken has an effect, is listed as without one, or is refused: all rows."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.compat.verl_keys import (
    CUT_LAYERS,
    ENGINE,
    MAPPED,
    NO_MEANING,
    OFFLOADS,
    REFUSED,
    SHARE,
    SHARED_ROWS,
    TOGETHER,
    flatten,
    understand,
)
from agentlightning.compat.verl_trainer import OF_THE_TRAINER, trainer_defaults
from tests.compat.test_verl import CONFIG

PLACED = {"trainer.nnodes": 2, "trainer.n_gpus_per_node": 4, **dict.fromkeys(OFFLOADS, False)}
ROLLOUT, ACTOR = "actor_rollout_ref.rollout.", "actor_rollout_ref.actor."
EXAMPLES: dict[str, tuple[Any, dict[str, Any], int]] = {
    "data.train_batch_size": (16, {}, 0),
    "data.truncation": ("error", {}, 0),
    "data.seed": (7, {}, 0),
    "data.max_prompt_length": (100, {}, 0),
    "data.max_response_length": (100, {}, 0),
    ROLLOUT + "n": (8, {}, 0),
    ROLLOUT + "temperature": (0.5, {}, 0),
    ROLLOUT + "top_p": (0.9, {}, 0),
    ROLLOUT + "top_k": (20, {}, 0),
    ROLLOUT + "max_num_seqs": (5, {}, 0),
    ROLLOUT + "max_model_len": (700, {}, 0),
    ROLLOUT + "val_kwargs.temperature": (0.3, {}, 0),
    ROLLOUT + "val_kwargs.n": (3, {}, 0),
    ROLLOUT + "val_kwargs.do_sample": (False, {}, 0),
    ENGINE: ("sglang", dict.fromkeys(OFFLOADS, False), 1),
    SHARE: (0.3, dict.fromkeys(OFFLOADS, False), 1),
    ROLLOUT + "tensor_model_parallel_size": (2, PLACED, 0),
    ACTOR + "ppo_mini_batch_size": (8, {}, 0),
    ACTOR + "ppo_epochs": (2, {}, 0),
    ACTOR + "ppo_max_token_len_per_gpu": (5000, {}, 0),
    ACTOR + "optim.lr": (1e-4, {}, 0),
    ACTOR + "optim.lr_scheduler_type": ("cosine", {}, 0),
    ACTOR + "optim.warmup_style": ("linear", {}, 0),
    ACTOR + "optim.lr_warmup_steps": (5, {}, 0),
    ACTOR + "optim.lr_warmup_steps_ratio": (0.5, {"trainer.total_training_steps": 40}, 0),
    ACTOR + "optim.weight_decay": (0.3, {}, 0),
    ACTOR + "grad_clip": (0.7, {}, 0),
    ACTOR + "entropy_coeff": (0.01, {}, 0),
    ACTOR + "use_kl_loss": (True, {ACTOR + "kl_loss_coef": 0.02}, 0),
    ACTOR + "kl_loss_coef": (0.02, {ACTOR + "use_kl_loss": True}, 0),
    ACTOR + "kl_loss_type": ("mse", {ACTOR + "use_kl_loss": True, ACTOR + "kl_loss_coef": 0.02}, 0),
    ACTOR + "clip_ratio": (0.1, {ACTOR + "clip_ratio_low": None, ACTOR + "clip_ratio_high": None}, 0),
    ACTOR + "clip_ratio_low": (0.1, {}, 0),
    ACTOR + "clip_ratio_high": (0.4, {}, 0),
    ACTOR + "loss_agg_mode": ("seq-mean-token-mean", {}, 0),
    ACTOR + "policy_loss.loss_mode": ("gspo", {}, 0),
    SHARED_ROWS: (2, PLACED, 0),
    CUT_LAYERS: (2, PLACED, 0),
    OFFLOADS[0]: (True, PLACED, 0),
    OFFLOADS[1]: (True, dict.fromkeys(OFFLOADS, False), 1),
    "actor_rollout_ref.model.path": ("echo", {}, 0),
    "actor_rollout_ref.model.lora_rank": (8, {}, 0),
    "actor_rollout_ref.model.enable_gradient_checkpointing": (False, {}, 0),
    "algorithm.adv_estimator": ("rloo", {}, 0),
    "algorithm.gamma": (0.9, {"algorithm.adv_estimator": "gae"}, 0),
    "algorithm.lam": (0.9, {"algorithm.adv_estimator": "gae"}, 0),
    "algorithm.norm_adv_by_std_in_grpo": (False, {}, 0),
    "algorithm.use_kl_in_reward": (True, {}, 0),
    "algorithm.kl_ctrl.kl_coef": (0.02, {"algorithm.use_kl_in_reward": True}, 0),
    "trainer.nnodes": (2, {}, 0),
    "trainer.n_gpus_per_node": (4, {}, 8),
    "trainer.total_epochs": (5, {}, 0),
    "trainer.total_training_steps": (9, {}, 0),
    "trainer.test_freq": (3, {}, 0),
    "trainer.val_before_train": (False, {}, 0),
    "trainer.save_freq": (3, {}, 0),
    "trainer.critic_warmup": (4, {"algorithm.adv_estimator": "gae"}, 0),
    "trainer.device": ("cpu", {}, 0),
    "trainer.max_actor_ckpt_to_keep": (3, {}, 0),
}
"""By key: a value that is not the configuration's or VERL's, what else has to be set, and how many GPUs there are."""
ONE_BOUND = ACTOR + "clip_ratio_c"
"""May have one value only where it matters."""
TRAINERS: dict[str, tuple[Any, Callable[[Any], Any], Any]] = {
    "trainer.logger": (["file"], lambda d: d.sinks, []),
    "trainer.project_name": ("mine", lambda d: d.name, "mine-calc_x"),
    "trainer.experiment_name": ("mine", lambda d: d.name, "AgentLightning-mine"),
    "trainer.default_local_dir": ("mine", lambda d: d.run_dir, Path("mine")),
    "trainer.resume_mode": ("resume_path", lambda d: d.resume, Path("there")),
    "trainer.resume_from_path": ("there", lambda d: d.resume, Path("there")),
    "agentlightning.port": (9998, lambda d: d.port, 9998),
}
"""Keys of the trainer: a value, where it arrives, and as what. Trackers have a test of their own."""


def test_each_key_has_a_test_of_its_effect() -> None:
    assert set(EXAMPLES) | set(TRAINERS) | {ONE_BOUND} == set(MAPPED) | set(TOGETHER)
    assert set(TRAINERS) == set(OF_THE_TRAINER)


@pytest.mark.parametrize("key", EXAMPLES)
def test_each_key_has_an_effect(key: str) -> None:
    """The algorithm is another with it, in a setting that the key names or belongs to."""
    value, besides, gpus = EXAMPLES[key]
    base = {k: v for k, v in (flatten(CONFIG) | besides).items() if v is not None}
    found = [understand(flat, lambda: gpus, lambda: gpus > 0) for flat in (base, base | {key: value})]
    before, after = (getattr(agl, meaning.algorithm)(**meaning.settings) for meaning in found)
    names = found[0].settings.keys() | found[1].settings.keys()
    changed_settings = {name for name in names if getattr(before, name) != getattr(after, name)}
    assert changed_settings, "it changes nothing"
    if key in MAPPED:
        assert MAPPED[key][0] in changed_settings
    assert key not in found[1].ignored or key == ENGINE


@pytest.mark.parametrize("key", TRAINERS)
def test_each_key_of_the_trainer_arrives(key: str) -> None:
    value, shown, wanted = TRAINERS[key]
    besides = {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": "there"} if "resume" in key else {}
    assert shown(trainer_defaults(flatten(CONFIG) | besides | {key: value})) == wanted


@pytest.mark.parametrize("key", REFUSED)
def test_a_key_with_one_value_is_refused_with_another(key: str) -> None:
    accepted, what_to_do = REFUSED[key]
    other = next(value for value in (True, "something", 0.25, ["x"], False) if not accepted(value))
    with pytest.raises(agl.ConfigError, match=re.escape(what_to_do)) as error:
        understand(flatten(CONFIG) | {key: other}, lambda: 0)
    assert key in str(error.value)


@pytest.mark.parametrize("key", NO_MEANING)
def test_a_key_without_a_meaning_is_listed_and_changes_nothing(key: str) -> None:
    base = flatten(CONFIG)
    with_it, without = (understand(flat, lambda: 0) for flat in (base | {key: None}, base))
    assert with_it.settings == without.settings
    assert key in with_it.ignored


@pytest.mark.parametrize("besides", [{}, {ACTOR + "use_kl_loss": True}, {"algorithm.use_kl_in_reward": True}])
def test_the_kind_of_a_divergence_that_counts_nowhere_is_listed(besides: dict[str, Any]) -> None:
    """Configurations of VERL give it beside use_kl_loss=False, beside a coefficient of 0, or with it in the reward."""
    meaning = understand(flatten(CONFIG) | besides | {ACTOR + "kl_loss_type": "mse"}, lambda: 0)
    assert ACTOR + "kl_loss_type" in meaning.ignored
    assert agl.GRPO(**meaning.settings).kl_in == "reward" or agl.GRPO(**meaning.settings).kl_coef == 0
