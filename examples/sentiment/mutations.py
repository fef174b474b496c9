"""A critic that is no language model: it changes a prompt at random, and knows nothing of what makes one good.

It is given to APO in place of an async OpenAI client, `agl.APO(Mutations(seed=0))`, so that a prompt can be tuned with
no model but the agent's own. A template is blocks between empty lines. An edit adds a block out of `BLOCKS`, takes
one away, or puts one elsewhere; whether that was any good is for the rollouts to say.
"""

from __future__ import annotations

import json
import random
import re
from types import SimpleNamespace
from typing import Any

QUESTIONS = (
    "Is this film review positive or negative?",
    "Positive or negative?",
    "Classify the sentiment of the film review.",
    "Did the critic like the film?",
    "Sentiment:",
)
STYLES = (
    "Reply with exactly one word, positive or negative.",
    "Answer in lower case, without a full stop.",
    "Do not explain your answer.",
    "You are an expert on films.",
    "Think step by step.",
)
SHOWN = (
    "the acting is superb and the story moves .\nSentiment: positive\na dull , lifeless mess .\nSentiment: negative",
    "two hours i will never get back .\nSentiment: negative\nan absolute joy to watch .\nSentiment: positive",
    "i laughed until i cried .\nSentiment: positive\nthe plot makes no sense at all .\nSentiment: negative",
)
BLOCKS = (*QUESTIONS, *STYLES, *SHOWN)
LONGEST = 8
"""Blocks of a template."""

_TEMPLATE = re.compile(r'^".*"$', re.MULTILINE)


class Mutations:
    """Has what the optimisers call on a client. The same seed and question give the same answer."""

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self._asked: dict[str, int] = {}
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=self._create))

    async def _create(self, *, messages: list[dict[str, str]], **_: Any) -> dict[str, Any]:
        question = messages[-1]["content"]
        wants_edit = "<new_template>" in question
        content = self._edit(question) if wants_edit else "I read nothing. Try something else."
        return {"choices": [{"message": {"content": content}}], "usage": {"prompt_tokens": 0, "completion_tokens": 0}}

    def _edit(self, question: str) -> str:
        """Another template than the one in the question, and another one each time the same is asked."""
        found = _TEMPLATE.search(question)
        template = json.loads(found[0]) if found else ""
        turn = self._asked[template] = self._asked.get(template, -1) + 1
        return f"<new_template>\n{mutated(template, random.Random(f'{self._seed} {turn} {template}'))}\n</new_template>"


def mutated(template: str, rng: random.Random) -> str:
    """The template with one or two random changes; the blocks with placeholders are moved and never lost."""
    blocks = template.split("\n\n")
    for _ in range(rng.choice((1, 2, 2))):
        loose = [n for n, block in enumerate(blocks) if "{" not in block]
        fresh = [block for block in BLOCKS if block not in blocks]
        changes = ["move"] if len(blocks) > 1 else []
        changes += ["add", "add"] if fresh and len(blocks) < LONGEST else []
        changes += ["drop"] if loose and len(blocks) > 1 else []
        change = rng.choice(changes)
        if change == "add":
            blocks.insert(rng.randint(0, len(blocks)), rng.choice(fresh))
        elif change == "drop":
            del blocks[rng.choice(loose)]
        else:
            blocks.insert(rng.randrange(len(blocks)), blocks.pop(rng.randrange(len(blocks))))
    return "\n\n".join(blocks)
