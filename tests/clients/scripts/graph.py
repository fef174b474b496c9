"""As scripts for 0.3 are written: LangGraph writes and checks a query; a class with `self.tracer`'s handler, tried by
`Trainer.dev`.
"""

import os
import re
import sqlite3
import tempfile
from pathlib import Path
from typing import Any, Literal, cast

from langchain.chat_models import init_chat_model
from langchain_core.prompts import ChatPromptTemplate
from langgraph.graph import END, START, MessagesState, StateGraph

import agentlightning as agl

logger = agl.setup_module_logging(name=__name__)

WRITE = ChatPromptTemplate([("system", "Write SQL for {schema}."), ("user", "Question: {question}")])
CHECK = ChatPromptTemplate([("system", "Check this SQL."), ("user", "{query}\n{result}")])


class State(MessagesState):
    question: str
    query: str
    result: str
    turns: int


class Graph:
    def __init__(self, database: Path, endpoint: str, model: str, temperature: float) -> None:
        self.database = database
        self.model: Any = init_chat_model(
            model,
            model_provider="openai",
            openai_api_base=endpoint,
            openai_api_key=os.environ.get("OPENAI_API_KEY", "dummy"),
            temperature=temperature,
            max_retries=0,
            max_tokens=64,
        )

    def write(self, state: State) -> dict[str, Any]:
        said = self.model.invoke(WRITE.invoke({"schema": "singer(name)", "question": state["question"]}))
        found = re.search(r"```\w*\n(.*?)\n```", said.content, re.DOTALL)
        return {"query": found.group(1) if found else said.content, "turns": state.get("turns", 0) + 1}

    def execute(self, state: State) -> dict[str, Any]:
        return {"result": str(answers(self.database, state["query"]))}

    def check(self, state: State) -> dict[str, Any]:
        return {"messages": [self.model.invoke(CHECK.invoke({"query": state["query"], "result": state["result"]}))]}

    def go_on(self, state: State) -> Literal["write", "__end__"]:
        return END if "right" in state["messages"][-1].content or state["turns"] > 1 else "write"

    def compiled(self) -> Any:
        builder: Any = StateGraph(State)
        for name in ("write", "execute", "check"):
            builder.add_node(name, getattr(self, name))
        builder.add_edge(START, "write")
        builder.add_edge("write", "execute")
        builder.add_edge("execute", "check")
        builder.add_conditional_edges("check", self.go_on)
        return builder.compile()


def answers(database: Path, query: str) -> list[Any] | None:
    connection = sqlite3.connect(database)
    try:
        return sorted(connection.execute(query).fetchall())
    except sqlite3.Error:
        return None
    finally:
        connection.close()


class SqlAgent(agl.LitAgent[dict[str, Any]]):
    def __init__(self, database: Path, trained_agents: str | None = "write") -> None:
        super().__init__(trained_agents=trained_agents)
        self.database = database

    def rollout(self, task: dict[str, Any], resources: agl.NamedResources, rollout: agl.Rollout) -> float | None:
        llm = cast(agl.LLM, resources["main_llm"])
        endpoint = llm.get_base_url(rollout.rollout_id, rollout.attempt.attempt_id)  # pyright: ignore
        graph = Graph(self.database, endpoint, llm.model, llm.sampling_parameters.get("temperature", 0.0)).compiled()
        handler = self.tracer.get_langchain_handler()  # pyright: ignore
        done = graph.invoke({"question": task["question"]}, {"callbacks": [handler] if handler else []})
        return float(answers(self.database, done["query"]) == answers(self.database, task["query"]))


class Collecting(agl.Hook):
    """Runners may be in other processes, which share a folder."""

    async def on_rollout_end(self, *, agent: Any, runner: Any, rollout: Any, spans: Any) -> None:
        write_down(rollout.rollout_id, agl.find_final_reward(spans))


def write_down(name: str, reward: float | None) -> None:
    Path(f"{name}.reward").write_text(str(reward))


if __name__ == "__main__":
    endpoint = agl.LLM(endpoint=os.environ["OPENAI_API_BASE"], model="small", sampling_parameters={"temperature": 0.7})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "concerts.sqlite"
        connection = sqlite3.connect(path)
        connection.executescript("CREATE TABLE singer(name); INSERT INTO singer VALUES ('a'), ('b');")
        connection.close()
        tasks = [{"question": "Who sings?", "query": "SELECT name FROM singer"}, {"question": "?", "query": "SELECT 1"}]
        trainer = agl.Trainer(n_workers=1, initial_resources={"main_llm": endpoint}, hooks=[Collecting()])
        trainer.dev(SqlAgent(path), cast("agl.Dataset[dict[str, Any]]", tasks))
    assert sorted(file.read_text() for file in Path().glob("*.reward")) == ["0.0", "1.0"]
