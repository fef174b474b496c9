"""Makes the small model that an application starts from, from random weights, in a few minutes on one core.

    python -m examples.tools.make_model sql --out models/sql

Like the calculator's, with its code: careful demonstrations until the model has the skill, then a short stage on ones
of deliberately mixed quality, so that it succeeds on some tasks and reinforcement has something to choose from. What is
demonstrated, and how often it is done well, stands in the `demonstrations.py` of each application.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from renderers import Qwen3Renderer, Qwen3RendererConfig
from transformers import PreTrainedTokenizerBase, Qwen3ForCausalLM

from agentlightning.trainer.example import load_example

from .demonstration import Demonstration

_base: Any = load_example("calc", "make_model")
_words: Any = load_example("calc", "tokenizer")

Row = tuple[list[int], list[int]]
Demonstrate = Callable[[random.Random, Mapping[str, float]], Demonstration]


@dataclass(frozen=True)
class Course:
    """What a model is taught, by weights of behaviours, and for how many steps."""

    demonstrate: Demonstrate
    skill: dict[str, float]
    mixed: dict[str, float]
    measure: Callable[[Any, Any], str]
    """(model, renderer) → how well it does, in a line to print."""
    vocabulary: int = 1024
    skill_steps: int = 300
    mixed_steps: int = 100
    layers: int = 2
    batch: int = 24
    positions: int = 1024
    """The longest conversation in tokens."""


def make(course: Course, out: Path, *, seed: int = 0, quick: bool = False) -> None:
    """Make the model and write it into a folder that plain `transformers` loads."""
    torch.manual_seed(seed)
    tokenizer = _words.make_tokenizer(_texts(course, random.Random(seed)), course.vocabulary)
    renderer = make_renderer(tokenizer)
    model: Qwen3ForCausalLM = _base.make_network(tokenizer, course.layers)
    model.config.max_position_embeddings = tokenizer.model_max_length = course.positions
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens", flush=True)

    skill = _base.Stage("skill", course.skill_steps, course.batch, 0.01, 2e-3, course.skill)
    mixed = _base.Stage("mixed quality", course.mixed_steps, course.batch, 0.005, 1e-3, course.mixed)
    for stage in (skill, mixed):
        rng = random.Random(seed)
        draw = partial(_drawn, course.demonstrate, rng, tokenizer, renderer)
        _base.train(model, draw, stage, quick=quick)
        if stage is mixed:
            _base.sharpen(model)
        if not quick:
            model.eval()
            print(course.measure(model, renderer), flush=True)
            model.train()
    _base.save(model, tokenizer, out)


def make_renderer(tokenizer: PreTrainedTokenizerBase) -> Qwen3Renderer:
    """As the gateway's for a model that does not think: conversations go on from their tokens after users' words."""
    return Qwen3Renderer(tokenizer, Qwen3RendererConfig(thinking_retention="all"))


def _drawn(
    demonstrate: Demonstrate,
    rng: random.Random,
    tokenizer: PreTrainedTokenizerBase,
    renderer: Qwen3Renderer,
    weights: Mapping[str, float],
) -> Row:
    return row_of(demonstrate(rng, weights), tokenizer, renderer)


def row_of(demonstration: Demonstration, tokenizer: PreTrainedTokenizerBase, renderer: Qwen3Renderer) -> Row:
    """Ids of the conversation as the agent's is rendered, and for each the id that follows where the model says it."""
    messages: Any = demonstration.messages
    tools: Any = demonstration.tools or None
    ids, sampled = renderer.render_ids(messages, tools=tools, add_generation_prompt=True), []
    for turn, following in zip_longest(demonstration.turns, demonstration.following()):
        response = [*tokenizer.encode(turn, add_special_tokens=False), tokenizer.eos_token_id]
        sampled.append(range(len(ids), len(ids) + len(response)))
        if following is None:
            ids = [*ids, *response]
        else:
            told: Any = following
            bridged = renderer.bridge_to_next_turn(ids, response, told, tools=tools)
            assert bridged is not None
            ids = bridged.token_ids
    targets = [_base.IGNORED] * len(ids)
    for span in sampled:
        for i in span:
            targets[i - 1] = ids[i]
    return ids, targets


def _texts(course: Course, rng: random.Random) -> list[str]:
    """What the tokenizer's merges are learnt from: demonstrations of every behaviour, and the chat format."""
    shown = [course.demonstrate(rng, course.mixed) for _ in range(3000)]
    texts = [t for d in shown for t in (*(str(m["content"]) for m in d.messages), *d.turns)]
    texts += [str(m["content"]) for d in shown for messages in d.following() for m in messages]
    texts += [json.dumps(tool) for d in shown for tool in d.tools]
    frame = [_words.TEMPLATE.read_text().split("{%- elif")[0], "user\n", "assistant\n", "system\n"]
    return texts + frame * 300


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("application", help="whose demonstrations: the name of an example")
    parser.add_argument("--out", type=Path, required=True, help="directory to write the model to")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a few steps only, to see that it runs")
    given = parser.parse_args()
    torch.set_num_threads(1)
    course = load_example(given.application, "demonstrations").course()
    make(course, given.out, seed=given.seed, quick=given.quick)


if __name__ == "__main__":
    main()
