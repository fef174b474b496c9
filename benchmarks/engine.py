"""The embedded engine against plain batched `generate` and transformers' own continuous batching, on one model.

    python benchmarks/engine.py [--model DIR] [--vllm PROGRAM] [--sizes 1,8,32] [--seconds 60] [--threads 1] [--quick]
                                [--device cuda --dtype bfloat16]

The work is an agent's: prompts of 128 tokens, 96 of them the same for all (system prompt, tools) and 32 their own;
responses of 16 to 111 tokens that nobody knows beforehand. All three sample at temperature 1 without filters, and every
response ends where it should; tokens past that, which `generate` computes for the rows of a batch that are done, do not
count. A second table has responses of one length, where a static batch has nothing to lose.

Ours returns the log-probs of what it samples; the others are not asked to. The three take turns in rounds of the same
jobs, and medians count, so that a busy machine is busy for all. With `--model` a size takes as many rounds as begin
within `--seconds`, one at least; each row is printed as it is measured. With `--vllm` a server of vLLM's own takes
turns too, over HTTP, token ids in and out, with as many threads as the others (`python scripts/vllm_cpu.py --no-tests`
makes one for CPUs). `--json`: the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from tempfile import TemporaryFile
from typing import Any
from urllib.error import URLError
from urllib.request import Request as HttpRequest, urlopen

import numpy as np
import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from agentlightning.engine.base import SamplingParams
from agentlightning.engine.events import Ended, Request
from agentlightning.engine.torch_engine import TorchEngine
from agentlightning.models import resolve_model, shipped_models

SHARED_TOKENS = 96
OWN_TOKENS = 32
SHORTEST, LONGEST = 16, 111
SAME_LENGTH = 64
CONCURRENCY = (1, 8, 32, 64)
OF_A_MODEL = "1,8,32"
"""Sizes with `--model`, which may be a large one."""
PATIENCE = 900
"""Seconds without any response after which a peer counts as broken: a large model on a busy machine is merely slow."""
NO_TOKEN = -1
"""As the end-of-sequence id: no response ends early."""


@dataclass(frozen=True)
class Job:
    """One request: its prompt and how many tokens are wanted."""

    prompt: list[int]
    tokens: int


Runner = Callable[[list[Job]], None]


class Work:
    """Makes jobs; the beginning of their prompts is always the same, the rest never."""

    def __init__(self, vocabulary: int) -> None:
        self._random = np.random.default_rng(0)
        self._vocabulary = vocabulary
        self._shared = self._ids(SHARED_TOKENS)

    def jobs(self, count: int, same_length: bool) -> list[Job]:
        lengths = self._random.integers(SHORTEST, LONGEST + 1, count)
        return [Job(self._shared + self._ids(OWN_TOKENS), SAME_LENGTH if same_length else int(n)) for n in lengths]

    def _ids(self, count: int) -> list[int]:
        return self._random.integers(0, self._vocabulary, count).tolist()


class Ours:
    """The embedded engine."""

    def __init__(self, model: PreTrainedModel, concurrency: int, **room: int) -> None:
        # No stop strings here, so no tokenizer is needed.
        self._engine = TorchEngine(model, transformers.PreTrainedTokenizerFast, (), max_concurrency=concurrency, **room)  # pyright: ignore

    def __call__(self, jobs: list[Job]) -> None:
        for number, job in enumerate(jobs):
            prompt = np.array(job.prompt, dtype=np.int32)
            params = SamplingParams(max_tokens=job.tokens)
            self._engine.submit(Request(request_id=number, prompt_ids=prompt, params=params))
        sampled = 0
        while self._engine.active:
            sampled += sum(len(event.chunk.ids) for event in self._engine.step() if isinstance(event, Ended))
        assert sampled == sum(job.tokens for job in jobs), sampled


class Generate:
    """Static batches of `generate`, each as long as its longest response."""

    def __init__(self, model: PreTrainedModel, concurrency: int) -> None:
        self._model: Any = model
        self._concurrency = concurrency

    def __call__(self, jobs: list[Job]) -> None:
        for start in range(0, len(jobs), self._concurrency):
            batch = jobs[start : start + self._concurrency]
            ids = torch.tensor([job.prompt for job in batch], device=self._model.device)
            longest = max(job.tokens for job in batch)
            out = self._model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                generation_config=sampling(longest),
            )
            assert out.shape[1] == ids.shape[1] + longest, out.shape


class Continuous:
    """transformers' continuous batching, with pages small enough that little is computed for nothing (its defaults take
    60 % of the machine's memory) and blocks for every request, so that none is ever evicted."""

    PAGE = 16

    def __init__(self, model: PreTrainedModel, concurrency: int) -> None:
        pages = (SHARED_TOKENS + OWN_TOKENS + LONGEST) // self.PAGE + 2
        config = ContinuousBatchingConfig(
            page_size=self.PAGE,
            num_blocks=pages * (concurrency + 2),
            max_batch_tokens=512,
            max_requests_per_batch=concurrency,
            auto_switch_to_flash=False,
        )
        self._manager: Any = model.init_continuous_batching(  # pyright: ignore[reportCallIssue]
            generation_config=sampling(LONGEST), continuous_batching_config=config
        )
        self._manager.start()

    def __call__(self, jobs: list[Job]) -> None:
        for job in jobs:
            self._manager.add_request(job.prompt, max_new_tokens=job.tokens)
        finished = sampled = 0
        while finished < len(jobs):
            result = self._manager.get_result(timeout=PATIENCE)
            assert result is not None, f"transformers' continuous batching gave no result for {PATIENCE} s"
            if result.is_finished():
                finished += 1
                sampled += len(result.generated_tokens)
        assert sampled == sum(job.tokens for job in jobs), sampled

    def close(self) -> None:
        self._manager.stop(block=True)
        self._manager.destroy()


class Vllm:
    """A server of vLLM's, asked over HTTP. One for all sizes: it takes a minute to start."""

    PORT = 18471

    ON_A_CPU = ("--dtype", "float32", "--max-model-len", "1024", "--enforce-eager")

    def __init__(
        self,
        program: str,
        model: str,
        most: int,
        threads: int,
        seconds: float = 900.0,
        arguments: Sequence[str] = ON_A_CPU,
    ) -> None:
        command = [program, "serve", model, "--host", "127.0.0.1", "--port", str(self.PORT), *arguments]
        command += ["--max-num-seqs", str(most), "--enable-scale-out"]
        command += ["--generation-config", "vllm", "--served-model-name", "model"]
        variables = {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "OMP_NUM_THREADS": str(threads),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }
        self._log = TemporaryFile()  # noqa: SIM115 (closed by `close`)
        self._process = subprocess.Popen(
            command, stdout=self._log, stderr=self._log, env={**os.environ, **variables}, start_new_session=True
        )
        until = time.monotonic() + seconds
        while not self._is_up():
            if self._process.poll() is not None or time.monotonic() > until:
                self._log.seek(0)
                raise SystemExit(f"vLLM did not start: {self._log.read().decode(errors='replace')[-3000:]}")
            time.sleep(0.5)

    def at(self, concurrency: int) -> Runner:
        """What sends so many requests at once."""

        def run(jobs: list[Job]) -> None:
            with ThreadPoolExecutor(concurrency) as pool:
                assert list(pool.map(self._ask, jobs)) == [job.tokens for job in jobs]

        return run

    def _ask(self, job: Job) -> int:
        params = {"temperature": 1.0, "max_tokens": job.tokens, "min_tokens": job.tokens, "ignore_eos": True}
        body = json.dumps({"model": "model", "token_ids": job.prompt, "sampling_params": {**params, "logprobs": 0}})
        asked = HttpRequest(
            f"http://127.0.0.1:{self.PORT}/inference/v1/generate",
            body.encode(),
            {"content-type": "application/json"},
        )
        with urlopen(asked, timeout=PATIENCE) as answer:
            return len(json.load(answer)["choices"][0]["token_ids"])

    def _is_up(self) -> bool:
        try:
            with urlopen(f"http://127.0.0.1:{self.PORT}/health", timeout=5) as answer:
                return answer.status == 200
        except (URLError, OSError):
            return False

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(60)
        self._log.close()


def sampling(tokens: int) -> GenerationConfig:
    """Temperature 1, no filters (`generate` would otherwise apply top_k = 50 silently), never an early end."""
    return GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=tokens,
        eos_token_id=NO_TOKEN,
        pad_token_id=0,
    )


def load(path: str | None, device: str = "cpu", dtype: str = "float32") -> PreTrainedModel:
    """The model to measure on: the given one, the shipped one, or a random one of the same shape."""
    if path is None and "calc" not in shipped_models():
        config = Qwen3Config(
            vocab_size=701,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            tie_word_embeddings=True,
            max_position_embeddings=1024,
        )
        return Qwen3ForCausalLM(config).eval()
    where = resolve_model(path or "calc")
    kind = getattr(torch, dtype)
    model: Any = AutoModelForCausalLM.from_pretrained(where, dtype=kind, attn_implementation="sdpa")
    return model.to(device).eval()


@dataclass(frozen=True)
class Result:
    """At one concurrency, medians over rounds."""

    speeds: dict[str, float]
    """Tokens per second, of ours and of each peer."""
    ratios: dict[str, float]
    """How many times a peer's speed ours is."""


def measure(
    made: Callable[[], PreTrainedModel],
    concurrency: int,
    quick: bool,
    same_length: bool,
    seconds: float | None,
    vllm: Vllm | None,
) -> Result:
    """All of them at one concurrency, in rounds of the same jobs; each round begins with another of them.

    seconds: no round begins later; None: a fixed number of rounds.
    """
    model, other = made(), made()
    work = Work(model.config.get_text_config().vocab_size)
    continuous = Continuous(other, concurrency)  # changes its model's attention: it has one of its own
    runners: dict[str, Runner] = {
        "ours": Ours(model, concurrency),
        "generate": Generate(model, concurrency),
        "transformers_cb": continuous,
    }
    if vllm is not None:
        runners["vllm"] = vllm.at(concurrency)
    # The fewer at once, the shorter a round and the more of them.
    count = concurrency if seconds is not None else max(2, concurrency * 3 // 2) if quick else 4 * concurrency
    rounds = {1: 7, 8: 5}.get(concurrency, 2) if quick else {1: 15, 8: 9}.get(concurrency, 5)
    speeds: dict[str, list[float]] = {name: [] for name in runners}
    try:
        for runner in runners.values():
            runner(work.jobs(max(1, concurrency // 2) if seconds is None else 1, same_length))
        until = time.monotonic() + (math.inf if seconds is None else seconds)
        for turn in range(rounds):
            if turn and time.monotonic() > until:
                break
            jobs = work.jobs(count, same_length)
            tokens = sum(job.tokens for job in jobs)
            names = list(runners)
            at = turn % len(names)
            for name in names[at:] + names[:at]:
                began = time.perf_counter()
                runners[name](jobs)
                speeds[name].append(tokens / (time.perf_counter() - began))
    finally:
        continuous.close()
    return summary(speeds)


def summary(speeds: dict[str, list[float]]) -> Result:
    """The ratios are taken round by round: what slows the machine down for a while slows both sides of a ratio."""

    def ratio(peer: str) -> float:
        return statistics.median(a / b for a, b in zip(speeds["ours"], speeds[peer], strict=True))

    medians = {name: statistics.median(values) for name, values in speeds.items()}
    return Result(medians, {peer: ratio(peer) for peer in speeds if peer != "ours"})


TITLES = {"ours": "ours tok/s", "generate": "generate", "transformers_cb": "transformers CB", "vllm": "vLLM"}


def headings(names: Sequence[str]) -> list[str]:
    return ["concurrent", *(TITLES[n] for n in names), *(f"ours / {TITLES[n]}" for n in names if n != "ours")]


def row(concurrency: int, result: Result) -> str:
    """A line under its `headings`."""
    speeds, ratios = result.speeds.values(), result.ratios.values()
    cells = (str(concurrency), *(f"{speed:,.0f}" for speed in speeds), *(f"{ratio:.2f}x" for ratio in ratios))
    return line(cells, headings(list(result.speeds)))


def line(cells: Iterable[str], under: Sequence[str]) -> str:
    return "  ".join(cell.rjust(len(heading)) for cell, heading in zip(cells, under, strict=True))


def keys(results: dict[int, Result], suffix: str = "") -> dict[str, float]:
    out: dict[str, float] = {}
    for concurrency, result in results.items():
        end = f"{suffix}_{concurrency}"
        for name, speed in result.speeds.items():
            out[f"{'' if name == 'ours' else f'{name}_'}tokens_per_s{end}"] = round(speed, 1)
        out |= {f"vs_{peer}{end}": round(ratio, 3) for peer, ratio in result.ratios.items()}
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description="Tokens per second of the embedded engine and its peers.")
    parser.add_argument("--model", help="directory or id; default: the shipped calculator model")
    parser.add_argument("--vllm", metavar="PROGRAM", help="measure vLLM too: where its `vllm` is")
    parser.add_argument("--sizes", help=f"concurrent requests, for example 1,8; {OF_A_MODEL} with --model")
    parser.add_argument("--seconds", type=float, help="per size, for a large model; 60 with --model")
    parser.add_argument("--threads", type=int, default=1, help="torch threads; the model process samples with 1")
    parser.add_argument("--device", default="cpu", help="where --model computes: cpu (default) or cuda")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="of --model's weights")
    parser.add_argument("--quick", action="store_true", help="under a minute: fewer rounds, mixed lengths only")
    parser.add_argument("--json", action="store_true", help="last line: one JSON object")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    sizes = arguments.sizes or (OF_A_MODEL if arguments.model else ",".join(map(str, CONCURRENCY)))
    seconds = arguments.seconds or (60.0 if arguments.model else None)
    numbers = [int(size) for size in sizes.split(",")]
    made = partial(load, arguments.model, arguments.device, arguments.dtype)
    figures: dict[str, float] = {}
    with ExitStack() as stack:
        vllm = None
        if arguments.vllm:
            vllm = Vllm(arguments.vllm, str(resolve_model(arguments.model or "calc")), max(numbers), arguments.threads)
            stack.callback(vllm.close)
        names = ["ours", "generate", "transformers_cb", *(["vllm"] if vllm else [])]
        for same_length in (False,) if arguments.quick else (False, True):
            print("All responses of 64 tokens" if same_length else "Responses of 16 to 111 tokens")
            print(line(headings(names), headings(names)))
            results: dict[int, Result] = {}
            for size in numbers:
                results[size] = measure(made, size, arguments.quick, same_length, seconds, vllm)
                print(row(size, results[size]), flush=True)
            figures |= keys(results, "_same_length" if same_length else "")
    if arguments.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
