"""Names that other libraries have and people look for here, and what to write instead. They lead nowhere."""

from __future__ import annotations

import re

_KNOWN = {
    **dict.fromkeys(
        ("train", "fit", "run", "finetune", "learn"),
        "It trains with Trainer(algorithm=GRPO(model=…)).fit(agent, tasks).",
    ),
    **dict.fromkeys(
        ("init", "login", "configure", "setup", "start"),
        "There is nothing to set up: make a Trainer(…) and call fit(agent, tasks).",
    ),
    **dict.fromkeys(
        ("Agent", "Environment", "Env", "Task", "Episode", "Trajectory", "Rubric", "reward", "reward_fn", "Reward"),
        "An agent is a function that does a task and returns its reward: @agl.rollout on def agent(task, llm). "
        "A task is any JSON value. Other people's environments are loaded: load_environment('gym:Taxi-v4').",
    ),
    **dict.fromkeys(
        ("algorithms", "algos", "trainers", "agents", "rewards", "envs", "environments", "core"),
        "The names are at the top: from agentlightning import GRPO, Trainer, rollout.",
    ),
    **dict.fromkeys(
        ("LightningModule", "LightningDataModule", "LightningTrainer"),
        "That is PyTorch Lightning's. This package trains agents: Trainer(algorithm=GRPO(model=…)).fit(agent, tasks).",
    ),
    **dict.fromkeys(
        ("evaluate", "eval", "test", "validate", "Evaluator", "benchmark"),
        "agl eval RUN compares models; Trainer(algorithm=Baseline(model=…)).fit(agent, tasks) measures one.",
    ),
    **dict.fromkeys(
        ("load", "load_model", "load_run", "open_run", "load_checkpoint", "from_pretrained", "resume", "load_policy"),
        "A run's model is named: GRPO(model='runs/NAME'); Trainer(resume='runs/NAME', algorithm=…).fit(…) goes on with "
        "it; metrics.read_metrics(Path('runs/NAME/metrics.jsonl')) gives its rows.",
    ),
    **dict.fromkeys(("seed", "set_seed", "seed_everything", "manual_seed"), "It is a setting: GRPO(model=…, seed=1)."),
    **dict.fromkeys(
        ("serve", "export", "generate", "chat", "show", "deploy", "plan", "push_to_hub"),
        "That is for a terminal:  agl serve RUN  answers over the OpenAI API,  agl export RUN --to FOLDER  writes the "
        "model,  agl --help  lists the others.",
    ),
    **dict.fromkeys(
        ("Tool", "tool", "Tools", "tools", "Message", "Messages", "Client"),
        "Tools, messages and clients are the agent's own: OpenAI(base_url=llm.endpoint, api_key=llm.api_key).",
    ),
    **dict.fromkeys(
        ("Store", "SQLiteStore", "MemoryStore"),
        "Stores are InMemoryLightningStore() and SqliteLightningStore('store.db'); a trainer makes its own.",
    ),
    **dict.fromkeys(
        ("callbacks", "Callback", "TrainerCallback", "BaseCallback", "Callbacks", "hooks", "callback"),
        "Rollouts are seen by a hook: class Mine(agl.Hook), Trainer(hooks=[Mine()]). After each step the step(self, "
        "metrics) of a sink is called: class Mine(agl.metrics.Sink), Trainer(sinks=[Mine()]).",
    ),
    **dict.fromkeys(
        ("log", "log_metrics", "log_metric", "track", "report", "Logger", "loggers", "tracking"),
        "Metrics of training are recorded by themselves, Trainer(sinks=['wandb']) sends them on. Numbers of an agent "
        "are parts of its reward: emit_reward({'correct': 1.0, 'length': 12}, primary_key='correct').",
    ),
    **dict.fromkeys(
        ("AutoModelForCausalLM", "AutoTokenizer", "LoraConfig", "Model", "Policy", "LanguageModel", "PolicyModel"),
        "A model is named, not made: GRPO(model='Qwen/Qwen3-0.6B', lora_rank=16).",
    ),
}
_OF_A_TRACKER = re.compile(
    r"(Wandb|WandB|WeightsAndBiases|MLflow|MLFlow|TensorBoard|Tensorboard|Trackio|CSV|Comet)"
    r"(Logger|Callback|Tracker|Writer|Hook|TrainerCallback)"
)
_MADE = re.compile(r"(\w+?)(Trainer|Config|Args|Arguments|TrainingArguments)")


def written_here(name: str, algorithms: set[str]) -> str | None:
    """What to write in place of a name; None for one that nobody is known to have."""
    if name in _KNOWN:
        return _KNOWN[name]
    if _OF_A_TRACKER.fullmatch(name):
        return (
            "Trackers have names: Trainer(sinks=['wandb']), of tensorboard, wandb, mlflow and trackio. With settings: "
            "from agentlightning.metrics.trackers import WandbSink."
        )
    made = _MADE.fullmatch(name)
    if made is None or made[1] not in algorithms:
        return None
    if made[2] == "Trainer":
        return f"Write Trainer(algorithm={made[1]}(model=…)).fit(agent, tasks)."
    return f"The settings of {made[1]} are its arguments: {made[1]}(model=…, learning_rate=…)."
