"""A support agent on tau2: its tasks, its simulated user, and what it earns."""
