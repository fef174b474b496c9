"""What several wire formats have in common: why something of a provider's is not available."""

from __future__ import annotations

from agentlightning.gateway.dialects.base import Fields, Kinds, Unavailable

HOSTED = "only the provider can run this tool; give the agent a function of its own"
COMPACTS = "the agent has to summarise its conversation itself"
TOOLS_LATER = "the tools of a request hold for its whole conversation; declare them all in 'tools'"
STATE = "nothing is stored under this id here; send the conversation with the request"

_SCHEMA = ("name", "description", "strict")
FORMATS = Kinds(
    known={
        "text": Fields(honoured=("type",)),
        "json_object": Fields(honoured=("type",)),
        "json_schema": Fields(honoured=("type", "schema", "json_schema"), harmless=_SCHEMA),
    }
)
FORMAT = Fields(honoured=("schema",), harmless=_SCHEMA)
CHOICE = Fields(
    honoured=("type", "name", "function", "custom", "allowed_tools", "mode", "tools"), harmless=("server_label",)
)
ALLOWED = Fields(honoured=("mode", "tools"))

_TEMPLATE = "the model's own chat template is used"
_ENGINE = "the engines have no such setting"
_SPACE = "white space in JSON answers is not constrained"
_THOUGHTS = "reasoning is always returned as reasoning_content"
GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
}
"""The fields of vLLM and SGLang that say what an answer looks like, and as what."""
STRUCTURED = Fields(
    honoured=("json", "regex", "choice", "grammar", "json_object"),
    harmless=("disable_fallback",),
    unavailable={
        "structural_tag": Unavailable("the form of a part of an answer is not held"),
        "disable_additional_properties": Unavailable(
            "write additionalProperties: false in the schema", neutral=(False,)
        ),
        "disable_any_whitespace": Unavailable(_SPACE, neutral=(False,)),
        "whitespace_pattern": Unavailable(_SPACE),
    },
)
THINKING = Fields(honoured=("type",), harmless=("budget_tokens", "display", "block_binding"))
EXTRAS_HONOURED = (
    "stop_token_ids",
    "min_tokens",
    "ignore_eos",
    "include_stop_str_in_output",
    "return_tokens_as_token_ids",
    "prompt_logprobs",
    "structured_outputs",
    "chat_template_kwargs",
    "enable_thinking",
    *GUIDED,
)
EXTRAS_HARMLESS = (
    "guided_decoding_backend",
    "spaces_between_special_tokens",
    "priority",
    "request_id",
    "cache_salt",
    "kv_transfer_params",
    "rid",
    "session_id",
)
EXTRAS_UNAVAILABLE = {
    "chat_template": Unavailable(_TEMPLATE),
    "documents": Unavailable(_TEMPLATE, neutral=([],)),
    "length_penalty": Unavailable(_ENGINE, neutral=(1,)),
    "repetition_penalty": Unavailable("use presence_penalty or frequency_penalty", neutral=(1,)),
    "use_beam_search": Unavailable(_ENGINE, neutral=(False,)),
    "early_stopping": Unavailable(_ENGINE, neutral=(False,)),
    "truncate_prompt_tokens": Unavailable("set cut_long_prompts on the gateway to cut long prompts"),
    "bad_words": Unavailable("use logit_bias", neutral=([],)),
    "allowed_token_ids": Unavailable("use logit_bias", neutral=([],)),
    "best_of": Unavailable("ask for n answers and choose one", neutral=(1,)),
    "add_special_tokens": Unavailable("no tokens are added to a prompt", neutral=(False,)),
    "guided_whitespace_pattern": Unavailable(_SPACE),
    **dict.fromkeys(
        ("include_reasoning", "separate_reasoning", "stream_reasoning"), Unavailable(_THOUGHTS, neutral=(True,))
    ),
}
"""vLLM's and SGLang's own fields beside OpenAI's."""
