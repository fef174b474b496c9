"""A terminal agent that nobody may edit, Codex as it is published: its repositories, its sandbox, and what it earns."""
