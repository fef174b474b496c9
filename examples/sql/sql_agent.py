"""A text-to-SQL agent on LangGraph: one node writes a query, one runs it, one checks it, one writes it again.

It is an ordinary LangGraph program. Two things in it know about training: `@agl.rollout`, and the base URL, which
stands for the gateway of the rollout whose code is running. The gateway takes each agent's name from the node that
calls the model, so that `train_agents="^(write|rewrite)$"` trains the two that write and not the one that checks.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, Literal

from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from pydantic import SecretStr
from typing_extensions import TypedDict

import agentlightning as agl

from . import prompts
from .grading import describe, extract_query, score
from .sandbox import Result, run_query

MAX_REWRITES = 2


class State(TypedDict):
    """What the nodes hand on; each gives the parts that it changes."""

    database: str
    question: str
    schema: str
    query: str
    result: Result
    feedback: str
    queries: list[str]
    verdicts: list[bool]


@cache
def sql_graph(model: str) -> Any:
    """The compiled graph, for any number of questions at once."""
    chat = ChatOpenAI(model=model, base_url=agl.GATEWAY_URL, api_key=SecretStr("none"), max_retries=0)

    async def ask(messages: list[tuple[str, str]]) -> str:
        return str((await chat.ainvoke(messages, max_tokens=64)).content)

    async def write(state: State) -> dict[str, Any]:
        query = extract_query(await ask(prompts.writer(state["schema"], state["question"])))
        return {"query": query, "queries": [query]}

    def execute(state: State) -> dict[str, Any]:
        return {"result": run_query(Path(state["database"]), state["query"])}

    async def check(state: State) -> dict[str, Any]:
        verdict = await ask(prompts.checker(state["question"], state["query"], state["result"].show()))
        accepted = verdict.strip().startswith(prompts.RIGHT)
        return {"feedback": verdict.strip(), "verdicts": [*state.get("verdicts", []), accepted]}

    async def rewrite(state: State) -> dict[str, Any]:
        prompt = prompts.rewriter(
            state["schema"], state["question"], state["query"], state["result"].show(), state["feedback"]
        )
        query = extract_query(await ask(prompt))
        return {"query": query, "queries": [*state["queries"], query]}

    def enough(state: State) -> Literal["rewrite", "__end__"]:
        return "__end__" if state["verdicts"][-1] or len(state["queries"]) > MAX_REWRITES else "rewrite"

    graph = StateGraph(State)
    for name, node in {"write": write, "execute": execute, "check": check, "rewrite": rewrite}.items():
        graph.add_node(name, node)  # pyright: ignore[reportArgumentType, reportCallIssue]
    graph.add_edge(START, "write")
    graph.add_edge("write", "execute")
    graph.add_edge("execute", "check")
    graph.add_conditional_edges("check", enough, {"rewrite": "rewrite", "__end__": END})
    graph.add_edge("rewrite", "execute")
    return graph.compile()


@agl.rollout
async def sql_agent(task: dict[str, Any], llm: agl.LLM) -> None:
    """Answer `task["question"]` about the SQLite file `task["database"]`; 1.0 if the last query gives what
    `task["query"]` gives. How each agent did is told by name beside it.
    """
    database = Path(task["database"])
    given = {"database": str(database), "question": task["question"], "schema": describe(database)}
    state = await sql_graph(llm.model).ainvoke(given)
    right = [score(database, query, task["query"]) for query in state["queries"]]
    agreed = [accepted == bool(reward) for accepted, reward in zip(state["verdicts"], right, strict=True)]
    rewards = {"correct": right[-1], "writer": right[0], "checker": sum(agreed) / len(agreed)}
    if len(right) > 1:
        rewards["rewriter"] = right[-1]
    agl.emit_reward(rewards, primary_key="correct")
