"""An agent that looks things up: its corpus, its retrieval server, and what it earns."""
