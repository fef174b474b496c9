"""Vercel's AI SDK with its provider of OpenAI, which asks the Responses API: given the base URL and no key."""

import json
from typing import Any

import agentlightning as agl
from tests.clients import node

PACKAGE, WIRE, STREAMS = "@ai-sdk/openai", "Responses", (False, True)
VERSION = node.version(PACKAGE)
CHANGE = 'createOpenAI({ baseURL: llm.endpoint, apiKey: "dummy", … })'
SCRIPTED = False


async def solve(question: str, llm: agl.LLM, stream: bool) -> str:
    return await node.run("ai_sdk.mjs", question, llm, stream, provider="openai")


async def book_room(question: str, llm: agl.LLM) -> dict[str, Any]:
    return json.loads(await node.run("ai_sdk.mjs", question, llm, False, required=True, provider="openai"))
