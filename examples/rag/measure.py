"""How often a model finds the answer, in this process, without the framework and the server: for measuring it while
making it.
"""

from __future__ import annotations

import asyncio
from typing import Any

from agentlightning.trainer.example import load_example

from .bm25 import Library
from .corpus import make_documents, make_tasks, make_world
from .prompts import MAX_TOKENS, MAX_TURNS, SEARCH_TOOL, conversation
from .reward import earned

NO_QUERY = "Error: give a query"


def measure(model: Any, renderer: Any, tasks: int = 200) -> str:
    """Means of what the agent reports, sampled at temperature 1."""
    given, library = make_tasks()["test"][:tasks], Library(make_documents(make_world()))
    batch = load_example("tools", "batch").Batch(model, renderer)
    searches = [0] * len(given)

    async def carry_out(i: int, arguments: Any) -> str:
        searches[i] += 1
        query = arguments.get("query") if isinstance(arguments, dict) else None
        return library.search(query) if isinstance(query, str) else NO_QUERY

    conversations = [conversation(task["question"]) for task in given]
    playing = batch.converse(conversations, [SEARCH_TOOL], carry_out, turns=MAX_TURNS, max_tokens=MAX_TOKENS)
    said = asyncio.run(playing)
    rewards = [earned(said[i], task["answer"], searches[i]) for i, task in enumerate(given)]
    return ", ".join(f"{name} {sum(reward[name] for reward in rewards) / len(rewards):.2f}" for name in rewards[0])
