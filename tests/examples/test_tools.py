"""The models of the applications: what they are taught, and that the script makes one that `transformers` loads."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from renderers import Qwen3Renderer
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentlightning.errors import ConfigError
from agentlightning.models import resolve_model
from agentlightning.trainer.example import load_example
from examples.sql.data import SIZES
from examples.sql.demonstrations import SKILL, databases, demonstrate, held_out, spoiled
from examples.sql.grading import extract_query, score
from examples.sql.questions import make_question
from examples.tools.demonstration import Demonstration
from examples.tools.make_model import row_of
from tests.typed import typed


def test_a_spoiled_query_is_another_one_and_mostly_a_wrong_one() -> None:
    rng, found = random.Random(0), []
    folder, _ = databases()
    for _ in range(60):
        question = make_question(rng)
        right = question.query.sql()
        for _, query in spoiled(question, rng):
            assert query != right
            found.append(score(folder / f"{question.schema.name}.sqlite", query, right))
    assert sum(found) / len(found) < 0.1, "some are right by chance: two of the same age"


def test_no_held_out_question_is_demonstrated() -> None:
    rng = random.Random(0)
    asked = {question for _, question in held_out()}
    assert len(asked) == SIZES["val"] + SIZES["test"], "a question names tables, so it is about one database"
    for _ in range(300):
        assert not asked & set(demonstrate(rng, SKILL).messages[-1]["content"].split("\n"))


def test_what_a_writer_shows_is_found_by_the_grader() -> None:
    rng = random.Random(1)
    said = [demonstrate(rng, {"careful": 1.0, "honest": 1.0}) for _ in range(50)]
    written = [d.turns[0] for d in said if d.turns[0].startswith("```")]
    assert written
    assert all(extract_query(text).startswith("SELECT") for text in written)


def test_a_row_is_what_the_agent_and_the_model_say_and_the_model_learns_its_own_part() -> None:
    """As the calculator's own teacher has it, tool calls and results included."""
    calc: Any = load_example("calc", "make_model")
    tokenizer: Any = AutoTokenizer.from_pretrained(resolve_model("calc"))
    renderer = Qwen3Renderer(tokenizer)
    shown = calc.demonstrate(random.Random(0), {"careful": 1.0})
    messages = [{"role": "system", "content": calc.SYSTEM_PROMPT}, {"role": "user", "content": shown.question}]
    assert shown.results
    same = Demonstration(messages, shown.turns, shown.results, [calc.CALC_TOOL])
    assert row_of(same, tokenizer, renderer) == calc.Teacher(tokenizer, renderer).row(shown)


def test_an_application_without_demonstrations_has_no_model() -> None:
    with pytest.raises(ConfigError, match="There is no example 'room_booking'"):
        load_example("tools", "cached").cached_model("room_booking")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_script_makes_a_model_that_loads(tmp_path: Path) -> None:
    make = "from agentlightning.trainer.example import load_example; load_example('tools', 'make_model').main()"
    done = typed(tmp_path, "-c", make, "sql", "--quick", "--out", "model")
    assert done.returncode == 0, done.stderr
    load = "from transformers import AutoModelForCausalLM as M; print(M.from_pretrained('model').config.model_type)"
    assert typed(tmp_path, "-c", load).stdout.strip() == "qwen3"


async def test_a_batch_converses_as_the_agent_does() -> None:
    """The calculator's own way to play many tasks at once is the other implementation."""
    calc, play, tasks = (load_example("calc", name) for name in ("calc_agent", "play", "tasks"))
    folder = resolve_model("calc")
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    renderer = Qwen3Renderer(AutoTokenizer.from_pretrained(folder))
    questions, _ = tasks.make_tasks(6, 0, seed=1)
    episodes = play.play(model, renderer, questions, generator=torch.Generator().manual_seed(0))

    async def carry_out(i: int, arguments: Any) -> str:
        return calc.calculate(json.dumps(arguments))

    asked = [
        [{"role": "system", "content": calc.SYSTEM_PROMPT}, {"role": "user", "content": task["question"]}]
        for task in questions
    ]
    batch = load_example("tools", "batch").Batch(model, renderer)
    said = await batch.converse(asked, [calc.CALC_TOOL], carry_out, turns=calc.MAX_TURNS, max_tokens=play.MAX_TOKENS)
    assert [calc.score(text, task["answer"]) for text, task in zip(said, questions, strict=True)] == [
        episode.reward for episode in episodes
    ]
    assert any(episode.reward for episode in episodes)
