"""Every method and argument that scripts for 0.2 and 0.3 use is there, or the table says what became of it."""

# Older members are there while the program runs, not for the checker.
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false

from __future__ import annotations

import inspect

import pytest

import agentlightning as agl
from agentlightning.compat.table import ARGUMENTS, MEMBERS as OLD_MEMBERS

MEMBERS = {
    "LightningStore": "capabilities statistics otlp_traces_endpoint start_rollout enqueue_rollout "
    "enqueue_many_rollouts dequeue_rollout dequeue_many_rollouts start_attempt add_span add_many_spans add_otel_span "
    "query_rollouts query_attempts get_rollout_by_id get_latest_attempt query_resources get_resources_by_id "
    "get_latest_resources "
    "add_resources update_resources get_next_span_sequence_id get_many_span_sequence_ids wait_for_rollouts query_spans "
    "update_rollout update_attempt query_workers get_worker_by_id update_worker",
    "LightningStoreServer": "start stop run_forever endpoint",
    "Tracer": "init init_worker teardown_worker teardown trace_context get_last_trace create_span operation_context "
    "trace_run trace_run_async get_langchain_handler lifespan",
    "LitAgent": "rollout rollout_async training_rollout training_rollout_async validation_rollout "
    "validation_rollout_async is_async set_trainer get_trainer set_runner get_runner tracer trainer runner",
    "LitAgentRunner": "init init_worker teardown_worker teardown iter step run_context get_agent get_store "
    "get_worker_id tracer __class_getitem__",
    "Algorithm": "run is_async set_trainer get_trainer set_llm_proxy get_llm_proxy set_adapter get_adapter set_store "
    "get_store set_initial_resources get_initial_resources __call__",
    "APO": "get_best_prompt __class_getitem__",
    "LLMProxy": "start stop restart is_running update_model_list set_store get_store as_resource initialize",
    "TracerTraceToTriplet": "adapt visualize __call__",
    "LlmProxyTraceToTriplet": "adapt __call__",
    "TraceToMessages": "adapt __call__",
    "Hook": "on_rollout_start on_trace_start on_trace_end on_rollout_end",
    "Span": "from_opentelemetry from_attributes from_core_fields",
    "LLM": "get_base_url",
    "ProxyLLM": "get_base_url with_attempted_rollout",
    "PromptTemplate": "format",
    "Trainer": "fit dev",
}
ARGUMENTS_OF = {
    "Trainer": "dev n_runners max_rollouts initial_resources tracer adapter store runner strategy port algorithm "
    "llm_proxy n_workers max_tasks daemon triplet_exporter hooks",
    "LitAgentRunner": "tracer max_rollouts poll_interval heartbeat_interval interval_jitter heartbeat_launch_mode "
    "heartbeat_include_gpu",
    "InMemoryLightningStore": "thread_safe eviction_memory_threshold safe_memory_threshold span_size_estimator tracker "
    "scan_debounce_seconds",
    "LightningStoreServer": "store host port cors_allow_origins launch_mode launcher_args n_workers tracker",
    "LightningStoreClient": "server_address retry_delays health_retry_delays request_timeout connection_timeout",
    "TracerTraceToTriplet": "repair_hierarchy llm_call_match agent_match exclude_llm_call_in_reward reward_match "
    "_skip_empty_token_spans",
    "AgentOpsTracer": "agentops_managed instrument_managed daemon",
    "WeaveTracer": "project_name weave_user_settings instrument_managed",
    "Baseline": "n_epochs train_split polling_interval max_queue_length span_verbosity",
    "APO": "async_openai_client gradient_model apply_edit_model diversity_temperature gradient_batch_size "
    "val_batch_size beam_width branch_factor beam_rounds rollout_batch_timeout run_initial_validation _poml_trace",
    "LLMProxy": "port model_list store host litellm_config num_retries num_workers launch_mode launcher_args "
    "middlewares callbacks",
    "VERL": "config trainer_cls daemon_cls",
    "SharedMemoryExecutionStrategy": "n_runners main_thread join_timeout graceful_delay poll_interval managed_store",
    "ClientServerExecutionStrategy": "role server_host server_port n_runners graceful_timeout terminate_timeout "
    "main_process managed_store allowed_exit_codes",
    "emit_annotation": "annotation propagate",
    "emit_reward": "reward primary_key attributes propagate",
    "emit_message": "attributes propagate",
    "emit_object": "attributes propagate",
    "emit_exception": "attributes propagate",
    "operation": "fn propagate name",
    "Rollout": "rollout_id input start_time end_time mode resources_id status config metadata",
    "RolloutConfig": "timeout_seconds unresponsive_seconds max_attempts retry_condition",
    "EnqueueRolloutRequest": "input mode resources_id config metadata",
    "LLM": "endpoint model api_key sampling_parameters",
    "PromptTemplate": "template engine",
    "Triplet": "prompt response reward metadata",
}


@pytest.mark.parametrize("name", MEMBERS)
def test_members(name: str) -> None:
    found = getattr(agl, name)
    refused = {line.name.rpartition(":")[2] for line in OLD_MEMBERS if line.to is None}
    asked = [member for member in MEMBERS[name].split() if f"{name}.{member}" not in refused]
    assert [member for member in asked if not hasattr(found, member)] == []


def test_a_member_that_is_not_kept_says_so() -> None:
    with pytest.raises(agl.ConfigError, match=r"protocol of 0\.1"):
        agl.Baseline().get_client()


def test_older_words_mean_the_newer_ones() -> None:
    assert agl.LightningStoreClient(server_address="http://127.0.0.1:1", request_timeout=3)
    with pytest.raises(agl.ConfigError, match="'other'"):
        agl.emit_reward(other=1.0)
    assert agl.emit_annotation(annotation={"a": 1}) is None, "no rollout runs here"
    assert agl.Baseline(n_epochs=3).repeats == 3


@pytest.mark.parametrize("algorithm", [agl.Algorithm(), agl.Baseline(), agl.GRPO(model="calc")])
def test_an_algorithm_that_no_trainer_runs_is_given_what_it_needs(algorithm: agl.Algorithm) -> None:
    with pytest.raises(ValueError, match="There is no trainer here"):
        algorithm.get_trainer()
    for what in ("store", "adapter", "llm_proxy", "initial_resources"):
        with pytest.raises(RuntimeError, match="is run by a Trainer"):
            getattr(algorithm, f"get_{what}")()
    for what in ("trainer", "store", "adapter", "llm_proxy", "initial_resources"):
        given = object()
        getattr(algorithm, f"set_{what}")(given)
        assert getattr(algorithm, f"get_{what}")() is given


@pytest.mark.parametrize("name", ARGUMENTS_OF)
def test_arguments(name: str) -> None:
    found = getattr(agl, name)
    parameters = inspect.signature(found).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return  # it reads them itself; its own tests give them
    old = {line.name.rpartition(":")[2].removesuffix("=)") for line in ARGUMENTS}
    missing = [a for a in ARGUMENTS_OF[name].split() if a not in parameters and f"{name}({a}" not in old]
    assert missing == []
