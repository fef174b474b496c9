"""The fields of OpenAI's Chat Completions."""

from __future__ import annotations

from agentlightning.gateway.dialects.base import Fields, Kinds, Unavailable
from agentlightning.gateway.dialects.tables.common import (
    ALLOWED,
    CHOICE,
    EXTRAS_HARMLESS,
    EXTRAS_HONOURED,
    EXTRAS_UNAVAILABLE,
    FORMATS,
    HOSTED,
    THINKING,
)
from agentlightning.types.call import MEDIA

FIELDS = Fields(
    honoured=(
        "model",
        "messages",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "n",
        "stream",
        "stream_options",
        "logprobs",
        "top_logprobs",
        "return_token_ids",
        "response_format",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
        "max_tokens",
        "max_completion_tokens",
        "stop",
        "seed",
        "reasoning_effort",
        "thinking",
        "continue_final_message",
        "add_generation_prompt",
        *EXTRAS_HONOURED,
    ),
    harmless=(
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prompt_cache_options",
        "prediction",
        "verbosity",
        "moderation",
        *EXTRAS_HARMLESS,
    ),
    unavailable={
        **EXTRAS_UNAVAILABLE,
        "echo": Unavailable("the last message is not repeated in the answer", neutral=(False,)),
        "modalities": Unavailable("answers are text", neutral=(["text"],)),
        "audio": Unavailable("answers are text"),
        "web_search_options": Unavailable(HOSTED),
        "functions": Unavailable("it is the old name of 'tools'; use that", neutral=([],), needed=True),
        "function_call": Unavailable("it is the old name of 'tool_choice'; use that", neutral=("none", "auto")),
        "skip_special_tokens": Unavailable("answers never contain the chat format's marks", neutral=(True, False)),
    },
)

_TEXT = Fields(honoured=("type", "text"), harmless=("prompt_cache_breakpoint", "cache_control"))
PARTS = Kinds(
    known={"text": _TEXT, "refusal": Fields(honoured=("type", "refusal"))},
    unavailable=dict.fromkeys(("image_url", "input_audio", "file", "video_url", "audio_url"), MEDIA),
    default="text",
)
_MESSAGE = Fields(honoured=("role", "content"), harmless=("name",))
MESSAGES = Kinds(
    known={
        "system": _MESSAGE,
        "developer": _MESSAGE,
        "user": _MESSAGE,
        "assistant": Fields(
            honoured=("role", "content", "refusal", "reasoning_content", "reasoning", "tool_calls", "function_call"),
            harmless=("name", "annotations", "provider_specific_fields"),
            unavailable={"audio": Unavailable(MEDIA)},
        ),
        "tool": Fields(honoured=("role", "content", "tool_call_id", "name")),
        "function": Fields(honoured=("role", "content", "name")),
    },
    by="role",
)
TOOLS = Kinds(
    known={"function": Fields(("type", "function")), "custom": Fields(("type", "custom"))},
    default="function",
)
FUNCTION = Fields(honoured=("name", "description", "parameters", "strict"))
CUSTOM = Fields(honoured=("name", "description", "format"))
CALLS = Kinds(
    known={"function": Fields(("id", "type", "function"), ("index",)), "custom": Fields(("id", "type", "custom"))},
    default="function",
)
CUSTOM_CALLED = Fields(honoured=("name", "input"))
CALLED = Fields(honoured=("name", "arguments"))
STREAM_OPTIONS = Fields(honoured=("include_usage",), harmless=("include_obfuscation",))
NESTED = {
    "messages[]": MESSAGES,
    "messages[].content[]": PARTS,
    "messages[].tool_calls[]": CALLS,
    "messages[].tool_calls[].function": CALLED,
    "messages[].tool_calls[].custom": CUSTOM_CALLED,
    "tools[]": TOOLS,
    "tools[].function": FUNCTION,
    "tools[].custom": CUSTOM,
    "tool_choice": CHOICE,
    "tool_choice.allowed_tools": ALLOWED,
    "response_format": FORMATS,
    "stream_options": STREAM_OPTIONS,
    "thinking": THINKING,
}
