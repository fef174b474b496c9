"""AgentScope 2."""

from typing import Any

from agentscope.agent import Agent
from agentscope.credential import OpenAICredential
from agentscope.message import TextBlock, UserMsg
from agentscope.model import OpenAIChatModel
from agentscope.permission import PermissionBehavior, PermissionDecision
from agentscope.tool import FunctionTool, ToolChunk, Toolkit

import agentlightning as agl
from tests.clients import tool
from tests.clients.tool import SYSTEM_PROMPT, Booking, agent_name

PACKAGE, WIRE, STREAMS = "agentscope", "Chat Completions", (False, True)
CHANGE = 'OpenAIChatModel(OpenAICredential(base_url=llm.endpoint, api_key="dummy"), llm.model)'
NAMED = True
SCRIPTED = True
ASKS_ANEW = "it tells the model the current time, to the second"
ALLOWED = PermissionDecision(behavior=PermissionBehavior.ALLOW, message="harmless")


async def calc(a: float, op: str, b: float) -> ToolChunk:
    """One operation on two numbers."""
    return ToolChunk(content=[TextBlock(text=tool.calc(a, op, b))])


async def solve(question: str, llm: agl.LLM, stream: bool) -> str:
    credential = OpenAICredential(base_url=llm.endpoint, api_key="dummy")  # pyright: ignore[reportArgumentType]
    model = OpenAIChatModel(credential, llm.model, stream=stream)
    toolkit = Toolkit([FunctionTool(calc, permission=ALLOWED)])
    agent = Agent(agent_name.get(), SYSTEM_PROMPT, model, toolkit)
    reply = await agent.reply(UserMsg(name="user", content=question))
    return reply.get_text_content() or ""


async def book_room(question: str, llm: agl.LLM) -> dict[str, Any]:
    """Structured output is a tool that the model has to call."""
    credential = OpenAICredential(base_url=llm.endpoint, api_key="dummy")  # pyright: ignore[reportArgumentType]
    model = OpenAIChatModel(credential, llm.model, stream=False)
    said = await model.generate_structured_output([UserMsg(name="user", content=question)], structured_model=Booking)
    return dict(said.content)


async def delegate(question: str, llm: agl.LLM) -> str:
    """An agent inside of a tool."""
    credential = OpenAICredential(base_url=llm.endpoint, api_key="dummy")  # pyright: ignore[reportArgumentType]
    model = OpenAIChatModel(credential, llm.model, stream=False)

    async def ask_helper(task: str) -> ToolChunk:
        """Asks the helper."""
        said = await Agent("helper", "You help.", model, Toolkit([])).reply(UserMsg(name="user", content=task))
        return ToolChunk(content=[TextBlock(text=said.get_text_content() or "")])

    toolkit = Toolkit([FunctionTool(ask_helper, permission=ALLOWED)])
    reply = await Agent("planner", "You plan.", model, toolkit).reply(UserMsg(name="user", content=question))
    return reply.get_text_content() or ""
