"""Agents that people run as programs: how each is started on a task and told of the model. One more is a record more.

Each runs with a home of its own, so that neither your settings nor your sessions have a part in a rollout.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from agentlightning.types import LLM


@dataclass(frozen=True, kw_only=True)
class KnownAgent:
    """An agent with a name. `{task.field}` in its command stands for a field of the task; `{llm.endpoint}`,
    `{llm.api_key}` and `{llm.model}` everywhere for the model that a rollout is given.
    """

    name: str
    install: str
    """The command that installs it."""
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Beside the variables that every program is given."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Configuration by its path in the program's home; JSON or TOML."""
    sub_agents: str
    """How its sub-agents are told apart, for `train_agents`."""
    tested: str
    """The newest version that was run."""


_NAMED = "train_agents='^sub-agent'"
_UNNAMED = "none are named; train_prompts chooses by the system prompt"
_CODEX = """\
model = "{llm.model}"
model_provider = "rollout"
approval_policy = "never"
sandbox_mode = "danger-full-access"
check_for_update_on_startup = false

[model_providers.rollout]
name = "rollout"
base_url = "{llm.endpoint}"
wire_api = "responses"
env_key = "OPENAI_API_KEY"

[analytics]
enabled = false
"""
_OPENCODE = {
    "$schema": "https://opencode.ai/config.json",
    "autoupdate": False,
    "share": "disabled",
    "permission": "allow",
    "model": "rollout/{llm.model}",
    "small_model": "rollout/{llm.model}",
    "provider": {
        "rollout": {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": "{llm.endpoint}", "apiKey": "{llm.api_key}"},
            "models": {"{llm.model}": {"tool_call": True}},
        }
    },
}

_ALL = (
    KnownAgent(
        name="claude-code",
        install="npm install -g @anthropic-ai/claude-code",
        command=("claude", "--print", "--dangerously-skip-permissions", "--", "{task.prompt}"),
        environment={
            "IS_SANDBOX": "1",  # else it does not run without asking as root
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_CODE_SUBAGENT_MODEL": "{llm.model}",
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": "{llm.model}",
        },
        sub_agents=_NAMED,
        tested="2.1.331",
    ),
    KnownAgent(
        name="codex",
        install="npm install -g @openai/codex",
        command=("codex", "exec", "--skip-git-repo-check", "--", "{task.prompt}"),
        files={".codex/config.toml": _CODEX},
        sub_agents=_NAMED,
        tested="0.169.0",
    ),
    KnownAgent(
        name="opencode",
        install="npm install -g opencode-ai",
        command=("opencode", "run", "--", "{task.prompt}"),
        files={".config/opencode/opencode.json": json.dumps(_OPENCODE, indent=2)},
        sub_agents=_NAMED,
        tested="1.18.33",
    ),
    KnownAgent(
        name="qwen-code",
        install="npm install -g @qwen-code/qwen-code",
        command=("qwen", "--yolo", "--auth-type=openai", "--prompt={task.prompt}"),
        sub_agents=_UNNAMED,
        tested="0.15.10",
    ),
    KnownAgent(
        name="gemini-cli",
        install="npm install -g @google/gemini-cli",
        command=("gemini", "--yolo", "--skip-trust", "--model={llm.model}", "--prompt={task.prompt}"),
        files={".gemini/settings.json": json.dumps({"security": {"auth": {"selectedType": "gemini-api-key"}}})},
        sub_agents=_UNNAMED,
        tested="0.61.0",
    ),
    KnownAgent(
        name="mini-swe-agent",
        install="pip install mini-swe-agent",
        command=("mini", "--yolo", "--exit-immediately", "--model=openai/{llm.model}", "--task={task.prompt}"),
        environment={
            "MSWEA_CONFIGURED": "true",
            "MSWEA_SILENT_STARTUP": "1",
            "MSWEA_COST_TRACKING": "ignore_errors",  # nobody has told it what this model costs
        },
        sub_agents="it has none",
        tested="2.4.6",
    ),
    KnownAgent(
        name="aider",
        install="pip install aider-chat",
        command=(
            *("aider", "--yes-always", "--no-git", "--no-check-update", "--no-show-model-warnings", "--no-analytics"),
            *("--no-pretty", "--no-stream", "--model=openai/{llm.model}", "--message={task.prompt}"),
        ),
        sub_agents="it has none",
        tested="0.86.2",
    ),
)

KNOWN_AGENTS: Mapping[str, KnownAgent] = MappingProxyType({agent.name: agent for agent in _ALL})
"""By name."""

_PLACE = re.compile(r"\{llm\.(endpoint|api_key|model)\}")


def with_llm(text: str, llm: LLM, *, quoted: bool = False) -> str:
    """The text with a rollout's model in its places; `quoted` if these stand within the quotes of JSON or TOML."""
    values = {
        "endpoint": llm.endpoint,
        "api_key": llm.api_key or "none",
        "model": llm.model,
    }

    def value(found: re.Match[str]) -> str:
        text = values[found[1]]
        return json.dumps(text)[1:-1] if quoted else text

    return _PLACE.sub(value, text)
