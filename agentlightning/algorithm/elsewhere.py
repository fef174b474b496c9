"""Settings that people look for in an algorithm, some by another library's names, and where they belong here."""

from __future__ import annotations

_BY_THE_AGENT = "The reward comes from the agent: let it return a number, or call agl.emit_reward(…)."
_GIVEN_TO_FIT = "Agent and tasks are given to the trainer: Trainer(algorithm=…).fit(agent, tasks, val_dataset=others)."
_OF_THE_TRAINER = "It is a setting of the trainer: Trainer(algorithm=…, {}=…)."

REWARD = dict.fromkeys(
    ("reward_fn", "reward_func", "reward_funcs", "reward_function", "reward_model", "rubric", "grader", "judge"),
    _BY_THE_AGENT,
)
"""How rollouts are rewarded."""
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
    "output_dir": _OF_THE_TRAINER.format("run_dir"),
    "report_to": "Where metrics go is a setting of the trainer: Trainer(algorithm=…, sinks=[WandbSink(…)]).",
}
"""What a trainer is given, and not an algorithm."""
OF_TRAINING = {
    **OF_THE_TRAINER,
    **dict.fromkeys(
        ("tokenizer", "processing_class"),
        "The tokenizer is the model's own; renderer=… chooses how messages become tokens.",
    ),
    **dict.fromkeys(
        ("args", "config", "cfg", "settings", "params", "kwargs", "training_args"),
        "Each setting is an argument of its own: GRPO(model=…, learning_rate=…).",
    ),
    "use_vllm": "Say backend='vllm'.",
    **dict.fromkeys(("bf16", "fp16", "half"), "Say dtype='bfloat16'."),
    **dict.fromkeys(("use_lora", "peft_config", "use_peft"), "Say lora_rank=16."),
    **dict.fromkeys(
        ("load_in_4bit", "load_in_8bit", "quantization", "quantization_config"),
        "Models are not quantised here: what takes least memory is lora_rank=16 with dtype='bfloat16'.",
    ),
    "gradient_accumulation_steps": (
        "A step learns from tasks_per_step × group_size rollouts, however many; tokens_per_batch bounds the memory of "
        "one pass."
    ),
    **dict.fromkeys(
        ("gpus", "num_gpus", "n_gpus", "cuda", "use_gpu", "use_cpu"),
        "A GPU is taken where there is one: device='cuda:1' takes another, device='cpu' none; ranks=2 spreads the "
        "learner over two.",
    ),
    **dict.fromkeys(
        ("max_prompt_length", "max_completion_length", "max_response_length", "max_prompt_len", "max_response_len"),
        "max_context bounds prompt and response together; the agent says max_tokens in its calls.",
    ),
    **dict.fromkeys(("optimizer", "optim"), "It is AdamW, with learning_rate and weight_decay."),
    **dict.fromkeys(("logging_steps", "log_every"), "Every step is written to metrics.jsonl and printed."),
}
"""What a training algorithm is not given."""
