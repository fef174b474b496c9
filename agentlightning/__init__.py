"""Agent Lightning: train any LLM agent with (almost) no change to its code.

    import agentlightning as agl

    @agl.rollout
    async def my_agent(task, llm): ...          # your agent; returns a reward

    agl.Trainer(algorithm=agl.GRPO(model="calc")).fit(my_agent, tasks)

Names are loaded when they are used, so that importing the package is cheap and needs neither torch nor any framework.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from agentlightning.compat import finder, lookup
from agentlightning.terminal import end_scripts_in_words

__version__ = "0.3.0"

_HOMES: dict[str, tuple[str, ...]] = {
    "agentlightning.adapter": ("LlmProxyTraceToTriplet", "TraceToMessages", "TracerTraceToTriplet"),
    "agentlightning.algorithm": (
        "Adam",
        "CallSettings",
        "Checkpoints",
        "ComputeSettings",
        "Diagnostics",
        "Rewards",
        "Validation",
        "Checks",
        "Correction",
        "Branches",
        "Explore",
        "Critic",
        "MovingBaseline",
        "Overlong",
        "Reference",
        "Replay",
        "StallRule",
        "Teacher",
        "APO",
        "CISPO",
        "DAPO",
        "DPO",
        "GEPA",
        "GRPO",
        "GSPO",
        "PPO",
        "REINFORCE",
        "RLOO",
        "SFT",
        "Algorithm",
        "Baseline",
        "Constraint",
        "Distill",
        "SelfDistill",
        "DrGRPO",
        "Estimator",
        "GroupJudge",
        "Joint",
        "League",
        "LossSpec",
        "Mixture",
        "Part",
        "PolicyHooks",
        "Prices",
        "ReinforcePP",
        "ReinforcePPBaseline",
        "RunHooks",
        "algo",
        "estimator",
    ),
    "agentlightning.emitter": (
        "emit_annotation",
        "emit_exception",
        "emit_message",
        "emit_object",
        "emit_reward",
        "operation",
        "replayed",
    ),
    "agentlightning.environments": ("load_environment",),
    "agentlightning.errors": (
        "AgentError",
        "AgentLightningError",
        "ConfigError",
        "ConflictError",
        "EngineError",
        "GatewayError",
        "JudgeError",
        "ModelError",
        "NotFoundError",
        "StoreError",
    ),
    "agentlightning.gateway": ("Gateway", "Provider", "SpendingLimits", "TokenPrice"),
    "agentlightning.litagent": (
        "Bubblewrap",
        "Container",
        "Kubernetes",
        "LitAgent",
        "Limits",
        "Program",
        "ProgramRun",
        "llm_rollout",
        "prompt_rollout",
        "rollout",
    ),
    "agentlightning.models": ("resolve_model",),
    "agentlightning.runner": ("LitAgentRunner", "Runner"),
    "agentlightning.runner.air": ("Air", "air"),
    "agentlightning.store": (
        "InMemoryLightningStore",
        "LightningStoreClient",
        "LightningStoreServer",
        "PostgresLightningStore",
        "SqliteLightningStore",
    ),
    "agentlightning.store.base": ("LightningStore",),
    "agentlightning.tracer": ("GATEWAY_URL", "AgentOpsTracer", "DummyTracer", "OtelTracer", "Tracer", "WeaveTracer"),
    "agentlightning.trainer": ("RunResult", "Trainer"),
    "agentlightning.trainer.example": ("load_example",),
    "agentlightning.types": (
        "LLM",
        "Attempt",
        "AttemptStatus",
        "AttemptedRollout",
        "Call",
        "Dataset",
        "Demonstrations",
        "EnqueueRolloutRequest",
        "Hook",
        "NamedResources",
        "Outcome",
        "PaginatedResult",
        "PromptTemplate",
        "ProxyLLM",
        "Resource",
        "ResourcesUpdate",
        "Rollout",
        "RolloutConfig",
        "RolloutMode",
        "RolloutStatus",
        "Sibling",
        "Span",
        "SystemPrompt",
        "ToolDescription",
        "Triplet",
        "Worker",
        "WorkerStatus",
    ),
    "agentlightning.types.reward": ("find_final_reward", "find_reward_spans", "get_reward_value", "is_reward_span"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = ["__version__", *sorted(_HOME_OF)]  # pyright: ignore[reportUnsupportedDunderAll]

if TYPE_CHECKING:
    from agentlightning.adapter import LlmProxyTraceToTriplet, TracerTraceToTriplet, TraceToMessages
    from agentlightning.algorithm import (
        APO,
        CISPO,
        DAPO,
        DPO,
        GEPA,
        GRPO,
        GSPO,
        PPO,
        REINFORCE,
        RLOO,
        SFT,
        Adam,
        Algorithm,
        Baseline,
        Branches,
        CallSettings,
        Checkpoints,
        Checks,
        ComputeSettings,
        Constraint,
        Correction,
        Critic,
        Diagnostics,
        Distill,
        DrGRPO,
        Estimator,
        Explore,
        GroupJudge,
        Joint,
        League,
        LossSpec,
        Mixture,
        MovingBaseline,
        Overlong,
        Part,
        PolicyHooks,
        Prices,
        Reference,
        ReinforcePP,
        ReinforcePPBaseline,
        Replay,
        Rewards,
        RunHooks,
        SelfDistill,
        StallRule,
        Teacher,
        Validation,
        algo,
        estimator,
    )
    from agentlightning.emitter import (
        emit_annotation,
        emit_exception,
        emit_message,
        emit_object,
        emit_reward,
        operation,
        replayed,
    )
    from agentlightning.environments import load_environment
    from agentlightning.errors import (
        AgentError,
        AgentLightningError,
        ConfigError,
        ConflictError,
        EngineError,
        GatewayError,
        JudgeError,
        ModelError,
        NotFoundError,
        StoreError,
    )
    from agentlightning.gateway import Gateway, Provider, SpendingLimits, TokenPrice
    from agentlightning.litagent import (
        Bubblewrap,
        Container,
        Kubernetes,
        Limits,
        LitAgent,
        Program,
        ProgramRun,
        llm_rollout,
        prompt_rollout,
        rollout,
    )
    from agentlightning.models import resolve_model
    from agentlightning.runner import LitAgentRunner, Runner
    from agentlightning.runner.air import Air, air
    from agentlightning.store import (
        InMemoryLightningStore,
        LightningStoreClient,
        LightningStoreServer,
        PostgresLightningStore,
        SqliteLightningStore,
    )
    from agentlightning.store.base import LightningStore
    from agentlightning.tracer import GATEWAY_URL, AgentOpsTracer, DummyTracer, OtelTracer, Tracer, WeaveTracer
    from agentlightning.trainer import RunResult, Trainer
    from agentlightning.trainer.example import load_example
    from agentlightning.types import (
        LLM,
        Attempt,
        AttemptedRollout,
        AttemptStatus,
        Call,
        Dataset,
        Demonstrations,
        EnqueueRolloutRequest,
        Hook,
        NamedResources,
        Outcome,
        PaginatedResult,
        PromptTemplate,
        ProxyLLM,
        Resource,
        ResourcesUpdate,
        Rollout,
        RolloutConfig,
        RolloutMode,
        RolloutStatus,
        Sibling,
        Span,
        SystemPrompt,
        ToolDescription,
        Triplet,
        Worker,
        WorkerStatus,
    )
    from agentlightning.types.reward import (
        find_final_reward,
        find_reward_spans,
        get_reward_value,
        is_reward_span,
    )


_MODULES = ("metrics",)
"""Modules whose names the messages give: `agl.metrics.SilentConsole()`."""


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name not in _HOME_OF:
        return lookup.resolve(__name__, name)
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


finder.install()


def __dir__() -> list[str]:
    return sorted(__all__)


end_scripts_in_words()
