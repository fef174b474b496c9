"""The official client with a tool of an MCP server over stdio."""

import sys
from pathlib import Path
from typing import Any

from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client
from openai import AsyncOpenAI

import agentlightning as agl
from tests.clients.tool import MAX_TURNS, SYSTEM_PROMPT

PACKAGE, WIRE, STREAMS = "mcp", "Chat Completions", (False,)
CHANGE = "OpenAI(base_url=llm.endpoint, api_key=llm.api_key); the MCP part stays as it is"
SCRIPTED = False
SERVER = Path(__file__).parent.parent / "mcp_server.py"


async def solve(question: str, llm: agl.LLM, stream: bool) -> str:
    server = StdioServerParameters(command=sys.executable, args=[str(SERVER)])
    async with stdio_client(server) as (read, write), ClientSession(read, write) as session:
        await session.initialize()
        tools: Any = [
            {
                "type": "function",
                "function": {"name": t.name, "description": t.description, "parameters": t.inputSchema},
            }
            for t in (await session.list_tools()).tools
        ]
        async with AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key) as client:
            return await _talk(client, session, llm.model, tools, question)


async def _talk(client: AsyncOpenAI, session: ClientSession, model: str, tools: Any, question: str) -> str:
    import json

    messages: list[Any] = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}]
    for _ in range(MAX_TURNS):
        answer = await client.chat.completions.create(model=model, messages=messages, tools=tools)
        message = answer.choices[0].message
        if not message.tool_calls:
            return message.content or ""
        messages.append(message)
        for call in message.tool_calls:
            assert call.type == "function"
            result = await session.call_tool(call.function.name, json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result.content[0].text})  # pyright: ignore
    return ""
