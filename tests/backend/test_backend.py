"""The backend's seam: each implementation keeps its promises, and the loop sees through one that does not."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import pytest_asyncio

import agentlightning as agl
from agentlightning.algorithm.checkpoint import latest_checkpoint, list_checkpoints, read_checkpoint
from agentlightning.backend import POLICY, Backend, Drain, ModelSpec, make_backend
from agentlightning.backend.embedded.backend import ServerThread, settings_of
from agentlightning.engine.base import Chunk, SamplingParams, concat
from agentlightning.errors import BackendDied, ConfigError, EngineError
from agentlightning.learner.base import ChecksPacking, LossConfig, OptimParams
from agentlightning.metrics import SilentConsole, read_metrics

from ..engine.conftest import random_ids
from ..engine.test_model_process import row
from .bigram import BigramBackend, BigramLearner
from .vllm.on_fake import LoraOnFake, VLLMOnFake

PROMPT = random_ids(12, 1)
STEP = OptimParams(learning_rate=0.05)


async def sample(backend: Backend, *, tokens: int = 8, seed: int | None = 0) -> Chunk:
    params = SamplingParams(max_tokens=tokens, seed=seed)
    return concat([chunk async for chunk in backend.engine(POLICY).generate(PROMPT, params)])


OTHERS = ("inprocess", BigramBackend, VLLMOnFake, LoraOnFake)
NAMES = ("embedded", "inprocess", "own", "vllm", "vllm-lora")


@pytest_asyncio.fixture(params=["embedded", *OTHERS], ids=NAMES)
async def backend(request: pytest.FixtureRequest, tiny_model_dir: Path) -> AsyncIterator[Backend]:
    made = make_backend(request.param, ModelSpec(model=str(tiny_model_dir), device="cpu", max_context=512, seed=0))
    await made.start()
    yield made
    await made.close()


@pytest.mark.quick_with("embedded", "own", "vllm-lora")
async def test_the_engine_samples_from_what_the_learner_has_once_it_is_published(backend: Backend) -> None:
    first = await sample(backend)
    batch, learner = row(PROMPT, first), backend.learner(POLICY)
    passed = await learner.forward_backward([batch, batch], LossConfig(name="reinforce"))
    np.testing.assert_allclose(passed.logprobs, np.tile(first.plain_logprobs, 2), atol=2e-5)
    step = await learner.optim_step(STEP)
    assert (step.version, await backend.publish(POLICY)) == (1, 1)
    assert step.grad_norm > 0
    again = await sample(backend, seed=5)
    assert ((await backend.engine(POLICY).info()).version, again.version) == (1, 1)
    np.testing.assert_allclose(await learner.forward(row(PROMPT, again)), again.plain_logprobs, atol=2e-5)
    assert np.abs(await learner.forward(batch) - first.plain_logprobs).max() > 1e-3
    assert await backend.publish(POLICY) == 1, "publishing what is published changes nothing"


@pytest.mark.quick_with("own", "vllm-lora")
@pytest.mark.parametrize(
    "backend", [pytest.param("embedded", marks=pytest.mark.slow), *OTHERS], ids=NAMES, indirect=True
)
async def test_a_checkpoint_brings_weights_optimiser_and_version_back(backend: Backend, tmp_path: Path) -> None:
    batch, learner = row(PROMPT, await sample(backend)), backend.learner(POLICY)
    await learner.forward_backward([batch], LossConfig(name="reinforce"))
    await learner.optim_step(STEP)
    await backend.publish(POLICY)
    await backend.checkpoint(str(tmp_path))
    second: Backend = type(backend)(ModelSpec(model=str(tmp_path / "model"), device="cpu", max_context=512))  # pyright: ignore
    await second.start()
    try:
        await second.restore(str(tmp_path))
        assert (await second.engine(POLICY).info()).version == 1
        np.testing.assert_allclose(await second.learner(POLICY).forward(batch), await learner.forward(batch), atol=2e-5)
    finally:
        await second.close()


@pytest.mark.parametrize(
    "backend", [pytest.param("embedded", marks=pytest.mark.slow), "inprocess", VLLMOnFake], indirect=True
)
async def test_a_paused_backend_starts_nothing(backend: Backend) -> None:
    await backend.pause()
    waiting = asyncio.create_task(sample(backend))
    await asyncio.wait([waiting], timeout=0.3)
    assert not waiting.done()
    await backend.resume()
    assert len((await waiting).ids) > 0


def test_what_is_no_backend_is_refused() -> None:
    with pytest.raises(ConfigError, match="it can be 'embedded', 'inprocess', 'ray', 'vllm' or a callable"):
        agl.GRPO(model="calc", backend="warp")


# ---- a whole run on a backend of one's own -------------------------------------------------------------------------


@agl.rollout
async def agent(task: int, llm: agl.LLM) -> float:
    """The reward: how many of the sampled characters are small letters."""
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key or "none")
    try:
        answer = await client.completions.create(model=llm.model, prompt=f"Task {task}:", max_tokens=8)
    finally:
        await client.close()
    text = answer.choices[0].text
    return sum(c.islower() for c in text) / max(len(text), 1)


def fit(tmp_path: Path, backend: Any, **settings: Any) -> list[dict[str, Any]]:
    given = {"steps": 12, "tasks_per_step": 2, "group_size": 16, "learning_rate": 2000.0, "save_every": 4, **settings}
    algorithm = agl.GRPO(model="calc", backend=backend, **given)
    trainer = agl.Trainer(algorithm=algorithm, run_dir=tmp_path / "run", console=SilentConsole())
    trainer.fit(agent, list(range(100)))
    return read_metrics(tmp_path / "run" / "metrics.jsonl")


@pytest.mark.slow
def test_a_run_on_a_backend_of_ones_own_learns(tmp_path: Path) -> None:
    rows = fit(tmp_path, BigramBackend)
    assert np.mean([m["reward"] for m in rows[-3:]]) > rows[0]["reward"] + 0.1
    assert all(m["sync_gap"] < 1e-5 for m in rows if m["updates"])
    assert not issubclass(BigramLearner, ChecksPacking)
    info = json.loads((latest_checkpoint(tmp_path / "run") / "checkpoint.json").read_text())
    assert info["step"] == rows[-1]["step"]


class Leaves(BigramBackend):
    """Machines are taken away after the second step, when nothing fits elsewhere, and after the third, when it does."""

    made: ClassVar[list[BigramBackend]] = []

    def __init__(self, spec: Any) -> None:
        super().__init__(spec)
        self.made.append(self)

    @property
    def drain(self) -> Drain | None:
        if len(self.made) > 1 or self._learner.version not in (2, 3):
            return None
        return Drain("The machine of the learner is draining.", can_move=self._learner.version == 3)


@pytest.mark.slow
def test_a_learner_that_has_to_leave_is_saved_after_each_step_and_started_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Leaves.made.clear()
    rows = fit(tmp_path, Leaves, steps=5, tasks_per_step=1, learning_rate=1.0, save_every=100, keep_checkpoints=9)
    assert [row["step"] for row in rows if row["step"]] == [1, 2, 3, 4, 5]
    assert len({task for row in rows if row["step"] for task in row["tasks"]}) == 5, "no step took another's tasks"
    assert [read_checkpoint(path).step for path in list_checkpoints(tmp_path / "run")] == [0, 2, 3, 5]
    assert len(Leaves.made) == 2
    assert "The machine of the learner is draining.\nThe run goes on from" in caplog.text


class Reloads(BigramBackend):
    """Its engine could be started again after any step: what it began with is still there."""

    begun: ClassVar[list[Path]] = []

    def __init__(self, spec: Any) -> None:
        super().__init__(spec)
        self._model = Path(spec.model)

    async def publish(self, policy: str) -> int:
        if self._model.is_absolute():
            assert (self._model / "table.npy").exists()
            self.begun.append(self._model)
        return await super().publish(policy)


@pytest.mark.slow
def test_a_run_keeps_the_checkpoint_that_it_goes_on_from(tmp_path: Path) -> None:
    Reloads.begun.clear()
    settings = {"tasks_per_step": 1, "learning_rate": 1.0, "save_every": 1, "keep_checkpoints": 1}
    fit(tmp_path, Reloads, steps=2, **settings)
    algorithm = agl.GRPO(model="calc", backend=Reloads, steps=6, group_size=16, **settings)
    run_dir = tmp_path / "run"
    trainer = agl.Trainer(algorithm=algorithm, run_dir=run_dir, resume=run_dir, console=SilentConsole())
    trainer.fit(agent, list(range(100)))
    first = run_dir / "checkpoints" / "step-000002" / "model"
    assert Reloads.begun.count(first) >= 4, "it was asked for in each step"
    assert [path.name for path in list_checkpoints(run_dir)] == ["step-000006"], "and goes when the run ends"


class Dies(BigramBackend):
    """So many times, when it has learned."""

    deaths: ClassVar[int] = 0

    @classmethod
    def die(cls) -> None:
        if Dies.deaths:
            Dies.deaths -= 1
            raise BackendDied("The model process ended: SIGKILL.")

    async def publish(self, policy: str) -> int:
        self.die()
        return await super().publish(policy)


class DiesEarly(Dies):
    """Before anything is saved."""

    async def publish(self, policy: str) -> int:
        return await BigramBackend.publish(self, policy)

    async def checkpoint(self, uri: str) -> None:
        self.die()
        await super().checkpoint(uri)


class IsTooLarge(Dies):
    """To be loaded."""

    async def start(self) -> None:
        self.die()


def test_a_backend_that_dies_as_it_loads_is_not_started_again(tmp_path: Path) -> None:
    Dies.deaths = 2
    with pytest.raises(BackendDied, match=r"SIGKILL\.\nThe run is in"):
        fit(tmp_path, IsTooLarge, steps=1)
    assert Dies.deaths == 1


@pytest.mark.parametrize("kind", [Dies, DiesEarly])
@pytest.mark.parametrize("deaths", [3, 4])
def test_a_backend_is_started_again_unless_it_dies_too_often_without_a_step(
    tmp_path: Path, kind: type[Dies], deaths: int
) -> None:
    Dies.deaths = deaths
    settings = {"steps": 2, "tasks_per_step": 1, "learning_rate": 1.0, "save_every": 1}
    if deaths == 4:
        with pytest.raises(BackendDied, match=r"SIGKILL\.\nIt was started again 3 times without a step\."):
            fit(tmp_path, kind, **settings)
        return
    rows = fit(tmp_path, kind, **settings)
    assert [row["step"] for row in rows if row["step"]] == [1, 2]
    assert len({task for row in rows if row["step"] for task in row["tasks"]}) == 2


class Forgets(BigramBackend):
    """`publish` does nothing, and says so."""

    async def publish(self, policy: str) -> int:
        return self._engine.version


class Pretends(BigramBackend):
    """`publish` does nothing, and says it did."""

    async def publish(self, policy: str) -> int:
        return self._learner.version


class Relabels(BigramBackend):
    """The engine has the old weights under the new version."""

    async def publish(self, policy: str) -> int:
        self._engine.version = self._learner.version
        return self._engine.version


class Halves(BigramBackend):
    """Some of the weights are left behind."""

    async def publish(self, policy: str) -> int:
        self._engine.table = (self._learner.table + self._engine.table) / 2
        self._engine.version = self._learner.version
        return self._engine.version


@pytest.mark.quick_with("Pretends", "Halves")
@pytest.mark.parametrize(
    ("broken", "cause"),
    [
        (Forgets, "left its engine at weight version 0, and its learner has version 1"),
        (Pretends, "still samples from version 0"),
        (Relabels, "off the learner's"),
        (Halves, "off the learner's"),
    ],
)
def test_a_publish_that_does_not_publish_stops_the_run_at_its_first_step(
    tmp_path: Path, broken: Any, cause: str
) -> None:
    with pytest.raises(EngineError, match=cause):
        fit(tmp_path, broken)
    assert [m["step"] for m in read_metrics(tmp_path / "run" / "metrics.jsonl")] == []


class Idle(ServerThread):
    """A thread that loads nothing, and ends with its socket as one that has a model does."""

    def _serve(self) -> None:
        with self._theirs:
            while self._theirs.recv(2**16):
                pass


def test_a_script_that_fails_before_it_closes_its_backend_ends_with_its_error() -> None:
    """`asyncio.run` waits for the threads that its loop waited for, so it must not be for the model's."""
    ended: list[BaseException] = []

    async def fail() -> None:
        await Idle.spawn(settings_of(ModelSpec(model="calc", device="cpu")))
        await asyncio.sleep(0)  # its end is waited for from now on
        raise ValueError("of the script")

    def script() -> None:
        try:
            asyncio.run(fail())
        except ValueError as error:
            ended.append(error)

    thread = threading.Thread(target=script, daemon=True)
    thread.start()
    thread.join(30)
    assert ended
