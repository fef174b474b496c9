"""One vLLM server of ours, from its start to its end: its arguments and environment, its log in the run's folder, its
last words.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from agentlightning.backend.vllm import guard
from agentlightning.backend.vllm.options import ServerOptions
from agentlightning.engine.limits import MAX_TOP_LOGPROBS
from agentlightning.errors import EngineError
from agentlightning.files import open_private

_WORDS = 20
"""How many lines from the end of its log the error about a dead server quotes."""
_TAIL_BYTES = 16_384
_STOP_SECONDS = 15.0
LOOPBACK = "127.0.0.1"


class VLLMProcess(Protocol):
    """A server that was started for this run."""

    log: Path
    ended: asyncio.Future[EngineError]
    """Done when the server has ended, with an error that says how: BackendDied where what it ran on is gone."""

    async def last_words(self) -> str:
        """The end of what it wrote, for an error's message."""
        ...

    async def stop(self) -> None:
        """End it and all its children. Idempotent."""
        ...


class ServerProcess:
    """A `VLLMProcess`, on this machine. It ends with `stop`, by itself, or with this process, however that ends."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path, began: int) -> None:
        self.log = log
        self.pid = process.pid
        self._process = process
        self._began = began
        self.ended: asyncio.Future[EngineError] = asyncio.ensure_future(self._until_ended())

    @classmethod
    async def start(cls, command: Sequence[str], environment: Mapping[str, str], log: Path) -> ServerProcess:
        """What it writes is appended to `log`."""
        log.parent.mkdir(parents=True, exist_ok=True)
        with open_private(log, "ab") as output:
            began = output.tell()
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", guard.__file__, *command),
                stdin=asyncio.subprocess.PIPE,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                env=dict(environment),
                start_new_session=True,
            )
        return cls(process, log, began)

    async def _until_ended(self) -> EngineError:
        code = await self._process.wait()
        how = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        if code == -signal.SIGKILL:
            how += " (the system does that when memory runs out)"
        words = await self.last_words()
        return EngineError(f"The vLLM server ended {how}.{words}\nAll that it said is in {self.log}.")

    async def stop(self) -> None:
        """See `Server.stop`."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(_STOP_SECONDS):
                await asyncio.shield(self.ended)
        except TimeoutError:
            pass
        finally:
            self.kill()
            await self.ended

    def kill(self) -> None:
        """End what is left of its group now."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    async def last_words(self) -> str:
        """See `Server.last_words`."""
        return await asyncio.to_thread(self._last_words)

    def _last_words(self) -> str:
        with self.log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(self._began, file.tell() - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
        return "".join(f"\n  | {line}" for line in _cause_last(lines)[-_WORDS:])


def _cause_last(lines: Sequence[str]) -> list[str]:
    """The lines without empty ones and the arrows under a traceback's code, so that more of the cause is seen."""
    return [line for line in lines if line.strip(" ^~") and not line.rstrip().endswith(("^", "~"))]


def free_port(host: str = LOOPBACK) -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


_WORKER = "agl_vllm_worker.Publication"
"""What vLLM mixes into its workers; its file is in `_WORKER_FOLDER`."""
_KEY_CHECK = "agl_vllm_worker.KeyCheck"
"""The middleware that its HTTP server asks first."""
_WORKER_FOLDER = Path(__file__).parent / "worker"

_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM takes as its largest rank of adapters."""

_KEEP_ALIVE_SECONDS = 300
"""How long a server keeps idle connections: longer than its clients do."""

_MAX_LOGPROBS = MAX_TOP_LOGPROBS + 1
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
    """How many policies have an adapter."""
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
        *("--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--max-logprobs", str(_MAX_LOGPROBS)),
        *("--generation-config", "vllm", "--enable-prompt-tokens-details"),
        *("--structured-outputs-config", json.dumps({"backend": "guidance"})),
        *("--worker-extension-cls", _WORKER, "--middleware", _KEY_CHECK),
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
    path = os.pathsep.join(filter(None, [str(_WORKER_FOLDER), os.environ.get("PYTHONPATH")]))
    found = {
        **os.environ,
        "PYTHONPATH": path,
        "VLLM_SERVER_DEV_MODE": "1",  # pause, resume, collective_rpc
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_API_KEY": key,
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(_KEEP_ALIVE_SECONDS),
    }
    if devices is not None:
        found["CUDA_VISIBLE_DEVICES"] = devices
    return {**found, **options.env}
