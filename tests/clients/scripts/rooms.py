"""As scripts for 0.3 are written: an agent with tools and a judge that answers by a schema, traced by AgentOps. Its
calls are read back as messages.
"""

import asyncio
import json
from typing import TypedDict

from agentlightning.reward import find_final_reward
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

import agentlightning as agl
from agentlightning.adapter import TraceToMessages
from agentlightning.litagent import rollout
from agentlightning.runner import LitAgentRunner
from agentlightning.store import InMemoryLightningStore
from agentlightning.tracer.agentops import AgentOpsTracer
from agentlightning.types import PromptTemplate


class Task(TypedDict):
    people: int
    wanted: str


class Judgement(BaseModel):
    reason: str
    score: float


ROOMS = {"Blue": 6, "Red": 2}
TOOL = {
    "type": "function",
    "function": {
        "name": "rooms_for",
        "description": "The rooms that hold so many people.",
        "parameters": {"type": "object", "properties": {"people": {"type": "integer"}}, "required": ["people"]},
    },
}


def rooms_for(people: int) -> list[str]:
    return [name for name, size in ROOMS.items() if size >= people]


@rollout
def choose(task: Task, prompt_template: PromptTemplate) -> float:
    client = OpenAI()
    messages = [
        {"role": "system", "content": "You book rooms."},
        {"role": "user", "content": prompt_template.format(**task)},
    ]
    said = client.chat.completions.create(model="small", messages=messages, tools=[TOOL], tool_choice="auto")
    for call in said.choices[0].message.tool_calls or []:
        found = json.dumps(rooms_for(**json.loads(call.function.arguments)))
        asked = {"name": call.function.name, "arguments": call.function.arguments}
        calls = [{"id": call.id, "type": "function", "function": asked}]
        messages.append({"role": "assistant", "content": None, "tool_calls": calls})
        messages.append({"role": "tool", "tool_call_id": call.id, "content": found})
    last = client.chat.completions.create(model="small", messages=messages).choices[0].message.content
    question = [{"role": "user", "content": f"Is this {task['wanted']}? {last}"}]
    judged = client.chat.completions.parse(model="judge", messages=question, response_format=Judgement)
    return Judgement.model_validate_json(judged.choices[0].message.content or "").score


async def main() -> None:
    runner = LitAgentRunner[Task](AgentOpsTracer())
    store = InMemoryLightningStore()
    prompt = PromptTemplate(template="A room for {people} people.", engine="f-string")
    with runner.run_context(agent=choose, store=store):
        done = await runner.step({"people": 4, "wanted": "Blue"}, resources={"main_prompt": prompt})
    spans = await store.query_spans(done.rollout_id)
    assert find_final_reward(spans) == 1.0
    conversations = TraceToMessages().adapt(spans)
    roles = [[message["role"] for message in found["messages"]] for found in conversations]
    assert ["system", "user", "assistant", "tool", "assistant"] in roles, roles
    (with_tool,) = (found for found, seen in zip(conversations, roles, strict=True) if "tool" in seen)
    assert with_tool["messages"][2]["tool_calls"][0]["function"]["name"] == "rooms_for"
    await one_session()


async def one_session() -> None:
    tracer, store = AgentOpsTracer(), InMemoryLightningStore()
    started = await store.start_rollout(input={"origin": "by hand"})
    ids = {"rollout_id": started.rollout_id, "attempt_id": started.attempt.attempt_id}
    with tracer.lifespan(store):
        async with tracer.trace_context("trace-1", **ids):
            messages = [{"role": "user", "content": "Who are you?"}]
            await AsyncOpenAI().chat.completions.create(model="small", messages=messages)
    spans = {span.name: span for span in await store.query_spans(started.rollout_id)}
    assert set(spans) == {"openai.chat.completion", "trace-1.session"}, set(spans)
    assert spans["trace-1.session"].attributes["agentops.span.kind"] == "session"
    call = spans["openai.chat.completion"]
    assert call.parent_id == spans["trace-1.session"].span_id
    assert call.attributes["gen_ai.prompt.0.content"] == "Who are you?"


if __name__ == "__main__":
    agl.setup_logging()
    asyncio.run(main())
