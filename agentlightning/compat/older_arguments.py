"""The part of the table that is about arguments: older words of callables of today, and what became of each."""

from __future__ import annotations

from agentlightning.compat.row import Old

_DECIDED = "the emitters decide by themselves"
_LOOP = "claims wait in the store, without polling"
_HEARTBEAT = "the runner sends heartbeats by itself"
_THREADS = "every store may be used from any thread"
_MEMORY = "spans are on disk; `agl store prune` deletes old rollouts"
_RETRIES = "retry_seconds= is the total time for retries"
_SERVED = "servers run inside the event loop that starts them"
_CORS = "pages of other sites are refused; serve the page from the store's own address"
_ALL_TASKS = "it runs each of its tasks once"

ARGUMENTS = (
    Old("agentlightning.emitter.emit:emit_annotation(annotation=)", "attributes"),
    Old("agentlightning.emitter.emit:emit_reward(reward=)", "value"),
    Old("agentlightning.emitter.emit:emit_annotation(propagate=)", "agentlightning.compat.emitting:propagate"),
    Old("agentlightning.emitter.emit:emit_exception(propagate=)", "agentlightning.compat.emitting:propagate"),
    Old("agentlightning.emitter.emit:emit_message(propagate=)", "agentlightning.compat.emitting:propagate"),
    Old("agentlightning.emitter.emit:emit_object(propagate=)", "agentlightning.compat.emitting:propagate"),
    Old("agentlightning.emitter.emit:emit_reward(propagate=)", "agentlightning.compat.emitting:propagate"),
    Old(
        "agentlightning.emitter.operation:operation(propagate=)",
        "",
        "every operation inside a rollout is recorded",
        (True,),
    ),
    Old(
        "agentlightning.adapter.triplets:TracerTraceToTriplet(_skip_empty_token_spans=)",
        "agentlightning.compat.adapters:skip_empty_token_spans",
        'leave out triplets without response["token_ids"] yourself',
    ),
    Old("agentlightning.runner.runner:LitAgentRunner(poll_interval=)", "", _LOOP),
    Old("agentlightning.runner.runner:LitAgentRunner(heartbeat_interval=)", "", _HEARTBEAT),
    Old("agentlightning.runner.runner:LitAgentRunner(interval_jitter=)", "", _HEARTBEAT),
    Old("agentlightning.runner.runner:LitAgentRunner(heartbeat_launch_mode=)", "", _HEARTBEAT),
    Old("agentlightning.runner.runner:LitAgentRunner(heartbeat_include_gpu=)", "", "heartbeats omit GPUs", (False,)),
    Old("agentlightning.runner.runner:LitAgentRunner.iter(event=)", "agentlightning.compat.runners:event", "stop="),
    Old("agentlightning.runner.runner:LitAgentRunner.step(event=)", "", "cancel the task that runs it", (None,)),
    Old("agentlightning.algorithm.baseline:Baseline(n_epochs=)", "repeats"),
    Old("agentlightning.algorithm.baseline:Baseline(train_split=)", "", _ALL_TASKS, (0.5,)),
    Old("agentlightning.algorithm.baseline:Baseline(polling_interval=)", "", _LOOP),
    Old("agentlightning.algorithm.baseline:Baseline(max_queue_length=)", "", "see Trainer(concurrency=)"),
    Old(
        "agentlightning.algorithm.baseline:Baseline(span_verbosity=)",
        "",
        "`agl show` prints the messages",
        ("keys", "none"),
    ),
    Old("agentlightning.algorithm.apo:APO(_poml_trace=)", "", "the run's journal always has every prompt and answer"),
    Old("agentlightning.store.http.client:LightningStoreClient(server_address=)", "url"),
    Old(
        "agentlightning.store.http.client:LightningStoreClient(retry_delays=)",
        "agentlightning.compat.stores:retry_delays",
        "retry_seconds= is their sum",
    ),
    Old("agentlightning.store.http.client:LightningStoreClient(health_retry_delays=)", "", _RETRIES),
    Old("agentlightning.store.http.client:LightningStoreClient(request_timeout=)", "request_seconds"),
    Old("agentlightning.store.http.client:LightningStoreClient(connection_timeout=)", "", _RETRIES),
    Old("agentlightning.store.http.server:LightningStoreServer(cors_allow_origins=)", "", _CORS, (None, [])),
    Old("agentlightning.store.http.server:LightningStoreServer(launch_mode=)", "", _SERVED),
    Old(
        "agentlightning.store.http.server:LightningStoreServer(launcher_args=)",
        "",
        "set host= and port=",
        (None,),
    ),
    Old("agentlightning.store.http.server:LightningStoreServer(n_workers=)", "", _SERVED, (1,)),
    Old("agentlightning.store.http.server:LightningStoreServer(tracker=)", "", "`agl store` has /metrics"),
    Old("agentlightning.store.stores:InMemoryLightningStore(thread_safe=)", "", _THREADS),
    Old("agentlightning.store.stores:InMemoryLightningStore(eviction_memory_threshold=)", "", _MEMORY),
    Old("agentlightning.store.stores:InMemoryLightningStore(safe_memory_threshold=)", "", _MEMORY),
    Old("agentlightning.store.stores:InMemoryLightningStore(span_size_estimator=)", "", _MEMORY),
    Old(
        "agentlightning.store.stores:InMemoryLightningStore(scan_debounce_seconds=)", "", "the watchdog runs by itself"
    ),
    Old("agentlightning.store.stores:InMemoryLightningStore(tracker=)", "", "`agl store` has /metrics"),
    Old(
        "agentlightning.tracer.agentops:AgentOpsTracer(agentops_managed=)",
        "",
        "AgentOps runs without an account",
    ),
    Old(
        "agentlightning.tracer.agentops:AgentOpsTracer(instrument_managed=)",
        "",
        "use OtelTracer() to run without instrumentation",
        (True,),
    ),
    Old("agentlightning.tracer.agentops:AgentOpsTracer(daemon=)", "", "it starts no process"),
    Old(
        "agentlightning.tracer.weave:WeaveTracer(project_name=)",
        "",
        "there is no Weave server with projects",
    ),
    Old("agentlightning.tracer.weave:WeaveTracer(weave_user_settings=)", "", "there is no Weave server", (None,)),
    Old(
        "agentlightning.tracer.weave:WeaveTracer(instrument_managed=)",
        "",
        "use OtelTracer() to run without Weave's instrumentation",
        (True,),
    ),
    Old("agentlightning.trainer.trainer:Trainer(daemon=)", "", "no daemon process is started"),
    Old(
        "agentlightning.trainer.trainer:Trainer(dev=)",
        "agentlightning.compat.trainers:dev",
        "Trainer.dev(agent, tasks)",
    ),
    Old("agentlightning.trainer.trainer:Trainer(max_tasks=)", "max_rollouts"),
    Old(
        "agentlightning.trainer.trainer:Trainer(runner=)",
        "agentlightning.compat.trainers:runner",
        "concurrency= and hooks=",
    ),
    Old("agentlightning.trainer.trainer:Trainer(triplet_exporter=)", "adapter"),
    Old(
        "agentlightning.trainer.trainer:Trainer(adapter=)",
        "agentlightning.compat.trainers:adapter",
        "pass the object itself",
    ),
    Old(
        "agentlightning.trainer.trainer:Trainer(algorithm=)",
        "agentlightning.compat.trainers:algorithm",
        "pass the object itself",
    ),
    Old(
        "agentlightning.trainer.trainer:Trainer(llm_proxy=)",
        "agentlightning.compat.trainers:llm_proxy",
        "pass the object itself",
    ),
    Old(
        "agentlightning.trainer.trainer:Trainer(store=)",
        "agentlightning.compat.trainers:store",
        "pass the object itself",
    ),
    Old(
        "agentlightning.trainer.trainer:Trainer(strategy=)",
        "agentlightning.compat.trainers:strategy",
        "'inline', 'processes' or 'remote'",
    ),
    Old(
        "agentlightning.trainer.trainer:Trainer(tracer=)",
        "agentlightning.compat.trainers:tracer",
        "pass the object itself",
    ),
)
"""An argument that the callable of today has too is read by its line only where it is described: given as a class, a
factory, a text that today's words do not have, or a dictionary."""
