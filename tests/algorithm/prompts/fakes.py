"""A critic and an agent without models: the agent earns by what its prompt says, the critic says what is told."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import agentlightning as agl
from agentlightning.metrics import SilentConsole

WORDS = ("alpha", "beta", "gamma")
SEED = "Solve {question}"
TRAIN = [{"question": f"t{n}"} for n in range(8)]
VAL = [{"question": f"v{n}"} for n in range(40)]


class FakeClient:
    """Looks like an async OpenAI client; `answer` makes the text of an answer, or the whole message, or raises."""

    def __init__(self, answer: Callable[[str], Any]) -> None:
        self.asked: list[str] = []
        self._answer = answer
        self.chat = SimpleNamespace(completions=self)

    async def create(self, **body: Any) -> dict[str, Any]:
        prompt = body["messages"][-1]["content"]
        self.asked.append(prompt)
        said = self._answer(prompt)
        message = said if isinstance(said, dict) else {"content": said}
        return {"choices": [{"message": message}], "usage": {"prompt_tokens": 100, "completion_tokens": 10}}


def template_of(prompt: str) -> str:
    """The template that a question is about."""
    return str(json.loads(next(line for line in prompt.splitlines() if line.startswith('"'))))


def helpful(prompt: str) -> str:
    """Says to add the first of WORDS that the template lacks; adds what was said."""
    template = template_of(prompt)
    if "A reviewer says" in prompt:
        added = re.findall(r"add (alpha|beta|gamma)", prompt)
        return f"<new_template>{template} {' '.join(added)}</new_template>"
    return "add " + next((word for word in WORDS if word not in template), "nothing")


def words_agent(ran: list[str]) -> Callable[..., float]:
    """Earns a third for each of WORDS in its prompt; writes down what it ran."""

    def agent(task: dict[str, str], prompt_template: agl.PromptTemplate) -> float:
        prompt = prompt_template.format(question=task["question"])
        ran.append(prompt)
        return sum(word in prompt for word in WORDS) / len(WORDS)

    return agent


def tune(
    algorithm: Any, agent: Callable[..., Any], run_dir: Path, *, val: Any = VAL, resume: bool = False, **resources: str
) -> agl.RunResult:
    texts = resources or {"prompt_template": SEED}
    given = {name: agl.PromptTemplate(template=text) for name, text in texts.items()}
    folder: dict[str, Any] = {"resume": run_dir} if resume else {"run_dir": run_dir}
    trainer = agl.Trainer(algorithm=algorithm, initial_resources=dict(given), console=SilentConsole(), **folder)
    return trainer.fit(agent, TRAIN, val)


def apo(client: FakeClient, **settings: Any) -> agl.APO:
    small: dict[str, Any] = {"beam_width": 2, "branch_factor": 1, "beam_rounds": 3, "val_batch_size": 8}
    return agl.APO(client, **{**small, **settings})
