"""Plays the agent's loop on a batch of tasks in this process, without HTTP: for measuring a model while making it.

Tokens are handled as in training: the ids that were sampled are kept, tool messages are rendered and appended.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from renderers import Message, ParsedResponse, Qwen3Renderer, ToolCallParseStatus
from transformers import DynamicCache, PreTrainedModel

from .calc_agent import CALC_TOOL, MAX_TURNS, SYSTEM_PROMPT, calculate, score

MAX_TOKENS = 64


@dataclass
class Episode:
    """One run of the agent: the tokens so far, which of them were sampled, and the reward once it is over."""

    task: dict[str, Any]
    ids: list[int]
    spans: list[tuple[int, int]] = field(default_factory=list)
    reward: float | None = None


def play(
    model: PreTrainedModel,
    renderer: Qwen3Renderer,
    tasks: Sequence[dict[str, Any]],
    *,
    greedy: bool = False,
    generator: torch.Generator | None = None,
) -> list[Episode]:
    """Run the agent on all tasks side by side."""
    episodes = [Episode(task, first_prompt(renderer, task["question"])) for task in tasks]
    for _ in range(MAX_TURNS):
        active = [episode for episode in episodes if episode.reward is None]
        if not active:
            break
        responses = sample(
            model, [e.ids for e in active], renderer.get_stop_token_ids(), greedy=greedy, generator=generator
        )
        for episode, response in zip(active, responses, strict=True):
            _advance(episode, response, renderer)
    return episodes


def success(episodes: Sequence[Episode]) -> float:
    return sum(episode.reward or 0.0 for episode in episodes) / len(episodes)


def first_prompt(renderer: Qwen3Renderer, question: str) -> list[int]:
    messages: list[Message] = [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": question},
    ]
    return renderer.render_ids(messages, tools=[CALC_TOOL], add_generation_prompt=True)


def extend(renderer: Qwen3Renderer, prompt: list[int], response: list[int], results: Sequence[str]) -> list[int] | None:
    """The next turn's prompt: prompt and response as they are, then the tool's answers. None if there is none."""
    answers: list[Message] = [{"role": "tool", "content": result} for result in results]
    bridged = renderer.bridge_to_next_turn(prompt, response, answers, tools=[CALC_TOOL])
    return bridged.token_ids if bridged else None


def _advance(episode: Episode, response: list[int], renderer: Qwen3Renderer) -> None:
    """Take a response into the episode: answer its tool calls or score its text."""
    prompt = episode.ids
    episode.ids = prompt + response
    episode.spans.append((len(prompt), len(episode.ids)))
    parsed = renderer.parse_response(response, tools=[CALC_TOOL], prompt_ids=prompt)
    results = _tool_results(parsed)
    following = extend(renderer, prompt, response, results) if results else None
    if following is None:
        episode.reward = 0.0 if results else score(parsed.content, episode.task["answer"])
    else:
        episode.ids = following


def _tool_results(parsed: ParsedResponse) -> list[str]:
    calls = [call for call in parsed.tool_calls if call.status == ToolCallParseStatus.OK]
    return [calculate(json.dumps(call.arguments)) for call in calls]


@torch.no_grad()
def sample(
    model: PreTrainedModel,
    prompts: Sequence[list[int]],
    stop_ids: Sequence[int],
    *,
    greedy: bool = False,
    generator: torch.Generator | None = None,
    max_tokens: int = MAX_TOKENS,
) -> list[list[int]]:
    """Sample one response per prompt at temperature 1. What all prompts begin with is computed once."""
    shared = common_prefix(prompts)
    cache, longest = DynamicCache(config=model.config), max(map(len, prompts))
    model(input_ids=torch.tensor([prompts[0][:shared]]), past_key_values=cache)
    cache.batch_repeat_interleave(len(prompts))
    rows = [[0] * (longest - len(prompt)) + prompt[shared:] for prompt in prompts]
    positions = torch.tensor([[max(0, i - (longest - len(p))) for i in range(shared, longest)] for p in prompts])
    mask = torch.tensor([[1] * shared + [0] * (longest - len(p)) + [1] * (len(p) - shared) for p in prompts])
    ids = torch.tensor(rows)
    responses: list[list[int]] = [[] for _ in prompts]
    alive = list(range(len(prompts)))
    for _ in range(max_tokens):
        logits = model(
            input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, logits_to_keep=1
        ).logits[:, -1]
        drawn = logits.argmax(-1) if greedy else torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
        for row, token in zip(alive, drawn.tolist(), strict=True):
            responses[row].append(token)
        keep = [i for i, token in enumerate(drawn.tolist()) if token not in stop_ids]
        if not keep:
            break
        if len(keep) < len(alive):
            cache.batch_select_indices(torch.tensor(keep))
            alive = [alive[i] for i in keep]
        ids, positions, mask = drawn[keep][:, None], positions[keep][:, -1:] + 1, mask[keep]
        mask = torch.cat([mask, mask.new_ones(len(keep), 1)], dim=1)
    return responses


def common_prefix(rows: Sequence[list[int]]) -> int:
    """How many tokens all rows begin with; at least one token of every row is left over."""
    shortest = min(map(len, rows)) - 1
    return next((i for i in range(shortest) if any(row[i] != rows[0][i] for row in rows)), shortest)
