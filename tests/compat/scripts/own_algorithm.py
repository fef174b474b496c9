"""As scripts for 0.3 are written: an algorithm by `@algo`, a store server and its client, an LLMProxy, a strategy."""

import asyncio
import socket

import agentlightning as agl
from agentlightning import (
    InMemoryLightningStore,
    LightningStore,
    LightningStoreClient,
    LightningStoreServer,
    LLMProxy,
    OtelTracer,
    TracerTraceToTriplet,
    Trainer,
    algo,
    rollout,
)
from agentlightning.execution.shared_memory import SharedMemoryExecutionStrategy
from agentlightning.types import Dataset, EnqueueRolloutRequest, PaginatedResult

agl.setup_logging(apply_to=["agentlightning"])
FOUND = []
START = {"prompt_template": agl.PromptTemplate(template="Be {a}", engine="f-string")}


@algo
async def find_best_prompt(
    store: LightningStore, train_dataset: Dataset[str], val_dataset: Dataset[str], adapter, initial_resources
):
    assert isinstance(adapter, TracerTraceToTriplet)
    for prompt in ("You are {a}", "Be {a}"):
        template = agl.PromptTemplate(template=prompt, engine="f-string")
        updated = await store.add_resources({"prompt_template": template})
        asked = [EnqueueRolloutRequest(input=t, mode="train", resources_id=updated.resources_id) for t in train_dataset]
        ids = [r.rollout_id for r in await store.enqueue_many_rollouts(asked)]
        done = []
        while len(done) < len(ids):
            done = await store.wait_for_rollouts(rollout_ids=ids, timeout=0.05)
        rewards = [agl.find_final_reward(await store.query_spans(i, "latest")) for i in ids]
        FOUND.append((sum(rewards) / len(rewards), prompt))


@rollout
def agent(task: str, prompt_template: agl.PromptTemplate, rollout: agl.Rollout) -> float:
    assert rollout.rollout_id
    return 1 if prompt_template.format(a=task).startswith("Be") else 0.25


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


async def serve_a_store() -> None:
    server = LightningStoreServer(InMemoryLightningStore(), host="127.0.0.1", port=free_port(), launch_mode="thread")
    await server.start()
    queued = await server.enqueue_rollout(input="x")
    client = LightningStoreClient(server.endpoint, retry_delays=(0.1,), request_timeout=5)
    claimed = await client.dequeue_rollout(worker_id="w")
    assert claimed.rollout_id == queued.rollout_id
    assert (await server.get_rollout_by_id(queued.rollout_id)).status == "preparing"
    page = await client.query_rollouts(limit=10)
    assert isinstance(page, PaginatedResult)
    assert page.total == 1
    assert server.capabilities["otlp_traces"]
    assert server.otlp_traces_endpoint().endswith("/v1/traces")
    await client.close()
    await server.stop()


def model(name: str) -> dict:
    params = {"model": f"hosted_vllm/{name}", "api_base": "http://127.0.0.1:9/v1"}
    return {"model_name": name, "litellm_params": params}


async def change_models() -> None:
    proxy = LLMProxy(model_list=[model("first")], store=InMemoryLightningStore(), launch_mode="thread", num_retries=2)
    await proxy.start()
    assert isinstance(proxy.as_resource(sampling_parameters={"temperature": 1.0}), agl.ProxyLLM)
    proxy.update_model_list([model("second")])
    await proxy.restart()
    assert proxy.as_resource().model == "second"
    await proxy.stop()


if __name__ == "__main__":
    asyncio.run(serve_a_store())
    asyncio.run(change_models())
    strategy = SharedMemoryExecutionStrategy(n_runners=2)
    trainer = Trainer(
        algorithm=find_best_prompt, adapter=TracerTraceToTriplet(), strategy=strategy, tracer=OtelTracer()
    )
    trainer.fit(agent, train_dataset=["a", "b", "c"], val_dataset=["d"])
    assert max(FOUND) == (1.0, "Be {a}")
    Trainer(n_workers=1, dev=True, initial_resources=START).fit(agent, ["a", "b"], val_dataset=["d"])
    Trainer(n_workers=1, tracer=agl.DummyTracer(), initial_resources=START).dev(agent, ["a", "b"])
