"""The calculator example: an agent with one tool, its tasks, and the script that makes the model it starts from."""
