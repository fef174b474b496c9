"""The fields of Anthropic's Messages."""

from __future__ import annotations

from agentlightning.gateway.dialects.base import Fields, Kinds, Unavailable
from agentlightning.gateway.dialects.tables.common import COMPACTS, FORMATS, HOSTED, THINKING, TOOLS_LATER
from agentlightning.types.call import MEDIA

FIELDS = Fields(
    honoured=(
        "model",
        "messages",
        "system",
        "tools",
        "tool_choice",
        "max_tokens",
        "stop_sequences",
        "stream",
        "temperature",
        "top_p",
        "top_k",
        "output_config",
        "output_format",
        "context_management",
        "thinking",
    ),
    harmless=(
        "metadata",
        "service_tier",
        "cache_control",
        "inference_geo",
        "betas",
        "speed",
        "diagnostics",
        "billing_policy",
        "fallbacks",
        "fallback_credit_token",
        "user_profile_id",
        "workspace_id",
    ),
    unavailable={
        "container": Unavailable(HOSTED),
        "mcp_servers": Unavailable("the agent has to ask these servers itself", neutral=([],)),
        "compaction": Unavailable(COMPACTS),
        "thread": Unavailable("nothing is kept between requests here; send the whole conversation", needed=True),
    },
)
_MARKS = ("cache_control",)
_CALLED = ("bash_*", "text_editor_*", "computer_*", "memory_*", "browser_toolset_*", "computer_toolset_*")
_RUN = ("web_search_*", "web_fetch_*", "code_execution_*", "tool_search_tool_*", "mcp_toolset", "advisor_*")
_RESULTS = (
    "server_tool_use",
    "mcp_tool_use",
    "mcp_tool_result",
    "web_search_tool_result",
    "web_fetch_tool_result",
    "advisor_tool_result",
    "code_execution_tool_result",
    "bash_code_execution_tool_result",
    "text_editor_code_execution_tool_result",
    "tool_search_tool_result",
)
TEXT = Fields(honoured=("type", "text"), harmless=(*_MARKS, "citations"))
_MEDIA = ("image", "document", "search_result", "container_upload", "browser_state", "web_search_result")
_NO_TEXT: dict[str, str] = {
    **dict.fromkeys(_MEDIA, MEDIA),
    **dict.fromkeys(("tool_addition", "tool_removal"), TOOLS_LATER),
    "mid_conv_system": "send it as a message of the system",
}
PARTS = Kinds(
    known={"text": TEXT},
    unavailable=_NO_TEXT,
    harmless=("tool_reference", "mcp_tool_listing", "fallback"),
    default="text",
)
RESULT = Fields(honoured=("type", "tool_use_id", "content"), harmless=(*_MARKS, "is_error", "toolset", "toolset_name"))
USER_PARTS = Kinds(
    known={"text": TEXT, "tool_result": RESULT},
    unavailable=_NO_TEXT,
    harmless=PARTS.harmless,
    default="text",
)
ASSISTANT_BLOCKS = Kinds(
    known={
        "text": TEXT,
        "thinking": Fields(honoured=("type", "thinking"), harmless=("signature",)),
        "tool_use": Fields(
            honoured=("type", "id", "name", "input"), harmless=(*_MARKS, "caller", "toolset", "toolset_name")
        ),
    },
    unavailable={
        **_NO_TEXT,
        **dict.fromkeys(_RESULTS, "it was made by a tool that is not available here"),
        "compaction": "send the summary as a text of its own",
    },
    harmless=("redacted_thinking", *PARTS.harmless),
    default="text",
)
MESSAGE = Fields(
    honoured=("role", "content"),
    harmless=("output_config",),
    unavailable={"clear_at": Unavailable("a message is shown for as long as it is sent", neutral=("never",))},
)
TOOLS = Kinds(
    known={
        "custom": Fields(
            honoured=("type", "name", "description", "input_schema", "strict"),
            harmless=(*_MARKS, "allowed_callers", "defer_loading", "eager_input_streaming", "input_examples"),
        )
    },
    unavailable={
        **dict.fromkeys(_CALLED, "the model was not trained on this tool; declare one of your own with a schema"),
        **dict.fromkeys(_RUN, HOSTED),
    },
    default="custom",
)
EDITS = Kinds(
    known={
        "clear_tool_uses_20250919": Fields(
            ("type", "trigger", "keep", "clear_at_least", "exclude_tools", "clear_tool_inputs")
        ),
        "clear_thinking_20251015": Fields(("type", "keep")),
    },
    unavailable={"compact_*": COMPACTS},
)
TOOL_CHOICE = Fields(honoured=("type", "name", "disable_parallel_tool_use"))
OUTPUT_CONFIG = Fields(honoured=("format", "effort"), harmless=("task_budget",))
NESTED = {
    "messages[]": MESSAGE,
    "messages[].content[] (user)": USER_PARTS,
    "messages[].content[] (assistant)": ASSISTANT_BLOCKS,
    "messages[].content[].content[]": PARTS,
    "system[]": PARTS,
    "tools[]": TOOLS,
    "tool_choice": TOOL_CHOICE,
    "context_management.edits[]": EDITS,
    "thinking": THINKING,
    "output_config": OUTPUT_CONFIG,
    "output_config.format": FORMATS,
}
