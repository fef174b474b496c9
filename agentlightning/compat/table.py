"""THE TABLE of names of agentlightning 0.2 and 0.3: where each leads, and what differs.

A name is written in one of four ways:

    package.module                  a module: every name that the newer module has can be had from the old one too
    package.module:name             a name in a module, old or new
    package.module:Class.member     a method or property that the class of today lacks
    package.module:callable(word=)  an argument that the callable of today lacks

`to` is the newer name in the same form. An argument leads to a newer word, to a function of this package that reads it,
or to "" where it asks for nothing that would be missed (values that ask for something are refused: `accepts`).
`None` is what is not kept: `note` says why and what to do instead, and is the error's text. Names that lead into this
package have no newer form; `note` says what is better.
"""

from __future__ import annotations

from agentlightning.compat.older_arguments import ARGUMENTS
from agentlightning.compat.row import Old

_FIRST = (
    "The protocol of 0.1 is not supported, and Trainer.fit does not need it. In a loop of your own, make `store = "
    "InMemoryLightningStore()` and serve it by `LightningStoreServer(store)`. Instead of update_resources call "
    "store.add_resources(resources); instead of queue_task, store.enqueue_rollout(task, mode); instead of "
    "poll_completed_rollout, store.wait_for_rollouts(rollout_ids=[id], timeout=…) and then store.query_spans(id). "
    "Run agents on other machines by agl runner --server URL."
)
_NO_MONGO = (
    "MongoDB is not supported, because it could not be tested. To share a store between machines, use "
    "PostgresLightningStore('postgresql://…') (extra `postgres`)."
)
_NO_COLLECTIONS = "Stores are SQL now and have no collections. Use InMemoryLightningStore()."
_NO_TREE = "Adapters keep no trees of spans; tracer.get_last_trace() prints and draws them."
_NO_INSTRUMENTATION = "Nothing has to be patched by hand: AgentOpsTracer and WeaveTracer start their instrumentation."
_NO_LAUNCHER = "LightningStoreServer and Gateway run inside the event loop that starts them; set their host= and port=."
_NO_METRICS = "`agl store` has the store's counters at /metrics, in Prometheus' format, without any setup."
_NO_SCAN = "The store's watchdog finds and ends unhealthy attempts by itself; no scan is needed."
_NO_STATUS = "The store sets a rollout's status from its attempts: read rollout.status."
_NO_VERL_PARTS = (
    "verl's classes are not patched. VERL(config) reads verl's configuration; GRPO(…, backend='ray') with "
    "backend_options={'learner': 'verl'} trains with verl's workers."
)
_NO_PARTS = "Use build_component: it makes a component from its description."
_NO_PROCESSOR = "OtelTracer assigns spans to attempts; add your own processor to the global TracerProvider."

MODULES = (
    Old("agentlightning.adapter.base", "agentlightning.compat.adapters"),
    Old("agentlightning.adapter.triplet", "agentlightning.adapter.triplets"),
    Old("agentlightning.algorithm.decorator", "agentlightning.algorithm.base"),
    Old("agentlightning.algorithm.fast", "agentlightning.algorithm"),
    Old("agentlightning.algorithm.utils", "agentlightning.compat.algorithms"),
    Old("agentlightning.algorithm.verl", "agentlightning.compat.verl"),
    Old("agentlightning.algorithm.verl.interface", "agentlightning.compat.verl"),
    Old("agentlightning.client", None, _FIRST),
    Old("agentlightning.config", "agentlightning.compat.commands"),
    Old("agentlightning.emitter.annotation", "agentlightning.emitter"),
    Old("agentlightning.emitter.exception", "agentlightning.emitter"),
    Old("agentlightning.emitter.message", "agentlightning.emitter"),
    Old("agentlightning.emitter.object", "agentlightning.emitter"),
    Old("agentlightning.emitter.reward", "agentlightning.emitter"),
    Old("agentlightning.env_var", "agentlightning.compat.environment"),
    Old("agentlightning.execution", "agentlightning.compat.execution"),
    Old("agentlightning.execution.base", "agentlightning.compat.execution"),
    Old("agentlightning.execution.client_server", "agentlightning.compat.execution"),
    Old("agentlightning.execution.events", "agentlightning.compat.execution"),
    Old("agentlightning.execution.shared_memory", "agentlightning.compat.execution"),
    Old("agentlightning.instrumentation", None, _NO_INSTRUMENTATION),
    Old("agentlightning.llm_proxy", "agentlightning.compat.llm_proxy"),
    Old("agentlightning.logging", "agentlightning.compat.loggers"),
    Old("agentlightning.reward", "agentlightning.compat.emitting"),
    Old("agentlightning.runner.agent", "agentlightning.runner"),
    Old("agentlightning.runner.base", "agentlightning.runner"),
    Old("agentlightning.runner.legacy", None, _FIRST),
    Old("agentlightning.semconv", "agentlightning.compat.semconv"),
    Old("agentlightning.server", None, _FIRST),
    Old("agentlightning.store.client_server", "agentlightning.store"),
    Old("agentlightning.store.collection", None, _NO_COLLECTIONS),
    Old("agentlightning.store.collection_based", "agentlightning.compat.stores"),
    Old("agentlightning.store.memory", "agentlightning.store"),
    Old("agentlightning.store.mongo", None, _NO_MONGO),
    Old("agentlightning.store.threading", "agentlightning.compat.stores"),
    Old("agentlightning.store.utils", "agentlightning.compat.stores"),
    Old("agentlightning.trainer.init_utils", "agentlightning.compat.components"),
    Old("agentlightning.trainer.legacy", None, _FIRST),
    Old("agentlightning.trainer.registry", "agentlightning.compat.components"),
    Old("agentlightning.types.core", "agentlightning.types"),
    Old("agentlightning.types.resources", "agentlightning.types"),
    Old("agentlightning.types.tracer", "agentlightning.types"),
    Old("agentlightning.utils", "agentlightning.compat.utils"),
    Old("agentlightning.utils.id", "agentlightning.types.ids"),
    Old("agentlightning.utils.metrics", None, _NO_METRICS),
    Old("agentlightning.utils.otel", "agentlightning.compat.otel"),
    Old("agentlightning.utils.otlp", "agentlightning.compat.utils"),
    Old("agentlightning.utils.server_launcher", None, _NO_LAUNCHER),
    Old("agentlightning.verl", "agentlightning.compat.verl"),
    Old("agentlightning.verl.__main__", "agentlightning.compat.verl"),
    Old("agentlightning.verl.async_server", None, _NO_VERL_PARTS),
    Old("agentlightning.verl.daemon", None, _NO_VERL_PARTS),
    Old("agentlightning.verl.dataset", None, _NO_VERL_PARTS),
    Old("agentlightning.verl.entrypoint", None, _NO_VERL_PARTS),
    Old("agentlightning.verl.trainer", None, _NO_VERL_PARTS),
)

NAMES = (
    # ---- adapters ----
    Old("agentlightning.adapter:Adapter", "agentlightning.compat.adapters:Adapter"),
    Old("agentlightning.adapter:TraceAdapter", "agentlightning.compat.adapters:TraceAdapter"),
    Old("agentlightning.adapter:OtelTraceAdapter", "agentlightning.compat.adapters:OtelTraceAdapter"),
    Old("agentlightning.adapter:TraceToTripletBase", "agentlightning.compat.adapters:TraceToTripletBase"),
    Old("agentlightning.adapter.triplet:TraceToTripletBase", "agentlightning.compat.adapters:TraceToTripletBase"),
    Old("agentlightning.adapter.triplet:RewardMatchPolicy", "agentlightning.compat.adapters:RewardMatchPolicy"),
    Old("agentlightning.adapter.triplet:TraceTree", None, _NO_TREE),
    Old("agentlightning.adapter.triplet:Transition", None, _NO_TREE),
    Old(
        "agentlightning.adapter.messages:OpenAIMessages",
        "agentlightning.compat.adapters:OpenAIMessages",
        "TraceToMessages gives plain dictionaries of this shape",
    ),
    # ---- algorithms ----
    Old(
        "agentlightning.algorithm:FastAlgorithm",
        "agentlightning.algorithm:Baseline",
        "Trainer.dev runs any algorithm",
    ),
    Old(
        "agentlightning.algorithm:VERL",
        "agentlightning.compat.verl:VERL",
        "GRPO(model=…) and its variants take the same settings by name",
    ),
    # ---- the protocol of 0.1 ----
    Old("agentlightning:AgentLightningClient", None, _FIRST),
    Old("agentlightning:AgentLightningServer", None, _FIRST),
    Old("agentlightning:DevTaskLoader", None, _FIRST),
    Old("agentlightning.runner:LegacyAgentRunner", None, _FIRST),
    Old("agentlightning.types:Task", "agentlightning.compat.types:Task"),
    Old("agentlightning.types:TaskIfAny", "agentlightning.compat.types:TaskIfAny"),
    Old("agentlightning.types:RolloutLegacy", "agentlightning.compat.types:RolloutLegacy"),
    Old("agentlightning.types:RolloutRawResultLegacy", "agentlightning.compat.types:RolloutRawResultLegacy"),
    Old("agentlightning.types:GenericResponse", "agentlightning.compat.types:GenericResponse"),
    # ---- emitters and readers of what they emit ----
    Old(
        "agentlightning.emitter:reward",
        "agentlightning.compat.emitting:reward",
        "return the number from the agent, or call emit_reward",
    ),
    Old(
        "agentlightning.emitter:OperationContext", "agentlightning.emitter:Operation", "the type of `with operation(…)`"
    ),
    Old("agentlightning.emitter:get_rewards_from_span", "agentlightning.compat.emitting:get_rewards_from_span"),
    Old("agentlightning.emitter:get_message_value", "agentlightning.compat.emitting:get_message_value"),
    Old("agentlightning.emitter:get_object_value", "agentlightning.compat.emitting:get_object_value"),
    # ---- environment, logging, command line ----
    Old("agentlightning:LightningEnvVar", "agentlightning.compat.environment:LightningEnvVar"),
    Old("agentlightning:resolve_bool_env_var", "agentlightning.compat.environment:resolve_bool_env_var"),
    Old("agentlightning:resolve_int_env_var", "agentlightning.compat.environment:resolve_int_env_var"),
    Old("agentlightning:resolve_str_env_var", "agentlightning.compat.environment:resolve_str_env_var"),
    Old("agentlightning:setup_logging", "agentlightning.compat.loggers:setup"),
    Old("agentlightning:setup_module_logging", "agentlightning.compat.loggers:setup_module"),
    Old(
        "agentlightning:configure_logger",
        "agentlightning.compat.loggers:configure_logger",
        "logging.basicConfig does the same",
    ),
    Old(
        "agentlightning:lightning_cli",
        "agentlightning.compat.commands:lightning_cli",
        "write your own argparse, or use `agl train`",
    ),
    # ---- agents ----
    Old("agentlightning.litagent:FunctionalLitAgent", "agentlightning.litagent.decorator:FunctionAgent"),
    Old("agentlightning.litagent.decorator:FunctionalLitAgent", "agentlightning.litagent.decorator:FunctionAgent"),
    # ---- where runners are ----
    Old(
        "agentlightning:ExecutionStrategy",
        "agentlightning.compat.execution:ExecutionStrategy",
        "Trainer(strategy='inline' | 'processes' | 'remote')",
    ),
    Old(
        "agentlightning:ClientServerExecutionStrategy",
        "agentlightning.compat.execution:ClientServerExecutionStrategy",
        "Trainer(strategy='processes', n_runners=…)",
    ),
    Old(
        "agentlightning:SharedMemoryExecutionStrategy",
        "agentlightning.compat.execution:SharedMemoryExecutionStrategy",
        "Trainer(strategy='inline', n_runners=…)",
    ),
    Old("agentlightning:ExecutionEvent", "agentlightning.compat.execution:ExecutionEvent"),
    Old("agentlightning:ThreadingEvent", "agentlightning.compat.execution:ThreadingEvent"),
    Old("agentlightning:MultiprocessingEvent", "agentlightning.compat.execution:MultiprocessingEvent"),
    # ---- the gateway ----
    Old("agentlightning:LLMProxy", "agentlightning.compat.llm_proxy:LLMProxy"),
    Old("agentlightning:ModelConfig", "agentlightning.compat.llm_proxy:ModelConfig"),
    # ---- the store ----
    Old("agentlightning.store:LightningStoreCapabilities", "agentlightning.store:Capabilities"),
    Old("agentlightning.store:LightningStoreStatistics", "agentlightning.store:Statistics"),
    Old("agentlightning.store.base:LightningStoreCapabilities", "agentlightning.store:Capabilities"),
    Old("agentlightning.store.base:LightningStoreStatistics", "agentlightning.store:Statistics"),
    Old("agentlightning.store.base:is_queuing", "agentlightning.compat.stores:is_queuing"),
    Old("agentlightning.store.base:is_running", "agentlightning.compat.stores:is_running"),
    Old("agentlightning.store.base:is_finished", "agentlightning.compat.stores:is_finished"),
    Old("agentlightning.store.utils:LATENCY_BUCKETS", None, _NO_METRICS),
    Old("agentlightning.store.utils:rollout_status_from_attempt", None, _NO_STATUS),
    Old("agentlightning.store.utils:scan_unhealthy_rollouts", None, _NO_SCAN),
    Old(
        "agentlightning.store:CollectionBasedLightningStore",
        "agentlightning.store.sql:SqlLightningStore",
        "the base of the SQL stores; InMemoryLightningStore() makes one",
    ),
    Old(
        "agentlightning.store.collection_based:CollectionBasedLightningStore",
        "agentlightning.store.sql:SqlLightningStore",
        "the base of the SQL stores; InMemoryLightningStore() makes one",
    ),
    Old("agentlightning.store:MongoLightningStore", None, _NO_MONGO),
    Old(
        "agentlightning.store:LightningStoreThreaded",
        "agentlightning.compat.stores:LightningStoreThreaded",
        "every store may be used from any thread",
    ),
    # ---- tracers ----
    Old("agentlightning.tracer:get_active_tracer", "agentlightning.compat.tracing:get_active_tracer"),
    Old("agentlightning.tracer:set_active_tracer", "agentlightning.compat.tracing:set_active_tracer"),
    Old("agentlightning.tracer:clear_active_tracer", "agentlightning.compat.tracing:clear_active_tracer"),
    Old("agentlightning.tracer.base:get_active_tracer", "agentlightning.compat.tracing:get_active_tracer"),
    Old("agentlightning.tracer.base:set_active_tracer", "agentlightning.compat.tracing:set_active_tracer"),
    Old("agentlightning.tracer.base:clear_active_tracer", "agentlightning.compat.tracing:clear_active_tracer"),
    Old(
        "agentlightning.tracer.base:with_active_tracer_context",
        "agentlightning.compat.tracing:with_active_tracer_context",
    ),
    Old("agentlightning.tracer.otel:LightningSpanProcessor", None, _NO_PROCESSOR),
    # ---- the trainer ----
    Old(
        "agentlightning.trainer:build_component",
        "agentlightning.compat.components:build_component",
        "pass the object itself",
    ),
    Old("agentlightning.trainer.init_utils:OptionalDefaults", None, _NO_PARTS),
    Old("agentlightning.trainer.init_utils:instantiate_component", None, _NO_PARTS),
    Old("agentlightning.trainer.init_utils:instantiate_from_spec", None, _NO_PARTS),
    Old("agentlightning.trainer.init_utils:load_class", None, _NO_PARTS),
    Old("agentlightning.trainer.registry:ExecutionStrategyRegistry", "agentlightning.compat.components:REGISTRY"),
    # ---- types ----
    Old("agentlightning:Attributes", "agentlightning.types:Attributes"),
    Old("agentlightning:SpanContext", "agentlightning.types:SpanContext"),
    Old("agentlightning:Event", "agentlightning.types:Event"),
    Old("agentlightning:Link", "agentlightning.types:Link"),
    Old("agentlightning:OtelResource", "agentlightning.types:OtelResource"),
    Old("agentlightning.types:TaskInput", "agentlightning.compat.types:TaskInput"),
    Old("agentlightning.types:RolloutRawResult", "agentlightning.litagent.litagent:RolloutResult"),
    Old("agentlightning.types:ParallelWorkerBase", "agentlightning.compat.types:ParallelWorkerBase"),
    Old("agentlightning.types:FilterField", "agentlightning.compat.types:FilterField"),
    Old("agentlightning.types:FilterOptions", "agentlightning.compat.types:FilterOptions"),
    Old("agentlightning.types:SortOptions", "agentlightning.compat.types:SortOptions"),
    Old("agentlightning.types:ResourceUnion", "agentlightning.types:Resource", "resources may have types of your own"),
    Old("agentlightning.types:AttributeValue", "agentlightning.compat.types:AttributeValue"),
    Old("agentlightning.types:TraceState", "agentlightning.compat.types:TraceState"),
    Old("agentlightning.types:TraceStatus", "agentlightning.types:SpanStatus"),
    Old(
        "agentlightning.types:SpanNames",
        "agentlightning.compat.types:SpanNames",
        "agentlightning.types.names has them as constants",
    ),
    Old(
        "agentlightning.types:SpanAttributeNames",
        "agentlightning.compat.types:SpanAttributeNames",
        "agentlightning.types.names has them as constants",
    ),
    Old("agentlightning.types:SpanLike", "agentlightning.types:Span"),
    Old("agentlightning.types:StatusCode", "agentlightning.compat.types:StatusCode"),
    Old(
        "agentlightning.types:SpanCoreFields",
        "agentlightning.compat.types:SpanCoreFields",
        "emitters return a complete Span",
    ),
    Old("agentlightning.types:SpanRecordingContext", "agentlightning.compat.types:SpanRecordingContext"),
    # ---- servers and OTLP ----
    Old("agentlightning.utils:PythonServerLauncher", None, _NO_LAUNCHER),
    Old("agentlightning.utils:PythonServerLauncherArgs", None, _NO_LAUNCHER),
    Old("agentlightning.utils.id:generate_id", "agentlightning.compat.utils:generate_id"),
    *(
        Old(f"agentlightning.verl:{name}", None, _NO_VERL_PARTS)
        for name in (
            "AgentDataset",
            "AgentLightningTrainer",
            "AgentModeDaemon",
            "LoadedDataset",
            "TaskRunner",
            "run_ppo",
        )
    ),
    Old(
        "agentlightning.utils.otlp:LightningStoreOTLPExporter",
        None,
        "Spans go to a served store by OpenTelemetry's own OTLPSpanExporter(endpoint=store.otlp_traces_endpoint()).",
    ),
    Old(
        "agentlightning.utils.otlp:handle_otlp_export",
        None,
        "`agl store` accepts OTLP at /v1/traces; a script need not handle it.",
    ),
    Old(
        "agentlightning.utils.otlp:spans_from_proto",
        None,
        "`agl store` accepts OTLP at /v1/traces; a script need not handle it.",
    ),
)

MEMBERS = (
    Old("agentlightning.algorithm.apo:APO.__class_getitem__", "agentlightning.compat.runners:of_type"),
    Old("agentlightning.adapter.triplets:TracerTraceToTriplet.__call__", "agentlightning.compat.adapters:adapt"),
    Old(
        "agentlightning.adapter.triplets:TracerTraceToTriplet.visualize",
        "agentlightning.compat.tracing:visualize_spans",
        "tracer.get_last_trace().draw(file)",
    ),
    Old("agentlightning.adapter.messages:TraceToMessages.__call__", "agentlightning.compat.adapters:adapt"),
    Old(
        "agentlightning.algorithm.base:Algorithm.get_store",
        "agentlightning.compat.algorithms:get_store",
        "self.context.store",
    ),
    Old("agentlightning.algorithm.base:Algorithm.set_store", "agentlightning.compat.algorithms:set_store"),
    Old(
        "agentlightning.algorithm.base:Algorithm.get_adapter",
        "agentlightning.compat.algorithms:get_adapter",
        "self.context.adapter",
    ),
    Old("agentlightning.algorithm.base:Algorithm.set_adapter", "agentlightning.compat.algorithms:set_adapter"),
    Old(
        "agentlightning.algorithm.base:Algorithm.get_llm_proxy",
        "agentlightning.compat.algorithms:get_llm_proxy",
        "self.context.llm_proxy",
    ),
    Old("agentlightning.algorithm.base:Algorithm.set_llm_proxy", "agentlightning.compat.algorithms:set_llm_proxy"),
    Old(
        "agentlightning.algorithm.base:Algorithm.get_initial_resources",
        "agentlightning.compat.algorithms:get_initial_resources",
        "self.context.resources",
    ),
    Old(
        "agentlightning.algorithm.base:Algorithm.set_initial_resources",
        "agentlightning.compat.algorithms:set_initial_resources",
    ),
    Old("agentlightning.algorithm.base:Algorithm.get_trainer", "agentlightning.compat.algorithms:get_trainer"),
    Old("agentlightning.algorithm.base:Algorithm.set_trainer", "agentlightning.compat.algorithms:set_trainer"),
    Old("agentlightning.algorithm.base:Algorithm.is_async", "agentlightning.compat.algorithms:is_async"),
    Old("agentlightning.algorithm.base:Algorithm.__call__", "agentlightning.compat.algorithms:call"),
    Old("agentlightning.algorithm.base:Algorithm.get_client", None, _FIRST),
    Old(
        "agentlightning.litagent.litagent:LitAgent.tracer",
        "agentlightning.compat.runners:agents_tracer",
        "emit_*, operation",
    ),
    Old("agentlightning.litagent.litagent:LitAgent.runner", "agentlightning.compat.runners:agents_runner"),
    Old("agentlightning.litagent.litagent:LitAgent.trainer", "agentlightning.compat.runners:agents_trainer"),
    Old("agentlightning.litagent.litagent:LitAgent.get_runner", "agentlightning.compat.runners:get_runner"),
    Old("agentlightning.litagent.litagent:LitAgent.get_trainer", "agentlightning.compat.runners:get_trainer"),
    Old("agentlightning.litagent.litagent:LitAgent.set_runner", "agentlightning.compat.runners:set_runner"),
    Old("agentlightning.litagent.litagent:LitAgent.set_trainer", "agentlightning.compat.runners:set_trainer"),
    Old("agentlightning.runner.runner:LitAgentRunner.__class_getitem__", "agentlightning.compat.runners:of_type"),
    Old("agentlightning.runner.runner:LitAgentRunner.get_agent", "agentlightning.compat.runners:get_agent"),
    Old("agentlightning.runner.runner:LitAgentRunner.get_store", "agentlightning.compat.runners:get_store"),
    Old(
        "agentlightning.runner.runner:LitAgentRunner.get_worker_id",
        "agentlightning.compat.runners:get_worker_id",
        "worker_id",
    ),
    Old("agentlightning.runner.runner:LitAgentRunner.run_context", "agentlightning.compat.runners:run_context"),
    Old(
        "agentlightning.runner.runner:LitAgentRunner.teardown_worker",
        "agentlightning.compat.runners:teardown_worker",
        "teardown",
    ),
    Old("agentlightning.runner.runner:LitAgentRunner.tracer", "agentlightning.compat.runners:tracer"),
    Old(
        "agentlightning.store.http.server:LightningStoreServer.__getattr__",
        "agentlightning.compat.stores:of_server",
        "server.store is the store that it serves",
    ),
    Old(
        "agentlightning.store.http.server:LightningStoreServer.__reduce__",
        "agentlightning.compat.stores:as_client",
        "in another process it is LightningStoreClient(server.endpoint, key)",
    ),
    Old(
        "agentlightning.store.http.client:LightningStoreClient.server_address",
        "agentlightning.compat.stores:server_address",
        "url",
    ),
    Old(
        "agentlightning.trainer.trainer:Trainer.fit_v0",
        "agentlightning.compat.trainers:fit_v0",
        "fit(agent, tasks) with an algorithm",
    ),
    Old("agentlightning.types.data:PaginatedResult.count", "agentlightning.compat.types:count"),
    Old("agentlightning.types.data:PaginatedResult.index", "agentlightning.compat.types:index"),
    Old(
        "agentlightning.tracer.trace:Trace.start_as_current_span",
        "agentlightning.compat.tracing:start_as_current_span",
        "operation, or a tracer of opentelemetry.trace.get_tracer",
    ),
    Old("agentlightning.tracer.trace:Trace.start_span", "agentlightning.compat.tracing:start_span"),
    Old("agentlightning.tracer.base:Tracer.last_trace", "agentlightning.compat.tracing:last_trace", "get_last_trace"),
    Old("agentlightning.tracer.tree:SpanTree.visualize", "agentlightning.compat.tracing:visualize", "draw(file)"),
    Old(
        "agentlightning.tracer.base:Tracer.create_span", "agentlightning.compat.tracing:create_span", "emit_annotation"
    ),
    Old(
        "agentlightning.tracer.base:Tracer.get_langchain_handler",
        "agentlightning.compat.tracing:get_langchain_handler",
        "the gateway records LangChain's calls",
    ),
    Old(
        "agentlightning.tracer.base:Tracer.lifespan",
        "agentlightning.compat.tracing:lifespan",
        "trace_context alone is enough",
    ),
    Old(
        "agentlightning.tracer.base:Tracer.operation_context",
        "agentlightning.compat.tracing:operation_context",
        "operation",
    ),
    Old("agentlightning.tracer.base:Tracer.trace_run", "agentlightning.compat.tracing:trace_run", "trace_context"),
    Old(
        "agentlightning.tracer.base:Tracer.trace_run_async",
        "agentlightning.compat.tracing:trace_run_async",
        "trace_context",
    ),
    Old(
        "agentlightning.types.resource:ProxyLLM.with_attempted_rollout",
        "agentlightning.compat.resources:with_attempted_rollout",
        "the runner does it",
    ),
    Old("agentlightning.types.span:Span.from_core_fields", "agentlightning.compat.types:from_core_fields"),
)

TABLE = (*MODULES, *NAMES, *MEMBERS, *ARGUMENTS)
_PACKAGES = ("adapter", "algorithm", "emitter", "runner", "store", "tracer", "trainer", "types")
"""All their public names could be had from `agentlightning` itself."""
BY_NAME = {
    **{old.name.replace(f".{p}:", ":"): old for p in _PACKAGES for old in NAMES if f"agentlightning.{p}:" in old.name},
    **{old.name: old for old in TABLE},
}
