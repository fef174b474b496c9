"""The agent: one call that says whether a sentence of a film review is positive or negative.

`sentiment_agent` shows two answered reviews first: its model is trained. `asking_agent` asks a plain question, and
demonstrations for it are tuned; `prompted_agent` takes the question from the resources. All are graded alike.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from openai import AsyncOpenAI

import agentlightning as agl

if TYPE_CHECKING:
    from .reviews import Review

QUESTION = "{review}\n\nPositive or negative?"
SHOWN = (("the acting is superb and the story moves .", "positive"), ("a dull , lifeless mess .", "negative"))
"""Two answered questions that every conversation begins with: without them so small a model answers in sentences."""
FIRST_PROMPT = "Is this film review positive or negative?\n\n{review}"
LABELS = ("positive", "negative")
MAX_TOKENS = 8

# One client for all rollouts: making one costs more than a call of the agent.
client = AsyncOpenAI(base_url="http://127.0.0.1/v1", api_key="set for each rollout")


@agl.rollout
async def sentiment_agent(task: Review, llm: agl.LLM) -> float:
    return grade(await ask(llm, conversation(task["text"])), task["label"])


@agl.rollout
async def asking_agent(task: Review, llm: agl.LLM) -> float:
    return grade(await answer_to(llm, agl.PromptTemplate(template=FIRST_PROMPT), task), task["label"])


@agl.rollout
async def prompted_agent(task: Review, llm: agl.LLM, prompt_template: agl.PromptTemplate) -> float:
    return grade(await answer_to(llm, prompt_template, task), task["label"])


async def answer_to(llm: agl.LLM, prompt: agl.PromptTemplate, task: Review, shown: Sequence[Any] = ()) -> str:
    """The model's most probable answer to the prompt, behind the turns that are `shown`."""
    return await ask(llm, [*shown, _message("user", prompt.format(review=task["text"]))], temperature=0)


def conversation(review: str) -> list[dict[str, str]]:
    """The messages of a call: what is shown, then the question."""
    turns = [
        message
        for text, label in SHOWN
        for message in (_message("user", QUESTION.format(review=text)), _message("assistant", label))
    ]
    return [*turns, _message("user", QUESTION.format(review=review))]


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


async def ask(llm: agl.LLM, messages: list[Any], **settings: Any) -> str:
    chat = client.with_options(base_url=llm.get_base_url(), api_key=llm.api_key or "none").chat.completions
    response = await chat.create(model=llm.model, messages=messages, max_tokens=MAX_TOKENS, **settings)
    return response.choices[0].message.content or ""


def grade(answer: str, label: str) -> float:
    """1.0 for the right word alone, 0.5 if it is said among others and the wrong word is not, else 0.0."""
    words = re.findall(r"[a-z]+", answer.lower())
    if words == [label]:
        return 1.0
    return 0.5 if label in words and not any(other in words for other in LABELS if other != label) else 0.0
