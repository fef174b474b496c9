"""What a run says of itself: what it trains, at which learning rate, and what to type next."""

from __future__ import annotations

from pathlib import Path

import pytest

import agentlightning as agl
from agentlightning.metrics.console import _duration, _progress
from agentlightning.trainer.words import closing, opening

TASKS = list(range(100))


def first_words(**settings: object) -> str:
    algorithm = agl.GRPO(model="calc", **settings)  # pyright: ignore[reportArgumentType]
    return opening(algorithm, algorithm.shape, Path("runs/x"), TASKS, None)


def test_the_learning_rate_is_said_and_whose_choice_it_was() -> None:
    assert (
        "all weights of calc (0.7 million parameters) at learning rate 0.00034, the default for that size"
        in first_words()
    )
    assert (
        "a LoRA adapter of rank 8 on calc (0.7 million parameters) at learning rate 0.002, the default"
        in first_words(lora_rank=8)
    )
    assert "at learning rate 0.002.\n" in first_words(learning_rate=2e-3)


def test_steps_tasks_and_folder_are_said() -> None:
    said = first_words(epochs=2, max_context=512)
    assert "14 steps of 16 tasks × 8 rollouts, on 100 training tasks and no validation tasks.\n" in said
    assert "runs/x" in said
    assert "contexts of at most 1024 tokens" in first_words(), "the default is more than the model can do"
    assert "40 steps of" in first_words(steps=40)
    assert "\n1 step of 16 tasks" in first_words(steps=1)


def test_the_rate_falls_from_what_is_taken() -> None:
    algorithm = agl.GRPO(model="calc", steps=4, schedule="linear")
    peak = algorithm.peak_rate
    assert [algorithm.rate(done, 0, 10) / peak for done in range(5)] == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.0])


def test_the_last_words_can_be_pasted() -> None:
    rows = [{"step": 0, "val_reward": 0.2}, {"step": 1, "reward": 0.25, "val_reward": 0.5, "updates": 1}]
    result = agl.RunResult(Path("runs/x"), Path("runs/x/checkpoints/step-000001"), False, rows)
    said = closing("agl", result, agent_known=True)
    for words in (
        "Validation reward 0.200 before training, 0.500",
        "  agl show runs/x ",
        "  agl eval runs/x/checkpoints/step-000001 --trust ",
        "  agl serve runs/x/checkpoints/step-000001 ",
    ):
        assert words in said
    assert result.learned
    stopped = agl.RunResult(Path("runs/x"), result.checkpoint, True, rows)
    assert "--resume runs/x " in closing("agl", stopped, agent_known=True)
    stopped = agl.RunResult(Path("runs/x"), None, True)
    assert closing("agl", stopped, agent_known=True).endswith("nothing is learned yet.")


@pytest.mark.parametrize("validated", [True, False])
@pytest.mark.parametrize("agent_known", [True, False])
def test_the_advice_to_compare_asks_for_what_the_run_does_not_know(validated: bool, agent_known: bool) -> None:
    rows = [{"step": 1, "loss": 0.25, "updates": 1, **({"val_reward": 0.5} if validated else {})}]
    said = closing("agl", agl.RunResult(Path("x"), Path("x/c"), False, rows), agent_known=agent_known)
    assert ("--tasks FILE" in said) is not validated
    assert ("--agent AGENT" in said) is not agent_known
    assert ("--trust" in said) is agent_known


def test_a_run_whose_steps_changed_nothing_did_not_learn() -> None:
    def learned(*rows: dict[str, object]) -> bool:
        return agl.RunResult(Path("x"), None, False, rows).learned

    assert not learned({"step": 1, "updates": 0}, {"step": 2, "updates": 0})
    assert learned({"step": 1, "updates": 0}, {"step": 2, "updates": 2})
    assert learned({"step": 1, "solver/updates": 1, "checker/updates": 0})
    assert learned({"step": 0, "val_reward": 0.5})


def test_a_row_says_the_step_of_how_many_and_the_time_left() -> None:
    assert _progress({"step": 3, "steps": 20, "seconds_left": 61.0}) == {"progress": "3/20", "left": "61 s"}
    assert _progress({"step": 0}) == {"progress": "0"}
    assert [_duration(s) for s in (5, 600, 7200)] == ["5 s", "10 min", "2.0 h"]
