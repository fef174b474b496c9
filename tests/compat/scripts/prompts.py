"""As scripts for 0.3 are written: APO on a prompt template, with a critic that this script plays itself."""

import asyncio
import logging
from threading import Thread

from aiohttp import web
from openai import AsyncOpenAI

from agentlightning import PromptTemplate, Trainer, rollout, setup_logging
from agentlightning.adapter import TraceToMessages
from agentlightning.algorithm.apo import APO

TEMPLATE = "<new_template>Answer kindly: {q}</new_template>"


@rollout
def polite(task: dict, prompt_template: PromptTemplate) -> float:
    return 1.0 if "kindly" in prompt_template.format(**task) else 0.0


async def critic(request: web.Request) -> web.Response:
    message = {"role": "assistant", "content": TEMPLATE if "<new_template>" in await request.text() else "Be kind."}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    choice = {"index": 0, "finish_reason": "stop", "message": message}
    answer = {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}
    return web.json_response(answer)


def serve_critic() -> int:
    loop, app = asyncio.new_event_loop(), web.Application()
    app.router.add_post("/v1/chat/completions", critic)
    served = web.AppRunner(app)
    loop.run_until_complete(served.setup())
    loop.run_until_complete(web.TCPSite(served, "127.0.0.1", 0).start())
    Thread(target=loop.run_forever, daemon=True).start()
    return served.addresses[0][1]


if __name__ == "__main__":
    setup_logging()
    logging.getLogger("agentlightning.algorithm.apo").addHandler(logging.FileHandler("apo.log"))
    client = AsyncOpenAI(base_url=f"http://127.0.0.1:{serve_critic()}/v1", api_key="dummy")
    apo = APO[dict](
        client,
        val_batch_size=8,
        gradient_batch_size=2,
        beam_width=2,
        branch_factor=2,
        beam_rounds=1,
        _poml_trace=True,
    )
    start = PromptTemplate(template="Answer: {q}", engine="f-string")
    trainer = Trainer(
        algorithm=apo, n_runners=2, initial_resources={"prompt_template": start}, adapter=TraceToMessages()
    )
    tasks = [{"q": str(n)} for n in range(16)]
    trainer.fit(agent=polite, train_dataset=tasks, val_dataset=tasks)
    assert apo.get_best_prompt().template == "Answer kindly: {q}", apo.get_best_prompt()
