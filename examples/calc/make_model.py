"""Makes the small model that ships with the package, from random weights, in a few minutes on one core.

    python -m examples.calc.make_model --out agentlightning/models/calc

Two stages of supervised training: careful demonstrations until the model has the skill, then a short one on
demonstrations of mixed quality, so that it succeeds on about four tasks of ten and has something to learn by
reinforcement. At last its distributions are sharpened: what is left to learn is which behaviour to choose, not to avoid
the improbable tokens that a model this small gives a little weight everywhere. Not a recipe for a good model: it is
made to be improved.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import torch
from renderers import Qwen3Renderer
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR
from transformers import DynamicCache, GenerationConfig, PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM

from .calc_agent import CALC_TOOL, SYSTEM_PROMPT
from .demonstrations import Demonstration, demonstrate
from .play import common_prefix, extend, first_prompt, play, success
from .tasks import make_tasks
from .tokenizer import END_OF_TEXT, TEMPLATE, TURN_END, make_tokenizer

IGNORED = -100
Row = tuple[list[int], list[int]]
"""Ids of a conversation, and for each the id that follows it if the model says that one, else IGNORED."""


@dataclass(frozen=True)
class Stage:
    """Supervised training on demonstrations whose behaviours are drawn by weight."""

    name: str
    steps: int
    batch: int
    muon_rate: float
    adam_rate: float
    weights: dict[str, float]


SKILL = Stage(
    "skill",
    1000,
    24,
    0.01,
    2e-3,
    {"careful": 84, "give up": 4, "hasty": 4, "wrong operator": 4, "slip": 0, "whole expression": 4},
)
MIXED = Stage(
    "mixed quality",
    150,
    24,
    0.002,
    4e-4,
    {"careful": 10, "give up": 30, "hasty": 23, "wrong operator": 19, "slip": 0, "whole expression": 18},
)
SHARPNESS = 1.35
"""Factor on the logits: sampling at temperature 1 is then as it was at 1 / 1.35."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory to write the model to")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a few steps only, to see that it runs")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)

    tokenizer = make_tokenizer(tokenizer_texts(random.Random(args.seed)))
    renderer = Qwen3Renderer(tokenizer)
    teacher = Teacher(tokenizer, renderer)
    model = make_network(tokenizer, args.layers)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens")
    for stage in (SKILL, MIXED):
        train(model, lambda weights: teacher.row(demonstrate(rng, weights)), stage, quick=args.quick)
        report(model, renderer, problems=50 if args.quick else 300)
    sharpen(model)
    report(model, renderer, problems=50 if args.quick else 300)
    save(model, tokenizer, args.out)


def tokenizer_texts(rng: random.Random) -> list[str]:
    """What the merges are learnt from: the chat format around demonstrations of every behaviour."""
    mixed = [demonstrate(rng, MIXED.weights) for _ in range(3000)]
    texts = [text for d in mixed for text in (d.question, *d.turns, *d.results)]
    frame = [TEMPLATE.read_text().split("{%- elif")[0], json.dumps(CALC_TOOL), SYSTEM_PROMPT, "user\n", "assistant\n"]
    return texts + frame * 300


def make_network(tokenizer: PreTrainedTokenizerBase, layers: int) -> Qwen3ForCausalLM:
    eos, pad = (tokenizer.get_vocab()[token] for token in (TURN_END, END_OF_TEXT))
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=eos,
        pad_token_id=pad,
    )
    return Qwen3ForCausalLM(config)


class Teacher:
    """Turns demonstrations into tokens and targets, exactly as the agent's conversations are rendered."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, renderer: Qwen3Renderer) -> None:
        self._tokenizer = tokenizer
        self._renderer = renderer

    def row(self, demonstration: Demonstration) -> Row:
        """Ids of the conversation, and for each the id that follows it if the model says that one, else IGNORED."""
        ids, sampled = first_prompt(self._renderer, demonstration.question), []
        for turn, result in zip_longest(demonstration.turns, demonstration.results):
            response = [*self._tokenizer.encode(turn, add_special_tokens=False), self._tokenizer.eos_token_id]
            sampled.append(range(len(ids), len(ids) + len(response)))
            ids = [*ids, *response] if result is None else extend(self._renderer, ids, response, [result]) or []
        targets = [IGNORED] * len(ids)
        for span in sampled:
            for i in span:
                targets[i - 1] = ids[i]
        return ids, targets


def train(
    model: Qwen3ForCausalLM, draw: Callable[[dict[str, float]], Row], stage: Stage, *, quick: bool = False
) -> None:
    """Muon on the matrices inside the layers, AdamW on the rest; both rates end at zero."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    optimizers = (
        torch.optim.Muon(matrices, lr=stage.muon_rate, weight_decay=0.0),
        torch.optim.AdamW(others, lr=stage.adam_rate, weight_decay=0.0),
    )
    steps = 3 if quick else stage.steps
    schedules = [LambdaLR(optimizer, lambda step: min(1.0, 2 * (1 - step / steps))) for optimizer in optimizers]
    start = time.monotonic()
    for step in range(1, steps + 1):
        loss = demonstration_loss(model, [draw(stage.weights) for _ in range(stage.batch)])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        model.zero_grad(set_to_none=True)
        if step % 50 == 0 or step == steps:
            print(
                f"{stage.name}: step {step}/{steps}, loss {loss.item():.4f}, {time.monotonic() - start:.0f} s",
                flush=True,
            )


def demonstration_loss(model: Qwen3ForCausalLM, rows: Sequence[Row]) -> torch.Tensor:
    """Mean cross-entropy of the model's turns. What all rows begin with (system prompt, tools) is computed once, up to
    the last token before the model's first turn: from there on there is something to learn.
    """
    spoken_from = min(next(i for i, target in enumerate(targets) if target != IGNORED) for _, targets in rows)
    shared = min(common_prefix([ids for ids, _ in rows]), spoken_from)
    longest = max(len(ids) for ids, _ in rows)
    cache = DynamicCache(config=model.config)
    model.model(input_ids=torch.tensor([rows[0][0][:shared]]), past_key_values=cache)
    cache.batch_repeat_interleave(len(rows))
    ids = torch.tensor([ids[shared:] + [0] * (longest - len(ids)) for ids, _ in rows])
    targets = torch.tensor([targets[shared:] + [IGNORED] * (longest - len(targets)) for _, targets in rows])
    hidden = model.model(input_ids=ids, past_key_values=cache).last_hidden_state
    spoken = targets != IGNORED
    return cross_entropy(model.lm_head(hidden[spoken]), targets[spoken])


def sharpen(model: Qwen3ForCausalLM) -> None:
    """Scale the logits by `SHARPNESS`, through the last norm, which is all that stands before the output matrix."""
    with torch.no_grad():
        model.model.norm.weight.mul_(SHARPNESS)


def report(model: Qwen3ForCausalLM, renderer: Qwen3Renderer, problems: int) -> None:
    """Print how often the agent succeeds on tasks of its own, sampled at temperature 1 and greedy."""
    tasks, _ = make_tasks(problems, 0, seed=1)
    model.eval()
    sampled = success(play(model, renderer, tasks, generator=torch.Generator().manual_seed(0)))
    greedy = success(play(model, renderer, tasks, greedy=True))
    print(f"success on {problems} tasks: sampled {sampled:.1%}, greedy {greedy:.1%}", flush=True)


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase, out: Path) -> None:
    """A model directory that plain `transformers` loads, with our file that names the renderer beside it."""
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        eos_token_id=tokenizer.convert_tokens_to_ids([TURN_END, END_OF_TEXT]),
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    (out / "agentlightning.json").write_text(json.dumps({"renderer": "qwen3"}, indent=2) + "\n")
    for file in out.iterdir():
        file.chmod(0o644)
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
