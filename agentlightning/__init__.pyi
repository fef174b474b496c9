"""What `agl.NAME` is, and where it is loaded from when it is used: a new name is a line here."""

from agentlightning import metrics as metrics
from agentlightning.adapter import (
    LlmProxyTraceToTriplet as LlmProxyTraceToTriplet,
    TracerTraceToTriplet as TracerTraceToTriplet,
    TraceToMessages as TraceToMessages,
)
from agentlightning.algorithm import (
    APO as APO,
    CISPO as CISPO,
    DAPO as DAPO,
    DPO as DPO,
    GEPA as GEPA,
    GRPO as GRPO,
    GSPO as GSPO,
    PPO as PPO,
    REINFORCE as REINFORCE,
    RLOO as RLOO,
    SFT as SFT,
    Adam as Adam,
    Algorithm as Algorithm,
    Baseline as Baseline,
    Branches as Branches,
    CallSettings as CallSettings,
    Checkpoints as Checkpoints,
    Checks as Checks,
    ComputeSettings as ComputeSettings,
    Constraint as Constraint,
    Correction as Correction,
    Critic as Critic,
    Diagnostics as Diagnostics,
    Distill as Distill,
    DrGRPO as DrGRPO,
    Estimator as Estimator,
    Explore as Explore,
    GroupJudge as GroupJudge,
    Joint as Joint,
    League as League,
    LossSpec as LossSpec,
    Mixture as Mixture,
    MovingBaseline as MovingBaseline,
    Overlong as Overlong,
    Part as Part,
    PolicyHooks as PolicyHooks,
    Prices as Prices,
    Reference as Reference,
    ReinforcePP as ReinforcePP,
    ReinforcePPBaseline as ReinforcePPBaseline,
    Replay as Replay,
    Rewards as Rewards,
    RunHooks as RunHooks,
    SelfDistill as SelfDistill,
    StallRule as StallRule,
    Teacher as Teacher,
    Validation as Validation,
    algo as algo,
    estimator as estimator,
)
from agentlightning.emitter import (
    emit_annotation as emit_annotation,
    emit_exception as emit_exception,
    emit_message as emit_message,
    emit_object as emit_object,
    emit_reward as emit_reward,
    operation as operation,
    replayed as replayed,
)
from agentlightning.environments import load_environment as load_environment
from agentlightning.errors import (
    AgentError as AgentError,
    AgentLightningError as AgentLightningError,
    ConfigError as ConfigError,
    ConflictError as ConflictError,
    EngineError as EngineError,
    GatewayError as GatewayError,
    JudgeError as JudgeError,
    ModelError as ModelError,
    NotFoundError as NotFoundError,
    StoreError as StoreError,
)
from agentlightning.gateway import (
    Gateway as Gateway,
    Provider as Provider,
    SpendingLimits as SpendingLimits,
    TokenPrice as TokenPrice,
)
from agentlightning.litagent import (
    Bubblewrap as Bubblewrap,
    Container as Container,
    Kubernetes as Kubernetes,
    Limits as Limits,
    LitAgent as LitAgent,
    Program as Program,
    ProgramRun as ProgramRun,
    llm_rollout as llm_rollout,
    prompt_rollout as prompt_rollout,
    rollout as rollout,
)
from agentlightning.models import resolve_model as resolve_model
from agentlightning.runner import LitAgentRunner as LitAgentRunner, Runner as Runner
from agentlightning.runner.air import Air as Air, air as air
from agentlightning.store import (
    InMemoryLightningStore as InMemoryLightningStore,
    LightningStoreClient as LightningStoreClient,
    LightningStoreServer as LightningStoreServer,
    PostgresLightningStore as PostgresLightningStore,
    SqliteLightningStore as SqliteLightningStore,
)
from agentlightning.store.base import LightningStore as LightningStore
from agentlightning.tracer import (
    GATEWAY_URL as GATEWAY_URL,
    AgentOpsTracer as AgentOpsTracer,
    DummyTracer as DummyTracer,
    OtelTracer as OtelTracer,
    Tracer as Tracer,
    WeaveTracer as WeaveTracer,
)
from agentlightning.trainer import RunResult as RunResult, Trainer as Trainer
from agentlightning.trainer.example import load_example as load_example
from agentlightning.types import (
    LLM as LLM,
    Attempt as Attempt,
    AttemptedRollout as AttemptedRollout,
    AttemptStatus as AttemptStatus,
    Call as Call,
    Dataset as Dataset,
    Demonstrations as Demonstrations,
    EnqueueRolloutRequest as EnqueueRolloutRequest,
    Hook as Hook,
    NamedResources as NamedResources,
    Outcome as Outcome,
    PaginatedResult as PaginatedResult,
    PromptTemplate as PromptTemplate,
    ProxyLLM as ProxyLLM,
    Resource as Resource,
    ResourcesUpdate as ResourcesUpdate,
    Rollout as Rollout,
    RolloutConfig as RolloutConfig,
    RolloutMode as RolloutMode,
    RolloutStatus as RolloutStatus,
    Sibling as Sibling,
    Span as Span,
    SystemPrompt as SystemPrompt,
    ToolDescription as ToolDescription,
    Triplet as Triplet,
    Worker as Worker,
    WorkerStatus as WorkerStatus,
)
from agentlightning.types.reward import (
    find_final_reward as find_final_reward,
    find_reward_spans as find_reward_spans,
    get_reward_value as get_reward_value,
    is_reward_span as is_reward_span,
)

__version__: str
__all__: list[str]
