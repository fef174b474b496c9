"""Google's ADK with its own client, without LiteLLM."""

from contextlib import aclosing
from typing import Any

from google.adk.agents import LlmAgent
from google.adk.agents.run_config import RunConfig, StreamingMode
from google.adk.models.base_llm import BaseLlm
from google.adk.models.google_llm import Gemini
from google.adk.runners import InMemoryRunner
from google.adk.tools import BaseTool
from google.genai import types

import agentlightning as agl
from tests.clients.tool import SYSTEM_PROMPT, Booking, agent_name, calc

PACKAGE, WIRE, STREAMS = "google-adk", "Gemini", (False, True)
CHANGE = 'Gemini(model=llm.model, base_url=llm.endpoint, client_kwargs={"api_key": "dummy"})'
NAMED = True
SCRIPTED = True


def _model(llm: agl.LLM) -> BaseLlm:
    return Gemini(model=llm.model, base_url=llm.endpoint, client_kwargs={"api_key": "dummy"})


async def solve(question: str, llm: agl.LLM, stream: bool) -> str:
    return await solve_with(_model(llm), question, stream)


async def book_room(question: str, llm: agl.LLM) -> dict[str, Any]:
    return await book_with(_model(llm), question)


async def solve_with(model: BaseLlm, question: str, stream: bool) -> str:
    agent = LlmAgent(name=agent_name.get(), model=model, instruction=SYSTEM_PROMPT, tools=[calc])
    runner = InMemoryRunner(agent, app_name="calc")
    session = await runner.session_service.create_session(app_name="calc", user_id="u")
    message = types.Content(role="user", parts=[types.Part(text=question)])
    config = RunConfig(streaming_mode=StreamingMode.SSE if stream else StreamingMode.NONE)
    text = ""
    async for event in runner.run_async(user_id="u", session_id=session.id, new_message=message, run_config=config):
        if event.is_final_response() and event.content and event.content.parts:
            text = "".join(part.text or "" for part in event.content.parts)
    return text


class Book(BaseTool):
    def __init__(self) -> None:
        super().__init__(name="book", description="Books a room.")

    def _get_declaration(self) -> types.FunctionDeclaration:
        schema = Booking.model_json_schema()
        return types.FunctionDeclaration(name=self.name, description=self.description, parameters_json_schema=schema)

    async def run_async(self, *, args: dict[str, Any], tool_context: Any) -> Any:
        return "booked"


async def book_with(model: BaseLlm, question: str) -> dict[str, Any]:
    """With the mode that makes every turn call a tool; the first turn is enough."""
    any_tool = types.FunctionCallingConfig(mode=types.FunctionCallingConfigMode.ANY)
    must = types.GenerateContentConfig(tool_config=types.ToolConfig(function_calling_config=any_tool))
    agent = LlmAgent(name="booker", model=model, instruction="Book.", tools=[Book()], generate_content_config=must)
    runner = InMemoryRunner(agent, app_name="book")
    session = await runner.session_service.create_session(app_name="book", user_id="u")
    message = types.Content(role="user", parts=[types.Part(text=question)])
    async with aclosing(runner.run_async(user_id="u", session_id=session.id, new_message=message)) as events:
        async for event in events:
            for call in event.get_function_calls():
                return dict(call.args or {})
    raise AssertionError("the model called nothing")


async def delegate(question: str, llm: agl.LLM) -> str:
    return await delegate_with(_model(llm), question)


async def delegate_with(model: BaseLlm, question: str) -> str:
    """A transfer to a sub-agent."""
    helper = LlmAgent(name="helper", model=model, instruction="You help.", description="Helps.")
    planner = LlmAgent(name="planner", model=model, instruction="You plan.", sub_agents=[helper])
    runner = InMemoryRunner(planner, app_name="team")
    session = await runner.session_service.create_session(app_name="team", user_id="u")
    message = types.Content(role="user", parts=[types.Part(text=question)])
    text = ""
    async for event in runner.run_async(user_id="u", session_id=session.id, new_message=message):
        if event.is_final_response() and event.content and event.content.parts:
            text = "".join(part.text or "" for part in event.content.parts)
    return text
