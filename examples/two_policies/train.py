"""Train both on a laptop, in about a minute: python examples/two_policies/train.py [STEPS]"""

from __future__ import annotations

import sys

import agentlightning as agl
from agentlightning.trainer.example import load_example

if __name__ == "__main__":
    example = load_example("two_policies", "team")
    algorithm = agl.GRPO(**example.SETTINGS, steps=int(sys.argv[1]) if len(sys.argv) > 1 else 12)
    agl.Trainer(algorithm=algorithm, concurrency=64).fit(example.team, load_example("calc", "recipe").train_tasks())
