"""Google's ADK through LiteLLM."""

import os
from typing import Any

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")

from google.adk.models.lite_llm import LiteLlm

import agentlightning as agl
from tests.clients.agents.google_adk_gemini import book_with, delegate_with, solve_with

PACKAGE, WIRE, STREAMS = "google-adk", "Chat Completions", (False, True)
CHANGE = 'LiteLlm(f"openai/{llm.model}", api_base=llm.endpoint, api_key=llm.api_key)'
NAMED = True
SCRIPTED = True


async def solve(question: str, llm: agl.LLM, stream: bool) -> str:
    model = LiteLlm(f"openai/{llm.model}", api_base=llm.endpoint, api_key=llm.api_key)
    return await solve_with(model, question, stream)


async def book_room(question: str, llm: agl.LLM) -> dict[str, Any]:
    return await book_with(LiteLlm(f"openai/{llm.model}", api_base=llm.endpoint, api_key="dummy"), question)


async def delegate(question: str, llm: agl.LLM) -> str:
    return await delegate_with(LiteLlm(f"openai/{llm.model}", api_base=llm.endpoint, api_key="dummy"), question)
