"""Makes the small model that plays the game, from random weights, in a few minutes on one core.

    python -m examples.bidding.make_model --out examples/bidding/model

It is taught on games of mixed quality: most bid any card that is left, one in four against a rival that plays by a rule
is played as well as can be. So it knows the rules, and mostly plays badly.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM

from agentlightning.trainer.example import load_example

from .game import CARDS, RIVALS, SYSTEM, UNKNOWN, best_bids, question, rival_bids, told

STEPS, BATCH, RATE = 1500, 48, 3e-3
GOOD = 0.25
"""The share of games that are played well."""
IGNORED = -100

words = load_example("calc", "tokenizer")


def make(folder: Path, *, steps: int = STEPS, seed: int = 0) -> None:
    """Make the model and write it into a folder that plain `transformers` loads."""
    rng = random.Random(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        games = [_game(rng) for _ in range(6000)]
        tokenizer = words.make_tokenizer(_texts(games))
        rows = [_row(tokenizer, game) for game in games]
        model = _network(tokenizer)
        _teach(model, rows, rng, steps)
    load_example("calc", "make_model").save(model, tokenizer, folder)


Game = tuple[Sequence[str], Sequence[str]]
"""What the player is told before each bid, and its bids."""


def _game(rng: random.Random) -> Game:
    """A game against a rival, or one in which both bid anything."""
    prizes, mine, other = (rng.sample(CARDS, len(CARDS)) for _ in range(3))
    name = rng.choice([*RIVALS, UNKNOWN])
    if name in RIVALS:
        other = rival_bids(RIVALS[name], prizes)
        if rng.random() < GOOD:
            mine = list(rng.choice(best_bids(tuple(prizes), name)))
    asked: list[str] = []
    news = f"Rival: {name}."
    for n, prize in enumerate(prizes[:-1]):
        asked.append(question(prize, sorted(mine[n:]), news))
        news = told(mine[n], other[n], prize)
    return asked, [str(card) for card in mine[:-1]]


def _texts(games: Sequence[Game]) -> list[str]:
    frame = [SYSTEM, "user\n", "assistant\n", "system\n"] * 300
    return [text for asked, _ in games for text in asked] + frame


def _row(tokenizer: PreTrainedTokenizerBase, game: Game) -> tuple[list[int], list[int]]:
    """Ids of the conversation in Qwen3's format, and for each the id that follows where the model says it."""
    ids: list[int] = []
    targets: list[int] = []
    end = tokenizer.get_vocab()[words.TURN_END]
    before = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n"
    for told_now, bid in zip(*game, strict=True):
        prompt = tokenizer.encode(f"{before}<|im_start|>user\n{told_now}<|im_end|>\n<|im_start|>assistant\n")
        said = [*tokenizer.encode(bid), end]
        ids += [*prompt, *said]
        targets += [*([IGNORED] * (len(prompt) - 1)), *said, IGNORED]
        before = "\n"
    return ids, targets


def _network(tokenizer: PreTrainedTokenizerBase) -> Qwen3ForCausalLM:
    eos, pad = (tokenizer.get_vocab()[token] for token in (words.TURN_END, words.END_OF_TEXT))
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=192,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=eos,
            pad_token_id=pad,
        )
    )


def _teach(
    model: Qwen3ForCausalLM, rows: Sequence[tuple[list[int], list[int]]], rng: random.Random, steps: int
) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, 2 * (1 - step / steps)))
    for step in range(1, steps + 1):
        batch = rng.sample(rows, BATCH)
        longest = max(len(ids) for ids, _ in batch)
        ids = torch.tensor([i + [0] * (longest - len(i)) for i, _ in batch])
        targets = torch.tensor([t + [IGNORED] * (longest - len(t)) for _, t in batch])
        hidden = model.model(input_ids=ids).last_hidden_state
        said = targets != IGNORED
        loss = cross_entropy(model.lm_head(hidden[said]), targets[said])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"step {step}/{steps}, loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    torch.set_num_threads(1)
    make(parser.parse_args().out)
