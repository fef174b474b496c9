"""As scripts for 0.3 are written: an algorithm of one's own and a runner in two processes beside `agl store`; then the
same algorithm inside a trainer.
"""

import asyncio
import socket
import subprocess
import sys
import time

from openai import AsyncOpenAI

import agentlightning as agl
from agentlightning.algorithm import algo

STORE = "from agentlightning.cli import main; main()"
PROMPTS = ("You are helpful. {question}", "You are friendly. {question}")


async def choose(*, store: agl.LightningStore) -> str:
    rewards = {}
    for prompt in PROMPTS:
        template = agl.PromptTemplate(template=prompt, engine="f-string")
        resources: agl.NamedResources = {"main_prompt": template}
        await store.add_resources(resources)
        queued = await store.enqueue_rollout(input="Why is the sky blue?", mode="train")
        for _ in range(240):
            done = await store.wait_for_rollouts(rollout_ids=[queued.rollout_id], timeout=0.01)
            if done:
                break
            await asyncio.sleep(0.25)
        assert done[0].status == "succeeded", done
        rewards[prompt] = agl.find_final_reward(await store.query_spans(queued.rollout_id))
    best = max(rewards, key=lambda prompt: rewards[prompt] or 0.0)
    assert best == PROMPTS[1], rewards
    return best


@agl.rollout
async def agent(task: str, prompt_template: agl.PromptTemplate) -> float:
    client = AsyncOpenAI()

    async def ask(text: str) -> str:
        answered = await client.chat.completions.create(model="small", messages=[{"role": "user", "content": text}])
        return answered.choices[0].message.content or ""

    said = await ask(prompt_template.format(question=task))
    return float(await ask(f"Judge with a number between 0 and 1: {said}"))


@algo
async def inside_a_trainer(*, store: agl.LightningStore):
    return await choose(store=store)


async def part(role: str, address: str) -> None:
    store = agl.LightningStoreClient(address)
    try:
        if role == "algorithm":
            await choose(store=store)
        else:
            runner = agl.LitAgentRunner[str](tracer=agl.OtelTracer())
            with runner.run_context(agent=agent, store=store):
                await runner.iter()
    finally:
        await store.close()


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def in_three_processes() -> None:
    port = free_port()
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    serving = subprocess.Popen([sys.executable, "-c", STORE, "store", "--port", str(port)], **quiet)
    running = None
    try:
        wait_for(port)
        address = f"http://127.0.0.1:{port}"
        running = subprocess.Popen([sys.executable, __file__, "runner", address], **quiet)
        subprocess.run([sys.executable, __file__, "algorithm", address], check=True, stderr=subprocess.DEVNULL)
    finally:
        for process in filter(None, (running, serving)):
            process.terminate()
            process.wait(30)


def wait_for(port: int) -> None:
    for _ in range(240):
        with socket.socket() as trying:
            if trying.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.25)
    raise TimeoutError(f"nothing listens on {port}")


if __name__ == "__main__":
    if sys.argv[1:]:
        asyncio.run(part(*sys.argv[1:]))
        sys.exit()
    in_three_processes()
    agl.setup_logging()
    agl.Trainer(n_workers=1, algorithm=inside_a_trainer).fit(agent)
