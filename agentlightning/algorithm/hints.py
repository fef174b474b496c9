"""Settings that people look for in an algorithm or a trainer, some by another library's names, with where they belong
here (`OF_TRAINING`, `OF_THE_TRAINER`), or that there is nothing of the kind.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from agentlightning.arguments import Hints
from agentlightning.other_names import OTHER_LIBRARIES_NAMES

_BY_THE_AGENT = "The reward comes from the agent: let it return a number, or call agl.emit_reward(…)."
_GIVEN_TO_FIT = "Agent and tasks are given to the trainer: Trainer(algorithm=…).fit(agent, tasks, val_dataset=others)."
_OF_THE_TRAINER = "It is a setting of the trainer: Trainer(algorithm=…, {}=…)."

REWARD = dict.fromkeys(
    ("reward_fn", "reward_func", "reward_funcs", "reward_function", "reward_model", "rubric", "grader", "judge"),
    _BY_THE_AGENT,
)
"""How rollouts are rewarded."""
OF_NAMES = {
    **dict.fromkeys(
        ("run_name", "name", "exp_name", "experiment_name", "project", "project_name", "experiment", "wandb_run_name"),
        "A run is named by its folder, Trainer(run_dir='runs/name'); a tracker's project is its sink's: "
        "Trainer(sinks=[WandbSink(project=…)]).",
    ),
    **dict.fromkeys(
        ("timeout", "timeout_seconds", "rollout_timeout", "max_time"),
        "A rollout ends by GRPO(rollout_config=RolloutConfig(timeout_seconds=600)); in a terminal --timeout 600.",
    ),
}
OF_HOOKS = {
    "callbacks": "Say Trainer(hooks=[Mine()]), whose class Mine is a subclass of agl.Hook.",
    **dict.fromkeys(
        ("verbose", "quiet", "silent", "progress_bar", "show_progress", "disable_tqdm", "verbosity"),
        "A run prints nothing with Trainer(console=agl.metrics.SilentConsole()).",
    ),
}
TRACKERS = dict.fromkeys(
    (
        *("report_to", "logger", "loggers", "log_with", "log_to", "wandb", "use_wandb", "wandb_project", "tensorboard"),
        *("wandb_entity", "mlflow", "tracker", "trackers", "log", "logging"),
        *(
            "log_every",
            "logging_steps",
            "log_steps",
            "log_interval",
            "tracking_uri",
            "mlflow_tracking_uri",
            "use_mlflow",
        ),
    ),
    "Where metrics go is a setting of the trainer: Trainer(algorithm=…, sinks=['wandb']), or sinks=[WandbSink(…)].",
)
"""How other trainers call what records their metrics."""
OF_THE_TRAINER = {
    **REWARD,
    "models": "Models that agents ask besides the policy are the trainer's: Trainer(algorithm=…, models={'judge': …}).",
    **dict.fromkeys(
        ("agent", "tasks", "dataset", "train_dataset", "val_dataset", "val_tasks", "eval_dataset"), _GIVEN_TO_FIT
    ),
    **{
        name: _OF_THE_TRAINER.format(name)
        for name in (
            *("run_dir", "resume", "store", "tracer", "hooks", "port", "console", "sinks"),
            *("n_runners", "concurrency", "strategy"),
        )
    },
    **{
        name: _OF_THE_TRAINER.format(ours)
        for name, ours in OTHER_LIBRARIES_NAMES.items()
        if ours in ("run_dir", "resume", "n_runners")
    },
    **dict.fromkeys(("num_workers", "n_agents", "num_runners"), _OF_THE_TRAINER.format("n_runners")),
    **TRACKERS,
    **OF_NAMES,
    **OF_HOOKS,
}
"""What a trainer is given, and not an algorithm."""
_OF_BATCHES = (
    "A step learns from tasks_per_step × group_size rollouts, however many; tokens_per_batch bounds the memory of one "
    "pass."
)
_OF_THE_ENGINE = (
    "The engine is said by backend='vllm', and its options by backend_options={…}, whose args are arguments of vllm "
    "serve (docs/vllm.md)."
)
_NOT_CHOSEN = (
    "Kernels, packing and padding are not chosen here: leave it out. tokens_per_batch bounds the memory of one pass."
)
_OF_MESSAGES = (
    "Messages become tokens as the model's chat template says (renderer=… chooses another way), and what the model "
    "wrote is learned, not what it read."
)
_OF_TASKS = (
    "Tasks are a list or a file, given to the trainer: Trainer(algorithm=…).fit(agent, tasks, val_dataset=others). "
    "Each goes to the agent as it is; seed decides the order."
)
_OF_VALIDATION = (
    "Validated are the tasks of fit(agent, tasks, val_dataset=others), every val_every steps and val_repeats times "
    "each; the best checkpoint is kept."
)
_OF_CHECKPOINTS = (
    "A checkpoint is written every save_every steps, and the last keep_checkpoints stay. Trainer(resume='runs/NAME', "
    "…) goes on; agl export RUN writes the model to a folder or to the Hugging Face Hub."
)
_OF_METRICS = (
    "Every step is in metrics.jsonl, and every rollout in the store (agl watch RUN, agl show RUN); "
    "Trainer(sinks=['wandb'], …) sends metrics on."
)
_BY_THE_LOOP = (
    "The agent is a loop of its own: it calls the model and its tools as often as it likes; max_calls bounds it."
)
KINDS = (
    (
        r"fast_dev_run|overfit_batches|dry_run|smoke_test|debug|barebones|num_sanity_val_steps",
        "Trainer(…).dev(agent, tasks[:4]) tries the agent and trains nothing; steps=1 trains one step.",
    ),
    (
        r"profilers?|detect_anomaly|profile_.*|trace_.*|enable_trace|memory_profil.*",
        "backend='inprocess' computes in this process, where a profiler or a debugger sees it.",
    ),
    (r"datamodule|(train|val|test|predict|eval)?_?data_?loaders?.*|data_collator|collate_fn", _OF_TASKS),
    (
        r".*(load_in_|quant|(^|_)qat_|4bit|8bit|nf4|fp8|float8).*",
        "Models are not quantised here: what takes least memory is lora_rank=16 with dtype='bfloat16'.",
    ),
    (
        r"(v?llm|sglang|engine)_.*|init_args|enforce_eager|free_cache_engine|.*prefix_cach.*|.*(sleep_mode|"
        r"enable_sleep).*|swap_space|max_num_(seqs|batched_tokens)|.*kv_cache.*|max_lora_rank|colocate.*|.*standby|"
        r"inference_.*|infer_.*|weight_(broadcast|sync|update).*",
        _OF_THE_ENGINE,
    ),
    (
        r".*(service|sampling|training|openai|inference|rest)_client|base_url|api_base|api_key|.*_(base_url|api_key)|"
        r"host|url",
        "The model is served here, and each rollout is told where: llm.endpoint. Other providers are the trainer's: "
        "Trainer(models={'judge': agl.Provider(base_url=…)}).",
    ),
    (
        r"(critic|value|vf|gae)_.*|.*_critic.*|whiten_.*",
        "A critic is PPO's, with lam and critic_warmup: Trainer(algorithm=PPO(model=…)).",
    ),
    (
        r".*(async|off_policy|staleness|stream_minibatch).*",
        "max_staleness=1 lets sampling run ahead of learning; in_flight='continue' keeps responses across new weights.",
    ),
    (
        r".*(importance|(^|_)tis(_|$)|mask_(high|low)|rollout_is).*",
        "Tokens of older weights are weighed by correction, correction_cap and correction_floor; loss='gspo' takes "
        "one ratio for a whole sequence.",
    ),
    (
        r".*(difficult|_threshold|oversampl|filter|constant_reward|zero_std|easy_|hard_|reject).*",
        "dynamic_sampling=3 replaces groups with equal rewards by new tasks; curriculum='learnability' draws tasks by "
        "their rewards.",
    ),
    (
        r".*(truncat|overlong|length_penalty).*",
        "outcome_use={'truncated': 'mask'} leaves truncated rollouts out; overlong_tokens and overlong_margin punish "
        "long ones; cut_long_prompts=True shortens prompts.",
    ),
    (
        r"(repetition|presence|frequency)_penalty|.*sampling(_params|_args|_kwargs)?|generation_(kwargs|config|args)|"
        r"stop_.*|num_beams|do_sample|ignore_eos|logit_bias|min_(new_)?tokens|bad_words|.*_processors?|logprobs",
        "Of sampling there are temperature, top_p, top_k and min_p. The rest is the agent's: it says so in its "
        "requests.",
    ),
    (
        r"(ref|reference)_.*|.*sync_ref.*|.*_ref(_model)?",
        "The reference of kl_coef is the model that the run began with; reference_every and reference_share let it "
        "follow.",
    ),
    (
        r"(.*_)?kl(_.*)?",
        "Of the KL divergence there are kl_coef, kl_in='loss' or 'reward', kl_estimator and kl_target; max_kl limits "
        "an update.",
    ),
    (
        r".*clip.*|delta",
        "Ratios are clipped by clip_low and clip_high, and in ways of their own by loss='dual_clip' or 'cispo'; "
        "gradients by max_grad_norm.",
    ),
    (r".*(reward|rubric|verifier|ruler|judge|scorer).*|rm_.*|remote_rm_url", _BY_THE_AGENT),
    (
        r"(ppo|grpo|dpo|pref|simpo|orpo|kto|cpo|sft|rl|trl|rlhf|stage|rl_type|do_train|do_rl|algo_name|"
        r"finetuning_type)(_.*)?",
        "What is learned, and how, is said by the algorithm's class: GRPO, PPO, RLOO, DAPO, SFT, DPO and others, each "
        "with the same settings.",
    ),
    (
        r"(lora|q?lora|peft|adapter|dora|relora|loftq|oft|ia3)_?.*|use_(rs|d|r)lora|use_[rd]ora|modules_to_save|"
        r".*target_(modules|linear|layers|param.*)|layers_.*|pissa.*|bias|(un)?fr(ee|o)zen?.*|finetune_.*|train_(mlp|"
        r"attn|unembed|embed).*|"
        r"full_finetuning|"
        r"num_layers_unfrozen|init_lora_weights",
        "An adapter is lora_rank=16, of all linear layers with alpha 32; without it all weights are trained. "
        "model='runs/NAME' goes on with one that is trained.",
    ),
    (
        r"(bf16|fp16|fp32|tf32|amp|pure_bf16|float16|float32|mixed_precision|autocast|half_precision)_?.*|.*_dtype",
        "Numbers are said by dtype='bfloat16' or 'float32'.",
    ),
    (
        r"(torch_?)?(compile|dynamo).*|deepcompile|use_cache|.*(attn|overlap|log_?probs?).*|.*(flash|xformers|liger|"
        r"unsloth|remove_padding|use_fused|cuda_graph|packing|"
        r"kernel).*|"
        r"att(entio)?n(_.*)?|jit_.*|use_dynamic_bsz|.*pad(ding)?(_.*)?|group_by_length|(cudnn_)?bench(mark)?|"
        r"inference_mode|"
        r"impl|ac|.*logprobs?_.*|torchtune_.*|.*chunk.*",
        _NOT_CHOSEN,
    ),
    (
        r".*_?micro_?batch.*|.*accumul.*|.*batch(_size|es)?(_.*)?|num_substeps|steps_per_generation|groups_per_.*|"
        r".*_bsz(_.*)?",
        _OF_BATCHES,
    ),
    (
        r"(ddp|fsdp2?|hsdp|dp|tp|pp|cp|sp|ep|dist|distributed|megatron|deepspeed|ds3?|zero|tpu|xla|nccl|gloo|ray|"
        r"ulysses|"
        r"accelerate|ulysses_sequence|expert|pipeline|context)_.*|.*_parallel(_size|ism)?|.*_offload|sync_batchnorm|"
        r"local_rank|.*(mps|xpu|cuda|accelerator|parallel|ring_).*|.*offload.*|.*(gpu|tpu|nodes|gpus_|replicate).*|"
        r".*distributed.*|.*_devices|amp_backend|balance_.*|torchrun|"
        r"plugins",
        "Where it computes is said by device, ranks, tensor_parallel and offload=True; several machines by "
        "backend='ray' (docs/ray.md).",
    ),
    (r"(hf_|hub_|use_auth_)?token|.*hf_token", "Hugging Face's key comes from the environment, HF_TOKEN."),
    (
        r"(model|tokenizer|processor)_.*|trust_remote_code|revision|device_map|.*rope.*|special_tokens|.*tokenizer.*|"
        r"cache_.*|.*_model_name|low_cpu_mem_usage|resize_.*|use_fast|local_files_only|max_position.*|tokenized_path",
        "A model is loaded as its own files say: model='FOLDER', or a Hugging Face id. To change them, edit "
        "config.json in a copy of the folder.",
    ),
    (
        r".*chat_template.*|(eos|bos|pad)_token|template|.*_template|.*thinking.*|mask_(history|inputs|prompt)|"
        r"train_on_.*|.*_only_loss",
        _OF_MESSAGES,
    ),
    (
        r"env(ironment)?s?(_.*)?|orchestrator.*",
        "An environment brings its agent and tasks: fit(*load_environment('gym:Taxi-v4')); in a terminal --env "
        "gym:Taxi-v4.",
    ),
    (
        r"multi_turn.*|.*(assistant_turns|tool_call|trajector).*|.*max_turns?.*|max_(iterations|iters|tool_calls|"
        r"agent_steps)|tool_.*|tools?_config|"
        r"interaction.*|agent_.*|"
        r"gather_trajectory.*",
        _BY_THE_LOOP,
    ),
    (
        r"(eval|evals|evaluation|evaluator|val|validation|test|do_eval|do_predict|do_test|predict)s?_.*|eval|limit_.*|"
        r"per_device_eval.*|.*_eval(s|uat.*)?|.*eval_.*|compute_metrics|preprocess_logits.*|include_.*|metric_for_.*|"
        r"greater_is_better|load_best.*|monitor",
        _OF_VALIDATION,
    ),
    (
        r"(save|saves|ckpt|checkpoint|checkpointing|resume|load_checkpoint|load|auto_resume|rolling|restore)s?_.*|ckpt|"
        r".*checkpoint(ing|s)?(_.*)?|.*(ckpt|bucket|weights_save).*|overwrite_.*|ignore_data_skip|push_to_hub.*|"
        r"hub_.*|interval|keep|initial_step",
        _OF_CHECKPOINTS,
    ),
    (
        r"(log|logs|logging|wandb|mlflow|comet|swanlab|tensorboard|trackio|neptune|plot|report|print|pbar|tracking|"
        r"tb)_.*|"
        r".*_to_(log|print)|.*(_log|autolog|tensorboard|swanlab|chart|_export)(_.*)?|log_completions|.*progress.*|"
        r".*_summary|.*_watch",
        _OF_METRICS,
    ),
    (
        r"(data|dataset|datasets|train|training|prompt|input|label|output|text|answer|response|image|column|"
        r"message)s?_(.*_)?(files?|data|set|sets|key|keys|column|columns|field|path|paths|dir|name|names|size|split|"
        r"num_proc|builder|info)|datasets?(_.*)?|dataloader_.*|.*num_(proc|workers)|max_(train_|eval_)?samples|"
        r"shuffle.*|.*columns|overwrite_cache|mix.*|interleave.*|streaming|.*_split|.*num_workers|buffer(_.*)?",
        _OF_TASKS,
    ),
    (
        r"(adam|adamw|optim|optimizer|muon|adafactor|lion|sgd|betas?\d?|galore|apollo|badam|lr|learning_rate|decay|"
        r"cosine|wsd|scheduler|momentum|nesterov|auto_lr)s?(_.*)?|.*label_smoothing.*|neftune.*|l2|.*_lr|.*(_|"
        r"^)decay(_.*)?|.*learning_rate.*|max_norm|.*weight_decay.*",
        "The optimiser is AdamW: learning_rate, schedule, warmup_steps, weight_decay, adam_beta1, adam_beta2, "
        "max_grad_norm.",
    ),
    (
        r"loss_.*|.*_loss_type|.*_loss",
        "A loss is a name, such as loss='ppo_clip', or your own function; clip_low, clip_high and kl_coef set it.",
    ),
    (
        r".*(advantage|std_norm|objective|weighting).*",
        "How rewards are compared is said by advantage and credit, how parts of a reward count by reward_weights.",
    ),
    (r".*dropout.*", "Nothing is dropped out in training: leave it out."),
    (
        r".*(memory|empty_cache).*|auto_(find|scale)_batch.*",
        "Memory is bounded by tokens_per_batch, gradient_checkpointing, offload and max_concurrency (docs/memory.md).",
    ),
    (r".*entropy.*", "Entropy is rewarded by entropy_coef; loss='clip_cov' or 'kl_cov' keep it up otherwise."),
)
"""What there is in place of settings of other libraries, by patterns of whole names, the first that fits: for names
that no setting here is near to."""


OF_TRAINING = Hints(
    KINDS,
    {
        **OF_THE_TRAINER,
        **dict.fromkeys(
            ("tokenizer", "processing_class"),
            "The tokenizer is the model's own; renderer=… chooses how messages become tokens.",
        ),
        **dict.fromkeys(
            ("args", "config", "cfg", "settings", "params", "kwargs", "training_args"),
            "Each setting is an argument of its own: GRPO(model=…, learning_rate=…).",
        ),
        **dict.fromkeys(
            ("group_reward", "group_reward_fn"),
            "It is the agent's: @agl.rollout(group_reward=…), or a method group_reward of a LitAgent.",
        ),
        **dict.fromkeys(("judge", "reward_model", "llm_judge"), "Say group_judge=agl.GroupJudge(base_url=…, model=…)."),
        **dict.fromkeys(("use_vllm", "fast_inference"), "Say backend='vllm'."),
        **dict.fromkeys(
            ("gpu_memory_utilization", "vllm_gpu_memory_utilization", "vllm_mode", "vllm_config"),
            "Of vLLM there are backend='vllm', backend_options={'gpu_memory_utilization': 0.45} (docs/vllm.md).",
        ),
        **dict.fromkeys(
            ("tensor_parallel_size", "tensor_model_parallel_size", "vllm_tensor_parallel_size", "tp"),
            "tensor_parallel=2 splits the learner's layers; of vLLM: backend_options={'tensor_parallel_size': 2}.",
        ),
        **dict.fromkeys(
            ("zero_stage", "deepspeed", "fsdp", "fsdp_config", "fsdp_size", "param_offload", "optimizer_offload"),
            "ranks=2 spreads the learner over two GPUs, offload=True keeps the optimizer in the machine's memory.",
        ),
        **dict.fromkeys(
            ("early_stopping", "early_stop", "early_stopping_patience", "patience", "target_reward"),
            "Training takes the steps it is given, or until Ctrl-C; keep_checkpoints keeps the best validated, too.",
        ),
        **dict.fromkeys(("bf16", "fp16", "half"), "Say dtype='bfloat16'."),
        **dict.fromkeys(("use_lora", "peft_config", "use_peft"), "Say lora_rank=16."),
        **dict.fromkeys(
            ("lora_alpha", "lora_dropout", "target_modules", "lora_target_modules", "lora_target"),
            "An adapter has alpha 32, no dropout and all linear layers. lora_rank is its size; to learn more or less "
            "in a step, change learning_rate.",
        ),
        "gradient_accumulation_steps": _OF_BATCHES,
        **dict.fromkeys(
            (
                *("gpus", "num_gpus", "n_gpus", "cuda", "use_gpu", "use_cpu", "n_gpus_per_node", "nproc_per_node"),
                *("devices", "accelerator", "world_size", "num_processes", "nnodes", "num_nodes"),
            ),
            "A GPU is taken where there is one: device='cuda:1' takes another, device='cpu' none; ranks=2 spreads the "
            "learner over two.",
        ),
        **dict.fromkeys(
            (
                *("max_prompt_length", "max_completion_length", "max_response_length", "max_prompt_len"),
                *("max_response_len", "prompt_max_len", "generate_max_len", "response_length", "prompt_length"),
            ),
            "max_context bounds prompt and response together; the agent says max_tokens in its calls.",
        ),
        **dict.fromkeys(
            ("actor_rollout_ref", "actor", "rollout", "trainer", "data", "algorithm"),
            "These are groups of verl's configuration, which  agl.VERL(config)  reads whole. Here each setting stands "
            "alone: GRPO(model=…, group_size=8, tasks_per_step=16, learning_rate=…).",
        ),
        **dict.fromkeys(
            ("system_prompt", "prompt_template", "tools", "stop", "stop_strings", "stop_sequences"),
            "That is the agent's: it says so in its requests to the model.",
        ),
        **dict.fromkeys(("optimizer", "optim"), "It is AdamW, with learning_rate and weight_decay."),
        **dict.fromkeys(("logging_steps", "log_every"), "Every step is written to metrics.jsonl and printed."),
    },
)
"""What a training algorithm is not given."""


def of_the_algorithm(settings: Collection[str], others: Collection[str]) -> Mapping[str, str]:
    """What is said of an algorithm's setting that a trainer is given, by its name here and by those of other libraries.
    `others`: names in `OF_TRAINING` to be said, too."""
    names = {theirs: ours for theirs, ours in OTHER_LIBRARIES_NAMES.items() if ours in settings}
    sentences = {theirs: f"{theirs} is called {ours} here, a setting" for theirs, ours in names.items()}
    sentences |= {name: f"{name} is a setting" for name in settings}
    shown = {name: ours if (ours := names.get(name, name)) == "model" else f"model=…, {ours}" for name in sentences}
    of = "of the algorithm: Trainer(algorithm=GRPO("
    return {name: f"{words} {of}{shown[name]}=…))." for name, words in sentences.items()} | {
        name: OF_TRAINING[name] for name in others if name not in settings
    }
