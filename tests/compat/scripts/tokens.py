"""As scripts for 0.3 are written: an LLMProxy before vLLM, a runner by hand, tokens read back for fine-tuning."""

import asyncio
import uuid
from typing import Any

import aiohttp
from agentlightning.llm_proxy import LLMProxy
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.store.threading import LightningStoreThreaded
from aiohttp import web

from agentlightning import (
    LLM,
    EnqueueRolloutRequest,
    LitAgentRunner,
    LlmProxyTraceToTriplet,
    OtelTracer,
    ProxyLLM,
    RolloutConfig,
    emit_reward,
    rollout,
)


async def vllm(request: web.Request) -> web.Response:
    """What a server of vLLM answers to whoever asks for token ids."""
    body = await request.json()
    assert body["return_token_ids"] is True
    message = {"role": "assistant", "content": "4"}
    choice = {"index": 0, "finish_reason": "stop", "message": message, "token_ids": [7, 8]}
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "object": "chat.completion", "created": 1, "model": body["model"]}
    return web.json_response({**head, "choices": [choice], "usage": usage, "prompt_token_ids": [1, 2, 3]})


@rollout
async def agent(task: str, llm: LLM, rollout: Any) -> None:
    body = {"model": llm.model, "messages": [{"role": "user", "content": task}], **llm.sampling_parameters}
    headers = {"Authorization": "Bearer dummy"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(f"{llm.get_base_url()}/chat/completions", json=body) as response,
    ):
        emit_reward(float((await response.json())["choices"][0]["message"]["content"] == "4"))


async def main() -> None:
    app = web.Application()
    app.router.add_post("/v1/chat/completions", vllm)
    site = web.AppRunner(app)
    await site.setup()
    await web.TCPSite(site, "127.0.0.1", 0).start()
    params = {"model": "hosted_vllm/local", "api_base": f"http://127.0.0.1:{site.addresses[0][1]}/v1"}
    store = LightningStoreThreaded(InMemoryLightningStore())
    callbacks = ["return_token_ids", "opentelemetry"]
    models = [{"model_name": "local", "litellm_params": params}]
    proxy = LLMProxy(model_list=models, store=store, launch_mode="thread", callbacks=callbacks)
    await proxy.start()
    resource = proxy.as_resource(sampling_parameters={"temperature": 0.5})
    assert isinstance(resource, ProxyLLM)
    update = await store.add_resources({"main_llm": resource})
    config = RolloutConfig(timeout_seconds=60, unresponsive_seconds=60)
    requests = [
        EnqueueRolloutRequest(input=f"{n} + 2?", mode="train", resources_id=update.resources_id, config=config)
        for n in range(3)
    ]
    queued = await store.enqueue_many_rollouts(requests)
    runner = LitAgentRunner[str](OtelTracer(), max_rollouts=3)
    with runner.run_context(agent=agent, store=store):
        await runner.iter()
    for done in queued:
        assert (await store.get_rollout_by_id(done.rollout_id)).status == "succeeded"
        (triplet,) = LlmProxyTraceToTriplet().adapt(await store.query_spans(done.rollout_id, "latest"))
        assert (triplet.prompt["token_ids"], triplet.response["token_ids"]) == ([1, 2, 3], [7, 8])
        assert triplet.reward == 1.0
    await proxy.stop()
    await site.cleanup()


if __name__ == "__main__":
    asyncio.run(main())
