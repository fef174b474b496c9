"""Train it with the defaults, in about four minutes: python examples/bidding/train.py [STEPS]"""

from __future__ import annotations

import argparse
from pathlib import Path

import agentlightning as agl
from agentlightning.trainer.example import load_example

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("steps", metavar="STEPS", type=int, nargs="?", default=60)
    game, agent = load_example("bidding", "game"), load_example("bidding", "bidding_agent")
    model = Path(__file__).parent / "model"
    tasks, held_out = game.make_tasks()
    algorithm = agl.GRPO(model=str(model), steps=parser.parse_args().steps)
    agl.Trainer(algorithm=algorithm).fit(agent.bidder, tasks, held_out)
