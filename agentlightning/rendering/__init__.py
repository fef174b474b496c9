"""Rendering: messages to prompt tokens, response tokens to messages, and the bridge between turns.

base       what a rendering promises          library    a rendering by the `renderers` library
load       which renderer fits a model        template   models with a chat template and no renderer
tokenizer  a tokenizer without transformers   grammar    answers that follow a JSON schema
reader     a response while it is sampled     messages   the neutral form of messages and tools
control    users' text is no control token
"""

from __future__ import annotations

from agentlightning.rendering.base import Parsed, ParsedCall, Rendering
from agentlightning.rendering.library import RenderersRendering
from agentlightning.rendering.load import doubt_about, load_rendering
from agentlightning.rendering.messages import Message, Tool

__all__ = [
    "Message",
    "Parsed",
    "ParsedCall",
    "RenderersRendering",
    "Rendering",
    "Tool",
    "doubt_about",
    "load_rendering",
]
