"""The whole of reinforcement learning in one flat file."""
