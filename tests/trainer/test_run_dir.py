"""One run at a time in a folder: a second one is refused before it touches anything."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

import agentlightning as agl
from agentlightning.algorithm.baseline import Baseline
from agentlightning.errors import ConfigError, StoreError
from agentlightning.metrics import SilentConsole
from agentlightning.store import SqliteLightningStore
from agentlightning.trainer.folder import METRICS_FILE, STORE_FILE
from agentlightning.trainer.live import RUN_FILE


def write_checkpoint(run_dir: Path, step: int) -> Path:
    checkpoint = run_dir / "checkpoints" / f"step-{step:06d}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "checkpoint.json").write_text(json.dumps({"step": step, "base_model": "m", "seed": 0}))
    return checkpoint


async def test_a_second_run_in_a_folder_leaves_the_first_ones_files_alone(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 1)
    metrics, settings = tmp_path / METRICS_FILE, tmp_path / RUN_FILE
    metrics.write_text("".join(json.dumps({"step": n}) + "\n" for n in range(5)))
    settings.write_text("{}")
    before = metrics.stat().st_ino, metrics.read_text()
    first = SqliteLightningStore(tmp_path / STORE_FILE)  # as the run that goes on holds it
    try:
        second = agl.Trainer(algorithm=Baseline(), resume=tmp_path, console=SilentConsole())
        with pytest.raises(StoreError, match="already open"):
            await second.fit_async(agl.rollout(lambda task: 1.0), [1])
    finally:
        await first.close()
    assert (metrics.stat().st_ino, metrics.read_text()) == before
    assert settings.read_text() == "{}"


async def test_a_run_that_goes_on_from_an_earlier_checkpoint_leaves_the_later_ones_aside(tmp_path: Path) -> None:
    first, second = write_checkpoint(tmp_path, 1), write_checkpoint(tmp_path, 2)
    trainer = agl.Trainer(algorithm=Baseline(), resume=first, console=SilentConsole())
    assert trainer.run_dir == tmp_path
    assert (await trainer.fit_async(agl.rollout(lambda task: 1.0), [1])).checkpoint == first
    (aside,) = (tmp_path / "checkpoints").glob(f"before-*-{second.name}")
    assert (aside / "checkpoint.json").is_file()


async def test_each_run_without_a_folder_gets_one_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = (agl.Trainer(algorithm=Baseline(), console=SilentConsole()) for _ in range(2))
    while first.run_dir != second.run_dir:  # made in the same second
        first, second = second, agl.Trainer(algorithm=Baseline(), console=SilentConsole())
    agent = agl.rollout(lambda task: 1.0)
    both = await asyncio.gather(first.fit_async(agent, [1]), second.fit_async(agent, [1]))
    again = await first.fit_async(agent, [1])  # the cell of a notebook that is run twice
    assert len({result.run_dir for result in (*both, again)}) == 3
    assert all((result.run_dir / STORE_FILE).is_file() for result in (*both, again))


async def test_a_trainer_that_is_training_is_not_asked_to_train(tmp_path: Path) -> None:
    trainer = agl.Trainer(algorithm=Baseline(), run_dir=tmp_path / "run", console=SilentConsole())

    @agl.rollout
    async def impatient(task: object) -> float:
        with pytest.raises(ConfigError, match=r"is training already, in .*run\. .* make another Trainer"):
            await trainer.fit_async(impatient, [1])
        return 1.0

    await trainer.fit_async(impatient, [1])
