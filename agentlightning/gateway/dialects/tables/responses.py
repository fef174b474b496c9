"""The fields of OpenAI's Responses."""

from __future__ import annotations

from agentlightning.gateway.dialects.base import Fields, Kinds, Unavailable
from agentlightning.gateway.dialects.tables.common import CHOICE, COMPACTS, FORMATS, HOSTED, STATE, TOOLS_LATER
from agentlightning.types.call import MEDIA

FIELDS = Fields(
    honoured=(
        "model",
        "input",
        "instructions",
        "previous_response_id",
        "store",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "stream",
        "temperature",
        "top_p",
        "max_output_tokens",
        "top_logprobs",
        "include",
        "text",
        "reasoning",
    ),
    harmless=(
        "user",
        "metadata",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prompt_cache_options",
        "client_metadata",
        "background_options",
        "stream_options",
        "moderation",
        "access_programs",
        "max_tool_calls",
        "image",
    ),
    unavailable={
        "background": Unavailable(
            "background responses are not supported; send the request without it", neutral=(False,), needed=True
        ),
        "truncation": Unavailable("set cut_long_prompts on the gateway to cut long prompts", ("disabled",)),
        "context_management": Unavailable(COMPACTS, neutral=([],)),
        "conversation": Unavailable(STATE, needed=True),
        "prompt": Unavailable(STATE, needed=True),
    },
)
_CALL = ("id", "status", "async", "caller")
_TEXT = Fields(honoured=("type", "text"), harmless=("prompt_cache_breakpoint", "annotations", "logprobs"))
PARTS = Kinds(
    known={
        **dict.fromkeys(("input_text", "output_text", "text", "reasoning_text", "summary_text"), _TEXT),
        "refusal": Fields(honoured=("type", "refusal")),
    },
    unavailable=dict.fromkeys(("input_image", "input_file", "input_audio", "computer_screenshot"), MEDIA),
    default="text",
)
_RUN = (
    "file_search_call",
    "computer_call",
    "computer_call_output",
    "web_search_call",
    "tool_search_call",
    "tool_search_output",
    "image_generation_call",
    "code_interpreter_call",
    "local_shell_call",
    "local_shell_call_output",
    "shell_call",
    "shell_call_output",
    "apply_patch_call",
    "apply_patch_call_output",
    "mcp_list_tools",
    "mcp_approval_request",
    "mcp_approval_response",
    "mcp_call",
    "program",
    "program_output",
)
ITEMS = Kinds(
    known={
        "item_reference": Fields(("type", "id")),
        "message": Fields(honoured=("type", "role", "content"), harmless=("id", "status", "phase")),
        "reasoning": Fields(
            honoured=("type", "content", "summary"), harmless=("id", "status", "encrypted_content", "format")
        ),
        "function_call": Fields(("type", "call_id", "name", "namespace", "arguments"), _CALL),
        "custom_tool_call": Fields(("type", "call_id", "name", "namespace", "input"), _CALL),
        **dict.fromkeys(
            ("function_call_output", "custom_tool_call_output"),
            Fields(("type", "call_id", "output"), (*_CALL, "name", "namespace")),
        ),
    },
    unavailable={
        **dict.fromkeys(_RUN, "it was made by a tool that is not available here"),
        "additional_tools": TOOLS_LATER,
        "compaction": "only its provider can read it; send the conversation itself",
        "compaction_trigger": COMPACTS,
        "configuration_update": "each request has its own settings",
    },
    default="message",
)
_OF_TOOLS = ("allowed_callers", "async", "defer_loading", "output_schema")
_CALLED = {
    "function": Fields(("type", "name", "description", "parameters", "strict"), _OF_TOOLS),
    "custom": Fields(("type", "name", "description", "format"), _OF_TOOLS),
}
IN_NAMESPACE = Kinds(known=_CALLED)
TOOLS = Kinds(
    known={**_CALLED, "namespace": Fields(("type", "name", "tools"), ("description",))},
    unavailable={
        **dict.fromkeys(
            (
                "web_search*",
                "file_search",
                "computer*",
                "mcp",
                "code_interpreter",
                "programmatic_tool_calling",
                "image_generation",
                "local_shell",
                "shell",
                "tool_search",
                "apply_patch",
            ),
            HOSTED,
        ),
    },
)
TEXT = Fields(honoured=("format",), harmless=("verbosity",))
REASONING = Fields(honoured=("effort",), harmless=("summary", "generate_summary", "context", "mode"))
NESTED = {
    "input[]": ITEMS,
    "input[].content[]": PARTS,
    "tools[]": TOOLS,
    "tools[].tools[]": IN_NAMESPACE,
    "tool_choice": CHOICE,
    "text": TEXT,
    "text.format": FORMATS,
    "reasoning": REASONING,
}
