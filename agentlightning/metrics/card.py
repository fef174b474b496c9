"""Model cards: what a checkpoint's README.md says of the model in it. Pure: text from what a run wrote down.

Only what is known is written. What goes to other people is short on purpose: no paths of this machine, no user's data.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from agentlightning.types.finding import counted

CARD_FILE = "README.md"
_SHOWN = ("steps", "tasks_per_step", "group_size", "learning_rate", "loss", "advantage", "credit", "normalization")
_SHOWN_IF_SET = ("lora_rank", "kl_coef", "entropy_coef", "minibatches", "update_epochs", "max_staleness", "max_context")
_POINTS = 12
"""Steps of the curve that are shown."""


Kind = Literal["weights", "adapter", "merged", "gguf"]
"""What the card lies beside: a whole model, a LoRA adapter, an adapter that was merged into its base, a GGUF file."""


def model_card(
    about: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]], *, step: int, base: str, kind: Kind
) -> str:
    """The card of the model after a step. `about` is what `run.json` says, `metrics` are rows of the run, `base` is the
    model that the run started from.
    """
    algorithm, settings = str(about.get("algorithm") or "reinforcement learning"), about.get("settings") or {}
    name = _public(base)
    rows = [row for row in metrics if int(row.get("step", 0)) <= step]
    trained = {"adapter": "A LoRA adapter on", "merged": "A LoRA adapter, merged into"}.get(kind, "The weights of")
    parts = [
        _header(name, kind),
        f"# {name.rsplit('/', 1)[-1]}, trained with {algorithm}\n",
        f"{trained} `{name}` after {counted(step, 'step')} of {algorithm} with Agent Lightning, learned from "
        "what an agent did "
        "with its tasks and what it earned.\n",
        _table("Training", _facts(about, settings)),
        _curve(rows),
        _loading(kind),
        _limits(rows),
    ]
    return "\n".join(part for part in parts if part)


def _public(base: str) -> str:
    """A Hugging Face id or a shipped model's name as it is; of a path on this machine its last part."""
    return base if base.count("/") <= 1 and not base.startswith(("/", ".", "~")) else Path(base).name


def _header(base: str, kind: Kind) -> str:
    fields = {
        "library_name": {"adapter": "peft", "gguf": "gguf"}.get(kind, "transformers"),
        "pipeline_tag": "text-generation",
        **({"base_model": base} if base.count("/") == 1 else {}),
        "tags": ["agent-lightning", "reinforcement-learning", *(["lora"] if kind == "adapter" else [])],
    }
    return "---\n" + "".join(f"{name}: {json.dumps(value)}\n" for name, value in fields.items()) + "---\n"


def _facts(about: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    tasks, val = about.get("tasks"), about.get("val_tasks")
    return {
        "algorithm": about.get("algorithm"),
        "agent": about.get("agent"),
        "training tasks": tasks and f"{tasks:,} (hash {about.get('tasks_hash')})",
        "validation tasks": val and f"{val:,} (hash {about.get('val_tasks_hash')})",
        **{name: settings.get(name) for name in (*_SHOWN, *_SHOWN_IF_SET)},
        "agentlightning": about.get("version"),
        "commit of the agent": about.get("commit"),
    }


def _table(title: str, facts: Mapping[str, Any]) -> str:
    lines = [f"| {name} | {_cell(value)} |" for name, value in facts.items() if value not in (None, "")]
    return "\n".join([f"## {title}\n", "| | |", "|---|---|", *lines, ""])


def _cell(value: Any) -> str:
    text = " ".join(f"{value:.6g}".split() if isinstance(value, float) else str(value).split())
    return text.replace("|", "\\|").replace("<", "&lt;")


def _curve(rows: Sequence[Mapping[str, Any]]) -> str:
    """Some steps with their rewards, and every validation."""
    known = [row for row in rows if row.get("reward") is not None or row.get("val_reward") is not None]
    if not known:
        return ""
    apart = max(-(-len(known) // _POINTS), 1)
    shown = [
        row for n, row in enumerate(known) if row.get("val_reward") is not None or n % apart == 0 or row is known[-1]
    ]
    lines = [f"| {row['step']} | {_number(row, 'reward')} | {_validated(row)} |" for row in shown]
    return "\n".join(["## Curve\n", "| step | mean reward in training | validation |", "|---|---|---|", *lines, ""])


def _number(row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    return "" if value is None else f"{value:.3f}"


def _validated(row: Mapping[str, Any]) -> str:
    if row.get("val_reward") is None:
        return ""
    between = (row.get("val_low"), row.get("val_high"))
    interval = "" if None in between else f" (95 % interval {between[0]:.3f} to {between[1]:.3f})"
    return f"{row['val_reward']:.3f}{interval}"


def _loading(kind: Kind) -> str:
    if kind == "gguf":
        return "## Use\n\n`llama-server -m model.gguf --jinja`, or any other program that reads GGUF.\n"
    package, name = ("peft", "AutoPeft") if kind == "adapter" else ("transformers", "Auto")
    code = (
        f"from {package} import {name}ModelForCausalLM\nfrom transformers import AutoTokenizer\n\n"
        f"model = {name}ModelForCausalLM.from_pretrained(PATH)\ntokenizer = AutoTokenizer.from_pretrained(PATH)"
    )
    return (
        f"## Use\n\n```python\n{code}\n```\n\nOr serve it over the OpenAI API: `agl serve PATH`. Its chat template is "
        "part of the tokenizer.\n"
    )


def _limits(rows: Sequence[Mapping[str, Any]]) -> str:
    validated = any(row.get("val_reward") is not None for row in rows)
    words = "on the validation tasks of this run" if validated else "nowhere: the run had no validation tasks"
    return (
        "## Limits\n\nThe model was made better at earning the reward of one agent on one set of tasks, and measured "
        f"{words}. Its answers to anything else were not looked at.\n"
    )
