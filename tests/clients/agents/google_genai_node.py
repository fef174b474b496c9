"""Google's client for Node: a program that is given the base URL and no key."""

import json
from typing import Any

import agentlightning as agl
from tests.clients import node

PACKAGE, WIRE, STREAMS = "@google/genai", "Gemini", (False, True)
VERSION = node.version(PACKAGE)
CHANGE = 'new GoogleGenAI({ apiKey: "dummy", httpOptions: { baseUrl: llm.endpoint } })'
SCRIPTED = False


async def solve(question: str, llm: agl.LLM, stream: bool) -> str:
    return await node.run("gemini.mjs", question, llm, stream)


async def book_room(question: str, llm: agl.LLM) -> dict[str, Any]:
    return json.loads(await node.run("gemini.mjs", question, llm, False, required=True))
