"""What several wire formats have in common: why something of a provider's is not to be had."""

from __future__ import annotations

from agentlightning.gateway.dialects.base import Fields, Kinds

HOSTED = "the provider runs this tool itself, and here nobody does; give the agent a function of its own"
MEDIA = "this model reads text only"
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
    honoured=("type", "name", "function", "custom"), harmless=("allowed_tools", "mode", "tools", "server_label")
)
