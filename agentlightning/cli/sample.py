"""A request that the served model knows how to answer: the first one of a rollout of its own run."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from agentlightning.errors import AgentLightningError
from agentlightning.models import shipped_models
from agentlightning.store import SqliteLightningStore
from agentlightning.trainer.example import load_example
from agentlightning.types import Span

STORE_FILE = "store.db"
_LOOKED_AT = 5
_EXAMPLE: dict[str, Any] = {"messages": [{"role": "user", "content": "What is 12 + 30?"}]}


async def curl_command(model: str, url: str, *, named: str, with_key: bool) -> str:
    """A `curl` to paste, on one line: a task of the model's run, or a plain question where there is no run."""
    request = {"model": named, **(_of_an_example(model) or await _of_its_run(Path(model)) or _EXAMPLE)}
    key = ' -H "Authorization: Bearer $AGL_API_KEY"' if with_key else ""
    return f"curl {url}/chat/completions{key} -H 'Content-Type: application/json' -d {shlex.quote(json.dumps(request))}"


async def _of_its_run(model: Path) -> dict[str, Any] | None:
    """From the store of the run that a checkpoint, or the model in it, belongs to."""
    file = _store_of(model)
    if file is None:
        return None
    try:
        store = SqliteLightningStore(file)
    except AgentLightningError:  # the run goes on and owns its store
        return None
    try:
        for rollout in await store.query_rollouts(sort_by="start_time", limit=_LOOKED_AT):
            for span in await store.query_spans(rollout.rollout_id, "latest"):
                if "gen_ai.input.messages" in span.attributes:
                    return as_request(span)
    finally:
        await store.close()
    return None


def _store_of(model: Path) -> Path | None:
    """In the folder itself, or in the run's, which is up to three folders above (checkpoints/step-…/model)."""
    places = (model, *model.resolve().parents[:3]) if model.exists() else ()
    return next((place / STORE_FILE for place in places if (place / STORE_FILE).is_file()), None)


def as_request(span: Span) -> dict[str, Any]:
    """The chat request of a recorded call that was the first of its conversation."""
    attributes = span.attributes
    messages = [
        {"role": message["role"], "content": "".join(str(part.get("content", "")) for part in message["parts"])}
        for message in json.loads(str(attributes["gen_ai.input.messages"]))
    ]
    tools = json.loads(str(attributes.get("gen_ai.tool.definitions", "[]")))
    limit = attributes.get("gen_ai.request.max_tokens")
    return {"messages": messages, **({"tools": tools} if tools else {}), **({"max_tokens": limit} if limit else {})}


def _of_an_example(model: str) -> dict[str, Any] | None:
    """A shipped model's, which was made for the example of its name."""
    if model not in shipped_models():
        return None
    return load_example(model, "recipe").request()
