"""DSPy's ReAct, whose fields are text in the messages; it sends with an HTTP library of its own."""

import dspy

import agentlightning as agl
from tests.clients.tool import calc

PACKAGE, WIRE, STREAMS = "dspy", "Chat Completions", (False,)
CHANGE = 'dspy.LM(f"openai/{llm.model}", api_base=llm.endpoint, api_key="dummy")'
SCRIPTED, CONTINUES = True, False


async def solve(question: str, llm: agl.LLM, stream: bool) -> str:
    model = dspy.LM(f"openai/{llm.model}", api_base=llm.endpoint, api_key="dummy", cache=False)
    with dspy.context(lm=model):
        said = await dspy.ReAct("question -> answer", tools=[calc], max_iters=3).acall(question=question)
    return str(said.answer)
