"""As scripts for 0.3 are written: an LLMProxy before a provider that the environment names, beside a store's server,
and an attempt that is asked through its URL.
"""

import asyncio
import socket

import aiohttp

import agentlightning as agl


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


async def main() -> None:
    serving = agl.LightningStoreServer(agl.InMemoryLightningStore(), "127.0.0.1", free_port())
    await serving.start()
    model = {"model_name": "small", "litellm_params": {"model": "openai/small"}}
    proxy = agl.LLMProxy(port=free_port(), model_list=[model], store=serving, callbacks=["opentelemetry"])
    await proxy.start()
    store = agl.LightningStoreClient(serving.endpoint)
    started = await store.start_rollout(input={"origin": "a test"})
    ids = {"rollout_id": started.rollout_id, "attempt_id": started.attempt.attempt_id}
    url = proxy.as_resource(model="small").get_base_url(*ids.values())
    async with aiohttp.ClientSession() as session:
        body = {"model": "small", "messages": [{"role": "user", "content": "Who are you?"}]}
        async with session.post(f"{url}/chat/completions", json=body) as response:
            said = (await response.json())["choices"][0]["message"]["content"]
    assert said == "I was asked: Who are you?"
    spans = await store.query_spans(**ids)
    assert spans
    assert {(span.rollout_id, span.attempt_id) for span in spans} == {tuple(ids.values())}
    await store.close()
    await proxy.stop()
    await serving.stop()


if __name__ == "__main__":
    agl.setup_logging()
    asyncio.run(main())
