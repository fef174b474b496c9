"""Starting what a policy needs: its model process and the gateway in front of it."""

from __future__ import annotations

from contextlib import AsyncExitStack

from agentlightning.algorithm.base import PolicySpec
from agentlightning.engine.events import POLICY
from agentlightning.errors import missing_extra
from agentlightning.gateway import Gateway
from agentlightning.gateway.routing.models import Frozen, Model, Trained
from agentlightning.learner.base import LearnerOptions
from agentlightning.modelprocess.client import ModelProcess
from agentlightning.modelprocess.protocol import Lora, Settings
from agentlightning.models import resolve_model
from agentlightning.store.base import LightningStore


def require_training_extra() -> None:
    """Raises ConfigError with the command to run when the extra `torch` is not installed."""
    from importlib.util import find_spec

    for package in ("torch", "transformers", "renderers"):
        if find_spec(package) is None:
            raise missing_extra("torch", package)


async def start_policy(
    stack: AsyncExitStack,
    store: LightningStore,
    spec: PolicySpec,
    port: int | None,
    *,
    host: str = "127.0.0.1",
    secret: bytes | None = None,
) -> tuple[ModelProcess, Gateway]:
    """Start both; `stack` stops them in reverse order. Raises ModelError, ConfigError or GatewayError."""
    require_training_extra()
    from agentlightning.rendering import load_rendering

    path = resolve_model(spec.model)
    process = ModelProcess(
        Settings(
            model=path,
            device=spec.device,
            dtype=spec.dtype,
            lora=Lora(rank=spec.lora_rank) if spec.lora_rank else None,
            policies=dict(spec.policies),
            frozen=spec.frozen,
            max_context=spec.max_context,
            max_concurrency=spec.max_concurrency,
            seed=spec.seed,
            in_flight=spec.in_flight,
            learner=LearnerOptions(
                gradient_checkpointing=spec.gradient_checkpointing,
                reference=resolve_model(spec.reference) if spec.reference else None,
                critic=spec.critic,
            ),
        )
    )
    await process.start()
    stack.push_async_callback(process.close)
    sampling = {"temperature": spec.temperature, "top_p": 1.0, "top_k": 0}
    rendering = load_rendering(path, spec.renderer)
    others: dict[str, Model] = {name: Trained(process.policy(name), rendering) for name in list(spec.policies)[1:]}
    if spec.frozen is not None:
        others[spec.frozen] = Frozen(process.policy(spec.frozen), rendering)
    gateway = Gateway(
        store,
        process,
        rendering,
        policy=next(iter(spec.policies), POLICY),
        models=others,
        host=host,
        port=port or 0,
        secret=secret,
        train_sampling=sampling,
        train_agents=spec.train_agents,
        train_prompts=spec.train_prompts,
        max_calls=spec.max_calls,
        max_tokens=spec.max_tokens,
        cut_long_prompts=spec.cut_long_prompts,
    )
    await gateway.start()
    stack.push_async_callback(gateway.stop)
    return process, gateway
