"""Where the rollouts of a step come from: which tasks, in which order, and how a step waits for them."""
