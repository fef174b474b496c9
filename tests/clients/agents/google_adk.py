"""Google's ADK through LiteLLM."""

import os

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")

from google.adk.agents import LlmAgent
from google.adk.agents.run_config import RunConfig, StreamingMode
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.genai import types

import agentlightning as agl
from tests.clients.tool import SYSTEM_PROMPT, agent_name, calc

PACKAGE, WIRE, STREAMS = "google-adk", "Chat Completions", (False, True)
CHANGE = 'LiteLlm(f"openai/{llm.model}", api_base=llm.endpoint, api_key=llm.api_key)'
NAMED = True
SCRIPTED = True


async def solve(question: str, llm: agl.LLM, stream: bool) -> str:
    model = LiteLlm(f"openai/{llm.model}", api_base=llm.endpoint, api_key=llm.api_key)
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
