"""verl's workers on the Ray cluster that this process is connected to, and the configuration they are made with.

An adapter is described to them by its shape: verl would draw its weights itself, or read them from a folder that every
machine must have; neither is needed, as the workers are given the policy's weights.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from agentlightning.errors import AgentLightningError, BackendDied, ConfigError, message_of_ray, missing_extra
from agentlightning.learner.policy import Policy
from agentlightning.learner.verl.packed_attention import ATTENTION
from agentlightning.learner.verl.sizes import Sizes

PRECISION = {"float32": "fp32", "bfloat16": "bf16"}
"""verl's names for the dtype that passes compute in. Weights and optimiser are kept in float32."""
SECONDS_TO_NAME = 3.0
"""How long it may take until a process whose connections are gone is known to be dead."""
LOST = "The other workers are ended, too; a run goes on from its last checkpoint."


class Workers:
    """A `RayWorkerGroup` of `learner.verl.worker.RankWorker`s."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._names: list[str] = []
        """The names of the workers with their processes; known once they have begun."""

    def begin(self) -> None:
        """Have the workers load the model, anew if they have one."""
        self._names = self.ask("begin")

    def ask(self, verb: str, *arguments: Any) -> Any:
        """What they say when all have done it. Raises BackendDied where one ended or failed, with its name: all are
        ended then, since the others wait for it in the middle of a pass."""
        from ray.exceptions import RayError, RayTaskError
        from verl.protocol import DataProtoFuture

        try:
            results = getattr(self._group, verb)(*arguments)
            return results.get() if isinstance(results, DataProtoFuture) else results
        except RayError as error:
            ended = self._ended()
            self.end()
            if ended:
                raise BackendDied(f"{' '.join(ended)}\n{LOST}") from error
            cause = error.cause if isinstance(error, RayTaskError) else error
            if isinstance(cause, AgentLightningError):
                raise cause from None
            first = (str(cause).strip().splitlines() or [""])[0]
            raise BackendDied(f"A worker of verl's failed in {verb}: {type(cause).__name__}: {first}") from error

    def _ended(self) -> list[str]:
        """Workers whose process is gone, in words. Of the others, some may be waiting for it for good, and some have
        failed because it is gone, sometimes before Ray knew of it."""
        import ray
        from ray.exceptions import RayActorError

        answers = [worker.__ray_ready__.remote() for worker in self._group.workers]
        ready, _ = ray.wait(answers, num_returns=len(answers), timeout=SECONDS_TO_NAME)
        found = []
        for rank, one in enumerate(answers):
            try:
                if one in ready:
                    ray.get(one)
            except RayActorError as error:
                name = self._names[rank] if self._names else f"verl worker {rank}"
                found.append(f"{name} ended: {message_of_ray(error)}")
        return found

    def end(self) -> None:
        import ray

        for worker in self._group.workers:
            ray.kill(worker)


def start_workers(
    policy: Policy, dtype: str, sizes: Sizes, placed: Any = None, *, gradient_checkpointing: bool = False
) -> Workers:
    """As many as `sizes` says, with the policy's model loaded: in the first bundles of a placement group, by default
    the one that this process is in. Raises ConfigError where verl is not installed."""
    environment = environment_of(sizes)
    os.environ.update(environment)  # verl reads it when it is first imported
    warnings.filterwarnings("ignore", category=UserWarning, module=r"verl\.workers\.engine")
    try:
        import ray
        from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

        from agentlightning.learner.verl.worker import RankWorker
    except ModuleNotFoundError as error:
        raise missing_extra("verl", error.name or "verl") from None
    config = config_of(base_of(policy), dtype, sizes, adapter_of(policy), gradient_checkpointing)
    pool = RayResourcePool([sizes.workers], use_gpu=sizes.gpus > 0, max_colocate_count=1 / (sizes.gpus or 1))
    pool.pgs = [placed or ray.util.get_current_placement_group()]
    kind = RayClassWithInitArgs(ray.remote(RankWorker), config)
    kind.update_options({"num_cpus": sizes.cpus})
    device = "cuda" if sizes.gpus else "cpu"
    workers = Workers(RayWorkerGroup(pool, kind, bin_pack=False, device_name=device, worker_env=environment))
    workers.begin()
    return workers


def environment_of(sizes: Sizes) -> dict[str, str]:
    """Where verl computes, and that it does not tell of each engine which it could not import."""
    quiet = {"VERL_LOGGING_LEVEL": "WARNING", "PYTHONWARNINGS": "ignore::UserWarning:verl.workers.engine"}
    found = {name: os.environ.get(name, value) for name, value in quiet.items()}
    if sizes.gpus:
        return {**found, "VERL_PLATFORM": "nvidia"}
    return {**found, "VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": "agentlightning.learner.verl.cpu"}


def base_of(policy: Policy) -> str:
    """Where the model is that the workers load: what an adapter stands on, or the policy itself."""
    return policy.path if policy.peft is None else str(policy.model.name_or_path)


def config_of(model: str, dtype: str, sizes: Sizes, adapter: Mapping[str, Any], gradient_checkpointing: bool) -> Any:
    """What verl calls it. Rows are packed where FlashAttention can be had, which a split of rows needs, else padded. It
    computes in bfloat16 only."""
    from transformers import AutoConfig
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, TrainingWorkerConfig

    flash = "flash_attention_2" if sizes.gpus else ATTENTION
    packed = sizes.sequence_parallel > 1 or (
        sizes.gpus > 0 and dtype == "bfloat16" and find_spec("flash_attn") is not None
    )
    given = AutoConfig.from_pretrained(model, trust_remote_code=False).to_dict()
    dropouts = {name: 0.0 for name, value in given.items() if name.endswith(("dropout", "_pdrop")) and value}
    precision = dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), "fp32") | {
        "param_dtype": PRECISION[dtype]
    }
    return TrainingWorkerConfig(
        model_type="language_model",
        model_config=HFModelConfig(
            path=model,
            use_remove_padding=packed,
            enable_gradient_checkpointing=gradient_checkpointing,
            override_config={"attn_implementation": flash if packed else "sdpa", **dropouts},
            **adapter,
        ),
        engine_config=FSDPEngineConfig(
            strategy="fsdp2",
            model_dtype="fp32",
            mixed_precision=precision,
            ulysses_sequence_parallel_size=sizes.sequence_parallel,
            param_offload=sizes.offload,
            optimizer_offload=sizes.offload,
            use_dynamic_bsz=False,
            use_torch_compile=False,
        ),
        optimizer_config=FSDPOptimizerConfig(clip_grad=float("inf"), weight_decay=0.0),
        checkpoint_config=CheckpointConfig(),
    )


_ANY = {"auto_mapping", "base_model_name_or_path", "inference_mode", "megatron_core", "peft_version", "revision"}
"""Fields of an adapter's configuration that do not change what is computed."""
_DROPPED = {"lora_dropout"}
"""Fields that have no effect, as nothing is dropped out in training, here or there."""


def adapter_of(policy: Policy) -> dict[str, Any]:
    """What verl's model configuration says of the policy's adapter; empty where all weights are trained. Raises
    ConfigError for an adapter that it has no words for."""
    if policy.peft is None:
        return {}
    from peft import LoraConfig

    config = policy.peft.peft_config["default"]
    modules = config.target_modules
    named = modules if isinstance(modules, str) else sorted(modules)
    plain = LoraConfig(r=config.r, lora_alpha=config.lora_alpha, target_modules=modules, task_type=config.task_type)
    usual = plain.to_dict()
    other = {n: v for n, v in config.to_dict().items() if v != usual.get(n) and n not in _ANY | _DROPPED}
    if other:
        words = ", ".join(f"{name}={value!r}" for name, value in sorted(other.items()))
        raise ConfigError(
            f"verl's workers make plain LoRA adapters, and that in {policy.path} is one with {words}. "
            "Start from a new adapter (lora_rank), or take learner='own'."
        )
    return {"lora_rank": config.r, "lora_alpha": config.lora_alpha, "target_modules": named}
