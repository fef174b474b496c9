"""Names of settings as other libraries have them, and slips of ours: the share that is answered with what there is."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.algorithm.hints import KINDS
from agentlightning.algorithm.records import names_of, settings_of
from agentlightning.errors import ConfigError
from tests.first_day.day import agl as command

OTHERS = {
    "trl": """
        vllm_server_host steps_per_generation mask_truncated_completions sync_ref_model log_completions
        use_liger_loss disable_dropout shuffle_dataset cache_implementation importance_sampling_level
        model_init_kwargs packing delta reward_processing_classes repetition_penalty num_generations beta
        epsilon_high max_completion_length
    """,
    "verl": """
        use_kl_in_reward norm_adv_by_std_in_grpo clip_ratio_c test_freq save_freq default_local_dir
        free_cache_engine ppo_mini_batch_size ppo_micro_batch_size_per_gpu use_remove_padding balance_batch
        prompt_key multi_turn rollout_n ulysses_sequence_parallel_size enforce_eager reward_manager use_dynamic_bsz
        critic_warmup_steps truncation
    """,
    "OpenRLHF": """
        colocate_all_models vllm_num_engines remote_rm_url input_key apply_chat_template flash_attn value_clip
        ref_num_nodes actor_num_gpus_per_node async_queue_size agent_func_path dynamic_filtering_reward_range
        prompt_data
    """,
    "unsloth": """
        use_rslora full_finetuning random_state rope_scaling trust_remote_code load_in_fp8 modules_to_save bias
        finetune_mlp_modules unsloth_vllm_standby device_map attn_implementation save_method float8_kv_cache
    """,
    "axolotl": """
        sample_packing val_set_size lora_target_linear wandb_watch neftune_noise_alpha xformers_attention tf32
        datasets special_tokens chat_template train_on_inputs group_by_length hub_model_id eval_batch_size
        saves_per_epoch
    """,
    "LLaMA-Factory": """
        stage finetuning_type template plot_loss pref_beta quantization_bit freeze_trainable_layers cutoff_len
        overwrite_output_dir ddp_timeout enable_thinking preprocessing_num_workers adapter_name_or_path val_size
        do_train
    """,
    "ART": """
        ruler engine_args peft_args gather_trajectory_groups inference_base_url training_dataset_size openai_client
        plot_tensors truncated_importance_sampling enable_sleep_mode logprob_calculation_chunk_size pbar_desc
    """,
    "prime-rl": """
        max_async_level oversampling_factor environment_ids easy_threshold online_difficulty_filtering ckpt bench
        inference_gpu_ids orchestrator rollouts_per_example token_mask_high async_barrier_timeout length_penalty
        dp_replicate
    """,
    "tinker-cookbook": """
        num_substeps loss_fn log_path remove_constant_reward_groups evaluator_builders dataset_builder
        service_client train_mlp adam_params infrequent_eval_every stream_minibatch_config groups_per_batch
        renderer_name
    """,
    "Lightning": """
        fast_dev_run profiler datamodule overfit_batches num_sanity_val_steps log_every_n_steps detect_anomaly
        accumulate_grad_batches enable_progress_bar sync_batchnorm limit_val_batches tpu_cores auto_lr_find
        enable_model_summary
    """,
    "transformers": """
        evaluation_strategy per_device_eval_batch_size dataloader_drop_last push_to_hub torch_compile adafactor
        load_best_model_at_end metric_for_best_model label_smoothing_factor ddp_find_unused_parameters
        save_safetensors logging_first_step remove_unused_columns data_collator hub_strategy optim_target_modules
        eval_on_start lr_scheduler_kwargs
    """,
}


def said_of(make: Callable[..., Any], name: str) -> str:
    with pytest.raises(ConfigError) as raised:
        make(**{name: 3})
    return str(raised.value)


def grpo(**given: Any) -> Any:
    return agl.GRPO(model="calc", **given)


@pytest.mark.parametrize("library", OTHERS)
def test_each_name_of_another_library_is_answered(library: str) -> None:
    unknown = {name: words for name in OTHERS[library].split() if "There are " in (words := said_of(grpo, name))}
    assert not unknown


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("fast_dev_run", ".dev(agent, tasks[:4])"),
        ("use_kl_in_reward", "Did you mean kl_in?"),
        ("local_rank", "device, ranks"),
        ("colocate_all_models", "backend_options"),
        ("datamodule", "val_dataset=others"),
        ("profiler", "backend='inprocess'"),
        ("do_train", "the algorithm's class"),
        ("shuffle", "seed decides the order"),
        ("sampling_params", "temperature, top_p, top_k and min_p"),
        ("default_local_dir", "Trainer(algorithm=…, run_dir=…)"),
        # none of these is in a table by its name
        ("vllm_enable_lora_v2", "backend_options"),
        ("wandb_run_group", "sinks=['wandb']"),
        ("fsdp_wrap_policy", "device, ranks"),
        ("eval_dataset_size", "val_every"),
        ("hub_private_repo", "agl export"),
        ("dataset_text_field", "Tasks are a list or a file"),
        ("torch_compile_mode", "not chosen here"),
    ],
)
def test_the_answer_is_of_its_kind(name: str, words: str) -> None:
    assert words in said_of(grpo, name)
    assert name in said_of(agl.Trainer, name)


def test_a_trainer_says_besides_whose_setting_it_is() -> None:
    words = said_of(agl.Trainer, "profiler")
    assert "backend='inprocess'" in words
    assert "Settings of training, such as model, learning_rate or steps, are the algorithm's" in words


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--fast-dev-run", "steps=1 trains one step"),
        ("--local-rank", "device, ranks"),
        ("--use-kl-in-reward", "--set kl_in=…"),
        ("--load-in-4bit", "not quantised"),
    ],
)
def test_an_option_of_another_library(option: str, words: str, tmp_path: Any) -> None:
    done = command(tmp_path, "train", "--agent", "a.py:b", "--tasks", "t.jsonl", option, "3")
    printed = " ".join(done.stderr.replace("│", " ").split())
    assert words in printed


def test_what_the_answers_name_exists() -> None:
    known = {*settings_of(agl.GRPO), *names_of(agl.GRPO), *inspect.signature(agl.Trainer).parameters, "base_url"}
    known |= {*inspect.signature(agl.Trainer.fit).parameters}
    sentences = [re.sub(r"'[^']*'", "''", words) for _, words in KINDS]  # without the values of settings
    named = {name for words in sentences for name in re.findall(r"\b([a-z_]+)=|\b([a-z]+_[a-z_]+)\b", words)}
    named = {one or other for one, other in named}
    assert named - known <= {"load_environment", "emit_reward"}  # functions


def slips(name: str) -> Iterator[str]:
    """How a setting is mistyped: each letter left out or doubled, each two exchanged, and other ways to join words."""
    yield from (name[:at] + name[at + 1 :] for at in range(1, len(name)))
    yield from (name[: at + 1] + name[at:] for at in range(len(name)))
    yield from (name[:at] + name[at + 1] + name[at] + name[at + 2 :] for at in range(len(name) - 1))
    first, *rest = name.split("_")
    yield from (first + "".join(map(str.title, rest)), name.replace("_", "-"), name.replace("_", ""))
    yield name[:-1] if name.endswith("s") else f"{name}s"


@pytest.mark.parametrize("make", [grpo, agl.Trainer, agl.RolloutConfig, agl.Provider], ids=lambda make: make.__name__)
def test_slips_of_every_setting_are_answered_with_it(make: Callable[..., Any]) -> None:
    kind = agl.GRPO if make is grpo else make
    known = {*inspect.signature(kind).parameters, *(names_of(agl.GRPO) if make is grpo else ())}
    tried = [(name, slip) for name in sorted(known) if len(name) > 3 for slip in slips(name) if slip not in known]
    right = [f"Did you mean {name}?" in said_of(make, slip) for name, slip in tried]
    assert sum(right) / len(right) >= 0.98
