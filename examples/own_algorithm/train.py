"""Train the calculator with both: python examples/own_algorithm/train.py [STEPS]"""

from __future__ import annotations

import sys

from advantages import wins_less_losses
from losses import proximal

import agentlightning as agl
from agentlightning.trainer.example import load_example

if __name__ == "__main__":
    recipe, agent = load_example("calc", "recipe"), load_example("calc", "calc_agent").calc_agent
    settings = {**recipe.SETTINGS, "steps": int(sys.argv[1]) if len(sys.argv) > 1 else 24, "update_epochs": 2}
    algorithm = agl.GRPO(model="calc", advantage=wins_less_losses, loss=proximal, **settings)
    agl.Trainer(algorithm=algorithm, concurrency=96).fit(agent, recipe.train_tasks(), recipe.val_tasks())
