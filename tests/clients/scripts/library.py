"""As scripts for 0.3 are written: a class with a rollout for training and one for validation, whose agent of OpenAI's
Agents SDK looks things up with a tool of an MCP server.
"""

import os
import sys
from pathlib import Path
from typing import Any, cast

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, set_tracing_disabled
from agents.mcp import MCPServerStdio
from openai import AsyncOpenAI

import agentlightning as agl

SERVER = """
from mcp.server.fastmcp import FastMCP

server = FastMCP("library")


@server.tool(description="The passage that answers best.")
def search(query: str) -> str:
    return "Oslo is the capital of Norway."


server.run()
"""


class Reader(agl.LitAgent[dict[str, Any]]):
    def __init__(self, trained_agents: str | None = None) -> None:
        super().__init__(trained_agents=trained_agents)
        self.temperatures: list[float] = []

    async def training_rollout_async(
        self, task: dict[str, Any], resources: agl.NamedResources, rollout: agl.Rollout
    ) -> float | None:
        llm = cast(agl.LLM, resources["main_llm"])
        self.temperatures.append(llm.sampling_parameters["temperature"])
        client = AsyncOpenAI(base_url=llm.endpoint, api_key=os.environ.get("OPENAI_API_KEY", "dummy"))
        async with MCPServerStdio({"command": sys.executable, "args": ["library.py"]}, name="library") as server:
            agent = Agent(
                name="Assistant",
                instructions="Answer from the passages.",
                model=OpenAIChatCompletionsModel(llm.model, client),
                model_settings=ModelSettings(max_tokens=64, temperature=llm.sampling_parameters["temperature"]),
                mcp_servers=[server],
            )
            said = await Runner.run(agent, task["question"])
        return float(task["answer"] in str(said.final_output))

    async def validation_rollout_async(
        self, task: dict[str, Any], resources: agl.NamedResources, rollout: agl.Rollout
    ) -> float | None:
        llm = cast(agl.LLM, resources["main_llm"])
        cold = agl.LLM(endpoint=llm.endpoint, model=llm.model, sampling_parameters={"temperature": 0.0})
        return await self.training_rollout_async(task, {"main_llm": cold}, rollout)


class Collecting(agl.Hook):
    """Runners may be in other processes, which share a folder."""

    async def on_rollout_end(self, *, agent: Any, runner: Any, rollout: Any, spans: Any) -> None:
        write_down(rollout.rollout_id, agl.find_final_reward(spans))


def write_down(name: str, reward: float | None) -> None:
    Path(f"{name}.reward").write_text(str(reward))


if __name__ == "__main__":
    agl.setup_logging()
    set_tracing_disabled(True)
    Path("library.py").write_text(SERVER)
    endpoint = agl.LLM(endpoint=os.environ["OPENAI_BASE_URL"], model="small", sampling_parameters={"temperature": 0.7})
    reader = Reader()
    trainer = agl.Trainer(n_workers=1, initial_resources={"main_llm": endpoint}, hooks=[Collecting()])
    tasks = [{"question": "Norway?", "answer": "Oslo"}, {"question": "Sweden?", "answer": "Stockholm"}]
    trainer.dev(reader, cast("agl.Dataset[dict[str, Any]]", tasks))
    assert sorted(file.read_text() for file in Path().glob("*.reward")) == ["0.0", "1.0"]
