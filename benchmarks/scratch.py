"""Three tasks from scratch, beside a plain loop: a random model learns to copy digits, to guess one, to say three.

    python benchmarks/scratch.py [--task copy] [--task guess] [--steps 60] [--seeds 2] [--rates default,1e-3] [--plain]
                                 [--tasks-per-step 8] [--entropy-coef 0] [--shape 0.6B] [--quick] [--json]

`copy`: say the three digits of the message again; the reward is the share of places that are right. `guess`: find a
digit in two tries; after the first one hears whether the number is lower or higher. It earns 1 for the first try, 0.7
for the second, else less the farther the last one is off. `digits`: say three that differ, whatever the message; the
reward is the share of places with a new one. The model has 18 tokens and 0.2 million random weights, or with `--shape`
the layers of a Qwen3 of that size (see `benchmarks/gpu.py`), which is for a GPU.

`--plain` runs the reference: torch with transformers' own forward, no cache, no server, no tree. It samples, rewards
and learns in the same way (GRPO with one update a step), so both curves are to be the same within noise.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

WORDS = ["<pad>", "<end>", "user", "assistant", "lower", "higher", "same", "?", *"0123456789"]
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% if m['role'] == 'assistant' %}<end> {% endif %}"
    "{% endfor %}{% if add_generation_prompt %}assistant {% endif %}"
)
GROUP, TRIES = 8, 2


SMALL = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 4, "head_dim": 24}  # fmt: skip


def make_model(folder: Path, seed: int, shape: str | None = None) -> Path:
    """A random Qwen3 with a token for each word."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    from benchmarks.gpu import SHAPES

    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>", unk_token="?")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    config = Qwen3Config(**{
        **(SMALL if shape is None else SHAPES[shape]), "vocab_size": len(WORDS), "max_position_embeddings": 64,
        "tie_word_embeddings": True, "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None,
    })  # fmt: skip
    torch.manual_seed(seed)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


# ---- the tasks, as generators: they yield messages and are sent answers, and return the reward -----------------------


def copy(task: list[int]) -> Any:
    digits = " ".join(map(str, task))
    answer = yield [{"role": "user", "content": digits}]
    said = answer.split()
    return fmean(n < len(said) and said[n] == str(d) for n, d in enumerate(task))


def different(task: list[int]) -> Any:
    answer = yield [{"role": "user", "content": " ".join(map(str, task))}]
    said = answer.split()[:3]
    return sum(word.isdigit() and word not in said[:n] for n, word in enumerate(said)) / 3


def guess(task: list[int]) -> Any:
    number, messages, off = task[0], [{"role": "user", "content": "?"}], 9
    for attempt in range(TRIES):
        answer = yield messages
        said = answer.split()[:1]
        off = abs(int(said[0]) - number) if said and said[0].isdigit() else 9
        if off == 0:
            return 1.0 if attempt == 0 else 0.7
        hint = "?" if off == 9 and not (said and said[0].isdigit()) else "lower" if int(said[0]) > number else "higher"
        messages = [*messages, {"role": "assistant", "content": answer}, {"role": "user", "content": hint}]
    return 0.3 * (1 - off / 9)


@dataclass(frozen=True)
class Game:
    play: Callable[[list[int]], Any]
    tasks: list[list[int]]
    tokens: int
    """At most so many in an answer."""


_RANDOM = random.Random(0)
GAMES = {
    "copy": Game(copy, [[_RANDOM.randrange(10) for _ in range(3)] for _ in range(256)], 4),
    "digits": Game(different, [[_RANDOM.randrange(10) for _ in range(3)] for _ in range(256)], 4),
    "guess": Game(guess, [[n % 10] for n in range(250)], 2),
}


# ---- this package ----------------------------------------------------------------------------------------------------


def ours(
    name: str, steps: int, seed: int, rate: float | None, tasks: int = 8, shape: str | None = None, **settings: Any
) -> list[float]:
    """Mean reward of each step."""
    from openai import AsyncOpenAI

    import agentlightning as agl
    from agentlightning.metrics import SilentConsole

    game, client = GAMES[name], AsyncOpenAI(base_url="http://127.0.0.1/v1", api_key="set for each rollout")

    @agl.rollout
    async def player(task: list[int], llm: agl.LLM) -> float:
        chat = client.with_options(base_url=llm.endpoint, api_key=llm.api_key).chat.completions
        moves = game.play(task)
        try:
            messages = next(moves)
            while True:
                answer = await chat.create(model=llm.model, messages=messages, max_tokens=game.tokens)
                messages = moves.send(answer.choices[0].message.content or "")
        except StopIteration as end:
            return float(end.value)

    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "model", seed, shape)
        algorithm = agl.GRPO(
            model=str(model), steps=steps, tasks_per_step=tasks, group_size=GROUP, seed=seed, max_context=64,
            save_every=1000, val_every=1000, learning_rate=rate, renderer="default", **settings,
        )  # fmt: skip
        trainer = agl.Trainer(algorithm=algorithm, run_dir=f"{folder}/run", concurrency=64, console=SilentConsole())
        return [row["reward"] for row in trainer.fit(player, game.tasks).metrics if row.get("reward") is not None]


# ---- the reference ---------------------------------------------------------------------------------------------------


def plain(name: str, steps: int, seed: int, rate: float, tasks: int = 8, entropy_coef: float = 0.0) -> list[float]:
    """GRPO as its paper has it (arXiv 2402.03300), without clipping, as each rollout is learned once."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    game, order = GAMES[name], random.Random(seed)
    torch.manual_seed(seed)
    with tempfile.TemporaryDirectory() as folder:
        path = make_model(Path(folder), seed)
        model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)

    def answers(prompts: list[list[int]]) -> list[list[int]]:
        """Sampled together, prompts of one length at a time."""
        found: list[list[int]] = [[] for _ in prompts]
        for length in {len(p) for p in prompts}:
            rows = [n for n, p in enumerate(prompts) if len(p) == length]
            ids = torch.tensor([prompts[n] for n in rows])
            for _ in range(game.tokens):
                with torch.no_grad():
                    drawn = torch.multinomial(model(input_ids=ids).logits[:, -1].softmax(-1), 1)
                ids = torch.cat([ids, drawn], 1)
            for n, row in zip(rows, ids[:, length:].tolist(), strict=True):
                found[n] = row[: row.index(1) + 1] if 1 in row else row
        return found

    def played(tasks: list[list[int]]) -> tuple[list[float], list[list[tuple[list[int], list[int]]]]]:
        """Rewards, and each rollout's prompts and answers."""
        moves, rewards = [game.play(task) for task in tasks], [0.0] * len(tasks)
        said: list[list[tuple[list[int], list[int]]]] = [[] for _ in tasks]
        open_ones = {n: next(move) for n, move in enumerate(moves)}
        while open_ones:
            texts = [
                tokenizer.apply_chat_template(m, add_generation_prompt=True, tokenize=False) for m in open_ones.values()
            ]
            prompts = [tokenizer(text)["input_ids"] for text in texts]
            following = {}
            for (n, _), prompt, answer in zip(open_ones.items(), prompts, answers(prompts), strict=True):
                said[n].append((prompt, answer))
                try:
                    following[n] = moves[n].send(tokenizer.decode(answer, skip_special_tokens=True))
                except StopIteration as end:
                    rewards[n] = float(end.value)
            open_ones = following
        return rewards, said

    curve = []
    for _ in range(steps):
        drawn = [task for task in order.sample(game.tasks, tasks) for _ in range(GROUP)]
        rewards, said = played(drawn)
        groups = torch.tensor(rewards).view(-1, GROUP)
        advantages = (
            (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True, correction=0) + 1e-6)
        ).flatten()
        losses, count = [], sum(len(answer) for one in said for _, answer in one)
        for advantage, one in zip(advantages.tolist(), said, strict=True):
            for prompt, answer in one:
                logits = model(input_ids=torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
                logs = logits.log_softmax(-1)
                entropy = -(logs.exp() * logs).sum()
                gained = advantage * logs.gather(1, torch.tensor(answer)[:, None]).sum()
                losses.append(-(gained + entropy_coef * entropy) / count)
        torch.stack(losses).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        curve.append(fmean(rewards))
    return curve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=list(GAMES), action="append")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--rates", default="default,1e-3")
    parser.add_argument("--tasks-per-step", type=int, default=8)
    parser.add_argument("--entropy-coef", type=float, default=0.0)
    parser.add_argument("--plain", action="store_true", help="the reference, too, at each rate that is given")
    parser.add_argument("--shape", help="the layers of a Qwen3 of this size, such as 0.6B; not with --plain")
    parser.add_argument("--quick", action="store_true", help="a few steps of one seed")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    steps, seeds = (4, 1) if given.quick else (given.steps, given.seeds)
    if given.shape and given.plain:
        parser.error("--plain is for the small model: leave --shape out")
    found = []
    for name in given.task or list(GAMES):
        for text in given.rates.split(","):
            rate = None if text == "default" else float(text)
            for who, run in {"ours": ours, "plain": plain}.items():
                if who == "plain" and (rate is None or not given.plain):
                    continue
                for seed in range(seeds):
                    more = {"entropy_coef": given.entropy_coef} | ({"shape": given.shape} if given.shape else {})
                    curve = run(name, steps, seed, rate, given.tasks_per_step, **more)  # pyright: ignore
                    tenth = max(steps // 6, 1)
                    ends = fmean(curve[:tenth]), fmean(curve[-tenth:])
                    found.append(
                        {"task": name, "loop": who, "rate": text, "seed": seed, "first": ends[0], "last": ends[1]}
                    )
                    if not given.json:
                        print(f"{name:6} {who:6} {text:8} seed {seed}: {ends[0]:.2f} → {ends[1]:.2f}", flush=True)
    if given.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
