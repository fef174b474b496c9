"""Google's own client for Python: a chat of the Gemini API."""

from typing import Any

from google import genai
from google.genai import types

import agentlightning as agl
from tests.clients.tool import MAX_TURNS, PARAMETERS, SYSTEM_PROMPT, Booking, calc

PACKAGE, WIRE, STREAMS = "google-genai", "Gemini", (False, True)
CHANGE = 'genai.Client(api_key=llm.api_key, http_options={"base_url": llm.endpoint})'
SCRIPTED = False
TOOL = types.FunctionDeclaration(
    name="calc", description="One operation on two numbers.", parameters_json_schema=PARAMETERS
)


async def solve(question: str, llm: agl.LLM, stream: bool) -> str:
    config = types.GenerateContentConfig(
        system_instruction=SYSTEM_PROMPT,
        tools=[types.Tool(function_declarations=[TOOL])],
        max_output_tokens=100,
        automatic_function_calling=types.AutomaticFunctionCallingConfig(disable=True),
    )
    async with genai.Client(api_key=llm.api_key, http_options={"base_url": llm.endpoint}).aio as client:
        chat = client.chats.create(model=llm.model, config=config)
        message: Any = question
        for _ in range(MAX_TURNS):
            pieces = [p async for p in await chat.send_message_stream(message)] if stream else []
            answers = pieces or [await chat.send_message(message)]
            calls = [call for answer in answers for call in answer.function_calls or ()]
            if not calls:
                return "".join(answer.text or "" for answer in answers)
            message = [
                types.Part.from_function_response(name=call.name, response={"result": calc(**call.args)})
                for call in calls
            ]
    return ""


async def book_room(question: str, llm: agl.LLM) -> dict[str, Any]:
    book = types.FunctionDeclaration(
        name="book", description="Books a room.", parameters_json_schema=Booking.model_json_schema()
    )
    calling = types.FunctionCallingConfig(mode=types.FunctionCallingConfigMode.ANY, allowed_function_names=["book"])
    config = types.GenerateContentConfig(
        tools=[types.Tool(function_declarations=[book])],
        tool_config=types.ToolConfig(function_calling_config=calling),
        automatic_function_calling=types.AutomaticFunctionCallingConfig(disable=True),
    )
    async with genai.Client(api_key="dummy", http_options={"base_url": llm.endpoint}).aio as client:
        answer = await client.models.generate_content(model=llm.model, contents=question, config=config)
    return answer.function_calls[0].args
