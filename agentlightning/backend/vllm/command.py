"""How a vLLM server is started for a policy: arguments and environment. Pure."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from agentlightning.backend.vllm.options import ServerOptions
from agentlightning.engine.limits import MAX_TOP_LOGPROBS

WORKER = "agl_vllm_worker.Publication"
"""What vLLM mixes into its workers; its file is in `WORKER_FOLDER`."""
KEY_CHECK = "agl_vllm_worker.KeyCheck"
"""What its HTTP server asks first."""
WORKER_FOLDER = Path(__file__).parent / "worker"

_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM makes room for."""

KEEP_ALIVE_SECONDS = 300
"""How long a server keeps idle connections: longer than whoever asks it uses them."""

MAX_LOGPROBS = MAX_TOP_LOGPROBS + 1
"""The sampled token counts as one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerContent:
    """What a server is to hold."""

    model: str
    """The base model's directory or hub id."""
    dtype: str
    on_cpu: bool
    max_context: int
    max_concurrency: int
    lora_rank: int | None = None
    """Of the adapters; None: all weights are trained."""
    adapters: int = 0
    """How many policies have one."""
    contexts_bytes: int | None = None
    """Memory for contexts on a CPU; None: vLLM takes a share of the machine's."""


def arguments(program: str, served: ServerContent, options: ServerOptions, host: str, port: int) -> list[str]:
    """The command line. What `options.args` repeats wins, because it comes last."""
    lora = []
    if served.lora_rank is not None:
        max_rank = next(r for r in _LORA_RANKS if r >= served.lora_rank)
        # Of each policy the adapter before stays as long as requests are under way that began with it.
        lora = ["--enable-lora", "--max-lora-rank", str(max_rank)]
        lora += ["--max-loras", str(2 * served.adapters), "--max-cpu-loras", str(4 * served.adapters)]
    # vLLM 0.32 on a CPU ends when the prompt of a request with a seed is computed in pieces; and keeps contexts in
    # blocks of 128 tokens by itself, so that what short prompts have in common would be computed for each of them.
    on_cpu = ["--no-enable-chunked-prefill", "--block-size", "32"] if served.on_cpu else []
    if served.on_cpu and served.contexts_bytes is not None:
        on_cpu += ["--kv-cache-memory-bytes", str(served.contexts_bytes)]
    return [
        *(program, "serve", served.model, "--host", host, "--port", str(port)),
        *("--dtype", served.dtype, "--max-model-len", str(served.max_context)),
        *("--max-num-seqs", str(served.max_concurrency)),
        *("--tensor-parallel-size", str(options.tensor_parallel_size)),
        *("--gpu-memory-utilization", str(options.gpu_memory_utilization)),
        # Token ids in and out; the log-probs of what was drawn; no settings that the model's author thought best.
        *("--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--max-logprobs", str(MAX_LOGPROBS)),
        *("--generation-config", "vllm", "--enable-prompt-tokens-details"),
        *("--structured-outputs-config", json.dumps({"backend": "guidance"})),
        *("--worker-extension-cls", WORKER, "--middleware", KEY_CHECK),
        *lora,
        *on_cpu,
        *options.args,
    ]


_GPU_DEVICES = (Path("/dev/nvidiactl"), Path("/dev/kfd"))


def is_on_cpu(device: str) -> bool:
    """Whether vLLM has no GPU to compute on, for a policy with this `device`."""
    return device == "cpu" or (device == "auto" and not any(path.exists() for path in _GPU_DEVICES))


def environment(options: ServerOptions, key: str, devices: str | None = None) -> Mapping[str, str]:
    """This process's environment, and what the server needs besides. `devices`: the GPUs that it sees."""
    path = os.pathsep.join(filter(None, [str(WORKER_FOLDER), os.environ.get("PYTHONPATH")]))
    found = {
        **os.environ,
        "PYTHONPATH": path,
        "VLLM_SERVER_DEV_MODE": "1",  # pause, resume, collective_rpc
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_API_KEY": key,
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(KEEP_ALIVE_SECONDS),
    }
    if devices is not None:
        found["CUDA_VISIBLE_DEVICES"] = devices
    return {**found, **options.env}
