"""Train both on a laptop, in about a minute: python examples/two_policies/train.py [STEPS]"""

from __future__ import annotations

import argparse

import agentlightning as agl
from agentlightning.trainer.example import load_example

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("steps", metavar="STEPS", type=int, nargs="?", default=12)
    example = load_example("two_policies", "team")
    algorithm = agl.GRPO(**example.SETTINGS, steps=parser.parse_args().steps)
    agl.Trainer(algorithm=algorithm, concurrency=64).fit(example.team, load_example("calc", "recipe").train_tasks())
