"""The baseline runs tasks and says what came of it; one that is stopped, of those that were finished."""

from __future__ import annotations

import asyncio
from pathlib import Path

import agentlightning as agl
from agentlightning.metrics import SilentConsole


class Heard(SilentConsole):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


async def test_a_run_that_is_stopped_says_what_it_had_come_to(tmp_path: Path) -> None:
    stop, ran = asyncio.Event(), []

    @agl.rollout
    async def agent(task: int) -> float:
        if task >= 3:
            while len(ran) < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.2)  # the others are being stored
            stop.set()
            await asyncio.sleep(600)
        ran.append(task)
        return float(task == 0)

    console, algorithm = Heard(), agl.Baseline()
    trainer = agl.Trainer(algorithm=algorithm, run_dir=tmp_path / "run", console=console)
    result = await trainer.fit_async(agent, range(5), stop=stop)
    assert result.stopped
    assert [e.reward for e in algorithm.episodes] == [1.0, 0.0, 0.0]
    assert any(note.startswith("3 rollouts, mean reward 0.333") for note in console.notes), console.notes
