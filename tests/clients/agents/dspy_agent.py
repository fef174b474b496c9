"""DSPy's ReAct, whose fields are text in the messages; it sends with an HTTP library of its own."""

from typing import Any

import dspy

import agentlightning as agl
from tests.clients.stand_ins import SUB_TASK
from tests.clients.tool import agent_name, calc

PACKAGE, WIRE, STREAMS = "dspy", "Chat Completions", (False,)
CHANGE = 'dspy.LM(f"openai/{llm.model}", api_base=llm.endpoint, api_key="dummy", cache=False)'
NAMED, NAME = True, "Team.{}"
SCRIPTED, CONTINUES = True, False


class Team(dspy.Module):
    """Two agents, told apart by the attributes that hold them."""

    def __init__(self) -> None:
        super().__init__()
        self.solver = dspy.ReAct("question -> answer", tools=[calc], max_iters=3)
        self.helper = dspy.ReAct("question -> answer", tools=[calc], max_iters=3)

    async def aforward(self, question: str) -> Any:
        return await getattr(self, agent_name.get()).acall(question=question)


async def solve(question: str, llm: agl.LLM, stream: bool) -> str:
    model = dspy.LM(f"openai/{llm.model}", api_base=llm.endpoint, api_key="dummy", cache=False)
    with dspy.context(lm=model):
        said = await Team().acall(question=question)
    return str(said.answer)


class Delegating(dspy.Module):
    """One module asks another."""

    def __init__(self) -> None:
        super().__init__()
        self.planner = dspy.Predict("question -> answer")
        self.helper = dspy.Predict("question -> answer")

    async def aforward(self, question: str) -> Any:
        await self.planner.acall(question=question)
        return await self.helper.acall(question=SUB_TASK)


async def delegate(question: str, llm: agl.LLM) -> str:
    model = dspy.LM(f"openai/{llm.model}", api_base=llm.endpoint, api_key="dummy", cache=False)
    with dspy.context(lm=model):
        return str((await Delegating().acall(question=question)).answer)
