"""As scripts for 0.3 are written: an agent is tried by a runner, by a runner with hooks, and by the trainer."""

import asyncio
import subprocess
import sys

from openai import AsyncOpenAI

from agentlightning import Trainer, configure_logger, rollout
from agentlightning.litagent import LitAgent
from agentlightning.runner import LitAgentRunner
from agentlightning.store import InMemoryLightningStore
from agentlightning.tracer import OtelTracer
from agentlightning.types import Hook, PromptTemplate, Rollout

QUESTION = "Why is the sky blue?"
PROMPT = PromptTemplate(template="You are friendly. {question}", engine="f-string")


async def ask(text: str) -> str:
    client = AsyncOpenAI()
    answered = await client.chat.completions.create(model="small", messages=[{"role": "user", "content": text}])
    return answered.choices[0].message.content or ""


@rollout
async def agent(task: str, prompt_template: PromptTemplate) -> float:
    said = await ask(prompt_template.format(question=task))
    return float(await ask(f"Judge with a number between 0 and 1: {said}"))


class Looking(Hook):
    def __init__(self) -> None:
        self.seen = []

    async def on_trace_end(self, *, agent: LitAgent, runner: LitAgentRunner, tracer: OtelTracer, rollout: Rollout):
        self.seen.append((rollout.input, [span.name for span in tracer.get_last_trace()]))


async def by_runner(hooks: list[Hook]) -> None:
    store = InMemoryLightningStore()
    runner = LitAgentRunner[str](OtelTracer())
    with runner.run_context(agent=agent, store=store, hooks=hooks):
        done = await runner.step(QUESTION, resources={"main_prompt": PROMPT})
    assert done.status == "succeeded"
    spans = await store.query_spans(done.rollout_id)
    assert spans[-1].name == "agentlightning.annotation"
    assert spans[-1].attributes["agentlightning.reward.0.value"] == 0.75


async def with_hooks() -> None:
    looking = Looking()
    await by_runner([looking])
    assert [task for task, _ in looking.seen] == [QUESTION]


def by_trainer() -> None:
    trainer = Trainer(n_workers=1, initial_resources={"main_prompt": PROMPT})
    trainer.dev(agent, [QUESTION, "What is blue?"])


MODES = {"runner": lambda: asyncio.run(by_runner([])), "hook": lambda: asyncio.run(with_hooks()), "trainer": by_trainer}

if __name__ == "__main__":
    if sys.argv[1:]:
        configure_logger()
        MODES[sys.argv[1]]()
        sys.exit()
    for mode in ("runner", "hook"):  # a process each, for tracers are the process's
        subprocess.run([sys.executable, __file__, mode], check=True, stderr=subprocess.DEVNULL)
    configure_logger()
    MODES["trainer"]()
