"""As scripts for 0.1 and 0.2 are written: the reward decorator, `resources.get`, a baseline's old settings, `dev`."""

from agentlightning import LLM, Baseline, Hook, LitAgent, Trainer, configure_logger, reward
from agentlightning.algorithm.fast import FastAlgorithm
from agentlightning.errors import ConfigError

configure_logger()
ENDED = []


@reward
async def evaluate(answer: int, truth: int) -> float:
    return float(answer == truth)


class Agent(LitAgent):
    async def training_rollout_async(self, task, rollout_id, resources):
        llm: LLM = resources.get("main_llm")
        assert llm.model == "gpt"
        assert isinstance(rollout_id, str)
        return await evaluate(task["x"], 1)

    async def validation_rollout_async(self, task, rollout_id, resources):
        return await self.training_rollout_async(task, rollout_id, resources)


class Counted(Hook):
    async def on_rollout_end(self, *, agent, runner, rollout, spans):
        ENDED.append((rollout.input["x"], len(spans)))


if __name__ == "__main__":
    algorithm = Baseline(n_epochs=1, train_split=0.5, polling_interval=1.0, max_queue_length=2, span_verbosity="keys")
    assert isinstance(algorithm, FastAlgorithm)
    endpoint = LLM(endpoint="http://localhost:1/v1", model="gpt")
    trainer = Trainer(
        n_workers=2, max_tasks=4, algorithm=algorithm, initial_resources={"main_llm": endpoint}, hooks=Counted()
    )
    trainer.dev(Agent(), [{"x": n} for n in range(4)])
    assert sorted(ENDED) == [(n, 2) for n in range(4)]
    said = ""
    try:
        Trainer(n_workers=2).fit(Agent(), "http://localhost:9999/")
    except ConfigError as error:
        said = str(error)
    assert "as in 0.1, is not kept" in said
