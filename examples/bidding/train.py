"""Train it with the defaults, in about a minute: python examples/bidding/train.py [STEPS]"""

from __future__ import annotations

import sys
from pathlib import Path

import agentlightning as agl
from agentlightning.trainer.example import load_example

if __name__ == "__main__":
    game, agent = load_example("bidding", "game"), load_example("bidding", "bidding_agent")
    model = Path(__file__).parent / "model"
    tasks, held_out = game.make_tasks()
    algorithm = agl.GRPO(model=str(model), steps=int(sys.argv[1]) if len(sys.argv) > 1 else 60)
    agl.Trainer(algorithm=algorithm).fit(agent.bidder, tasks, held_out)
