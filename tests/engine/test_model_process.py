"""The model process over a real socket: exact, ordered, and loud when it dies."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import pytest_asyncio

from agentlightning.backend.embedded.client import ModelProcess
from agentlightning.backend.embedded.protocol import ProcessSettings
from agentlightning.engine.base import Chunk, Engine, SamplingParams, concat
from agentlightning.errors import BackendDied, ConfigError, EngineError, ModelError
from agentlightning.learner.base import Learner, LossConfig, OptimParams, PackedBatch
from agentlightning.types.call import Int32Array

from .conftest import random_ids

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.own_model_process]

EXACT = 2e-5
CONCURRENCY = 8


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def process(tiny_model_dir: Path) -> AsyncIterator[ModelProcess]:
    settings = ProcessSettings(model=str(tiny_model_dir), max_concurrency=CONCURRENCY, learning_threads=1, device="cpu")
    async with ModelProcess(settings) as process:
        yield process


def seams(process: ModelProcess) -> tuple[Engine, Learner]:
    """For the type checker: it is both."""
    return process, process


async def sample(process: ModelProcess, prompt: Int32Array, *, stream: bool = False, **params: object) -> Chunk:
    settings = SamplingParams(**{"max_tokens": 12, **params})  # pyright: ignore[reportArgumentType]
    return concat([chunk async for chunk in process.generate(prompt, settings, stream=stream)])


def row(prompt: Int32Array, chunk: Chunk) -> PackedBatch:
    """A prompt and its response as a tree of one segment, every response token pushed up."""
    ids = np.concatenate([prompt, chunk.ids]).astype(np.int32)
    count = len(chunk.ids)
    return PackedBatch(
        ids_N=ids,
        positions_N=np.arange(len(ids), dtype=np.int32),
        starts_S=np.zeros(1, dtype=np.int32),
        parents_S=np.full(1, -1, dtype=np.int32),
        source_E=np.arange(len(prompt) - 1, len(ids) - 1, dtype=np.int32),
        targets_E=chunk.ids,
        sequence_E=np.zeros(count, dtype=np.int32),
        group_E=np.zeros(count, dtype=np.int32),
        old_logprobs_E=chunk.plain_logprobs,
        advantages_E=np.ones(count, dtype=np.float32),
        weights_E=np.full(count, 1 / count, dtype=np.float32),
        temperature_E=np.ones(count, dtype=np.float32),
    )


def of_prompt(prompt: Int32Array, chunk: Chunk) -> PackedBatch:
    """What the learner is asked to check the log-probs of a prompt's tokens."""
    assert chunk.prompt is not None
    return row(prompt[:1], msgspec.structs.replace(chunk, ids=prompt[1:], plain_logprobs=chunk.prompt.logprobs))


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
async def test_the_log_probs_of_a_prompt_are_the_learners(process: ModelProcess, stream: bool) -> None:
    prompt = random_ids(30, 1)
    for top in (0, 4):
        chunk = await sample(process, prompt, stream=stream, prompt_logprobs=top)
        assert chunk.prompt is not None
        np.testing.assert_allclose(await process.forward(of_prompt(prompt, chunk)), chunk.prompt.logprobs, atol=EXACT)
        shape = None if chunk.prompt.top_ids is None else chunk.prompt.top_ids.shape
        assert shape == ((29, 4) if top else None)
    assert (await process.info()).scores_prompts


async def test_what_was_sampled_is_what_the_learner_computes(process: ModelProcess) -> None:
    prompts = [random_ids(10 + 3 * i, i) for i in range(20)]
    chunks = await asyncio.gather(*(sample(process, prompt) for prompt in prompts))
    for prompt, chunk in zip(prompts, chunks, strict=True):
        logprobs = await process.forward(row(prompt, chunk))
        np.testing.assert_allclose(logprobs, chunk.plain_logprobs, atol=EXACT)
        np.testing.assert_array_equal(chunk.logprobs, chunk.plain_logprobs)


async def test_a_step_waits_for_running_requests_and_new_ones_wait_for_it(process: ModelProcess) -> None:
    prompt = random_ids(20, 1)
    version = (await process.info()).version
    batch = row(prompt, await sample(process, prompt))
    before = [asyncio.create_task(sample(process, random_ids(9, s), max_tokens=60)) for s in range(CONCURRENCY)]
    await process.info()  # they are running now
    passed = await process.forward_backward([batch], LossConfig())
    step = asyncio.create_task(process.optim_step(OptimParams(learning_rate=0.05)))
    await asyncio.sleep(0)
    after = [asyncio.create_task(sample(process, prompt, max_tokens=30)) for _ in range(2 * CONCURRENCY)]
    np.testing.assert_allclose(passed.logprobs, batch.old_logprobs_E, atol=EXACT)
    assert (await step).version == version + 1
    assert all(task.done() for task in before)
    await asyncio.wait(after, timeout=0.2)
    assert not any(task.done() for task in after), "nothing is sampled before the new weights are published"
    assert await process.publish() == version + 1
    assert {(await task).version for task in before} == {version}
    changed = [await task for task in after]
    assert {chunk.version for chunk in changed} == {version + 1}
    for chunk in changed:
        np.testing.assert_allclose(await process.forward(row(prompt, chunk)), chunk.plain_logprobs, atol=EXACT)
    assert np.abs(await process.forward(batch) - batch.old_logprobs_E).max() > 0.01


LONG = SamplingParams(max_tokens=900, temperature=0.0)
"""Greedy: a model that knows nothing repeats itself then, and does not happen to end."""


async def _all(chunks: AsyncGenerator[Chunk, None]) -> list[Chunk]:
    return [chunk async for chunk in chunks]


@pytest.mark.slow
async def test_requests_in_flight_may_go_on_under_the_new_weights(tiny_model_dir: Path) -> None:
    settings = ProcessSettings(
        model=str(tiny_model_dir), max_context=1024, in_flight="continue", learning_threads=1, device="cpu"
    )
    async with ModelProcess(settings) as process:
        prompt = random_ids(20, 1)
        batch = row(prompt, await sample(process, prompt))
        await process.forward_backward([batch], LossConfig())
        stream = process.generate(prompt, LONG, stream=True)
        whole = asyncio.create_task(_all(process.generate(prompt, LONG)))
        chunks = [await anext(stream) for _ in range(5)]
        await process.optim_step(OptimParams(learning_rate=0.05))
        assert await process.publish() == 1
        chunks += [chunk async for chunk in stream]
        first, second = await whole
        assert (first.version, first.finish_reason) == (0, None), "what it sampled so far came out at once"
        assert (second.version, second.finish_reason is None) == (1, False)
    versions = [chunk.version for chunk in chunks]
    assert versions == sorted(versions)
    assert set(versions) == {0, 1}


async def test_a_stream_comes_token_by_token(process: ModelProcess) -> None:
    prompt = random_ids(20, 3)
    whole = await sample(process, prompt, seed=5, top_logprobs=2)
    pieces = [c async for c in process.generate(prompt, SamplingParams(max_tokens=12, seed=5), stream=True)]
    assert [len(piece.ids) for piece in pieces] == [1] * len(whole.ids)
    assert concat(pieces).ids.tolist() == whole.ids.tolist()
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + [whole.finish_reason]
    again = await sample(process, prompt, seed=5, top_logprobs=2, stream=True)
    assert again.top_ids is not None
    assert whole.top_ids is not None
    assert again.top_ids.tolist() == whole.top_ids.tolist()
    assert whole.top_ids.shape == (len(whole.ids), 2)


async def test_closing_or_cancelling_aborts(process: ModelProcess) -> None:
    async with aclosing(process.generate(random_ids(9, 1), SamplingParams(max_tokens=400), stream=True)) as stream:
        await anext(stream)
    tasks = [asyncio.create_task(sample(process, random_ids(9, s), max_tokens=400)) for s in range(3 * CONCURRENCY)]
    await process.info()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    stats = await process.stats()
    assert (stats.running, stats.waiting) == (0, 0)


async def test_errors_arrive_as_what_they_are(process: ModelProcess, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="prompt has 600 tokens"):
        await sample(process, random_ids(600, 1))
    with pytest.raises(ConfigError, match="temperature"):
        await sample(process, random_ids(6, 1), temperature=-1.0)
    with pytest.raises(ConfigError, match=r"optimiser's state in .* cannot be read"):
        await process.load_state(str(tmp_path / "nothing"))
    with pytest.raises(EngineError, match="Export failed"):
        await process.export("/proc/nothing")
    assert len((await sample(process, random_ids(6, 1))).ids) > 0


async def test_time_is_accounted_for(process: ModelProcess) -> None:
    before, start = await process.stats(), time.perf_counter()
    prompt = random_ids(40, 11)
    chunk = await sample(process, prompt, max_tokens=30)
    await sample(process, prompt, max_tokens=1)
    await process.forward(row(prompt, chunk))
    await asyncio.sleep(0.2)
    after, wall = await process.stats(), time.perf_counter() - start
    assert after.tokens_sampled - before.tokens_sampled == len(chunk.ids) + 1
    assert after.prefill_tokens - before.prefill_tokens == 40
    assert after.cached_tokens - before.cached_tokens == 39
    sampling, learning = after.sampling_s - before.sampling_s, after.learning_s - before.learning_s
    idle = after.idle_s - before.idle_s
    assert min(sampling, learning) > 0
    assert idle >= 0.1, "it slept for 0.2 s"
    assert sampling + learning + idle == pytest.approx(wall, abs=0.1)


async def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    process = ModelProcess(ProcessSettings(model=str(tmp_path / "missing")))
    with pytest.raises(ModelError, match="There is no model at"):
        await process.start()
    with pytest.raises(EngineError, match="not running"):
        await process.info()
    await process.close()


@pytest.mark.slow
async def test_why_a_model_cannot_be_loaded_is_quoted(tiny_model_dir: Path, tmp_path: Path) -> None:
    model = shutil.copytree(tiny_model_dir, tmp_path / "model")
    (model / "agentlightning.json").write_text("abacus")
    with pytest.raises(ModelError, match="could not be loaded: Expecting value"):
        await ModelProcess(ProcessSettings(model=str(model))).start()


@pytest.mark.slow
async def test_a_device_that_is_not_there_is_named(tiny_model_dir: Path) -> None:
    with pytest.raises(ConfigError, match="The device 'abacus' cannot be used"):
        await ModelProcess(ProcessSettings(model=str(tiny_model_dir), device="abacus")).start()


async def test_signals_are_the_parents_business(process: ModelProcess) -> None:
    assert process.pid is not None
    assert os.getpgid(process.pid) != os.getpgid(0), "a Ctrl-C goes to the terminal's group"
    os.kill(process.pid, signal.SIGTERM)
    assert (await process.info()).max_context > 0


async def test_not_ready_in_time(tiny_model_dir: Path) -> None:
    process = ModelProcess(ProcessSettings(model=str(tiny_model_dir)), start_timeout=0.05)
    with pytest.raises(EngineError, match="not ready within"):
        await process.start()
    assert process.pid is None


PARENT = """
import asyncio, sys
from agentlightning.backend.embedded.client import ModelProcess
from agentlightning.backend.embedded.protocol import ProcessSettings

async def main():
    process = ModelProcess(ProcessSettings(model=sys.argv[1]))
    await process.start()
    assert "torch" not in sys.modules
    print(process.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


async def test_the_child_dies_with_its_parent(tiny_model_dir: Path) -> None:
    command = [sys.executable, "-c", PARENT, str(tiny_model_dir)]
    parent = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert parent.stdout is not None
    child = int(await parent.stdout.readline())
    parent.kill()
    await parent.wait()
    deadline = time.monotonic() + 10
    while _alive(child):
        assert time.monotonic() < deadline, "the model process outlived its parent"
        await asyncio.sleep(0.05)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_a_failed_save_says_where_and_how_much_room_there_is(process: ModelProcess, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for saved in (process.save_state, process.export):
        with pytest.raises(EngineError, match=rf"MiB are free in {tmp_path}.*resume from the last checkpoint"):
            await saved(str(tmp_path / "file" / "state"))


async def test_short_memory_names_the_settings_that_need_less() -> None:
    import torch

    from agentlightning.backend.embedded.protocol import Forward
    from agentlightning.backend.embedded.server import _what_to_do

    with pytest.raises(RuntimeError) as short:
        torch.empty(1 << 50)
    forward: Any = Forward(None)  # pyright: ignore[reportArgumentType]
    for error in (short.value, torch.OutOfMemoryError("CUDA out of memory"), MemoryError()):
        assert "lower tokens_per_batch" in _what_to_do(forward, error)
    assert _what_to_do(forward, ValueError("another")) == ""


async def test_a_token_that_does_not_exist_is_named(process: ModelProcess) -> None:
    prompt = random_ids(5, 0)
    batch = row(np.append(prompt, 99_999).astype(np.int32), await sample(process, prompt))
    with pytest.raises(ModelError, match="no token 99999 in this model's vocabulary"):
        await process.forward(batch)


@pytest.mark.slow
async def test_death_is_told_to_everyone_and_a_checkpoint_brings_it_back(process: ModelProcess, tmp_path: Path) -> None:
    version = (await process.info()).version
    await process.export(str(tmp_path / "model"))
    await process.save_state(str(tmp_path / "state"))
    prompt = random_ids(20, 3)
    response = await sample(process, prompt, temperature=0.0)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGINT)  # Ctrl-C is the parent's business
    waiting: list[asyncio.Task[Any]] = [
        asyncio.create_task(sample(process, random_ids(9, s), max_tokens=400)) for s in range(20)
    ]
    waiting.append(asyncio.create_task(process.optim_step(OptimParams(learning_rate=0.1))))
    waiting.append(asyncio.create_task(process.watch()))
    await process.info()
    os.kill(process.pid, signal.SIGKILL)
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    if not isinstance(outcomes[20], BaseException):  # the step may have been done before
        del outcomes[20]
    assert all(isinstance(outcome, BackendDied) and "SIGKILL" in str(outcome) for outcome in outcomes), outcomes
    with pytest.raises(EngineError, match="from its last checkpoint"):
        await sample(process, prompt)
    await process.close()
    async with ModelProcess(msgspec.structs.replace(process.settings, model=str(tmp_path / "model"))) as another:
        await another.load_state(str(tmp_path / "state"))
        assert await another.publish() == version
        assert (await another.info()).version == version
        again = await sample(another, prompt, temperature=0.0)
    assert (again.ids.tolist(), again.version) == (response.ids.tolist(), version)
