"""The agent of the reinforcement method: through a real gateway, and in a training that rises."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.errors import ConfigError, JudgeError
from agentlightning.finetuning.graders import GraderSettings
from agentlightning.finetuning.graders.agent import GRADE, GradedCompletion
from agentlightning.gateway import Gateway, Provider
from agentlightning.metrics import SilentConsole, read_metrics
from agentlightning.runner import LitAgentRunner
from agentlightning.tracer import OtelTracer
from agentlightning.types import AttemptedRollout, Span
from agentlightning.types.reward import find_final_reward, find_reward_spans, get_rewards
from scripts.tuning_curves import SOURCE, items
from tests.gateway.conftest import CALC, Site, calculator, rendering, script, site, store  # noqa: F401 (fixtures)
from tests.gateway.scripted import ScriptedEngine

TASK = {"messages": [{"role": "user", "content": "How much is 2 and 3?"}], "tools": [CALC], "answer": {"a": 2, "b": 3}}
EXACT = {
    "type": "string_check",
    "name": "exact",
    "operation": "eq",
    "input": "{{ sample.output_tools[0].function.name }}",
    "reference": "calc",
}
JUDGE = {
    "type": "score_model",
    "name": "judged",
    "model": "judge",
    "input": [{"role": "user", "content": "{{ sample.output_text }}{{ item.answer.a }}"}],
}


async def attempt(site: Site, agent: GradedCompletion, task: Any = TASK) -> list[Span]:  # noqa: F811
    """One attempt of the agent; its spans."""
    runner = LitAgentRunner(OtelTracer(), gateway=site.gateway)
    runner.init(agent)
    runner.init_worker(0, site.store)
    try:
        resource = site.gateway.as_resource()
        finished: AttemptedRollout = await runner.step(task, resources={"main_llm": resource})
    finally:
        runner.teardown()
    return list(await site.store.query_spans(finished.rollout_id))


async def test_the_policy_is_asked_once_and_graded_by_name(site: Site) -> None:  # noqa: F811
    source = "import json\ndef grade(sample, item):\n"
    source += "    return float(json.loads(sample['output_tools'][0]['function']['arguments']) == item['answer']) / 2"
    args = {"type": "python", "name": "p", "source": source}
    grader = {"type": "multi", "graders": {"exact": EXACT, "args": args}, "calculate_output": "exact + args"}
    spans = await attempt(site, GradedCompletion(grader))
    assert find_final_reward(spans) == 1.5
    (rewarded,) = find_reward_spans(spans)
    assert get_rewards(rewarded) == {"reward": 1.5, "exact": 1.0, "args": 0.5}
    (noted,) = [span.attributes[GRADE] for span in spans if GRADE in span.attributes]
    assert json.loads(str(noted))["sub_rewards"] == {"exact": 1.0, "args": 0.5}
    assert len(site.engine.params) == 1


async def test_a_response_format_is_held_and_gives_json(site: Site) -> None:  # noqa: F811
    site.engine.script = lambda prompt, params: json.dumps({"n": 5}) if params.grammar else "five"
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    form = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": schema}}
    grader = {**EXACT, "input": "{{ sample.output_json.n }}", "reference": "{{ item.answer.a }}", "operation": "ne"}
    task = {key: value for key, value in TASK.items() if key != "tools"}
    assert find_final_reward(await attempt(site, GradedCompletion(grader, response_format=form), task)) == 1.0
    assert find_final_reward(await attempt(site, GradedCompletion(grader), task)) == 0.0  # "five" is no JSON


async def test_a_grader_that_fails_is_a_judge_error_with_its_last_line(site: Site) -> None:  # noqa: F811
    grader = {"type": "python", "name": "p", "source": "def grade(sample, item):\n    return item['zz']"}
    with pytest.raises(JudgeError, match=r"KeyError: 'zz' \(grader.py, line 2, in grade\)"):
        await attempt(site, GradedCompletion(grader))
    (failed,) = [r for r in await site.store.query_rollouts() if r.rollout_id != site.rollout_id]
    assert isinstance(failed, AttemptedRollout)
    assert failed.attempt.outcome is agl.Outcome.JUDGE_ERROR


async def test_the_policy_that_cannot_be_asked_is_no_judge_error(site: Site) -> None:  # noqa: F811
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "nonsense"}}}
    with pytest.raises(agl.AgentError):
        await attempt(site, GradedCompletion(EXACT, response_format=form))


@pytest.fixture
async def judge(site: Site) -> AsyncIterator[None]:  # noqa: F811
    engine = ScriptedEngine(site.engine.rendering, lambda prompt, params: '{"steps": "", "result": 0.75}')
    async with Gateway(site.store, engine, site.engine.rendering, policy="far") as gateway:
        claimed = await site.store.start_rollout(input={})
        key = gateway.key_for(claimed.rollout_id, claimed.attempt.attempt_id)
        await site.gateway.update_model_list({"judge": Provider(base_url=gateway.endpoint, api_key=key, model="far")})
        yield


async def test_model_graders_ask_through_the_runs_gateway(site: Site, judge: None) -> None:  # noqa: F811
    spans = await attempt(site, GradedCompletion(JUDGE))
    assert find_final_reward(spans) == 0.75
    assert [s.name for s in spans if s.name.startswith("chat")] == ["chat policy", "chat judge"]


async def test_the_policy_does_not_grade_itself(site: Site) -> None:  # noqa: F811
    agent = GradedCompletion({**JUDGE, "model": "policy"})
    with pytest.raises(ConfigError):
        agent.check_resources({"main_llm": site.gateway.as_resource()})


@pytest.mark.parametrize("task", [{}, {"messages": []}, {"messages": "x"}, {**TASK, "tools": {}}, "x", None])
def test_a_task_without_messages_is_refused_before_the_run(task: Any) -> None:
    with pytest.raises(ConfigError):
        GradedCompletion(EXACT).check_task(task)


# ---- training -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [0, 1])
async def test_grpo_with_a_python_grader_rises(tmp_path: Path, seed: int) -> None:
    rows = items(400)
    algorithm = agl.GRPO(
        model="calc", steps=12, tasks_per_step=8, group_size=8, learning_rate=2e-4, minibatches=2, max_context=512,
        max_tokens=64, val_every=12, seed=seed,
    )  # fmt: skip
    agent = GradedCompletion({"type": "python", "name": "call", "source": SOURCE}, settings=GraderSettings(seconds=20))
    trainer = agl.Trainer(algorithm=algorithm, run_dir=tmp_path / "run", concurrency=64, console=SilentConsole())
    await trainer.fit_async(agent, rows[:320], rows[320:])
    measured = read_metrics(tmp_path / "run" / "metrics.jsonl")
    validated = [row["val_reward"] for row in measured if row.get("val_reward") is not None]
    assert validated[-1] > validated[0] + 0.1, validated
