"""What a model's linear layers take of a CPU in float32, in bfloat16 and rounded to int8, by PyTorch's own kernels.

    OMP_WAIT_POLICY=PASSIVE python benchmarks/dtypes.py [--model DIR] [--sizes 1,8,32] [--threads 2] [--json]

Linear layers and the output head are most of what sampling computes; attention and the drawing of tokens are left out.
Weights are random, in the shapes of the model. `int8 weights` multiplies bfloat16 activations by weights that are
widened as they are read (weight-only), and `int8 both` rounds float32 activations, too, row by row as they come. Scales
are one for each output, and of activations one for each row.

The kinds take turns, and the medians of processor time count: waiting for a core that others use is left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import AutoConfig, AutoModelForCausalLM

from agentlightning.models import resolve_model

PROMPT_TOKENS = 128
TURNS = 15
Product = Callable[[], Tensor]


def rounded(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Each row as int8 numbers and their scale."""
    scale = rows.abs().amax(-1).clamp(min=1e-12) / 127
    return (rows / scale[:, None]).round().to(torch.int8), scale


def products(shape: tuple[int, int], rows: int) -> dict[str, Product]:
    """A linear layer of this shape on so many rows, by kind."""
    weight, x = torch.randn(shape), torch.randn(rows, shape[1])
    short_weight, short_x = weight.bfloat16(), x.bfloat16()
    int8_weight, scale = rounded(weight)
    short_scale = scale.bfloat16()

    def both() -> Tensor:
        int8_x, scale_x = rounded(x)
        return torch.ops.aten._int_mm(int8_x, int8_weight.t()) * scale_x[:, None] * scale

    return {
        "float32": lambda: linear(x, weight),
        "bfloat16": lambda: linear(short_x, short_weight),
        "int8 weights": lambda: torch.ops.aten._weight_int8pack_mm(short_x, int8_weight, short_scale),
        "int8 both": both,
    }


def seconds(shape: tuple[int, int], rows: int, turns: int) -> dict[str, float]:
    """Median processor time of each kind; that their products agree is checked on the way."""
    kinds = products(shape, rows)
    exact = kinds["float32"]()
    for name, product in kinds.items():
        error = float((product().float() - exact).norm() / exact.norm())
        assert error < 0.05, (name, shape, rows, error)
    taken: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(turns):
        for name, product in kinds.items():
            began = time.process_time()
            product()
            taken[name].append(time.process_time() - began)
    return {name: statistics.median(values) for name, values in taken.items()}


def layers(model: str) -> tuple[Counter[tuple[int, int]], tuple[int, int]]:
    """How many linear layers of each shape a model has, and the shape of its output head."""
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(resolve_model(model)))
    head = made.get_output_embeddings()
    found = [m for m in made.modules() if isinstance(m, nn.Linear) and m is not head]
    return Counter((m.out_features, m.in_features) for m in found), tuple(head.weight.shape)


def total(model: str, rows: int, head_rows: int, turns: int) -> dict[str, float]:
    """Seconds of one pass through all linear layers, by kind."""
    shapes, head = layers(model)
    sums = Counter(seconds(head, head_rows, turns))
    for shape, count in shapes.items():
        sums.update({name: count * one for name, one in seconds(shape, rows, turns).items()})
    return dict(sums)


def main() -> None:
    parser = argparse.ArgumentParser(description="Linear layers in several types on a CPU.")
    parser.add_argument("--model", default="calc", help="directory or id; default: the shipped calculator model")
    parser.add_argument("--sizes", default="1,8,32", help="concurrent requests")
    parser.add_argument("--threads", type=int, default=2, help="torch threads")
    parser.add_argument("--quick", action="store_true", help="fewer turns")
    parser.add_argument("--json", action="store_true", help="last line: one JSON object")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    cases = {f"{size} at once": (int(size), int(size)) for size in arguments.sizes.split(",")}
    cases[f"prompt of {PROMPT_TOKENS}"] = (PROMPT_TOKENS, 1)
    figures: dict[str, float] = {}
    with torch.inference_mode():
        for case, (rows, head_rows) in cases.items():
            found = total(arguments.model, rows, head_rows, 5 if arguments.quick else TURNS)
            ratios = {name: found["float32"] / one for name, one in found.items()}
            texts = (f"{name} {found[name] * 1e3:.0f} ms ({ratio:.2f}x)" for name, ratio in ratios.items())
            print(f"{case:>14}: {', '.join(texts)}", flush=True)
            key = case.replace(" ", "_")
            figures |= {f"{name.replace(' ', '_')}_{key}": round(ratio, 3) for name, ratio in ratios.items()}
    if arguments.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
