"""Agents that people run as programs: how each is started on a task and told of the model. One more is a record more.

Each runs with a home of its own, so that neither your settings nor your sessions have a part in a rollout, and does
what its model says without asking.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from agentlightning.types import LLM


@dataclass(frozen=True, kw_only=True)
class KnownAgent:
    """An agent with a name. `{task.field}` in its command stands for a field of the task, `{llm.model}` for the name of
    the model that a rollout is given. Where that is, and its key, are in the variables that every program is given:
    only these hold in a sandbox.
    """

    name: str
    install: str
    """The command that installs it."""
    program: str
    """What is looked for to see whether it is installed."""
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Beside the variables that every program is given."""
    sub_agents: str
    """How its sub-agents are told apart, for `train_agents`."""
    tested: str
    """The newest version that was run."""


_NAMED = "train_agents='^sub-agent'"
_UNNAMED = "none are named; train_prompts chooses by the system prompt"
_OPENCODE = {
    "autoupdate": False,
    "share": "disabled",
    "permission": "allow",
    "model": "rollout/{env:OPENAI_MODEL}",
    "small_model": "rollout/{env:OPENAI_MODEL}",
    "provider": {
        "rollout": {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": "{env:OPENAI_BASE_URL}", "apiKey": "{env:OPENAI_API_KEY}"},
            "models": {"{env:OPENAI_MODEL}": {"tool_call": True}},
        }
    },
}
_OPENHANDS = """\
export LLM_MODEL="openai/$OPENAI_MODEL" LLM_API_KEY="$OPENAI_API_KEY" LLM_BASE_URL="$OPENAI_BASE_URL"
exec openhands --headless --override-with-envs --task="$1"
"""
_CODEX = """\
exec codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox \
  -c check_for_update_on_startup=false -c analytics.enabled=false -m "$OPENAI_MODEL" -c model_provider=rollout \
  -c model_providers.rollout.name=rollout -c "model_providers.rollout.base_url='$OPENAI_BASE_URL'" \
  -c model_providers.rollout.wire_api=responses -c model_providers.rollout.env_key=OPENAI_API_KEY \
  -- "$1"
"""
"""Codex takes its provider's address from options alone; the shell puts in what holds where it runs."""
_GEMINI = """\
mkdir -p "$HOME/.gemini"
echo '{"security":{"auth":{"selectedType":"gemini-api-key"}}}' > "$HOME/.gemini/settings.json"
exec gemini --yolo --skip-trust --model="$GEMINI_MODEL" --prompt="$1"
"""
"""With another base URL than Google's it takes the key only if its settings say so."""
_PI = """\
mkdir -p "$HOME/.pi/agent"
cat > "$HOME/.pi/agent/models.json" <<END
{"providers": {"rollout": {"baseUrl": "$OPENAI_BASE_URL", "api": "openai-completions", "apiKey": "OPENAI_API_KEY",
  "models": [{"id": "$OPENAI_MODEL"}]}}}
END
exec pi --print --offline --no-session --provider rollout --model "$OPENAI_MODEL" " $1"
"""
"""It has no `--`, and takes what begins with - or @ for an option or a file: hence the space."""
_CLINE = """\
cline auth --provider openai --apikey "$OPENAI_API_KEY" --modelid "$OPENAI_MODEL" --baseurl "$OPENAI_BASE_URL" >&2
exec cline --provider openai --model "$OPENAI_MODEL" --auto-approve true -- "$1"
"""

_LETTA = """\
letta --backend local connect openai-compatible --base-url "$OPENAI_BASE_URL" --api-key "$OPENAI_API_KEY" >&2
exec letta --backend local --new-agent --yolo --no-mods --model "openai-compatible/$OPENAI_MODEL" --prompt " $1"
"""

_ALL = (
    KnownAgent(
        name="claude-code",
        install="npm install -g @anthropic-ai/claude-code",
        program="claude",
        command=("claude", "--print", "--dangerously-skip-permissions", "--", "{task.prompt}"),
        environment={
            "IS_SANDBOX": "1",  # else it does not run without asking as root
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_CODE_SUBAGENT_MODEL": "{llm.model}",
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": "{llm.model}",
        },
        sub_agents=_NAMED,
        tested="2.1.332",
    ),
    KnownAgent(
        name="codex",
        install="npm install -g @openai/codex",
        program="codex",
        command=("sh", "-c", _CODEX, "sh", "{task.prompt}"),
        sub_agents=_NAMED,
        tested="0.171.0",
    ),
    KnownAgent(
        name="opencode",
        install="npm install -g opencode-ai",
        program="opencode",
        command=("opencode", "run", "--", "{task.prompt}"),
        environment={"OPENCODE_CONFIG_CONTENT": json.dumps(_OPENCODE)},
        sub_agents=_NAMED,
        tested="1.18.33",
    ),
    KnownAgent(
        name="qwen-code",
        install="npm install -g @qwen-code/qwen-code",
        program="qwen",
        command=("qwen", "--yolo", "--auth-type=openai", "--prompt={task.prompt}"),
        sub_agents=_UNNAMED,
        tested="0.24.4",
    ),
    KnownAgent(
        name="gemini-cli",
        install="npm install -g @google/gemini-cli",
        program="gemini",
        command=("sh", "-c", _GEMINI, "sh", "{task.prompt}"),
        sub_agents=_UNNAMED,
        tested="0.61.0",
    ),
    KnownAgent(
        name="pi",
        install="npm install -g @earendil-works/pi-coding-agent",
        program="pi",
        command=("sh", "-c", _PI, "sh", "{task.prompt}"),
        sub_agents="it has none",
        tested="0.74.2",
    ),
    KnownAgent(
        name="cline",
        install="npm install -g cline",
        program="cline",
        command=("sh", "-c", _CLINE, "sh", "{task.prompt}"),
        sub_agents=_UNNAMED,
        tested="3.0.65",
    ),
    KnownAgent(
        name="kilo",
        install="npm install -g @kilocode/cli@7.7.7",
        program="kilo",
        command=("kilo", "run", "--auto", "--", "{task.prompt}"),
        environment={"KILO_CONFIG_CONTENT": json.dumps(_OPENCODE)},
        sub_agents=_NAMED,
        tested="7.7.7",
    ),
    KnownAgent(
        name="letta",
        install="pip install letta",
        program="letta",
        command=("sh", "-c", _LETTA, "sh", "{task.prompt}"),
        sub_agents=_UNNAMED,
        tested="0.34.12",
    ),
    KnownAgent(
        name="openhands",
        install="pip install openhands",
        program="openhands",
        command=("sh", "-c", _OPENHANDS, "sh", "{task.prompt}"),
        environment={"OPENHANDS_SUPPRESS_BANNER": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        sub_agents="it has none",
        tested="1.16.0",
    ),
    KnownAgent(
        name="mini-swe-agent",
        install="pip install mini-swe-agent",
        program="mini",
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
        program="aider",
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


def with_llm(text: str, llm: LLM) -> str:
    """The text with the name of a rollout's model in its places."""
    return text.replace("{llm.model}", llm.model)
