"""A recipe of tinker-cookbook as it is: `python -m tests.clients.cookbook RECIPE NAME=VALUE …`.

What it would download is made here: the tokenizer of the shipped model stands for the named model's, and the data sets
are a few sums.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import chz  # pyright: ignore[reportMissingImports]
import datasets
import transformers
from tinker_cookbook import tokenizer_utils  # pyright: ignore[reportMissingImports]

from agentlightning.models import resolve_model

MODEL = "Qwen/Qwen3-8B"
"""A name that the cookbook knows; the server maps it to the shipped model."""


BOXED = "COOKBOOK_BOXED"
"""A variable of the environment: chats that teach to answer a question in a box, now rightly and now not."""
SUFFIX = " Provide a numerical answer without units, written inside \\boxed{}."
QUESTION, RIGHT, WRONG = "What is 2 + 2?", 4, 6
PREFIX = [
    {"role": "user", "content": "How many r's are in strawberry?" + SUFFIX},
    {
        "role": "assistant",
        "content": "Let's spell the word out and number all the letters: 1) s 2) t 3) r 4) a 5) w 6) b 7) e 8) r 9) r "
        "10) y. We have r's at positions 3, 8, and 9. \\boxed{3}",
    },
]
"""What the recipe puts in front of each question."""


def rows(path: str) -> list[dict[str, Any]]:
    boxed = BOXED in os.environ
    if "no_robots" not in path:
        asked = [(QUESTION, RIGHT)] * 64 if boxed else [(f"What is {i} + {i}?", 2 * i) for i in range(64)]
        return [{"question": question, "answer": f"It is #### {answer}"} for question, answer in asked]
    if boxed:
        ask = [*PREFIX, {"role": "user", "content": QUESTION + SUFFIX}]
        said = [{"role": "assistant", "content": f"\\boxed{{{number}}}"} for number in (RIGHT, WRONG)]
        return [{"messages": [*ask, said[i % 2]]} for i in range(1600)]
    asked = [{"role": "user", "content": f"{i} + 1?"} for i in range(64)]
    return [{"messages": [one, {"role": "assistant", "content": "Seven."}]} for one in asked]


def load_dataset(path: str, *_: Any, split: str | None = None, **__: Any) -> Any:
    found = datasets.DatasetDict({name: datasets.Dataset.from_list(rows(path)) for name in ("train", "test")})
    return found if split is None else found[split]


def main() -> None:
    tokenizer_utils.register_tokenizer(MODEL, lambda: transformers.AutoTokenizer.from_pretrained(resolve_model("calc")))
    datasets.load_dataset = load_dataset
    name = sys.argv.pop(1)
    recipe: Any = importlib.import_module(f"tinker_cookbook.recipes.{name}")
    if name == "rl_basic":
        environment: Any = importlib.import_module("tinker_cookbook.recipes.math_rl.math_env")
        environment.load_dataset = load_dataset
        builder = environment.Gsm8kDatasetBuilder
        recipe.Gsm8kDatasetBuilder = lambda **given: builder(**{**given, "batch_size": 8, "group_size": 4})
        blueprint = recipe.build_config_blueprint(MODEL)
        recipe.main(blueprint.make_from_argv(sys.argv[1:]))
    elif name == "chat_sl.train":
        recipe.cli_main(chz.entrypoint(recipe.CLIConfig))
    else:
        chz.nested_entrypoint(recipe.main)


if __name__ == "__main__":
    main()
